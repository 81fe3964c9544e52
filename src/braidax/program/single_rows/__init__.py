"""Rows of what a program makes, computed without the others."""
