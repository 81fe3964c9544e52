"""Partition search: the model against numbers that are known, choices by a simulated timer, and one real search."""

import io
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from braidax.parallel.ids import see_ids, trace_reads
from braidax.parallel.partition import Axes, Measure, Model, Partitions, Point, _Trials, choose, fit, search_partitions
from tests.laws.tree import ROOT
from tests.parallel.models import make_mesh
from tests.parallel.test_hybrid import LENGTH, init, make_batch, pooled, sampled

CUBE = {"outer": bx.Hybrid(), "middle": bx.Hybrid(), "inner": bx.Hybrid()}
BATCHES = [make_batch(seed) for seed in range(2)]


def cube() -> Mesh:
    return jax.make_mesh((2, 2, 2), tuple(CUBE), axis_types=(AxisType.Auto,) * 3)


# The model


def exact(a: float, b: float, c: float, sizes: Sequence[int]) -> list[tuple[int, float]]:
    return [(size, b / size + a * (size - 1) + c) for size in sizes]


@pytest.mark.parametrize(
    ("a", "b", "c"), [(3e-4, 8e-3, 2e-3), (0.0, 8e-3, 2e-3), (3e-4, 0.0, 2e-3), (3e-4, 8e-3, 0.0), (0.0, 0.0, 2e-3)]
)
@pytest.mark.parametrize("sizes", [(1, 2, 4), (2, 4, 8, 16, 64), (2, 2, 4, 8, 8)])
def test_the_fit_finds_what_made_the_points(a: float, b: float, c: float, sizes: tuple[int, ...]) -> None:
    model = fit(exact(a, b, c, sizes))
    np.testing.assert_allclose((model.a, model.b, model.c), (a, b, c), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(model.seconds(32), b / 32 + 31 * a + c, rtol=1e-6)


def test_no_term_is_negative() -> None:
    convex = [(1, 1.0), (2, 3.0), (4, 3.5), (8, 3.6)]  # no such curve: it flattens
    model = fit(convex)
    assert min(model.a, model.b, model.c) >= 0

    def error(a: float, b: float, c: float) -> float:
        return sum(((b / size + a * (size - 1) + c) / seconds - 1) ** 2 for size, seconds in convex)

    random = np.random.default_rng(0)
    least = error(model.a, model.b, model.c)
    for step in (1e-3, 0.03, 1.0):
        for change in random.normal(size=(300, 3)) * step:
            assert error(*np.maximum(np.array([model.a, model.b, model.c]) + change, 0)) >= least - 1e-12


def test_few_points() -> None:
    alone = fit([(4, 2.0), (4, 4.0)])
    np.testing.assert_allclose((alone.a, alone.b, alone.c), (0, 0, 2.4))  # of relative errors: 20 % and 40 %
    falling, rising = fit([(2, 5.0), (4, 4.0)]), fit([(2, 4.0), (8, 7.0)])
    np.testing.assert_allclose((falling.a, falling.b, falling.c), (0, 4, 3), atol=1e-9)
    np.testing.assert_allclose((rising.a, rising.b, rising.c), (0.5, 0, 3.5), atol=1e-9)
    steep = fit([(2, 9.0), (4, 3.0)])  # b / P falls by half at most
    assert steep.a == steep.c == 0
    assert steep.b > 12
    level = fit([(2, 4.0), (8, 4.0)])
    np.testing.assert_allclose((level.a, level.b, level.c), (0, 0, 4), atol=1e-9)


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(2, 0.0)], [(2, float("nan"))], [(2, 1.0), (4, float("inf"))]])
def test_points_that_are_none(points: list[Any]) -> None:
    with pytest.raises(ArgumentError, match=r"points holds .*, expected pairs of P >= 1 and seconds > 0"):
        fit(points)


def test_the_best() -> None:
    assert Model(a=1.0, b=64.0, c=0).best([1, 2, 4, 8, 16]) == 8
    assert Model(a=1.0, b=0, c=1.0).best([1, 2, 4]) == 1
    assert Model(a=0, b=0, c=1.0).best([1, 2, 4]) == 4  # all the same: the least memory
    assert str(Model(a=1e-3, b=64e-3, c=0)) == "t(P) = 64 / P + 1 (P - 1) + 0 ms"


# Choices


def test_what_is_clearly_slower_is_not_chosen() -> None:
    sizes = (8, 4, 2, 1)
    points = [Point(("a",) * size, size, seconds, 0.01) for size, seconds in zip(sizes, (5, 1, 5, 5), strict=True)]
    assert choose(points)[0].num_shards == 4  # whatever the model makes of such a curve
    wide = [Point(point.axes, point.num_shards, point.seconds, 5.0) for point in points]
    chosen, model, why = choose(wide)
    assert chosen.num_shards == model.best(sizes)
    assert "by the model; measured alike:" in why


