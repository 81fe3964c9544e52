"""Parts of a program that follow its parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.errors import ArgumentError
from braidax.program import FollowingPart, Lies, following, trace
from tests.support.program.cutting.models import draw

PARAMS = {"head": draw(4, 4, seed=1), "layers": draw(6, 4, 4, seed=2), "tied": draw(4, 4, seed=3)}
BATCH = {"mask": draw(8, seed=4), "x": draw(8, 4, seed=5)}
LIE = [[Lies(None, 2)], [Lies((0, 1), 0), Lies((1, 4), 1), Lies((4, 6), 2)], [Lies(None, 0)]]
"""Of `head`, `layers` and `tied`."""


def parts_of(fn: Callable[..., Any], lie: Sequence[Sequence[Lies]] = LIE) -> list[FollowingPart]:
    """The parts of a function; checks that they compute what it does."""
    found = following(trace(fn, PARAMS, BATCH), lie)
    flat, values, outputs = jax.tree.leaves((PARAMS, BATCH)), dict[int, Any](), dict[int, Any]()
    for one in found:
        leaves: list[Any] = [None] * len(flat)
        for number, rows in one.leaves:
            leaves[number] = flat[number] if rows is None else flat[number][slice(*rows)]
        args = jax.tree.unflatten(jax.tree.structure((PARAMS, BATCH)), leaves)
        sent, results = one.program(*args, tuple(values[at] for at in one.incoming))
        values.update(zip(one.outgoing, sent, strict=True))
        outputs.update(zip(one.outputs, results, strict=True))
    for at, value in enumerate(jax.tree.leaves(fn(PARAMS, BATCH))):
        np.testing.assert_allclose(outputs[at], value, rtol=1e-5, err_msg=str(at))
    assert [one.place for one in found] == sorted({one.place for one in found})
    return found


def layers(x: Any, weights: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def read(parts: Sequence[FollowingPart]) -> list[tuple[int, list[tuple[int, Any]]]]:
    return [(one.place, list(one.leaves)) for one in parts]


def test_a_loop_is_divided_where_its_rows_lie_and_tied_weights_are_read_twice() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = layers(batch["x"] @ params["tied"], params["layers"].astype(jnp.bfloat16).astype(jnp.float32))
        x = (x @ params["head"]) @ params["tied"].T
        return (x.sum(-1) * batch["mask"]).sum(), batch["mask"].sum(), 3

    parts = parts_of(loss)
    # The leaves of params, then `mask` (3) and `x` (4): each with the rows that are read.
    assert read(parts) == [
        (0, [(1, (0, 1)), (2, None), (4, None)]),
        (1, [(1, (1, 4))]),
        (2, [(0, None), (1, (4, 6)), (2, None), (3, None)]),
    ]
    assert [(one.incoming, one.outgoing, one.outputs) for one in parts] == [
        ((), (0,), ()), ((0,), (1,), ()), ((1,), (), (0, 1, 2)),
    ]  # fmt: skip


def test_values_go_straight_to_who_reads_them_and_work_on_samples_to_who_needs_it_first() -> None:
    def fn(params: Any, batch: Any) -> Any:
        first = batch["x"] @ params["tied"]
        apart = batch["x"] @ batch["x"].T  # needs no parameter
        return apart @ (jnp.tanh(first) @ params["layers"][2]) @ params["head"] + first, first.sum()

    parts = parts_of(fn)
    assert [(one.place, one.incoming, one.outgoing, one.outputs) for one in parts] == [
        (0, (), (0, 1), (1,)), (1, (1,), (2,), ()), (2, (0, 2), (), (0,)),
    ]  # fmt: skip
    assert read(parts) == [(0, [(2, None), (4, None)]), (1, [(1, (2, 3)), (4, None)]), (2, [(0, None)])]


def test_what_reads_all_at_once_is_at_the_last_place() -> None:
    def generate(params: Any, batch: Any) -> Any:
        def one(x: Any, _: Any) -> Any:
            return layers(x @ params["tied"], params["layers"]) @ params["head"], x.sum()

        return jax.lax.scan(one, batch["x"], None, 3)

    def backwards(params: Any, batch: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), batch["x"], params["layers"], reverse=True)

    for fn in (generate, backwards):
        assert [one.place for one in parts_of(fn)] == [2]
    (part,) = parts_of(lambda params, batch: params["layers"] * 2)
    assert part.place == 2


def test_parameters_themselves_are_given_where_they_lie() -> None:
    parts = parts_of(lambda params, batch: params)
    assert [(one.place, one.outputs) for one in parts] == [(0, (2,)), (2, (0, 1))]


def test_what_has_effects_is_kept_and_what_nobody_needs_is_not() -> None:
    seen: list[float] = []

    def fn(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["tied"]
        jax.debug.callback(lambda value: seen.append(float(value)), x.sum())
        _ = x @ params["head"]
        return layers(x, params["layers"][:3])

    parts = parts_of(fn)
    jax.effects_barrier()
    assert len(seen) == 2  # of the parts, and of the whole
    # Rows of rows are read where they lie, with those beside them.
    assert read(parts) == [(0, [(1, (0, 3)), (2, None), (4, None)]), (1, [(1, (0, 3))])]


def test_a_function_that_changes_a_reference_is_refused() -> None:
    def fn(params: Any, batch: Any) -> Any:
        held = jax.new_ref(batch["x"])
        held[...] = held[...] @ params["tied"]
        return held[...]

    with pytest.raises(ArgumentError, match=r"the function changes a reference .* return a new value instead"):
        following(trace(fn, PARAMS, BATCH), LIE)
