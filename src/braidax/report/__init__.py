"""What a person sees of a run: progress, metrics on disk, and the share of time spent waiting for data."""

from braidax.report.pace import Logger, Pace, RunLength
from braidax.report.report import Report

__all__ = ["Logger", "Pace", "Report", "RunLength"]
