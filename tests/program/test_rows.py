"""Without its tables a program has the same loss, and gradients of rows that add up to those of the tables."""

from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AxisType

from braidax.errors import ArgumentError
from braidax.program import (
    Lookup,
    RowProgram,
    compile_on,
    find_batch_dims,
    find_uses,
    named_leaves,
    trace,
    without_tables,
)
from tests.support.program.losses import SHAPES, SPARSE, V, draw
from tests.support.program.losses import ids as draw_ids


class Case:
    """A model shape taken apart; `rest` are its parameters without the tables."""

    def __init__(self, name: str) -> None:
        loss, self.params, self.batch = SHAPES[name].make()
        self.program = trace(loss, self.params, self.batch)
        found = [leaf for leaf in find_uses(self.program) if leaf.verdict == "sparse"]
        self.rows: RowProgram = without_tables(self.program, found)
        leaves = dict(named_leaves(self.params))
        self.tables = {leaf.name: leaves[leaf.name] for leaf in found}
        emptied = [None if name in self.tables else leaf for name, leaf in leaves.items()]
        self.rest = jax.tree.unflatten(jax.tree.structure(self.params), emptied)

    def look_up(self, lookup: Lookup, ids: Any) -> Any:
        return self.tables[lookup.name][jnp.maximum(ids, 0)]

    @cached_property
    def expected(self) -> tuple[Any, dict[str, Any]]:
        loss, gradients = jax.jit(jax.value_and_grad(self.program))(self.params, self.batch)
        return loss, {name: leaf for name, leaf in named_leaves(gradients) if name in self.tables}

    def scattered(self, all_ids: Any, gradients: Any) -> dict[str, Any]:
        """The gradients of rows, added up where their ids are."""
        sums = {name: np.zeros(table.shape) for name, table in self.tables.items()}
        for lookup, ids, rows in zip(self.rows.lookups, all_ids, gradients, strict=True):
            assert (ids.shape, ids.dtype) == (lookup.ids.shape, np.int32)
            flat = np.asarray(ids).reshape(-1)
            assert flat.min() >= -1
            assert flat.max() < lookup.num_rows
            values = np.asarray(rows, np.float64).reshape(len(flat), *sums[lookup.name].shape[1:])
            assert not values[flat < 0].any()
            np.add.at(sums[lookup.name], flat[flat >= 0], values[flat >= 0])
        return sums


@cache
def case_of(name: str) -> Case:
    return Case(name)


