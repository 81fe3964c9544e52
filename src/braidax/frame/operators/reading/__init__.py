"""Files: who reads what of them."""
