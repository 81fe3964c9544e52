"""What the benchmarks share: rows, claims, turns, the machine, and files that are whole or not there."""

from benchmarks.harness.claims import Claim, Comparison
from benchmarks.harness.peers import absent, installed
from benchmarks.harness.report import Report
from benchmarks.harness.rows import Row, short
from benchmarks.harness.running import arguments, run, say
from benchmarks.harness.turns import take_turns

__all__ = [
    "Claim",
    "Comparison",
    "Report",
    "Row",
    "absent",
    "arguments",
    "installed",
    "run",
    "say",
    "short",
    "take_turns",
]
