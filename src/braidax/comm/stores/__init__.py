"""Stores: where ranks that do not know one another yet find what they need to know."""