def check(case: Case, loss: Any, sums: dict[str, Any], tolerance: float) -> None:
    expected, dense = case.expected
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert sums.keys() == dense.keys()
    for name, table in dense.items():
        assert np.abs(table).max() > 0
        np.testing.assert_allclose(sums[name], np.asarray(table), rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", [name for name in SPARSE if name not in ("index", "pooled", "carry")])
def test_rows_are_fed(name: str) -> None:
    case = case_of(name)
    all_ids = case.rows.ids(case.rest, case.batch)
    fed = case.rows.fed()
    rows = tuple(
        jnp.where((ids < 0).reshape(*ids.shape, *[1] * (spec.rows.ndim - ids.ndim)), 1e9, case.look_up(spec, ids))
        for spec, ids in zip(case.rows.lookups, all_ids, strict=True)
    )
    gradient = jax.jit(jax.value_and_grad(fed, argnums=2)).trace(case.rest, case.batch, rows)
    loss, gradients = gradient.lower().compile()(case.rest, case.batch, rows)
    check(case, loss, case.scattered(all_ids, gradients), SHAPES[name].tolerance)
    shapes = shapes_in(gradient.jaxpr.jaxpr)
    assert not {table.shape for table in case.tables.values()} & shapes
    assert rows[0].shape in shapes


@pytest.mark.parametrize("name", ["at", "scan", "cond", "carry", "cast", "remat"])
def test_rows_are_looked_up_in_place(name: str) -> None:
    case = case_of(name)
    everywhere = range(len(case.rows.lookups))
    zeros = tuple(jnp.zeros(one.rows.shape, one.rows.dtype) for one in case.rows.lookups)
    gradient = jax.value_and_grad(case.rows.tapped(case.look_up, at=everywhere), argnums=2, has_aux=True)
    (loss, all_ids), gradients = jax.jit(gradient)(case.rest, case.batch, zeros)
    check(case, loss, case.scattered(all_ids, gradients), SHAPES[name].tolerance)
    for early, ids in zip(case.rows.ids(case.rest, case.batch), all_ids, strict=True):
        assert early is None or np.array_equal(early, ids)


def test_late_lookups_are_tapped_and_the_others_fed() -> None:
    case = case_of("carry")
    assert [(one.name, one.late, one.ids.shape) for one in case.rows.lookups] == [
        ("other", False, (12,)), ("table", True, (4, 4)),
    ]  # fmt: skip
    early, none = case.rows.ids(case.rest, case.batch)
    assert none is None
    seen: list[str] = []

    def look_up(lookup: Lookup, ids: Any) -> Any:
        seen.append(lookup.name)
        return case.look_up(lookup, ids)

    values = (case.look_up(case.rows.lookups[0], early), jnp.zeros((4, 4, 6)))
    gradient = jax.value_and_grad(case.rows.tapped(look_up), argnums=2, has_aux=True)
    (loss, (fed, late)), gradients = jax.jit(gradient)(case.rest, case.batch, values)
    assert (fed, set(seen)) == (None, {"table"})
    check(case, loss, case.scattered((early, late), gradients), 1e-6)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_lookup_may_be_an_island_inside_loops_on_a_mesh(kind: AxisType) -> None:
    """Rows live at `id mod 4`; each device gives those it has and the sum is the row, inside a rematerialised scan."""
    case = case_of("carry")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    whole, split = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P(None, "data")))
    padded = np.zeros((40, 6), np.float32)
    padded[:V] = case.tables["table"]

    def island(ids: Any, shard: Any) -> Any:
        mine = ids % 4 == jax.lax.axis_index("data")
        return jax.lax.psum(jnp.where(mine[:, None], shard[ids // 4, 0], 0), "data")

    def gradient(rest: Any, batch: Any, stored: Any, values: Any) -> Any:
        def look_up(lookup: Lookup, ids: Any) -> Any:
            one = jax.shard_map(island, in_specs=(jax.P(), jax.P(None, "data")), out_specs=jax.P(), axis_names={"data"})
            return one(ids, stored)

        tapped = case.rows.tapped(look_up)
        (loss, (_, late)), gradients = jax.value_and_grad(tapped, argnums=2, has_aux=True)(rest, batch, values)
        return loss, late, gradients

    early, _ = case.rows.ids(case.rest, case.batch)
    values = (case.look_up(case.rows.lookups[0], early), jnp.zeros((4, 4, 6)))
    step = compile_on(mesh, gradient, in_shardings=(whole, whole, split, whole), out_shardings=whole)
    stored = jax.device_put(padded.reshape(10, 4, 6), split)
    loss, late, gradients = step(*jax.device_put((case.rest, case.batch), whole), stored, jax.device_put(values, whole))
    check(case, np.asarray(loss), case.scattered((early, late), gradients), 1e-6)


@pytest.mark.parametrize("leading", [0, 1])
def test_ids_lie_flat_with_the_chosen_dim_first(leading: int) -> None:
    def loss(table: Any, ids: Any) -> Any:
        return (table[ids] * jnp.arange(12.0).reshape(3, 4, 1)).sum()

    table, batch = draw(V, 6), draw_ids(3, 4)
    program = trace(loss, table, batch)
    (leaf,) = find_uses(program)
    rows = without_tables(program, [leaf], leading={leaf.uses[0].path: leading})
    (flat,) = rows.ids(None, batch)
    np.testing.assert_array_equal(flat, np.asarray(batch.T if leading else batch).reshape(-1))
    np.testing.assert_allclose(rows.fed()(None, batch, (table[flat],)), loss(table, batch), rtol=1e-6)


def test_with_the_batch_first_no_rows_move() -> None:
    """Ids lie time by batch: laid flat batch first, each device keeps the rows of its own samples."""

    def loss(params: Any, batch: Any) -> Any:
        def step(hidden: Any, row: Any) -> Any:
            return jnp.tanh(hidden @ params["weight"] + row), None

        return (jax.lax.scan(step, jnp.zeros((16, 6)), params["table"][batch.T])[0] ** 2).mean()

    params, batch = {"table": draw(V, 6), "weight": draw(6, 6)}, draw_ids(16, 3)
    program = trace(loss, params, batch)
    table = find_uses(program)[0]
    path = table.uses[0].path
    dim = find_batch_dims(program, [path], {1: 0})[path][1]
    assert dim == 1
    rows = without_tables(program, [table], leading={path: dim})
    mesh = jax.make_mesh((8,), ("data",))
    whole, split = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
    gradient = jax.value_and_grad(rows.fed(), argnums=2)
    step = compile_on(mesh, gradient, in_shardings=(whole, split, (split,)), out_shardings=(whole, (split,)))
    text = step.lower({"table": None, "weight": params["weight"]}, batch, (draw(48, 6),)).compile().as_text()
    assert "all-reduce(" in text
    assert not any(f"{name}(" in text for name in ("all-gather", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint32])
def test_any_gather_of_rows_is_known(dtype: Any) -> None:
    """Ids of another dtype, of which not all rows have one, and rows that lie along the first dim of the result."""

    def loss(table: Any, ids: Any) -> Any:
        numbers = jax.lax.GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(0,), start_index_map=(0,))
        rows = jax.lax.gather(table, ids[:, None], numbers, (1, 6), mode="fill", fill_value=5.0)
        return (rows * jnp.arange(24.0).reshape(6, 4)).sum()

    high = 2**32 - 1 if dtype is jnp.uint32 else 100
    table, batch = draw(300, 6), jnp.array(np.array([0, 3, 36, high], np.uint64).astype(dtype))
    program = trace(loss, table, batch)
    rows = without_tables(program, find_uses(program))
    (flat,) = rows.ids(None, batch)
    assert flat.tolist() == [0, 3, 36, -1 if dtype is jnp.uint32 else 100]
    np.testing.assert_allclose(rows.fed()(None, batch, (table[flat],)), loss(table, batch), rtol=1e-5)


def test_ids_are_computed_without_the_model_and_the_model_without_ids() -> None:
    names = primitives(case_of("scan").rows.ids.closed.jaxpr)
    assert "select_n" in names
    assert not names & {"dot_general", "tanh", "gather", "braidax_lookup"}
    names = primitives(case_of("two tables").rows.fed().closed.jaxpr)
    assert names == {"jit", "reshape", "mul", "add", "sin", "reduce_sum"}


def test_the_wrappers_stay_around_what_is_fed() -> None:
    assert "remat2" in primitives(case_of("remat").rows.fed().closed.jaxpr)
    assert {"scan", "cond"} <= primitives(case_of("cond").rows.fed().closed.jaxpr)


def test_some_tables_may_stay() -> None:
    loss, params, batch = SHAPES["two tables"].make()
    program = trace(loss, params, batch)
    rows = without_tables(program, find_uses(program)[:1])
    assert jax.tree.structure(rows.ids.in_specs[0]) == jax.tree.structure({"first": None, "second": 0})
    (flat,) = rows.ids({"first": None, "second": params["second"]}, batch)
    got = rows.fed()({"first": None, "second": params["second"]}, batch, (params["first"][flat],))
    np.testing.assert_allclose(got, loss(params, batch), rtol=1e-6)


def test_what_does_not_fit_is_an_error() -> None:
    case = case_of("carry")
    with pytest.raises(
        ArgumentError, match="ids of table depend on parameters, so that rows cannot be fed: use tapped"
    ):
        case.rows.fed()
    with pytest.raises(ArgumentError, match=r"at is \[0\], expected indices of lookups, with those late: \[1\]"):
        case.rows.tapped(case.look_up, at=[0])
    values = (jnp.zeros((12, 6)), jnp.zeros((4, 4, 6)))
    with pytest.raises(ArgumentError, match=r"lookup gave float32\[6\] for table, expected float32\[4, 6\]: one row"):
        case.rows.tapped(lambda lookup, ids: jnp.zeros(6))(case.rest, case.batch, values)
    with pytest.raises(ArgumentError, match="1 arrays of rows were given, expected one for each lookup: 2"):
        case.rows.tapped(case.look_up)(case.rest, case.batch, values[:1])
    loss, params, batch = SHAPES["tied"].make()
    program = trace(loss, params, batch)
    with pytest.raises(ArgumentError, match=r"tables holds table, which is mixed \(gathered by rows .*\), expected sp"):
        without_tables(program, find_uses(program))


def shapes_in(jaxpr: Jaxpr) -> set[tuple[int, ...]]:
    """The shapes of all values, at any depth."""
    found: set[tuple[int, ...]] = set()
    for inner in walk(jaxpr):
        atoms = [*inner.invars, *inner.constvars, *(v for e in inner.eqns for v in (*e.invars, *e.outvars))]
        found |= {tuple(atom.aval.shape) for atom in atoms if hasattr(atom.aval, "shape")}  # pyright: ignore
    return found


def primitives(jaxpr: Jaxpr) -> set[str]:
    return {equation.primitive.name for inner in walk(jaxpr) for equation in inner.eqns}


def walk(jaxpr: Jaxpr) -> list[Jaxpr]:
    inner = [deep for equation in jaxpr.eqns for one in jaxprs_in_params(equation.params) for deep in walk(one)]
    return [jaxpr, *inner]
