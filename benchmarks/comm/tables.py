"""Figures as tables: a line for each size, a column for each system."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Report

Figures = Mapping[str, Sequence[float]]
"""Seconds by system, one figure a round."""


@dataclass(frozen=True)
class Pair:
    """One column of ratios. **Fields:** `ours`; `peers`: the fastest counts; `name`: of the peers."""

    ours: str
    peers: Sequence[str]
    name: str

    def __str__(self) -> str:
        return f"{self.ours} / {self.name}"


@dataclass(frozen=True)
class Comparison:
    """One table: how long each system takes, and how many times as fast ours are as peers.

    **Fields:** `title`: of the table and of the rows of the report. `metric`: what the seconds are of.
    """

    title: str
    metric: str
    pairs: Sequence[Pair]
    lines: dict[int, Figures] = field(default_factory=dict[int, Figures])

    def add(self, report: Report, num_bytes: int, figures: Figures) -> None:
        """Adds the figures of one size to the table and to the report."""
        self.lines[num_bytes] = figures
        case = f"{self.title}, {named(num_bytes)}"
        for system, seconds in figures.items():
            report.add(case, system, self.metric, "us", [1e6 * value for value in seconds])
            if num_bytes >= 1 << 20:
                report.add(case, system, "bandwidth", "GB/s", [num_bytes / value / 1e9 for value in seconds])
        for pair in self.pairs:
            report.add(case, str(pair), "times as fast", "x", self._ratios(num_bytes, pair))

    def ratio(self, num_bytes: int, pair: Pair) -> float:
        """Returns how many times as fast ours is as its fastest peer: the median over the rounds."""
        return statistics.median(self._ratios(num_bytes, pair))

    def show(self) -> None:
        """Prints the table: medians, in GB/s from 1 MiB on."""
        table = Table(title=f"{self.title}: {self.metric}, us; from 1 MiB on GB/s")
        systems = list(next(iter(self.lines.values()), {}))
        for column in ("bytes", *systems, *map(str, self.pairs)):
            table.add_column(column, justify="right")
        for num_bytes, figures in self.lines.items():
            medians = [statistics.median(figures[system]) for system in systems]
            shown = [num_bytes / value / 1e9 if num_bytes >= 1 << 20 else 1e6 * value for value in medians]
            ratios = [self.ratio(num_bytes, pair) for pair in self.pairs]
            table.add_row(named(num_bytes), *(_short(value) for value in (*shown, *ratios)))
        Console(width=160).print(table)

    def _ratios(self, num_bytes: int, pair: Pair) -> list[float]:
        figures = self.lines[num_bytes]
        best = min(pair.peers, key=lambda peer: statistics.median(figures[peer]))
        return [peer / ours for peer, ours in zip(figures[best], figures[pair.ours], strict=True)]


def named(num_bytes: int) -> str:
    """Returns `16 MiB` for 16,777,216."""
    power = min(3, int(math.log2(num_bytes)) // 10)
    return f"{num_bytes >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
