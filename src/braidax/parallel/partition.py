"""Over how many devices each table is split, from a cost model fitted to steps measured in the running process.

Parallax (EuroSys 2019) has the model `t(P) = b / P + a (P - 1) + c`, and its code relaunches the cluster for each P.
Here the ways to split a table are the sets of mesh axes that it may be split over; a step that does nothing but pull,
push and update is compiled for each of them, on tables of zeros, and they take turns.
"""

import fnmatch
import glob
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.program import compile_on

from .arrays import place
from .ids import SeenIds, see_ids, trace_reads
from .parallelize import parallelize
from .placements import Placement, Replicated, Rows
from .plan import make_plan
from .row_options import row_options
from .step import Step
from .strategies import Hybrid, Strategy, batch_axes, check_strategies

Axes = tuple[str, ...]
Measure = Callable[[Sequence[str], Sequence[Axes]], Mapping[Axes, Sequence[float]]]
"""`(paths of tables, ways to split them) -> seconds of some steps by each way`."""

NUM_TURNS, NUM_STEPS = 3, 5  # so often each way is measured, and so many steps at a time

HOPELESS = 16
"""A table with more rows than so many times the ids of a step is not tried whole: each of its rows would be moved."""


@dataclass(frozen=True)
class Model:
    """What a step costs by P: `b / P + a (P - 1) + c` seconds, no term negative.

    **Fields:** `a`: for each further device to talk to. `b`: work that is divided. `c`: what does not depend on P.
    """

    a: float
    b: float
    c: float

    def seconds(self, num_shards: int) -> float:
        """Returns what the model expects."""
        return self.b / num_shards + self.a * (num_shards - 1) + self.c

    def best(self, candidates: Iterable[int]) -> int:
        """Returns the fastest P; of equal ones the largest, by which a device holds least."""
        return min(candidates, key=lambda num_shards: (self.seconds(num_shards), -num_shards))

    def __str__(self) -> str:
        """The formula, in milliseconds."""
        return f"t(P) = {1e3 * self.b:.3g} / P + {1e3 * self.a:.3g} (P - 1) + {1e3 * self.c:.3g} ms"


