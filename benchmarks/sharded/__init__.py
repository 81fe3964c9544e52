"""Fully sharded training against the same by XLA alone, and by hand."""
