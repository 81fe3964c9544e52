"""Simulated schedules to look at."""
