"""What overlaps with what: a factorial study of prefetch, checkpoints, gradient sync and stages, measured."""

from .best_mix import SPACE, find_best_mix
from .case import NUM_STAGES, Case, Place, Workload
from .design import Design, Length, sweeps_of
from .factors import FACTORS, PAIRS, Factor, Levels, Setting, Sweep, crossed, parse_pairs, sweep
from .folder import FORMAT, StudyFolder
from .limits import Limits, parse_limits
from .predictions import Predicted, Spent, predict_interactions
from .report import Written, write_report
from .runner import Progress, open_bench, run_study
from .runs import Run, Use

__all__ = [
    "FACTORS",
    "FORMAT",
    "NUM_STAGES",
    "PAIRS",
    "SPACE",
    "Case",
    "Design",
    "Factor",
    "Length",
    "Levels",
    "Limits",
    "Place",
    "Predicted",
    "Progress",
    "Run",
    "Setting",
    "Spent",
    "StudyFolder",
    "Sweep",
    "Use",
    "Workload",
    "Written",
    "crossed",
    "find_best_mix",
    "open_bench",
    "parse_limits",
    "parse_pairs",
    "predict_interactions",
    "run_study",
    "sweep",
    "sweeps_of",
    "write_report",
]
