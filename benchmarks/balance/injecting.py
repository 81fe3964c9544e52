"""`attribution`: 20 ms are injected into each lane of a real run, and have to be found there and nowhere else.

Each run is made twice in turn: with the 20 ms in a lane, and with the same 20 ms between two steps, in the lane
`other`. What the lane has more of a step is compared with what was slept, and all others have to be as long. A core
that had nothing to do for 20 ms computes and dispatches the next step by a millisecond or two slower: that is real, is
in the lane where it happens, and is alike in both runs. Beside a checkpoint the other run has no 20 ms, as they are
beside one alone. A loop of either run lets its devices finish each step before it goes on: what it sleeps is then
hidden by nothing. What is injected:

- `data wait`: the loader sleeps before it gives a batch;
- `dispatch`: `step.update` sleeps before it does anything;
- `snapshot stall`: the checkpointer's `update` sleeps;
- `persist interference`: the gradients sleep in a callback while a checkpoint is under way, which is written slowly;
- `exposed communication`: `step.update` waits for a message of a peer, who sleeps before it is sent;
- `bubble`: what the first of two stages sends goes by a third device, which sleeps in a callback;
- `compute`: the gradients sleep in a callback.
"""

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax as bx
from benchmarks.harness import Report, say
from braidax.comm import MemoryStore, connect
from braidax.parallel.stages.running import measuring
from braidax.tune import LANES, attribute

INJECTED_SECONDS = 0.02
CASE = "20 ms injected into a run"
_WIDTH, _BATCH = 128, 128
_STATE_BYTES = 3 * 8 * _WIDTH**2 * 4
_PERSIST_STEPS = 4  # that a persist lasts, as long as until the next one
_FIRST_STEPS = 4  # in which programs are compiled, those of the trace too
_REST_SECONDS = 0.01  # of the gradients of steps beside which there may be one
_STAGES_EVERY = 5  # updates, of which the fourth is measured: of a hundred only one would be


@dataclass(frozen=True)
class Scale:
    """How much is measured. **Fields:** `num_steps`: of a run, without the first. `rounds`: runs of each kind."""

    num_steps: int
    rounds: int


FULL, QUICK = Scale(num_steps=60, rounds=5), Scale(num_steps=24, rounds=1)


@dataclass
class Injection:
    """Sleeps, and notes when and for how long. **Fields:** `seconds`: of a sleep, 0 for none."""

    seconds: float
    sleeps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def sleep(self) -> None:
        """Passes the time, on whichever thread, and keeps its core awake."""
        if self.seconds:
            begun = time.perf_counter()
            while time.perf_counter() - begun < self.seconds:
                time.sleep(0)  # others may have the interpreter
            self.sleeps.append((begun, time.perf_counter() - begun))

    def slept(self, start: float, end: float) -> list[float]:
        """Returns the seconds of sleeps that began between two instants."""
        return [seconds for begun, seconds in self.sleeps if start <= begun < end]


@dataclass(frozen=True)
class Found:
    """What one run has shown, of the steps behind the first.

    **Fields:** `lanes`, `slept`: seconds a step: the median, and the mean where not all steps sleep. `wrong`: the share
    of all their time, by a clock that is not the trace's, by which the lanes do not add up to it.
    """

    lanes: dict[str, float]
    slept: float
    wrong: float


class _InStep(bx.Report):
    """A report that lets devices finish each step, and notes when they have; behind that it may sleep."""

    injection: Injection | None = None

    def __init__(self) -> None:
        super().__init__(show="nothing", trace=bx.Trace())
        self.ends: list[float] = []

    def update(self, metrics: Any, *, epoch: int, state: Any = None) -> None:
        """As of `Report`."""
        super().update(metrics, epoch=epoch, state=state)
        jax.block_until_ready((metrics, state.params, state.opt_state))
        self.ends.append(time.perf_counter())
        if self.injection is not None:
            self.injection.sleep()


class _SlowLoader(bx.DataLoader):
    """Sleeps before it gives a batch."""

    injection: Injection | None = None

    def __iter__(self) -> Iterator[Any]:
        """As of `DataLoader`."""
        for batch in super().__iter__():
            if self.injection is not None:
                self.injection.sleep()
            yield batch


