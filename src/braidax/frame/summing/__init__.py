"""Sums, counts and the like of groups by an integer, in one pass in C over rows, or over two tables that it joins."""
