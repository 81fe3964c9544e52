"""The loader against a naive loop: `python -m benchmarks.naive`."""