class _SlowSaver(bx.Checkpointer):
    """Sleeps in `update`."""

    injection: Injection | None = None

    def update(self, tree: Any, *, metric: Any = None) -> None:
        """As of `Checkpointer`."""
        super().update(tree, metric=metric)
        if self.injection is not None:
            self.injection.sleep()


def _init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    shape = (4, _WIDTH, _WIDTH)
    return {"first": jax.random.normal(first, shape) * 0.06, "second": jax.random.normal(second, shape) * 0.06}


def _loss(before: Callable[[], object] | None) -> Callable[[Any, Any], jax.Array]:
    """Returns a loss whose way forward calls something first."""

    def called(x: Any) -> Any:
        assert before is not None
        before()
        return np.zeros((), np.float32)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        if before is not None:
            given = jax.lax.stop_gradient(x[0, 0])
            x = x + jax.pure_callback(called, jax.ShapeDtypeStruct((), jnp.float32), given)
        for weight in (*params["first"], *params["second"]):
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return loss


def _under_way() -> bool:
    return any(thread.name.startswith("braidax-checkpoint") for thread in threading.enumerate())


@contextlib.contextmanager
def _slow_dispatch(step: Any, injection: Injection, trace: bx.Trace) -> Generator[None]:
    """Lets `update` sleep first."""
    update = step.update

    def later(*given: Any, **options: Any) -> Any:
        injection.sleep()
        return update(*given, **options)

    step.update = later
    yield


@contextlib.contextmanager
def _slow_peer(step: Any, injection: Injection, trace: bx.Trace) -> Generator[None]:
    """Lets `update` ask a peer first, who sleeps before the answer."""
    store, update = MemoryStore(), step.update

    def answer() -> None:
        with connect(store, rank=1, size=2) as comm:
            while bytes(comm.recv(0)) == b"answer":
                injection.sleep()
                comm.send(b"answered", 0)

    peer = threading.Thread(target=answer, name="peer")
    peer.start()
    with connect(store, rank=0, size=2) as comm:
        comm.trace = trace

        def asking(*given: Any, **options: Any) -> Any:
            comm.send(b"answer", 1)
            comm.recv(1)
            return update(*given, **options)

        step.update = asking
        try:
            yield
        finally:
            comm.send(b"end", 1)
            peer.join()


class _SlowWay:
    """Sends by a device that is of no stage and sleeps. **Arguments:** `way`: that it stands for."""

    def __init__(self, way: Any, injection: Injection) -> None:
        self._way, self._beside = way, jax.sharding.SingleDeviceSharding(jax.devices()[2])

        def sleep(x: Any) -> Any:
            injection.sleep()
            return np.zeros((), np.float32)

        def slowly(arrays: Any) -> Any:
            first = jax.tree.leaves(arrays)[0]
            zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), first.ravel()[0])
            return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), arrays)

        self._slowly = jax.jit(slowly)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._way, name)

    def send(self, arrays: Sequence[Any]) -> Any:
        """As of `Way`."""
        return self._way.send(self._slowly(jax.device_put(tuple(arrays), self._beside)))


@contextlib.contextmanager
def _slow_way(step: Any, injection: Injection, trace: bx.Trace) -> Generator[None]:
    """Lets the first stage send slowly to the second one, and more updates be measured."""
    ways, every = step._work.run._ways, measuring._EVERY
    ways[0] = ways[0]._replace(forward=_SlowWay(ways[0].forward, injection))
    measuring._EVERY = _STAGES_EVERY
    try:
        yield
    finally:
        measuring._EVERY = every


_INTO_STEP: dict[str, Callable[[Any, Injection, bx.Trace], contextlib.AbstractContextManager[None]]] = {
    "dispatch": _slow_dispatch,
    "exposed communication": _slow_peer,
    "bubble": _slow_way,
}
_INJECTED = tuple(lane for lane in LANES if lane != "other")


def _step_of(lane: str, injection: Injection) -> Any:
    def beside() -> None:
        time.sleep(_REST_SECONDS)
        if _under_way():
            injection.sleep()

    called: dict[str, Callable[[], object]] = {"compute": injection.sleep, "persist interference": beside}
    loss, batch = _loss(called.get(lane)), {"x": jax.ShapeDtypeStruct((_BATCH, _WIDTH), jnp.float32)}
    axis, devices = ("stage", jax.devices()[:2]) if lane == "bubble" else ("data", jax.devices()[:1])
    mesh = jax.make_mesh((len(devices),), (axis,), devices=devices)
    strategy = bx.parallel.Pipeline("GPipe", clock="counted") if lane == "bubble" else bx.DataParallel()
    return bx.parallelize(loss, optax.adam(1e-3), mesh, {axis: strategy}, init=_init, batch=batch)


