"""What `benchmarks.rotated` reads from programs, and how it finds the largest model."""

import argparse
import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness import Report
from benchmarks.harness.gpt2 import Shape
from benchmarks.rotated import memory, sent, ways
from benchmarks.rotated.mixture import Mixture
from benchmarks.rotated.ways import RTP

SMALL = Shape(520, 512, 2, 32, 1, qkv="by heads")


def test_gathered_shapes_are_read_without_ones_and_in_order() -> None:
    text = """
  %one = f32[1,512,64]{2,1,0} all-gather(%a), channel_id=1, dimensions={2}
  %two = (f32[64]{0}, s32[8,1]{1,0}) all-gather(%b, %c), dimensions={0}
  %three = (f32[2]{0}, f32[16]{0}) all-gather-start(%d), dimensions={0}
  %four = f32[99]{0} all-reduce(%all-gather.1), to_apply=%sum
"""
    assert sent.gathered_shapes(text) == [(64, 512), (64,), (8,), (2,), (16,)]


def test_bytes_of_a_small_shape_are_those_of_the_formula() -> None:
    found = Report(argparse.Namespace(quick=False, json=None, only=None, benchmark="rotated"))
    sent.weights(found, SMALL, (2,), 4)
    claims = {claim.name: claim for claim in found.claims}
    assert claims["no_gather"].value == 0
    assert claims["bytes"].value == pytest.approx(1, abs=0.01)


def test_a_leaf_that_goes_around_is_seen_when_it_is_gathered() -> None:
    step, _ = ways.made(RTP, SMALL, 4)
    shapes = sent._rotated_shapes(step)
    assert {(512, 520), (512, 2048), (2, 512, 2048), (8, 64, 512)} <= shapes
    assert (32, 512) not in shapes  # positions, which are gathered


@pytest.mark.parametrize(("limit", "most"), [(1000, 9), (1049, 9), (1050, 10)])
def test_the_largest_model_fits_and_one_more_layer_does_not(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    def made(way: str, shape: Shape, num_devices: int) -> Any:
        peak = 100 * shape.layers + (50 if shape.layers > 8 else 0)  # not on the line of the first two
        return None, SimpleNamespace(peak_bytes=lambda _: peak)

    monkeypatch.setattr(ways, "made", made)
    assert memory._most_layers(RTP, SMALL, limit, 8) == most


def test_a_mixture_is_that_of_the_two_best_experts_of_each_token() -> None:
    shape = Mixture(40, 64, 1, 6, 2, qkv="by heads", experts=4, room=8)  # for all tokens
    with jax.default_prng_impl("unsafe_rbg"):  # whose draws compile quickly
        drawn = jax.jit(shape.init)(jax.random.key(0))["layers"]
    w = jax.tree.map(lambda leaf: 20 * np.asarray(leaf[0]), drawn)
    h = np.random.default_rng(1).normal(size=(2, 6, 64)).astype(np.float32)

    @jax.jit
    def expected(h: Any, w: Any) -> Any:
        gates = jax.nn.softmax(h @ w["router"])
        all_of_them = jnp.einsum("btef,efd->bted", jax.nn.gelu(jnp.einsum("btd,edf->btef", h, w["up"])), w["down"])
        best = jnp.where(gates >= jnp.sort(gates, -1)[..., -2:-1], gates, 0)
        return jnp.einsum("bte,bted->btd", best, all_of_them)

    few = dataclasses.replace(shape, room=1)
    assert few.capacity == 2
    for_all, for_few = (jax.jit(lambda h, w, one=one: one.wider(h, w))(h, w) for one in (shape, few))
    np.testing.assert_allclose(for_all, expected(h, w), rtol=1e-4, atol=1e-4)
    assert not np.allclose(for_few, for_all)
