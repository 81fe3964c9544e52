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
class Comparison:
    """One table: how long each system takes, and how many times as fast ours are as peers.

    **Fields:** `title`: of the table and of the rows of the report. `metric`: what the seconds are of. `pairs`: ours, and
    peers of which the fastest counts, for each column of ratios.
    """

    title: str
    metric: str
    pairs: Sequence[tuple[str, Sequence[str]]]
    lines: dict[int, Figures] = field(default_factory=dict[int, Figures])

    def add(self, report: Report, num_bytes: int, figures: Figures) -> None:
        """Adds the figures of one size to the table and to the report."""
        self.lines[num_bytes] = figures
        case = f"{self.title}, {named(num_bytes)}"
        for system, seconds in figures.items():
            report.add(case, system, self.metric, "us", [1e6 * value for value in seconds])
            if num_bytes >= 1 << 20:
                report.add(case, system, "bandwidth", "GB/s", [num_bytes / value / 1e9 for value in seconds])
        for ours, peers in self.pairs:
            if ours in figures:
                report.add(case, f"{ours} / {' or '.join(peers)}", "times as fast", "x", self.ratios(num_bytes, ours))

    def ratios(self, num_bytes: int, ours: str, peers: Sequence[str] = ()) -> list[float]:
        """Returns how many times as fast ours is as its fastest peer, in each round."""
        figures = self.lines[num_bytes]
        chosen = peers or next(peers for name, peers in self.pairs if name == ours)
        best = min(chosen, key=lambda peer: statistics.median(figures[peer]))
        return [peer / mine for peer, mine in zip(figures[best], figures[ours], strict=True)]

    def ratio(self, num_bytes: int, ours: str, peers: Sequence[str] = ()) -> float:
        """Returns the median of `ratios`."""
        return statistics.median(self.ratios(num_bytes, ours, peers))

    def show(self) -> None:
        """Prints the table: medians, in GB/s from 1 MiB on."""
        table = Table(title=f"{self.title}: {self.metric}, us; from 1 MiB on GB/s")
        systems = list(next(iter(self.lines.values()), {}))
        for column in ("bytes", *systems, *(f"{ours} / {' or '.join(peers)}" for ours, peers in self.pairs)):
            table.add_column(column, justify="right")
        for num_bytes, figures in self.lines.items():
            medians = [statistics.median(figures[system]) for system in systems]
            shown = [num_bytes / value / 1e9 if num_bytes >= 1 << 20 else 1e6 * value for value in medians]
            ratios = [self.ratio(num_bytes, ours) for ours, _ in self.pairs]
            table.add_row(named(num_bytes), *(_short(value) for value in (*shown, *ratios)))
        Console(width=160).print(table)


def named(num_bytes: int) -> str:
    """Returns `16 MiB` for 16,777,216."""
    power = min(3, int(math.log2(num_bytes)) // 10)
    return f"{num_bytes >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
