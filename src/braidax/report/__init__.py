"""What a person sees of a run: progress, metrics on disk, and the share of time spent waiting for data."""

from braidax.report.pace import Pace, RunLength
from braidax.report.report import Report

__all__ = ["Pace", "Report", "RunLength"]
