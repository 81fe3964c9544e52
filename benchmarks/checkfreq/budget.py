"""Whether `Adaptive` keeps its budget over a long run while something else uses the machine."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

import braidax as bx
from benchmarks.checkfreq.training import Trainer
from benchmarks.harness import Report

_NUM_SETTLING = 3
_MAX_EXTRA_STEPS = 200
_PATTERN = 24  # steps, after which the noise repeats
_SHARE_BURNING, _SHARE_WRITING = 0.3, 0.1  # of the steps


@final
class Watch:
    """A clock that can be stopped."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        """Returns the seconds for which it has gone."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        """Goes on."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stands still until the next `start`."""
        self._seconds, self._since = self(), None


@dataclass(frozen=True)
class ByWatch:
    """An interval that sees the time of another clock: to it, the blocks without checkpoints have never been.

    **Arguments:** `interval`; `watch`: instead of the clock it is given.
    """

    interval: bx.checkpoint.Interval
    watch: Watch

    def start(
        self, num_updates: int, *, announcements: Any = None, clock: Callable[[], float] = time.perf_counter
    ) -> bx.checkpoint.Spacing:
        """As of `braidax.checkpoint.Interval`."""
        return self.interval.start(num_updates, announcements=announcements, clock=self.watch)


def measure_budget(
    report: Report,
    trainer: Trainer,
    folder: Path,
    case: str,
    *,
    budget: float,
    step_seconds: float,
    num_blocks: int,
    block_steps: int,
) -> float:
    """Trains in blocks with `Adaptive(budget)`, each followed by one without checkpoints, both with the same noise.

    What checkpoints cost is by how much the steps with one under way, and three more, took longer than those of the
    same noise without: so the chance in all the other steps, more than the budget itself, stays out of it.

    **Returns:** by what share checkpoints made the run longer, in percent.
    """
    watch = Watch()
    blocks: list[tuple[list[float], list[bool]]] = []
    peaceful: list[list[float]] = [[] for _ in range(_PATTERN)]  # by noise, the steps of blocks without checkpoints
    shares: list[float] = []
    with (
        _noise(folder, step_seconds) as disturb,
        bx.Checkpointer(folder / "budget", ByWatch(bx.Adaptive(budget), watch), keep=2) as saver,
    ):
        for _ in range(num_blocks):
            watch.start()
            blocks.append(_block(trainer, saver, disturb, block_steps))
            watch.stop()
            seconds, _ = blocks[-1]
            without: list[float] = []
            for number in range(len(seconds)):
                disturb(number)
                without.append(trainer.advance())
                peaceful[number % _PATTERN].append(without[-1])
            shares.append(100 * (sum(seconds) / sum(without) - 1))
        verdict = saver.spacing.verdict
    expected = [statistics.mean(found) for found in peaceful]
    added = sum(
        second - expected[number % _PATTERN]
        for seconds, disturbed in blocks
        for number, (second, counts) in enumerate(zip(seconds, disturbed, strict=True))
        if counts
    )
    total = sum(expected[number % _PATTERN] for seconds, _ in blocks for number in range(len(seconds)))
    name = f"ours, Adaptive({budget:g})"
    overhead = report.add(case, name, "overhead of the run", "%", [100 * added / total])
    report.add(case, name, "overhead of a block, all its steps", "%", shares)
    report.add(case, name, f"updates between checkpoints at the end, by {verdict.bound}", "", [verdict.num_updates])
    report.add(case, name, "the run, with checkpoints", "s", [sum(sum(seconds) for seconds, _ in blocks)])
    return overhead


def _block(
    trainer: Trainer, saver: bx.Checkpointer, disturb: Callable[[int], None], num_steps: int
) -> tuple[list[float], list[bool]]:
    """Takes steps, more of them while a checkpoint is under way, so that none is in the block behind.

    **Returns:** their seconds, and which of them a checkpoint was under way in, or in one of the three before.
    """
    steps: list[float] = []
    disturbed: list[bool] = []
    num_settled = _NUM_SETTLING
    while len(steps) < num_steps or num_settled < _NUM_SETTLING:
        disturb(len(steps))
        start = time.perf_counter()
        trainer.advance(saver.wait)
        saver.update(trainer.tree)
        steps.append(time.perf_counter() - start)
        num_settled = num_settled + 1 if saver._pending is None else 0
        disturbed.append(num_settled <= _NUM_SETTLING)
        if len(steps) > num_steps + _MAX_EXTRA_STEPS:
            raise RuntimeError(f"{saver.path}: no rest after {len(steps)} updates: {saver.spacing.verdict}")
    return steps, disturbed


@contextmanager
def _noise(folder: Path, step_seconds: float) -> Generator[Callable[[int], None]]:
    """Yields what is called before each step of a block: a process then keeps a core busy for a while, or writes.

    Which steps are disturbed is random, and the same in every block.
    """
    rng = np.random.default_rng(0)
    kinds = rng.choice(
        ["", "burn", "write"], _PATTERN, p=[1 - _SHARE_BURNING - _SHARE_WRITING, _SHARE_BURNING, _SHARE_WRITING]
    )
    seconds = rng.uniform(0.2, 1.0, _PATTERN) * step_seconds
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.checkfreq.noise", str(folder)], stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        commands = process.stdin

        def disturb(number: int) -> None:
            kind = kinds[number % _PATTERN]
            if kind:
                commands.write(f"{kind} {seconds[number % _PATTERN]:.4f}\n".encode())
                commands.flush()

        try:
            yield disturb
        finally:
            commands.close()  # which ends it
