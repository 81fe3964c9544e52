"""A program in two halves, of which the first hands on what the second needs; and the loops of both."""
