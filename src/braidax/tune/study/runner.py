"""Runs a study: all settings in the order of its blocks, in processes that stay, each run kept when it is done."""

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import final

from braidax.cores import usable_cores
from braidax.errors import ArgumentError, CallFailed, PeerLost
from braidax.gang import LocalGang
from braidax.spans import Trace
from braidax.tune.attribution import Attribution, attribute, merge_traces
from braidax.tune.attribution.intervals import both, within, without
from braidax.tune.attribution.intervals import length as total
from braidax.tune.attribution.recorded import recorded

from . import ranks
from .case import Case, Place
from .design import Design, Length
from .factors import Setting
from .folder import StudyFolder
from .limits import Confined, Limits
from .runs import Run, Use

_BENCH = "bench"
_START_SECONDS = 120.0
_GRACE_SECONDS = 2.0  # that processes may take to end on Ctrl-C: they have nothing to save
_RUN_SECONDS = 1800.0  # that one run, or the making of its programs, may take
_PART_SECONDS = {"prepare": 4.0, "run": 0.5}  # guesses, until the first of each is measured
_GREETINGS = ("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's words about machines that compiled what is kept


@dataclass(frozen=True)
class Progress:
    """How far a study is. **Fields:** `done`, `total`: parts of the work, the making of programs among them. `doing`:
    in words. `left_seconds`: by how long parts have taken so far, or the study's own first guess."""

    done: int
    total: int
    doing: str
    left_seconds: float


@dataclass
class _Pace:
    """How long the parts of a study take."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"prepare": [], "run": []})

    def left(self, prepares: int, runs: int) -> float:
        """Returns how long so many more may take."""
        counts = {"prepare": prepares, "run": runs}
        return sum(counts[kind] * self._each(kind) for kind in counts)

    def _each(self, kind: str) -> float:
        found = self.seconds[kind]
        return statistics.fmean(found) if found else _PART_SECONDS[kind]


def run_study(
    case: Case,
    design: Design,
    folder: StudyFolder,
    *,
    place: Place = Place(),  # noqa: B008 (it is frozen)
    limits: Limits = Limits(),  # noqa: B008 (likewise)
    tell: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Measures what is missing in the folder; interrupted at any moment, it goes on there when it is called again.

    **Arguments:** `tell`: is told before each part of the work how far all is.

    **Raises:** `ArgumentError` for a limit that cannot be set, or that what is trained does not fit in; what training
    raises as `CallFailed`.
    """
    done = {(run.block, run.setting) for run in folder.runs}
    missing = [each for each in design.order() if each not in done]
    if not missing:
        return
    with contextlib.ExitStack() as stack:
        confined = stack.enter_context(Confined(limits, folder.path))
        scratch, cache = stack.enter_context(folder.scratch()), _cache(folder).absolute()
        given = ranks.Begin(case, place, confined.confinement, scratch, cache, design.seed)
        gang = stack.enter_context(_started(place, limits))
        _Session(gang, given, folder, design, tell, _num_cores(limits)).measure(missing)


def _num_cores(limits: Limits) -> float:
    return usable_cores() if limits.cores is None else limits.cores


def _cache(folder: StudyFolder) -> Path:
    path = folder.path / "compiled"
    path.mkdir(exist_ok=True)
    return path


@contextlib.contextmanager
def _started(place: Place, limits: Limits) -> Generator[LocalGang, None, None]:
    log = StringIO()
    name, level = _GREETINGS
    environment = {name: os.environ.get(name, level)}
    try:
        with LocalGang(
            place.processes,
            environment=environment,
            log=log,
            grace_seconds=_GRACE_SECONDS,
            timeout_seconds=_START_SECONDS,
        ) as gang:
            yield gang
    except PeerLost as lost:
        words = log.getvalue().strip().splitlines()[-5:]
        reason = f" under the limit memory {limits.memory_bytes >> 20} MiB: allow more" if limits.memory_bytes else ""
        raise ArgumentError("\n".join([f"a process that trains has ended{reason}; {lost}", *words])) from lost


@contextlib.contextmanager
def open_bench(
    case: Case,
    scratch: Path,
    *,
    place: Place = Place(),  # noqa: B008 (it is frozen)
    limits: Limits = Limits(),  # noqa: B008 (likewise)
    seed: int = 0,
) -> Generator[Callable[[Setting, Length], Run], None, None]:
    """Opens the processes that train a case; what is yielded runs a setting for so many steps, and returns the run.

    Programs of a setting are compiled at its first run, and kept.

    **Arguments:** `scratch`: an empty folder for checkpoints and compiled programs, which the caller takes away.

    **Raises:** as `run_study`.
    """
    folders = [scratch / "checkpoints", scratch / "compiled"]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    with Confined(limits, scratch) as confined, _started(place, limits) as gang:
        saved, compiled = (folder.absolute() for folder in folders)
        begin = ranks.Begin(case, place, confined.confinement, saved, compiled, seed)
        bench = _Bench(gang, begin, _num_cores(limits))

        def measure(setting: Setting, length: Length) -> Run:
            if not bench.has(setting):
                bench.prepare(setting)
            return bench.run(0, setting, length)[0]

        yield measure
        bench.leave()


@final
class _Bench:
    """What all ranks of a gang keep to train a case, and the programs that they have made so far."""

    def __init__(self, gang: LocalGang, given: ranks.Begin, num_cores: float) -> None:
        gang.run(ranks.begin, given, keep=_BENCH, timeout_seconds=_RUN_SECONDS)
        self._gang, self._kept, self._num_cores = gang, gang.kept(_BENCH), num_cores
        self.prepared = set[tuple[Setting, bool]]()

    def has(self, setting: Setting) -> bool:
        """Whether the programs of a setting are made."""
        return _programs(setting) in self.prepared

    def prepare(self, setting: Setting) -> None:
        """Makes them."""
        self._gang.run(ranks.prepare, self._kept, setting, timeout_seconds=_RUN_SECONDS)
        self.prepared.add(_programs(setting))

    def run(self, block: int, setting: Setting, length: Length) -> tuple[Run, Trace]:
        """Runs a setting, and returns what was measured, and the trace of all ranks."""
        told = self._gang.run(ranks.measure, self._kept, setting, length, timeout_seconds=_RUN_SECONDS)
        trace = merge_traces([part for part, _ in told])
        run = to_run(block, setting, trace, length)
        core_seconds = math.fsum(seconds for _, seconds in told)
        use = Use(core_seconds, self._num_cores, *saving_seconds(trace, length))
        return replace(run, use=use), trace

    def leave(self) -> None:
        """Leaves JAX's processes, all at once."""
        with contextlib.suppress(CallFailed):
            self._gang.run(ranks.leave, self._kept, timeout_seconds=_START_SECONDS)


@dataclass
class _Session:
    """A study under way: its bench, and how long the parts of it take."""

    gang: LocalGang
    given: ranks.Begin
    folder: StudyFolder
    design: Design
    tell: Callable[[Progress], None]
    num_cores: float
    pace: _Pace = field(default_factory=_Pace)

    def measure(self, missing: list[tuple[int, Setting]]) -> None:
        """Runs all of these, in order."""
        self._say(missing, 0, "starting", set())
        bench = _Bench(self.gang, self.given, self.num_cores)
        for at, (block, setting) in enumerate(missing):
            if not bench.has(setting):
                self._say(missing, at, f"compiling {setting.name}", bench.prepared)
                with self._timed("prepare"):
                    bench.prepare(setting)
            doing = f"block {block + 1} of {self.design.num_blocks}: {setting.name}"
            self._say(missing, at, doing, bench.prepared)
            length = self.design.length(setting)
            with self._timed("run"):
                run, trace = bench.run(block, setting, length)
            self.folder.keep_trace(setting.name, trace, is_first=block == 0)
            self.folder.append(run)
        bench.leave()
        self._say(missing, len(missing), "measured", bench.prepared)

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Generator[None, None, None]:
        begun = time.perf_counter()
        yield
        self.pace.seconds[kind].append(time.perf_counter() - begun)

    def _say(
        self, missing: list[tuple[int, Setting]], at: int, doing: str, prepared: set[tuple[Setting, bool]]
    ) -> None:
        keys = {_programs(setting) for _, setting in missing}
        to_make = len({_programs(setting) for _, setting in missing[at:]} - prepared)
        done, total = at + len(keys & prepared), len(missing) + len(keys)
        self.tell(Progress(done, total, doing, self.pace.left(to_make, len(missing) - at)))


def _programs(setting: Setting) -> tuple[Setting, bool]:
    """Returns what settings share that need nothing compiled after one another: a snapshot has programs of its own."""
    return setting.program, setting.checkpoint_every is not None


def to_run(block: int, setting: Setting, trace: Trace, length: Length) -> Run:
    """Returns what a trace says of a run: of the steps behind the warm ones. **Raises:** `ArgumentError` for fewer."""
    steps = attribute(trace).steps[length.num_warm : length.num_warm + length.num_counted]
    if len(steps) < length.num_counted:
        raise ArgumentError(
            f"the trace of {setting.name} has {len(steps)} steps behind {length.num_warm}, expected "
            f"{length.num_counted}"
        )
    counted = Attribution(steps)
    return Run(block, setting, counted.step_seconds, counted.mean(), tuple(step.seconds for step in steps))


def saving_seconds(trace: Trace, length: Length) -> tuple[float, float]:
    """Returns how long a checkpoint was copied or written, a step, and for how much of that the loop kept devices idle.

    The rest of the lane `snapshot stall` is the saver's own work. Of several processes all wait for the slowest.
    """
    saved, waited = [0.0], [0.0]
    for process in recorded(trace.spans).values():
        ends = [step.end for step in process.steps]
        start, end = ends[length.num_warm - 1], ends[length.num_warm + length.num_counted - 1]
        waits = without(both(process.loop.get("snapshot stall", []), process.saving), process.busy)
        saved.append(total(within(process.saving, start, end)) / length.num_counted)
        waited.append(total(within(waits, start, end)) / length.num_counted)
    return max(saved), max(waited)
