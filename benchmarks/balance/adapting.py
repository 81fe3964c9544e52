"""`adapt` and `tuning_cost`: what a tuner does when the disk slows down, and what its trials cost.

`adapt`: a network and its momentum train beside checkpoints, on a disk that the kernel holds to a rate. The rate is
halved while it trains. Counted are the steps from there until checkpoints are as far apart, within a quarter, as a run
settles at that has the slow disk from its start.

`tuning_cost`: the same run with a tuner and without takes turns, in blocks of steps; what the one takes longer, trials
included, is compared with the other.
"""

import contextlib
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax as bx
from benchmarks.harness import Report, say
from benchmarks.harness.disk_rate import DiskRate, disk_rate
from benchmarks.harness.memory import NoLimitError
from braidax.tune import Limits, Tuner

ADAPT, COST = "adapt: the disk writes half as fast", "tuning_cost: with and without a tuner"
_LIMITS = Limits(overhead=0.1)
_WITHIN = 1.25


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    **Fields:** `width`: of three square layers. `rate`: of the disk at first, in bytes a second. `settled_steps`: until
    a run is called settled. `rounds`: runs of each kind. `blocks`, `block_steps`: of the cost.
    """

    width: int
    rate: int
    settled_steps: int
    rounds: int
    blocks: int
    block_steps: int


FULL = Scale(width=1024, rate=48 << 20, settled_steps=300, rounds=3, blocks=40, block_steps=60)
QUICK = Scale(width=256, rate=32 << 20, settled_steps=60, rounds=1, blocks=4, block_steps=20)


class _Training:
    """A run of its own, that goes on as long as it is asked to."""

    def __init__(self, width: int, folder: Path | None) -> None:
        def loss(params: Any, batch: Any) -> jax.Array:
            value = batch["x"]
            for weight in params["layers"]:
                value = jnp.tanh(value @ weight)
            return jnp.mean(value**2)

        def init(key: jax.Array) -> Any:
            return {"layers": tuple(jax.random.normal(one, (width, width)) * 0.02 for one in jax.random.split(key, 3))}

        self._mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        samples = {"x": np.random.default_rng(0).normal(size=(1024, width)).astype(np.float32)}
        batch = {"x": jax.ShapeDtypeStruct((64, width), np.float32)}
        optimizer = optax.sgd(1e-3, momentum=0.9)
        self._step = bx.parallelize(loss, optimizer, self._mesh, {"data": bx.DataParallel()}, init=init, batch=batch)
        self.loader = bx.DataLoader(samples, self._mesh, self._step.batch_shardings, batch_size=64, epochs=None)
        self.saver = None if folder is None else bx.Checkpointer(folder, _LIMITS.interval, keep=1)
        self._state = self._step.init(jax.random.key(0))
        self._batches: Iterator[Any] = iter(self.loader)
        self._pending: list[Any] = []

    def steps(self, number: int, tuner: Tuner | None) -> Iterator[float]:
        """Trains so many steps, two ahead of the devices at most, and yields the seconds of each."""
        last = time.perf_counter()
        before_apply = None if self.saver is None else self.saver.wait
        for _ in range(number):
            self._state, metrics = self._step.update(self._state, next(self._batches), before_apply=before_apply)
            if self.saver is not None:
                self.saver.update(self._state)
            if tuner is not None:
                tuner.stepped()
            self._pending.append(metrics)
            if len(self._pending) > 2:
                jax.block_until_ready(self._pending.pop(0))
            now = time.perf_counter()
            yield now - last
            last = now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._batches
        jax.block_until_ready(self._state)
        self.loader.close()
        if self.saver is not None:
            self.saver.close()


def measure_adapt(report: Report, *, quick: bool) -> None:
    """Makes the claim `adapt`."""
    scale = QUICK if quick else FULL
    try:
        with disk_rate(Path(tempfile.gettempdir())) as rate:
            settled = [_settled(scale, rate) for _ in range(scale.rounds)]
            wanted = statistics.median(settled)
            say(f"{ADAPT}: with the slow disk from the start, a checkpoint every {wanted:g} updates")
            found = [_steps_until(scale, rate, wanted) for _ in range(scale.rounds)]
    except NoLimitError as error:
        report.not_measured("adapt", "<= 200", str(error))
        return
    report.add(ADAPT, "slow from its start", "updates between checkpoints", "", settled)
    report.add(ADAPT, "slow since", "steps until they are as far apart, within a quarter", "", found)
    report.at_most("adapt", found, 200)


def _settled(scale: Scale, rate: DiskRate) -> int:
    """Returns how far apart checkpoints are in a run that has the slow disk from its start."""
    rate.set(scale.rate // 2)
    with _tuned(scale) as (training, tuner):
        for _ in training.steps(scale.settled_steps, tuner):
            pass
        assert training.saver is not None
        return training.saver.spacing.num_updates


def _steps_until(scale: Scale, rate: DiskRate, wanted: float) -> int:
    """Returns after how many steps since the disk slowed down checkpoints are as far apart as is wanted."""
    rate.set(scale.rate)
    with _tuned(scale) as (training, tuner):
        for _ in training.steps(scale.settled_steps, tuner):
            pass
        rate.set(scale.rate // 2)
        assert training.saver is not None
        for number, _ in enumerate(training.steps(4 * scale.settled_steps, tuner), 1):
            if 1 / _WITHIN <= training.saver.spacing.num_updates / wanted <= _WITHIN:
                return number
        return 4 * scale.settled_steps


@contextlib.contextmanager
def _tuned(scale: Scale) -> Generator[tuple[_Training, Tuner], None, None]:
    tuner = Tuner(_LIMITS)
    with (
        tempfile.TemporaryDirectory(prefix="braidax-balance-") as folder,
        _Training(scale.width, Path(folder)) as training,
        tuner.owning(training.loader, training.saver),
    ):
        yield training, tuner


def measure_cost(report: Report, *, quick: bool) -> None:
    """Makes the claim `tuning_cost`."""
    scale = QUICK if quick else FULL
    tuner = Tuner(_LIMITS)
    with _Training(scale.width, None) as tuned, _Training(scale.width, None) as plain, tuner.owning(tuned.loader):
        plain.loader.depth.paused = True  # as the other one begins
        seconds: dict[str, list[float]] = {"with a tuner": [], "without": []}
        for number in range(scale.blocks):
            turns = [("with a tuner", tuned, tuner), ("without", plain, None)]
            for name, training, its in turns if number % 2 else turns[::-1]:
                if its is not None:
                    its.pause()
                seconds[name].append(sum(training.steps(scale.block_steps, its)))
        for name, values in seconds.items():
            report.add(COST, name, "a block of steps", "s", values[1:])
        verdicts = Counter(entry.verdict for entry in tuner.diary)
        report.note(f"{COST}: {verdicts['kept']} moves were kept, and {verdicts['reverted']} reverted")
    pairs = list(itertools.islice(zip(seconds["with a tuner"], seconds["without"], strict=True), 1, None))
    loss = sum(one for one, _ in pairs) / sum(other for _, other in pairs) - 1
    report.at_most("tuning_cost", max(0.0, loss), 0.02)