def test_a_replicated_table_is_compared_by_its_seconds() -> None:
    by_rows = [Point(("a", "b"), 8, 3.0, 0.1), Point(("a",), 4, 4.0, 0.1), Point(("b",), 2, 5.0, 0.1)]
    chosen, model, _ = choose([*by_rows, Point((), 1, 2.0, 0.1)])
    assert chosen.axes == ()
    assert model == fit([(8, 3.0), (4, 4.0), (2, 5.0)])
    assert choose([*by_rows, Point((), 1, 9.0, 0.1)])[0].axes == ("a", "b")
    # Not told apart by noise: the model has no say about the replicated one, whatever it makes of P = 1.
    assert choose([*by_rows, Point((), 1, 2.9, 0.3)])[0].axes == ()
    assert choose([*by_rows, Point((), 1, 3.1, 0.3)])[0].axes == ("a", "b")


def simulated(a: float, b: float, c: float, *, noise: float, seed: int, whole: float = 1.0) -> Measure:
    random = np.random.default_rng(seed)

    def measure(paths: Sequence[str], ways: Sequence[Axes]) -> dict[Axes, list[float]]:
        expected = {way: Model(a, b, c).seconds(2 ** len(way)) if way else whole for way in ways}
        return {way: (time * np.exp(noise * random.normal(size=15))).tolist() for way, time in expected.items()}

    return measure


def search(measure: Measure | None, loss: Any = pooled, **options: Any) -> Partitions:
    mesh = options.pop("mesh", None) or cube()
    options = {"strategies": CUBE, "init": init, "batches": BATCHES, **options}
    return search_partitions(loss, optax.adagrad(0.1), mesh, options.pop("strategies"), measure=measure, **options)


