"""What a compiled program sends, read from its text: of programs for CPU, and of kept ones for GPUs and TPUs."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from braidax.program import Collective, collectives_of, exposed_part, total_sent

TEXTS = Path(__file__).parent / "texts"
SHARD, WHOLE = 1024 // 8 * 1024 * 2, 1024 * 1024 * 2  # of weights [1024, 1024] in bfloat16, over 8 devices

CARRIED = """HloModule carried, is_scheduled=true, num_partitions=4

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], (f32[8]{0}, f32[8]{0})) parameter(0)
  %turn = s32[] get-tuple-element(%p), index=0
  %begun = (f32[8]{0}, f32[8]{0}) get-tuple-element(%p), index=1
  MATRICES%dot = f32[8]{0} dot(%x, %w), lhs_contracting_dims={0}
  %end = f32[8]{0} collective-permute-done(%begun)
  %begin = (f32[8]{0}, f32[8]{0}) collective-permute-start(%end), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %one = s32[] constant(1)
  %next = s32[] add(%turn, %one)
  ROOT %out = (s32[], (f32[8]{0}, f32[8]{0})) tuple(%next, %begin)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], (f32[8]{0}, f32[8]{0})) parameter(0)
  %limit = s32[] constant(8)
  %at = s32[] get-tuple-element(%q), index=0
  ROOT %less = pred[] compare(%at, %limit), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %first = s32[] constant(FIRST)
  %begin.0 = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %given = (s32[], (f32[8]{0}, f32[8]{0})) tuple(%first, %begin.0)
  %loop = (s32[], (f32[8]{0}, f32[8]{0})) while(%given), condition=%condition, body=%body
  %last = (f32[8]{0}, f32[8]{0}) get-tuple-element(%loop), index=1
  ROOT %end.0 = f32[8]{0} collective-permute-done(%last)
}
"""


def text_of(local: object, mesh: tuple[int, ...], spec: P, out: P) -> str:
    names = ("a", "b")[: len(mesh)]
    with jax.set_mesh(jax.make_mesh(mesh, names, axis_types=(AxisType.Auto,) * len(mesh))):
        fn = jax.jit(jax.shard_map(local, in_specs=spec, out_specs=out, check_vma=False))  # pyright: ignore
        return fn.lower(jax.ShapeDtypeStruct((16, 8), jnp.float32)).compile().as_text() or ""


def kept(name: str) -> tuple[Collective, ...]:
    return collectives_of((TEXTS / f"{name}.hlo").read_text())


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
    assert not any(one.is_async or one.is_covered for one in found)
    assert exposed_part(found) == 1


def test_groups_are_those_of_an_axis() -> None:
    gather = partial(jax.lax.all_gather, axis_name="b", tiled=True)
    found = collectives_of(text_of(gather, (4, 2), P(("a", "b")), P("a")))
    assert [(one.kind, one.group_size, one.sent_bytes) for one in found] == [("all-gather", 2, 64.0)]


@pytest.mark.parametrize(
    ("told", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3), ("replica_groups=[2,4]<=[8]", 4), ("replica_groups={}", 8),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", 4), ("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2,'b'}", 4),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", 2), ("channel_id=1", 8),
    ],
)  # fmt: skip
def test_groups_are_told_in_several_forms(told: str, size: int) -> None:
    text = "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
    (one,) = collectives_of(f"{text}  ROOT %y = f32[8]{{0}} all-reduce(%x), {told}, to_apply=%add\n}}\n")
    assert one == Collective("all-reduce", 32, size, 1, False)
    with pytest.raises(ValueError, match=r"'replica_groups=by name, .*' is no known form, expected \{\{0,1\}\}"):
        collectives_of(f"{text}  ROOT %y = f32[8]{{0}} all-reduce(%x), replica_groups=by name, to_apply=%add\n}}\n")


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


def test_a_loop_of_gathers_and_scatters_on_gpus() -> None:
    assert kept("h100_layers") == (
        Collective("all-gather", WHOLE, 8, 5, False, True, False),
        Collective("reduce-scatter", SHARD, 8, 4, False, True, True),  # the last one is behind the loop
        Collective("reduce-scatter", SHARD, 8, 1, False, True, False),
        Collective("all-reduce", 2, 8, 1, False, True, False),
    )
    covered, every = 4 * SHARD * 7, 5 * WHOLE * 7 / 8 + 5 * SHARD * 7 + 2 * 2 * 7 / 8
    assert exposed_part(kept("h100_layers")) == pytest.approx(1 - covered / every)


def test_a_ring_under_products_on_gpus_and_tpus() -> None:
    permutes = Collective("collective-permute", WHOLE, 8, 8, False, True, True)
    of_gpus, of_tpus = kept("h100_ring"), kept("v5e_ring")
    assert of_gpus[0] == of_tpus[0] == permutes
    # On GPUs it says that it is synchronous, though it has a start and an end.
    assert [(one.kind, one.is_async) for one in (*of_gpus[1:], *of_tpus[1:])] == [("all-to-all", False)] * 2


def test_chains_of_fusions_on_tpus() -> None:
    gathers = {one for one in kept("v5e_layers") if one.kind == "all-gather"}
    assert gathers == {
        Collective("all-gather", WHOLE, 8, 5, False, False, False),  # the first of a layer
        Collective("all-gather", WHOLE, 8, 5, False, True, True),  # the second one, under products with the first
    }
    scatters = [one for one in kept("v5e_layers") if one.kind == "reduce-scatter"]
    assert scatters == [Collective("reduce-scatter", SHARD, 8, 5, False, False, False)] * 2


def test_calls_on_other_cores_of_tpus() -> None:
    assert kept("tpu7x_layers")[:2] == (
        Collective("all-gather", WHOLE, 8, 5, False, True, False),
        Collective("reduce-scatter", SHARD, 8, 5, False, True, True),
    )


@pytest.mark.parametrize("matrices", [True, False])
def test_what_a_loop_carries_on_ends_in_its_next_turn(matrices: bool) -> None:
    text = CARRIED.replace("FIRST", "2")
    text = text.replace("MATRICES", "") if matrices else "\n".join(x for x in text.splitlines() if "MATRICES" not in x)
    begun = Collective("collective-permute", 32, 4, 1, False, True, matrices)
    assert collectives_of(text) == (begun, Collective("collective-permute", 32, 4, 6, False, True, matrices))


def test_a_loop_from_nobody_knows_where_is_unknown() -> None:
    text = CARRIED.replace("MATRICES", "").replace("%first = s32[] constant(FIRST)", "%first = s32[] custom-call(%x)")
    assert [one.in_unknown_loop for one in collectives_of(text)] == [False, True]
