"""The systems, each run in a child process of its own: what it needs is imported there only."""