def fit(points: Iterable[tuple[int, float]]) -> Model:
    """Fits the model to measured steps, by least squares of relative errors with no negative coefficient.

    Of three different P or more all three terms are fitted; of two, `c` and the one of the others that goes the right
    way, so that the model meets both (or, where that would take a negative `c`, comes nearest); of one, `c` alone.

    **Arguments:** `points`: pairs of P and seconds; a P may come up several times.

    **Raises:** `ArgumentError` when there are none, or when any is not positive.
    """
    measured = list(points)
    wrong = [pair for pair in measured if pair[0] < 1 or not 0 < pair[1] < math.inf]
    if not measured or wrong:
        raise ArgumentError(f"points holds {wrong or 'nothing'}, expected pairs of P >= 1 and seconds > 0")
    num_shards, seconds = (np.array(column, np.float64) for column in zip(*measured, strict=True))
    terms = np.stack([num_shards - 1, 1 / num_shards, np.ones_like(num_shards)], axis=1)
    different = np.unique(num_shards)
    allowed = [0, 1, 2]
    if different.size == 2:
        few, many = (seconds[num_shards == size].mean() for size in different)
        allowed = [1, 2] if many < few else [0, 2]
    elif different.size == 1:
        allowed = [2]
    best, least = np.zeros(3), math.inf
    # With three terms every set of positive ones can be tried: the best that is feasible is the optimum.
    for count in range(1, len(allowed) + 1):
        for chosen in itertools.combinations(allowed, count):
            part = terms[:, chosen] / seconds[:, None]
            solution = np.linalg.lstsq(part, np.ones_like(seconds))[0]
            error = float(np.square(part @ solution - 1).sum())
            if (solution >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(3), error
                best[list(chosen)] = solution
    return Model(*best.tolist())


@dataclass(frozen=True)
class Point:
    """A way to split a table, measured.

    **Fields:** `axes`: over which mesh axes; none where the table is replicated. `num_shards`: P. `seconds`: median of
    steps; `spread_seconds`: half the range of the middle half of them.
    """

    axes: Axes
    num_shards: int
    seconds: float
    spread_seconds: float

    def __str__(self) -> str:
        """The way, and its seconds."""
        return f"{_in_words(self.axes)} {1e3 * self.seconds:.3g} ± {1e3 * self.spread_seconds:.2g} ms"


@dataclass(frozen=True)
class Partition:
    """How one table should be split.

    **Fields:** `path`: of the variable. `axes`: the mesh axes, none to replicate it. `points`: what was measured, of
    all tables of its width together. `model`: fitted to those by rows. `why`: in words.
    """

    path: str
    axes: Axes
    points: tuple[Point, ...]
    model: Model
    why: str

    def __str__(self) -> str:
        """The choice, what was measured, and the model."""
        measured = "\n".join(f"    {point}" for point in self.points)
        return f"{self.path}: {_in_words(self.axes)}; {self.why}\n{measured}\n    {self.model}"


@dataclass(frozen=True)
class Partitions:
    """What a search has found; `print` shows it. **Fields:** `tables`: one entry for each. `axes`: that were free."""

    tables: tuple[Partition, ...]
    axes: Axes

    def overrides(self, axis: str) -> dict[str, Placement]:
        """Returns what `Hybrid(overrides=…)` of one mesh axis is given, so that tables are split as was found.

        **Raises:** `ArgumentError` when the axis was none of those that tables could be split over.
        """
        if axis not in self.axes:
            raise ArgumentError(f"axis={axis!r} was not searched, expected one of {self.axes}")
        return {
            glob.escape(table.path): Rows() if axis in table.axes else Replicated()  # of the patterns of fnmatch, too
            for table in self.tables
        }

    def __str__(self) -> str:
        """All tables."""
        return "\n".join(str(table) for table in self.tables) or "no table that rows pay for: nothing to split"


def choose(points: Sequence[Point]) -> tuple[Point, Model, str]:
    """Chooses among ways that were measured.

    Those that noise does not tell from the fastest are compared by the model, which has seen all points; a replicated
    table, which the model is not of, by its measured seconds. A way that is clearly slower is never chosen.

    **Returns:** the chosen one, the model and why. **Raises:** `ArgumentError` when no way is by rows.
    """
    model = fit((point.num_shards, point.seconds) for point in points if point.axes)
    fastest = min(points, key=lambda point: point.seconds)
    limit = fastest.seconds + fastest.spread_seconds
    near = [point for point in points if point.seconds - point.spread_seconds <= limit]

    def expected(point: Point) -> tuple[float, float]:
        return model.seconds(point.num_shards) if point.axes else point.seconds, point.seconds

    chosen = min(near, key=expected)
    if len(near) == 1:
        return chosen, model, f"the fastest of {len(points)} ways"
    others = ", ".join(_in_words(point.axes) for point in near if point is not chosen)
    return chosen, model, f"the fastest of {len(points)} ways by the model; measured alike: {others}"


def search_partitions(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    strategies: Mapping[str, Strategy],
    *,
    init: Callable[..., Any],
    batches: Iterable[Any],
    microbatches: int = 1,
    measure: Measure | None = None,
) -> Partitions:
    """Finds out over which mesh axes each table is best split, by steps measured on the mesh, in this process.

    Searched are the tables that the strategies place by `Rows` and no override speaks of, and the axes with `Hybrid`.
    Tables of equal width and dtype are exchanged together, so they are measured together and split alike. They are
    tried over every set of these axes, and replicated where a step uses a good part of their rows. The model itself is
    not computed. All processes take the same measurements, and choose by those of the slowest.

    **Arguments:** as of `parallelize`; `batches`: a few real ones, host arrays or global arrays. `measure`: takes the
    measurements, for who has others than steps on this mesh.

    **Returns:** `Partitions`. **Raises:** as `parallelize`; `ArgumentError` where no axis has the strategy `Hybrid`.
    """
    check_strategies(mesh, strategies)
    given, free = list(batches), _free_axes(mesh, strategies)
    traced = trace_reads(loss_fn, init, given, microbatches=microbatches)
    options = row_options(optimizer, strategies, traced.reads.params, traced.reads.sparse)
    variables = traced.reads.variables("params", options)
    plan = make_plan(mesh, strategies, variables, microbatches=microbatches)
    patterns = [pattern for strategy in strategies.values() for pattern in getattr(strategy, "overrides", {})]
    paths = [
        one.path
        for one in plan.variables
        if any(isinstance(placement, Rows) for placement in one.placements)
        and not any(fnmatch.fnmatchcase(one.path, pattern) for pattern in patterns)
    ]
    if not paths:
        return Partitions((), free)
    tables = see_ids(traced, given, microbatches=microbatches).tables
    measure = _Trials(tables, optimizer, mesh, strategies) if measure is None else measure
    found: dict[str, Partition] = {}
    for group in _groups({path: tables[path] for path in paths}):
        ways = _ways(mesh, free, [tables[path] for path in group])
        points = _points(mesh, measure(group, ways), ways)
        chosen, model, why = choose(points)
        found |= {path: Partition(path, chosen.axes, points, model, why) for path in group}
    return Partitions(tuple(found[path] for path in paths), free)


def _free_axes(mesh: Mesh, strategies: Mapping[str, Strategy]) -> Axes:
    free = tuple(axis for axis in mesh.axis_names if isinstance(strategies.get(axis), Hybrid))
    if not free:
        raise ArgumentError(
            f"strategies is {dict(strategies)!r} without Hybrid, so that no table is split: give the axes that tables "
            f"may be split over bx.Hybrid()"
        )
    return free


def _groups(tables: Mapping[str, SeenIds]) -> list[list[str]]:
    """The tables that travel together."""
    groups: dict[Any, list[str]] = {}
    for path, table in tables.items():
        groups.setdefault((math.prod(table.spec.shape[1:]), str(table.spec.dtype)), []).append(path)
    return list(groups.values())


def _ways(mesh: Mesh, free: Axes, tables: Sequence[SeenIds]) -> list[Axes]:
    """The sets of axes, most devices first; and none, unless that is hopeless."""
    several = [axis for axis in free if mesh.shape[axis] > 1] or free[:1]
    ways = [way for count in range(1, len(several) + 1) for way in itertools.combinations(several, count)]
    ways.sort(key=lambda way: -_num_shards(mesh, way))
    num_ids = [(table.spec.shape[0], sum(ids.size for ids in table.steps[0])) for table in tables]
    return [*ways, *([] if any(num_rows > HOPELESS * count for num_rows, count in num_ids) else [()])]


def _points(mesh: Mesh, seconds: Mapping[Axes, Sequence[float]], ways: Sequence[Axes]) -> tuple[Point, ...]:
    """Medians and spreads, each of the process where it is largest, so that all have the same."""
    own = np.zeros((len(ways), 2), np.float32)
    for row, way in zip(own, ways, strict=True):
        low, median, high = np.percentile(seconds[way], [25, 50, 75])
        row[:] = median, (high - low) / 2
    split, whole = NamedSharding(mesh, PartitionSpec(mesh.axis_names)), NamedSharding(mesh, PartitionSpec())
    of_devices = jax.make_array_from_callback((mesh.size, *own.shape), split, lambda _: own[None])
    largest = compile_on(mesh, lambda values: values.max(0), in_shardings=(split,), out_shardings=whole)
    agreed = np.asarray(largest(of_devices)).tolist()
    return tuple(Point(way, _num_shards(mesh, way), *pair) for way, pair in zip(ways, agreed, strict=True))


def _num_shards(mesh: Mesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _in_words(axes: Axes) -> str:
    return f"rows over {', '.join(axes)}" if axes else "replicated"


@final
class _Trials:
    """Times steps that pull the rows of some tables, push gradients of them, and move them, by real ids.

    A step is one that `parallelize` makes, of a loss that has nothing but the tables, so that it does what it will do
    in training. Tables are made anew, split, for each turn of each way, and are gone after it.
    """

    def __init__(
        self,
        tables: Mapping[str, SeenIds],
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        strategies: Mapping[str, Strategy],
    ) -> None:
        self._tables, self._optimizer, self._mesh, self._strategies = tables, optimizer, mesh, strategies
        self._divisor = _num_shards(mesh, batch_axes(mesh, strategies))

    def __call__(self, paths: Sequence[str], ways: Sequence[Axes]) -> dict[Axes, list[float]]:
        batches = [self._batch(paths, number) for number in range(len(self._tables[paths[0]].steps))]
        steps = {way: self._step(paths, way, batches[0]) for way in ways}
        placed = [place(batch, steps[ways[0]].batch_shardings) for batch in batches]
        seconds: dict[Axes, list[float]] = {way: [] for way in ways}
        for _ in range(NUM_TURNS):
            for way, step in steps.items():
                seconds[way] += _turn(step, placed)
        return seconds

    def _batch(self, paths: Sequence[str], number: int) -> dict[str, list[np.ndarray]]:
        """The ids of a step, with ids that are beyond the table for none, and for what is missing to divide them."""
        batch: dict[str, list[np.ndarray]] = {}
        for path in paths:
            num_rows = self._tables[path].spec.shape[0]
            laid = [
                np.pad(ids, ((0, -len(ids) % self._divisor), (0, 0)), constant_values=-1)
                for ids in self._tables[path].steps[number]
            ]
            batch[path] = [np.where(ids < 0, num_rows, ids).astype(np.int32) for ids in laid]
        return batch

    def _step(self, paths: Sequence[str], way: Axes, batch: Any) -> Step:
        specs = {path.removeprefix("params/"): self._tables[path].spec for path in paths}

        def loss(params: Any, batch: Any) -> jax.Array:
            total = jnp.zeros(())
            for name, table in params.items():
                for ids in batch[f"params/{name}"]:
                    rows = jnp.take(table, ids, axis=0, mode="fill", fill_value=0)
                    total += jnp.square(rows).sum(dtype=jnp.float32)
            return total

        strategies: dict[str, Strategy] = {}
        for axis, strategy in self._strategies.items():
            if isinstance(strategy, Hybrid):
                placement = Rows() if axis in way else Replicated()
                overrides = {glob.escape(path): placement for path in paths}
                strategy = replace(strategy, overrides=overrides, out_of_range="as jax")
            strategies[axis] = strategy
        return parallelize(
            loss,
            self._optimizer,
            self._mesh,
            strategies,
            init=lambda key: {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in specs.items()},
            batch=batch,
        )


def _turn(step: Step, batches: Sequence[Any]) -> list[float]:
    """The seconds of some steps behind one that is not counted, on tables that are made for them."""
    state, seconds = step.init(jax.random.key(0)), list[float]()
    for number in range(NUM_STEPS + 1):
        start = time.perf_counter()
        state, metrics = step.update(state, batches[number % len(batches)])
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
