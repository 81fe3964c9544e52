"""How a case is measured: systems take turns, and what the first turn has found is compared."""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from benchmarks.cylon.data import Files
from benchmarks.cylon.equal import assert_same
from benchmarks.cylon.worlds import AbsentError, World
from benchmarks.harness import Report, say, take_turns

TIME, MEAN, ALL = "time", "geometric mean", "all queries"


@dataclass(frozen=True)
class Bench:
    """What all cases need.

    **Fields:** `report`. `folder`: for tables. `peers`: the Python of the peers' environment, None without one.
    `generator`: the program `tpchgen-cli`, "" without one. `num_cores`: that each system may use. `cases_of`: by
    system the cases that it takes part in; all, if it is not named.
    """

    report: Report
    folder: Path
    peers: str | None
    generator: str
    num_cores: int
    cases_of: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])

    def world(self, case: str, name: str) -> World:
        """Starts a system for a case. **Raises:** `AbsentError` if it cannot."""
        if case not in self.cases_of.get(name, [case]):
            raise AbsentError("left out by --quick")
        return World(name, peers=self.peers, num_cores=self.num_cores)

    @contextmanager
    def worlds(
        self, case: str, names: Sequence[str], files: Files, *, memory: bool, first: tuple[str, Files | None]
    ) -> Generator[dict[str, World]]:
        """Yields the systems that are there, with tables; of the others the report says why they are not.

        **Arguments:** `files`, `memory`: as `World.load` takes them. `first`: a task that each of them does before,
        so that its processes have started and imported, and the tables for that, None for the same.
        """
        with contextlib.ExitStack() as stack:
            found: dict[str, World] = {}
            for name in names:
                try:
                    world = self.world(case, name)
                    stack.callback(world.close)
                    task, small = first
                    world.load(small or files, memory=memory)
                    with world.awake():
                        world.run(task, to_caller=False)
                    if small:
                        world.load(files, memory=memory)
                    found[name] = world
                except (AbsentError, RuntimeError, TimeoutError) as error:
                    self.fail(case, name, error)
            yield found

    def fail(self, case: str, name: str, error: Exception, *, at: str = "") -> None:
        """Says why a system is not measured; what is wrong with ours ends the run."""
        if not isinstance(error, AbsentError) and name.startswith("ours"):
            raise error
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = str(error) if isinstance(error, AbsentError) else f"it fails: {lines[-1][:150] if lines else error!r}"
        self.report.missing(case, name, why, at=at)


@dataclass(frozen=True)
class Way:
    """How a task is asked for.

    **Fields:** `rounds`: turns of a system, the one in which it is checked included; one that takes longer than
    `patience` seconds has no other one. `scale`: the factor of TPC-H. `to_caller`: as `World.run` takes it.
    """

    rounds: int
    patience: float = 4.0
    scale: float = 1.0
    to_caller: bool = False


def measure(bench: Bench, case: str, worlds: Mapping[str, World], task: str, way: Way, *, at: str) -> list[str]:
    """Measures one task, a line of a case: all that give the same result as the first system does.

    **Returns:** the systems that were measured.

    **Raises:** `AssertionError` if ours gives another result.
    """
    figures = {name: [seconds] for name, seconds in _checked(bench, case, worlds, task, way, at).items()}
    again = {name: _turn(worlds[name], task, way) for name, (seconds,) in figures.items() if seconds <= way.patience}
    for name, values in take_turns(again, rounds=way.rounds - 1).items():
        figures[name] += values
    for name, values in figures.items():
        bench.report.add(case, name, TIME, "s", values, at=at)
    medians = ", ".join(f"{name} {statistics.median(values):.3g}" for name, values in figures.items())
    say(f"  {case}, {at}: {medians} s")
    return list(figures)


def add_means(report: Report, case: str, names: Sequence[str], lines: Sequence[str]) -> None:
    """Adds the geometric mean over all lines for each system that was measured at each of them, by round."""
    for name in names:
        rows = [row for row in report.rows if (row.case, row.system, row.metric) == (case, name, TIME)]
        if {row.at for row in rows} == set(lines):
            rounds = list(zip(*(row.values for row in rows), strict=False))
            report.add(case, name, MEAN, "s", [statistics.geometric_mean(values) for values in rounds], at=ALL)
        elif not any((row.case, row.system, row.at) == (case, name, "") for row in report.rows):
            lost = [line for line in lines if line not in {row.at for row in rows}]
            report.missing(case, name, f"no mean without {', '.join(lost)}", at=ALL)


def _checked(bench: Bench, case: str, worlds: Mapping[str, World], task: str, way: Way, at: str) -> dict[str, float]:
    """Lets each system answer once; returns how long those took that agree with the first one."""
    expected: pl.DataFrame | None = None
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        for name, world in sorted(worlds.items(), key=lambda item: item[0].startswith("ours")):
            path = Path(folder) / "found.parquet"
            try:
                with world.awake():
                    took = world.run(task, scale=way.scale, to_caller=way.to_caller, out=path)
                found = pl.read_parquet(path, memory_map=False)
                if expected is None:
                    expected = found
                assert_same(task, found, expected)
                seconds[name] = took
            except AssertionError as error:
                if name.startswith("ours"):
                    raise
                bench.fail(case, name, RuntimeError(f"another result than the others': {error}"), at=at)
            except (AbsentError, RuntimeError, TimeoutError) as error:
                bench.fail(case, name, error, at=at)
            path.unlink(missing_ok=True)
    return {name: seconds[name] for name in worlds if name in seconds}


def _turn(world: World, task: str, way: Way) -> Callable[[], float]:
    def run() -> float:
        with world.awake():
            return world.run(task, scale=way.scale, to_caller=way.to_caller)

    return run
