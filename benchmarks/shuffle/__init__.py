"""Globally shuffled reading, ours beside what people use today: `python -m benchmarks.shuffle`."""
