"""Which servers have which parts of the tables, and how that changes."""