@pytest.mark.parametrize(
    ("a", "b", "c", "best"),
    [(0.1e-3, 16e-3, 1e-3, 8), (1e-3, 16e-3, 1e-3, 4), (3e-3, 16e-3, 1e-3, 2), (0, 0, 1e-3, 8)],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_best_split(a: float, b: float, c: float, best: int, seed: int) -> None:
    found = search(simulated(a, b, c, noise=0.1, seed=seed))
    assert [table.path for table in found.tables] == ["params/other", "params/table"]
    for table in found.tables:
        times = {size: Model(a, b, c).seconds(size) for size in (2, 4, 8)}
        assert times[2 ** len(table.axes)] <= 1.06 * min(times.values())
        assert 2 ** len(table.axes) == best or b == 0
        assert len(table.points) == 7
        np.testing.assert_allclose(table.model.seconds(best), times[best], rtol=0.1)


def test_a_table_may_be_best_replicated() -> None:
    found = search(simulated(3e-3, 16e-3, 1e-3, noise=0.1, seed=0, whole=1e-3), loss=sampled)
    chosen = {table.path: table.axes for table in found.tables}
    assert chosen["params/narrow"] == ()  # 203 numbers, and 80 ids a step
    assert len(chosen["params/other"]) == 1  # 1,218 rows together with the other table of width 6, and 53 ids
    assert [len(table.points) for table in found.tables if table.path == "params/narrow"] == [8]
    assert [len(table.points) for table in found.tables if table.path == "params/other"] == [7]


def test_who_is_asked_for_what() -> None:
    asked: list[Any] = []

    def measure(paths: Sequence[str], ways: Sequence[Axes]) -> dict[Axes, list[float]]:
        asked.append((list(paths), list(ways)))
        return {way: [1.0 + len(way)] for way in ways}

    found = search(measure, mesh=make_mesh("4x2 auto"), strategies={"data": bx.Hybrid(), "model": bx.Hybrid()})
    assert asked == [(["params/other", "params/table"], [("data", "model"), ("data",), ("model",)])]
    assert [table.axes for table in found.tables] == [("data",), ("data",)]
    assert found.overrides("data") == {"params/other": bx.Rows(), "params/table": bx.Rows()}
    assert found.overrides("model") == {"params/other": bx.Replicated(), "params/table": bx.Replicated()}
    with pytest.raises(ArgumentError, match=r"axis='x' was not searched, expected one of \('data', 'model'\)"):
        found.overrides("x")
    # Along an axis for data alone tables are whole, and what the user has said is left alone.
    strategies = {"data": bx.Hybrid({"*/oth*": bx.Rows()}), "model": bx.DataParallel()}
    found = search(measure, mesh=make_mesh("4x2 auto"), strategies=strategies)
    assert asked[1:] == [(["params/table"], [("data",), ()])]  # 203 rows, 80 ids a step: whole is worth a try
    assert (found.axes, found.tables[0].axes) == (("data",), ())
    assert found.overrides("data") == {"params/table": bx.Replicated()}
    assert search(measure, strategies={"inner": bx.Hybrid({"*": bx.Replicated()})}).tables == ()
    assert str(search(measure, strategies={"inner": bx.Hybrid({"*": bx.Replicated()})})).startswith("no table")
    with pytest.raises(ArgumentError, match="without Hybrid, so that no table is split"):
        search(measure, strategies={"inner": bx.DataParallel()})


def test_overrides_name_no_other_variable() -> None:
    def begin(key: jax.Array) -> Any:
        return {"t[ab]*": init(key)["other"], "ta": init(key)["other"]}

    def loss(params: Any, batch: Any) -> Any:
        return params["t[ab]*"][batch["ids"]].sum() + params["ta"].sum()

    found = search(simulated(0, 1.0, 1.0, noise=0, seed=0, whole=9.0), loss=loss, init=begin)
    strategies = {axis: bx.Hybrid(found.overrides(axis)) for axis in CUBE}
    step = bx.parallelize(loss, optax.sgd(0.1), cube(), strategies, init=begin, batch=BATCHES[0])
    placed = {variable.path: set(map(str, variable.placements)) for variable in step.plan.variables}
    assert placed == {"params/t[ab]*": {"rows"}, "params/ta": {"replicated"}}


# Real steps


def looked_up_by_some(params: Any, batch: Any) -> Any:
    some = jnp.where(jnp.arange(LENGTH) < batch["length"][:, None], 3 * batch["ids"], 5000)
    return jnp.square(jnp.take(params["other"], some, axis=0, mode="fill", fill_value=0).sum(1)).mean()


def test_a_trial_is_a_step_by_the_same_ids() -> None:
    strategies = {"data": bx.Hybrid({"*": bx.Replicated()}), "model": bx.Hybrid(), "rest": bx.DataParallel()}
    mesh = jax.make_mesh((2, 2, 2), tuple(strategies), axis_types=(AxisType.Auto,) * 3)
    batches = [jax.tree.map(lambda leaf: leaf[:12], batch) for batch in BATCHES]
    tables = see_ids(trace_reads(looked_up_by_some, init, batches), batches).tables
    trials = _Trials(tables, optax.adagrad(0.1), mesh, strategies)
    batch = trials._batch(["params/other"], 1)
    (ids,) = batch["params/other"]
    used = np.arange(LENGTH) < batches[1]["length"][:, None]
    np.testing.assert_array_equal(ids[:60, 0], np.where(used, 3 * batches[1]["ids"], 1015).ravel())  # beyond all rows
    assert ids[60:].tolist() == [[1015]] * 4  # 8 devices divide 64
    for way in [("data", "model"), ("data",), ("model",), ()]:
        (planned,) = trials._step(["params/other"], way, batch).plan.variables
        assert (planned.path, planned.shape) == ("params/other", (1015, 6))
        expected = [bx.Rows() if axis in way else bx.Replicated() for axis in strategies]
        assert list(planned.placements) == expected


def test_a_real_search() -> None:
    """Of a table that is looked up by ids which some samples have and some have not."""
    strategies = {"data": bx.Hybrid(), "model": bx.Hybrid(out_of_range="raise")}
    mesh = make_mesh("4x2 explicit")
    found = search(None, mesh=mesh, strategies=strategies, loss=looked_up_by_some)
    (table,) = found.tables
    sizes = {point.axes: point.num_shards for point in table.points}
    assert sizes == {("data", "model"): 8, ("data",): 4, ("model",): 2, (): 1}
    assert all(1e-5 < point.seconds < 10 for point in table.points)
    assert table.axes in sizes
    assert table.model == fit([(point.num_shards, point.seconds) for point in table.points if point.axes])
    told = str(found)
    assert told.startswith("params/other: r")
    assert "    rows over data, model " in told
    assert "t(P) = " in told
    strategies = {axis: bx.Hybrid(found.overrides(axis)) for axis in strategies}
    step = bx.parallelize(looked_up_by_some, optax.adagrad(0.1), mesh, strategies, init=init, batch=BATCHES[0])
    split = {v.path: v.placements for v in step.plan.variables}
    assert split[table.path] == tuple(bx.Rows() if axis in table.axes else bx.Replicated() for axis in mesh.axis_names)


def test_processes_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two processes measures another way as slow: both go by the slower."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    log = io.StringIO()
    program = Program("tests.parallel.partition_of_two", kind="module", devices_per_process=4)
    assert launch_here(program, 2, log=log) == 0, log.getvalue()
    told = dict(line.split(" ", 1) for line in log.getvalue().splitlines() if line.endswith("]"))
    assert set(told) == {"[0]", "[1]"}
    assert told["[0]"] == told["[1]"]
    axes, num_touched = json.loads(told["[0]"])
    assert axes == ["model"]
    assert num_touched == np.mean([len(np.unique(batch["ids"])) for batch in BATCHES])
