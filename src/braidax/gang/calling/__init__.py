"""Calls of functions in the ranks of a gang: what is told to them, what comes back, and what a failure ends."""
