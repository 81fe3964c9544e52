"""What is said of the time of steps, and what is tuned by it: `python -m benchmarks.balance`."""
