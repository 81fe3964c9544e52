"""Schedules of pipelines, run: one process over several devices."""
