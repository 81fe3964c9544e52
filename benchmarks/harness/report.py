"""The report of one run: rows, claims, notes; shown, and saved as one file."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.claims import Claim, against_best, limit, worst_of
from benchmarks.harness.files import write_whole
from benchmarks.harness.machine import described, num_cores, summary
from benchmarks.harness.rows import Row
from benchmarks.harness.running import FALLEN, RESULTS, say

FORM = 1  # of the file; another one is not read


class Report:
    """Collects what a run has measured.

    **Arguments:** `options`: what `arguments` has parsed. `distributions`: of the peers, whose versions are told.
    """

    def __init__(self, options: argparse.Namespace, *distributions: str) -> None:
        self.rows: list[Row] = []
        self.claims: list[Claim] = []
        self.notes: list[str] = []
        self._quick: bool = options.quick
        self._file: Path | None = options.json
        self._name: str = options.benchmark
        self._distributions = distributions
        self._start = time.perf_counter()
        if self._file and self._file.resolve().parent == RESULTS and (options.quick or options.only):
            asked = "--quick" if options.quick else "--only"
            raise SystemExit(f"{asked} --json: the page shows whole runs only; name a FILE for the figures of a part")
        if num_cores() == 1:
            self.note("this machine has one core: all processes and threads share it, and nothing here scales")

    def add(self, case: str, system: str, metric: str, unit: str, values: Sequence[float], *, at: str = "") -> float:
        """Adds a row, as of `Row`, and returns its median."""
        self.rows.append(Row(case, at, system, metric, unit, tuple(map(float, values))))
        return self.rows[-1].median

    def missing(self, case: str, system: str, why: str, *, at: str = "") -> None:
        """Adds that a system is not measured in a case, at one line or (`at` is "") at all of them."""
        self.rows.append(Row(case, at, system, "", "", (), why))
        note = f"{system} is missing: {why}"
        if note not in self.notes:
            self.note(note)

    def note(self, line: str) -> None:
        """Adds what a reader of the figures has to know, and says it."""
        self.notes.append(line)
        say(line)

    def against(
        self,
        claim: str,
        case: str,
        metric: str,
        *,
        ours: str,
        peers: Sequence[str],
        at: Sequence[str] | None = None,
        at_least: float = 1,
    ) -> Claim:
        """Claims how many times as good as the best of the named peers ours is, where this is least so.

        **Arguments:** `case`, `metric`: of the rows. `ours`, `peers`: systems that did equal work. `at`: the lines; by
        default all in which ours was measured. `at_least`: the ratio to be reached.

        **Raises:** `ValueError` if ours has no figures, or a peer has neither figures nor a reason why there are none.
        """
        self.claims.append(self._against(claim, case, metric, ours, peers, at, at_least))
        return self.claims[-1]

    def against_everywhere(
        self,
        claim: str,
        compared: Sequence[tuple[str, str, Sequence[str]]],
        metric: str,
        *,
        at: Sequence[str],
        at_least: float,
    ) -> Claim:
        """Claims the same of several cases, or systems of ours, at once: it counts by the worst line of all.

        **Arguments:** `compared`: case, ours, and its peers. The others, and **Raises:** as of `against`.
        """
        parts = [self._against(claim, case, metric, ours, peers, at, at_least) for case, ours, peers in compared]
        self.claims.append(worst_of(claim, parts))
        return self.claims[-1]

    def at_least(self, claim: str, value: float | Sequence[float], target: float) -> None:
        """Claims that a figure of ours, the median of several, is not below a target."""
        self.claims.append(limit(claim, _several(value), at_least=target))

    def at_most(self, claim: str, value: float | Sequence[float], target: float) -> None:
        """Claims that a figure of ours, the median of several, is not above a target."""
        self.claims.append(limit(claim, _several(value), at_most=target))

    def not_measured(self, claim: str, target: str, why: str) -> None:
        """Says why a claim is not made in this run."""
        self.claims.append(Claim(claim, None, None, None, target, None, why=why))

    def finish(self) -> int:
        """Shows what was found and saves it if asked to.

        **Returns:** the exit status: `FALLEN` when a claim does not hold, but with `--quick` 0.
        """
        machine = described(self._name, self._distributions, seconds=time.perf_counter() - self._start)
        self._show(machine)
        if self._file is not None:
            rows, claims = [asdict(row) for row in self.rows], [asdict(claim) for claim in self.claims]
            content = {"form": FORM, "benchmark": self._name, "quick": self._quick, "machine": machine}
            content |= {"notes": self.notes, "claims": claims, "rows": rows}
            write_whole(self._file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            say(f"{self._file}: {len(rows)} rows and {len(claims)} claims")
        fallen = [claim.name for claim in self.claims if claim.holds is False]
        if fallen and self._quick:
            say(f"not judged, as --quick measures too little: {', '.join(fallen)}")
        return FALLEN if fallen and not self._quick else 0

    def _against(
        self,
        claim: str,
        case: str,
        metric: str,
        ours: str,
        peers: Sequence[str],
        at: Sequence[str] | None,
        at_least: float,
    ) -> Claim:
        mine = [row for row in self.rows if (row.case, row.system, row.metric) == (case, ours, metric)]
        lines = [row for row in mine if at is None or row.at in at]
        if not mine and (why := self._why_missing(case, ours)):
            return Claim(claim, None, None, None, f">= {at_least:g}", None, why=f"{ours}: {why}")
        if not lines or {row.at for row in lines} != set(at or [row.at for row in mine]):
            raise ValueError(f"{claim}: {ours} has no {metric!r} in {case!r} at {at or 'any line'}")
        theirs = [[self._figures(claim, row, peer) for peer in peers] for row in lines]
        return against_best(claim, lines, theirs, at_least=at_least)

    def _why_missing(self, case: str, system: str) -> str:
        return next((row.missing for row in self.rows if (row.case, row.system) == (case, system) and row.missing), "")

    def _figures(self, claim: str, ours: Row, peer: str) -> Row:
        """Returns the row of a peer that stands beside ours, or the one that says why there is none."""
        for row in self.rows:
            same = (row.at, row.metric) == (ours.at, ours.metric) or (row.missing and row.at in ("", ours.at))
            if same and (row.case, row.system) == (ours.case, peer):
                return row
        where = f"{ours.metric!r} in {ours.case!r} at {ours.at!r}"
        raise ValueError(f"{claim}: {peer} has no {where}, and no reason is given why")

    def _show(self, machine: dict[str, Any]) -> None:
        console = Console(width=160)
        claims = Table(title="claims" + (", not judged (--quick)" if self._quick else ""))
        for column in ("claim", "found", "target", "holds"):
            claims.add_column(column)
        for claim in self.claims:
            holds = {True: "yes", False: "NO", None: "not measured"}[claim.holds]
            claims.add_row(claim.name, str(claim), claim.target, "-" if self._quick else holds)
        table = Table(title=summary(machine))
        for column in ("case", "at", "system", "metric"):
            table.add_column(column)
        for column in ("median (min–max)", "unit", "runs"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(row.case, row.at, row.system, row.metric, str(row), row.unit, str(row.runs))
        console.print(table)
        console.print(claims)


def _several(value: float | Sequence[float]) -> Sequence[float]:
    return [value] if isinstance(value, int | float) else value
