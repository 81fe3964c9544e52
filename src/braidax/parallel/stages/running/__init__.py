"""Schedules of pipelines, run over several devices, which may be those of several processes."""
