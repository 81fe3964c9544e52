"""Rows on their way from rank to rank."""
