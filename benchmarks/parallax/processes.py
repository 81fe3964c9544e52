"""The same on processes that exchange by gloo over loopback, and against TorchRec."""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, gangs, say, take_turns
from benchmarks.parallax import rank, torchrec
from benchmarks.parallax.models import STEPS, Model
from benchmarks.parallax.rank import Steps
from benchmarks.parallax.systems import OURS
from benchmarks.parallax.traffic import FORMULA

TORCHREC = "TorchRec"

_LIMIT_SECONDS = 240.0  # of one call of the processes
_ALIKE = 2e-3

Ask = Callable[..., list[Any]]


def processes(report: Report, num_processes: int, make: Callable[[], Model], *, count: int) -> None:
    """Measures systems on processes of one device each.

    **Arguments:** `make`: makes the model in each process; can be pickled. `count`: of steps.
    """
    model = make()
    case = f"{model.name}, {num_processes} processes"
    say(f"{case} …")
    sent: dict[str, float] = {}
    losses: list[float] = []
    with _joined(num_processes) as ask:
        formulas = ask(rank.formulas, make)[0]
        for system in rank.SYSTEMS:
            steps: list[Steps] = ask(rank.take_steps, make, system, count)
            losses = losses or steps[0].losses
            np.testing.assert_allclose(steps[0].losses, losses, rtol=_ALIKE, err_msg=f"{case}, {system}")
            seconds = [max(those) for those in zip(*(one.seconds for one in steps), strict=True)]
            sent[system] = max(one.num_bytes for one in steps)
            report.add(case, system, "step", "ms", [1e3 * value for value in seconds])
            report.add(case, system, "sent by the busiest process, a step", "MB", [sent[system] / 1e6])
            if system in formulas:
                report.add(case, system, FORMULA, "MB", [formulas[system] / 1e6])
            say(f"  {system}: {1e3 * statistics.median(seconds):.1f} ms, {sent[system] / 1e6:.3f} MB")
    report.at_most(f"bytes_{num_processes}_processes", sent[OURS] / formulas[OURS], 1.1)


def against_torchrec(
    report: Report, python: str, num_processes: int, make: Callable[[], Model], *, count: int, rounds: int
) -> None:
    """Lets ours and TorchRec train a table alone, in turns: the same table, ids and optimizer, the same losses.

    **Arguments:** `python`: of an environment with TorchRec. `make`: a `lookup`.
    """
    model = make()
    case = f"{model.name}, {num_processes} processes"
    say(f"{case} …")
    steps: dict[str, list[Steps]] = {OURS: [], TORCHREC: []}
    with tempfile.TemporaryDirectory() as folder, _joined(num_processes) as ask:
        ids = np.stack([batch["ids"] for batch in model.batches(rank.WARMUP + count)])
        path = Path(folder) / "ids.npy"
        np.save(path, ids.reshape(len(ids), num_processes, -1, STEPS))

        def mine() -> float:
            return _noted(steps[OURS], ask(rank.take_steps, make, OURS, count))

        def theirs() -> float:
            return _noted(steps[TORCHREC], torchrec.take_steps(python, model, path, num_processes, rank.WARMUP))

        figures = take_turns({OURS: mine, TORCHREC: theirs}, rounds=rounds)
    for system, values in figures.items():
        report.add(case, system, "step", "ms", [1e3 * value for value in values])
        sent = max(one.num_bytes for one in steps[system]) / 1e6
        report.add(case, system, "sent by the busiest process, a step", "MB", [sent])
        say(f"  {system}: {1e3 * statistics.median(values):.1f} ms, {sent:.3f} MB")
    losses = np.mean([one.losses for one in steps[TORCHREC][:num_processes]], axis=0)  # each has its own part
    np.testing.assert_allclose(losses, steps[OURS][0].losses, rtol=_ALIKE, err_msg=case)
    report.add(case, f"{TORCHREC} / ours", "step", "x", [
        theirs / mine for mine, theirs in zip(figures[OURS], figures[TORCHREC], strict=True)
    ])  # fmt: skip


def _noted(kept: list[Steps], steps: Sequence[Steps]) -> float:
    """Keeps what the processes did; returns the median of the seconds of a step, of the slowest."""
    kept.extend(steps)
    return statistics.median(max(those) for those in zip(*(one.seconds for one in steps), strict=True))


@contextlib.contextmanager
def _joined(num_processes: int) -> Generator[Ask]:
    with gangs.processes(num_processes) as (gang, port):

        def ask(fn: Callable[..., Any], *args: Any) -> list[Any]:
            return gang.run(fn, port, *args, timeout_seconds=_LIMIT_SECONDS)

        ask(rank.join)
        yield ask
