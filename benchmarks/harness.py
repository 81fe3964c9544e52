"""What the benchmarks share: rows, claims, tables, and systems that take turns in one run."""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One figure of one system: median and 95th percentile over `runs` measurements, in `unit`."""

    case: str
    system: str
    metric: str
    unit: str
    median: float
    p95: float
    runs: int


@dataclass(frozen=True)
class Claim:
    """One line of an issue's Speed: `value` is the number that it compares with `target`."""

    claim: str
    value: float
    target: str
    holds: bool


@dataclass
class Report:
    """Collects the rows and claims of a run."""

    rows: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def add(self, case: str, system: str, metric: str, unit: str, values: Sequence[float]) -> float:
        """Adds a row of all measurements, and returns their median."""
        row = Row(case, system, metric, unit, statistics.median(values), float(np.percentile(values, 95)), len(values))
        self.rows.append(row)
        return row.median

    def at_least(self, claim: str, value: float, target: float) -> None:
        """Claims that `value >= target`."""
        self.claims.append(Claim(claim, value, f">= {target:g}", value >= target))

    def at_most(self, claim: str, value: float, target: float) -> None:
        """Claims that `value <= target`."""
        self.claims.append(Claim(claim, value, f"<= {target:g}", value <= target))

    def show(self) -> None:
        """Prints both tables."""
        console = Console(width=140)
        table = Table(title=machine()["summary"])
        for column in ("case", "system", "metric"):
            table.add_column(column)
        for column in ("median", "p95", "unit", "runs"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.case, row.system, row.metric, *map(_short, (row.median, row.p95)), row.unit, str(row.runs)
            )
        console.print(table)
        claims = Table(title="claims")
        for column in ("claim", "value", "target", "holds"):
            claims.add_column(column)
        for claim in self.claims:
            claims.add_row(claim.claim, _short(claim.value), claim.target, "yes" if claim.holds else "NO")
        console.print(claims)

    def finish(self, options: argparse.Namespace) -> int:
        """Shows the tables, writes the JSON if asked to, and returns the exit status: 1 when a claim does not hold."""
        self.show()
        if options.json:
            rows, claims = [asdict(row) for row in self.rows], [asdict(claim) for claim in self.claims]
            Path(options.json).write_text(json.dumps({"machine": machine(), "rows": rows, "claims": claims}, indent=1))
        return 0 if all(claim.holds for claim in self.claims) else 1


def arguments(description: str) -> argparse.ArgumentParser:
    """Returns the parser of what every benchmark understands."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smoke run under 60 s: small sizes, figures mean little")
    parser.add_argument("--json", metavar="FILE", help="write rows and claims to FILE")
    return parser


def machine() -> Mapping[str, str]:
    """Returns what the figures depend on."""
    cores = len(os.sched_getaffinity(0))
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    versions = f"Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}"
    return {
        "cpu": model,
        "cores": str(cores),
        "memory_gib": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f}",
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m " + " ".join([_module(Path(sys.argv[0])), *sys.argv[1:]]),
        "summary": f"{model}, {cores} cores, {versions}, {time.strftime('%Y-%m-%d')}",
    }


def _module(path: Path) -> str:
    parts = [path.parent.parent.name, path.parent.name] if path.stem == "__main__" else [path.parent.name, path.stem]
    return ".".join(parts)


def batches_per_second(batches: Iterator[Any], *, warmup: int, count: int) -> tuple[float, list[float]]:
    """Draws batches and waits for each to be on its devices.

    **Returns:** batches per second over `count` of them, and the seconds between their arrivals.
    """
    for _ in range(warmup):
        jax.block_until_ready(next(batches))
    marks = [time.perf_counter()]
    for _ in range(count):
        jax.block_until_ready(next(batches))
        marks.append(time.perf_counter())
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    return count / (marks[-1] - marks[0]), list(np.diff(marks))


def take_turns(
    systems: Mapping[str, Callable[[], float]], *, rounds: int, longest_seconds: float = math.inf
) -> dict[str, list[float]]:
    """Runs every system once a round, so that a machine that drifts drifts for all; returns each one's figures.

    **Arguments:** `longest_seconds`: a system that takes longer for one figure is not run again after the second round.
    """
    figures: dict[str, list[float]] = {name: [] for name in systems}
    slow: set[str] = set()
    for number in range(rounds):
        order = list(systems) if number % 2 == 0 else list(systems)[::-1]
        for name in order:
            if number < 2 or name not in slow:
                start = time.perf_counter()
                figures[name].append(systems[name]())
                slow |= {name} if time.perf_counter() - start > longest_seconds else set()
    return figures


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
