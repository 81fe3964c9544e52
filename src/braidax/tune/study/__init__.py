"""What overlaps with what: a factorial study of prefetch, checkpoints, gradient sync and stages, measured."""

from .case import NUM_STAGES, Case, Place, Workload
from .design import Design, Length, sweeps_of
from .factors import FACTORS, PAIRS, Factor, Levels, Setting, Sweep, crossed, parse_pairs, sweep
from .folder import FORMAT, StudyFolder
from .limits import Limits, parse_limits
from .report import Written, write_report
from .runner import Progress, run_study
from .runs import Run

__all__ = [
    "FACTORS",
    "FORMAT",
    "NUM_STAGES",
    "PAIRS",
    "Case",
    "Design",
    "Factor",
    "Length",
    "Levels",
    "Limits",
    "Place",
    "Progress",
    "Run",
    "Setting",
    "StudyFolder",
    "Sweep",
    "Workload",
    "Written",
    "crossed",
    "parse_limits",
    "parse_pairs",
    "run_study",
    "sweep",
    "sweeps_of",
    "write_report",
]