def _run(lane: str, num_steps: int, folder: Path, *, into: Literal["lane", "other"]) -> Found:
    """Trains as for a lane, with an injection into that or into the lane `other`."""
    injection, beside = Injection(INJECTED_SECONDS if into == "lane" else 0.0), Injection(INJECTED_SECONDS)
    step, report = _step_of(lane, injection), _InStep()
    samples = np.random.default_rng(0).normal(size=((num_steps + 1) * _BATCH, _WIDTH)).astype(np.float32)
    has_saves = lane == "persist interference"
    with contextlib.ExitStack() as stack:
        if lane in _INTO_STEP:
            stack.enter_context(_INTO_STEP[lane](step, injection, report.trace))
        loader = _SlowLoader({"x": samples}, step.mesh, step.batch_shardings, batch_size=_BATCH, seed=0)
        saver = _SlowSaver(folder, bx.Every(2 * _PERSIST_STEPS if has_saves else 10 * num_steps))
        stack.enter_context(loader)
        stack.enter_context(saver)
        loader.injection = injection if lane == "data wait" else None
        saver.injection = injection if lane == "snapshot stall" else None
        if has_saves:
            saver.limit_bytes_per_second = _STATE_BYTES / (_PERSIST_STEPS * (injection.seconds + _REST_SECONDS))
        elif into == "other":
            report.injection = injection = beside
        bx.fit(step, step.init(jax.random.key(0)), loader, saver=saver, report=report)
    told, first, last = attribute(report.trace), report.ends[0], report.ends[-1]
    num, slept = len(told.counted), injection.slept(first, last)
    steps = told.steps[_FIRST_STEPS:]
    in_lanes = sum(sum(step.lanes.values()) for step in steps)
    wrong = abs(in_lanes / (last - report.ends[_FIRST_STEPS - 1]) - 1)
    if has_saves:
        return Found(told.mean(), sum(slept) / num, wrong)
    lanes = {one: statistics.median(step.lanes[one] for step in told.counted) for one in LANES}
    return Found(lanes, statistics.median(slept or [0.0]), wrong)


@dataclass(frozen=True)
class Compared:
    """An injection, by runs with it here and elsewhere. **Fields:** of 1: `share` of it that is in its lane;
    `wrong`: of the step, by which lanes do not add up to it. `elsewhere`: seconds, the most in another lane, of 20 ms.
    """

    share: float
    elsewhere: float
    wrong: float


def _compared(lane: str, without: Found, injected: Found) -> Compared:
    more = {one: injected.lanes[one] - without.lanes[one] for one in LANES}
    more["other"] += without.slept
    slept = injected.slept
    elsewhere = max(abs(seconds) for one, seconds in more.items() if one != lane)
    wrong = max(without.wrong, injected.wrong)
    return Compared(more[lane] / slept, elsewhere * INJECTED_SECONDS / slept, wrong)


def measure(report: Report, *, quick: bool) -> None:
    """Adds rows for each lane, and the claims."""
    scale = QUICK if quick else FULL
    found: dict[str, list[Compared]] = {lane: [] for lane in _INJECTED}
    for lane in _INJECTED * scale.rounds:
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            without = _run(lane, scale.num_steps, Path(first), into="other")
            injected = _run(lane, scale.num_steps, Path(second), into="lane")
        found[lane].append(one := _compared(lane, without, injected))
        say(f"{lane}: {100 * one.share:.1f} % in its lane, at most {1e3 * one.elsewhere:.2f} ms elsewhere")
    shares, elsewhere, wrong = list[float](), list[float](), list[float]()
    for lane, runs in found.items():
        shares.append(report.add(CASE, lane, "in its lane", "% (of what was slept)", [100 * one.share for one in runs]))
        elsewhere.append(report.add(CASE, lane, "in any other lane", "ms", [1e3 * one.elsewhere for one in runs]))
        wrong.append(report.add(CASE, lane, "lanes against the step", "%", [100 * one.wrong for one in runs]))
    report.at_least("attribution", min(shares), 95)
    report.at_most("attribution_elsewhere", max(elsewhere), 1)
    report.at_most("attribution_sum", max(wrong), 1)
