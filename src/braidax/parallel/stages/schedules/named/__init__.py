"""Schedules that have names, each built from the rules of its paper."""
