"""Schedules found for given costs, under a limit of memory."""
