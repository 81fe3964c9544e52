"""Tables of servers in files: rows that memory has no room for, and values that others serve."""
