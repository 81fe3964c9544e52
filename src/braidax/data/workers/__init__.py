"""Threads and processes that read."""
