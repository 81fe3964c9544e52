"""What a batch reads of tables, and brings to them."""
