"""What a compiled program sends, read from its text."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from braidax.program import Collective, collectives_of, total_sent


def text_of(local: object, mesh: tuple[int, ...], spec: P, out: P) -> str:
    names = ("a", "b")[: len(mesh)]
    with jax.set_mesh(jax.make_mesh(mesh, names, axis_types=(AxisType.Auto,) * len(mesh))):
        fn = jax.jit(jax.shard_map(local, in_specs=spec, out_specs=out, check_vma=False))  # pyright: ignore
        return fn.lower(jax.ShapeDtypeStruct((16, 8), jnp.float32)).compile().as_text() or ""


def test_each_kind() -> None:
    def local(x: jax.Array) -> jax.Array:
        y = jax.lax.psum_scatter(jax.lax.all_gather(x, "a", tiled=True), "a", tiled=True)
        y = jax.lax.ppermute(y, "a", [(0, 1), (1, 0)])
        return jax.lax.psum(y, "a").sum()

    found = collectives_of(text_of(local, (8,), P("a"), P()))
    assert {one.kind: (one.result_bytes, one.sent_bytes) for one in found} == {
        "all-gather": (512, 448.0), "reduce-scatter": (64, 448.0), "collective-permute": (64, 64.0),
        "all-reduce": (64, 112.0),
    }  # fmt: skip
    assert {(one.group_size, one.times, one.in_unknown_loop) for one in found} == {(8, 1, False)}


def test_groups_are_those_of_an_axis() -> None:
    gather = partial(jax.lax.all_gather, axis_name="b", tiled=True)
    found = collectives_of(text_of(gather, (4, 2), P(("a", "b")), P("a")))
    assert [(one.kind, one.group_size, one.sent_bytes) for one in found] == [("all-gather", 2, 64.0)]


def test_loops_count_as_often_as_they_turn() -> None:
    def known(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, x: jax.lax.psum(x, "a") / 8, x)

    def unknown(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.max() < 1e9, lambda x: jax.lax.psum(x, "a"), x)

    found = collectives_of(text_of(known, (8,), P("a"), P("a")))
    assert [(one.kind, one.times) for one in found] == [("all-reduce", 5)]
    assert total_sent(found) == {"all-reduce": 5 * 64 * 2 * 7 / 8}
    (one,) = collectives_of(text_of(unknown, (8,), P("a"), P("a")))
    assert one == Collective("all-reduce", 64, 8, 1, True)
    assert total_sent([one]) == {}


def test_what_is_no_program() -> None:
    with pytest.raises(ValueError, match="a program's text begins 'no program', expected one with an ENTRY"):
        collectives_of("no program")
