"""Operators of which ranks need one another's rows."""
