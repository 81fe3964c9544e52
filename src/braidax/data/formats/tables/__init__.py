"""Tables: Arrow, Parquet, Hugging Face."""
