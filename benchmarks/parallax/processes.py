"""The same on processes that exchange by gloo over loopback, and against TorchRec."""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, gangs, say, take_turns
from benchmarks.harness.models import STEPS, Model
from benchmarks.parallax import rank, torchrec
from benchmarks.parallax.cases import STEP
from benchmarks.parallax.rank import Steps
from benchmarks.parallax.systems import OURS
from benchmarks.parallax.traffic import FORMULA

TORCHREC = "TorchRec"
_SENT = "sent by the busiest process, a step"

_LIMIT_SECONDS = 240.0  # of one call of the processes
_ALIKE = 2e-3

Ask = Callable[..., list[Any]]


def processes(report: Report, num_processes: int, make: Callable[[], Model], *, count: int, rounds: int) -> None:
    """Lets systems take turns on processes of one device each.

    **Arguments:** `make`: makes the model in each process; can be pickled. `count`: of steps of a turn.
    """
    model = make()
    case = f"{model.name}, {num_processes} processes"
    say(f"{case} …")
    steps: dict[str, list[Steps]] = {system: [] for system in rank.SYSTEMS}
    with _joined(num_processes) as ask:
        formulas = ask(rank.formulas, make)[0]

        def turn(system: str) -> Callable[[], float]:
            return lambda: _noted(steps[system], ask(rank.take_steps, make, system, count))

        figures = take_turns({system: turn(system) for system in rank.SYSTEMS}, rounds=max(rounds, 1))
    losses, sent = steps[OURS][0].losses, dict[str, float]()
    for system, values in figures.items():
        np.testing.assert_allclose(steps[system][0].losses, losses, rtol=_ALIKE, err_msg=f"{case}, {system}")
        sent[system] = max(one.num_bytes for one in steps[system])
        report.add(case, system, STEP, "ms", [1e3 * value for value in values])
        report.add(case, system, _SENT, "MB", [sent[system] / 1e6])
        if system in formulas:
            report.add(case, system, FORMULA.strip(), "MB", [formulas[system] / 1e6])
        say(f"  {system}: {1e3 * statistics.median(values):.1f} ms, {sent[system] / 1e6:.3f} MB")
    peers = [system for system in rank.SYSTEMS if system != OURS]
    report.against(f"lm1b_{num_processes}_processes", case, STEP, ours=OURS, peers=peers)
    report.against(f"bytes_{num_processes}_processes", case, _SENT, ours=OURS, peers=peers)
    report.at_most(f"bytes_formula_{num_processes}_processes", sent[OURS] / formulas[OURS], 1.1)


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

        figures = take_turns({OURS: mine, TORCHREC: theirs}, rounds=max(rounds, 1))
    for system, values in figures.items():
        report.add(case, system, STEP, "ms", [1e3 * value for value in values])
        sent = max(one.num_bytes for one in steps[system]) / 1e6
        report.add(case, system, _SENT, "MB", [sent])
        say(f"  {system}: {1e3 * statistics.median(values):.1f} ms, {sent:.3f} MB")
    losses = np.mean([one.losses for one in steps[TORCHREC][:num_processes]], axis=0)  # each has its own part
    np.testing.assert_allclose(losses, steps[OURS][0].losses, rtol=_ALIKE, err_msg=case)
    report.against("torchrec", case, STEP, ours=OURS, peers=[TORCHREC])
    report.against("torchrec_bytes", case, _SENT, ours=OURS, peers=[TORCHREC])


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
