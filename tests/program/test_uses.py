"""Verdicts on many model shapes, with the line that decides."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from braidax.program import LeafUses, find_uses, trace
from tests.support.program import losses
from tests.support.program.losses import SHAPES, draw, ids


def uses_of(loss: Any, params: Any, *rest: Any, argument: int = 0) -> dict[str, LeafUses]:
    return {leaf.name: leaf for leaf in find_uses(trace(loss, params, *rest), argument)}


def deciding_in(found: LeafUses) -> Any:
    """The use that decides: the first that needs the whole leaf, else the first of all."""
    return next((use for use in found.uses if use.kind == "dense"), found.uses[0])


def line_with(text: str, file: str) -> str:
    lines = Path(file).read_text().splitlines()
    (number,) = (at for at, line in enumerate(lines, 1) if line.rstrip().endswith(text))
    return f"{file}:{number}"


@pytest.mark.parametrize("name", SHAPES)
def test_verdicts(name: str) -> None:
    shape = SHAPES[name]
    found = uses_of(*shape.make())
    assert {leaf: found[leaf].verdict for leaf in shape.verdicts} == shape.verdicts
    deciding = deciding_in(found[next(iter(shape.verdicts))])
    assert deciding.line.startswith(losses.__file__)
    if shape.line:
        assert deciding.line == line_with(shape.line, losses.__file__)
    assert shape.says in deciding.why


@pytest.mark.parametrize(
    ("name", "ids_shapes", "lengths"),
    [("take", [(4, 3)], ()), ("scan", [(4,)], (3,)), ("cond", [(3,), (3,)], (4,)), ("scalar", [()], ())],
)
def test_ids_have_their_shape_and_loops(name: str, ids_shapes: list[Any], lengths: Any) -> None:
    rows = [use.rows for use in uses_of(*SHAPES[name].make())["table"].uses]
    assert [(one.ids_shape, one.lengths) for one in rows if one] == [(shape, lengths) for shape in ids_shapes]


def test_what_becomes_of_ids_out_of_range_is_known() -> None:
    table = uses_of(*SHAPES["at"].make())["table"]
    assert [use.rows and use.rows.out_of_range for use in table.uses] == ["fill", "clip", "promise"]
    assert [use.rows and use.rows.out_of_range for use in uses_of(*SHAPES["equinox"].make())["embed/weight"].uses] == [
        "clip"
    ]


def test_sentences() -> None:
    line = line_with("# tied", losses.__file__).rpartition("/")[2]
    why = uses_of(*SHAPES["tied"].make())["table"].why
    assert why.startswith("gathered by rows (ids out of range are promised not to occur) at losses.py:")
    assert why.endswith(f", but used whole by transpose at {line}: its gradient is dense")
    assert uses_of(*SHAPES["scan"].make())["table"].why.endswith(": 12 ids of 37 rows")
    unused = uses_of(*SHAPES["jit"].make())["spare"]
    assert (unused.why, unused.uses) == ("nothing reads it", ())


def returned(table: Any, ids: Any) -> Any:
    return table[ids].sum(), table


def carried(table: Any, ids: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, t: t * 2, table)[ids].sum()


def columns(table: Any, ids: Any) -> Any:
    return jnp.take(table, ids[0] % 6, axis=1).sum()


def parts_of_rows(table: Any, ids: Any) -> Any:
    return table[ids, 2].sum()


def one_static_row(table: Any, ids: Any) -> Any:
    return table[3].sum()


def scaled_before(table: Any, ids: Any) -> Any:
    return (table * 2)[ids].sum()


def given_out_of_a_loop(table: Any, ids: Any) -> Any:
    return jax.lax.cond(ids[0, 0] > 0, lambda: table, lambda: jnp.zeros_like(table))[ids].sum()


def compared_with_one_hot(table: Any, ids: Any) -> Any:
    return (jax.nn.one_hot(ids, 37) @ table).sum()


def as_integers(table: Any, ids: Any) -> Any:
    return table.astype(jnp.int32)[ids].sum()


@pytest.mark.parametrize(
    ("loss", "verdict", "says"),
    [
        (returned, "mixed", "returned by the program"),
        (carried, "dense", "carried whole through scan"),
        (columns, "dense", "read by gather in slices of [37, 1], which are no rows"),
        (parts_of_rows, "dense", "read by gather in slices of [1, 1], which are no rows"),
        (one_static_row, "dense", "used whole by slice"),
        (scaled_before, "dense", "used whole by mul"),
        (given_out_of_a_loop, "dense", "passed on whole by cond"),
        (compared_with_one_hot, "dense", "used whole by dot_general"),
        (as_integers, "dense", "used whole by convert_element_type"),
    ],
)
def test_other_uses_need_the_whole_table(loss: Any, verdict: str, says: str) -> None:
    table = uses_of(loss, draw(37, 6), ids(4, 3))[""]
    assert table.verdict == verdict
    assert deciding_in(table).why == says


def test_rows_filled_for_lack_of_several_indices_are_no_rows() -> None:
    """A gather whose other index may be out of range as well has no rule for the constant that stands for its rows."""

    def loss(table: Any, ids: Any) -> Any:
        numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0, 1))
        return jax.lax.gather(table, ids, numbers, (1, 6), mode="fill").sum()

    table = uses_of(loss, draw(37, 6), ids(4, 2))[""]
    assert (table.verdict, table.why.partition(" at ")[0]) == (
        "dense", "read by gather with several indices that may be out of range",
    )  # fmt: skip


def test_a_shared_trace_does_not_lend_its_line() -> None:
    """JAX traces jnp.take once for both, and keeps the line of the first."""

    def first(table: Any, ids: Any) -> Any:
        return jnp.take(table, ids, axis=0).sum()  # here first

    def second(table: Any, ids: Any) -> Any:
        return jnp.take(table, ids, axis=0).sum()  # here second

    for loss, text in ((first, "# here first"), (second, "# here second")):
        deciding = deciding_in(uses_of(jax.jit(loss), draw(41, 7), ids(4, 3))[""])
        assert deciding.line == line_with(text, __file__)


def test_any_argument_may_be_asked_for() -> None:
    def loss(scale: Any, tables: Any, ids: Any) -> Any:
        return (tables["a"][ids] * scale).sum()

    found = uses_of(loss, draw(6), {"a": draw(37, 6), "b": draw(3)}, ids(4, 3), argument=1)
    assert {name: leaf.verdict for name, leaf in found.items()} == {"a": "sparse", "b": "unused"}
