"""Messages between host processes, ours beside what people use today: `python -m benchmarks.comm`."""
