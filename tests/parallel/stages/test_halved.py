"""The halves of a stage's backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core.primitives import dot_general_p

from braidax.parallel.stages.halved import Halved
from braidax.parallel.stages.passes import Passes, is_float
from braidax.program import Chain, Stage
from braidax.program.bodies import equations_of
from tests.support.program.cutting.models import draw, gpt, layers, residual

CASES = {"layers": layers(4), "gpt": gpt(3), "residual": residual(norm=True)}


def stage_of(name: str, which: int) -> Stage:
    chain = Chain(CASES[name].traced())
    borders = chain.borders()
    return chain.stages([borders[1], borders[2]])[which]


def drawn(specs: Any) -> Any:
    def one(spec: Any) -> Any:
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(1), spec.shape) if spec.shape else jax.random.key(1)
        return draw(*spec.shape, seed=3).astype(spec.dtype) if is_float(spec) else jnp.ones(spec.shape, spec.dtype)

    return jax.tree.map(one, specs)


def whole(passes: Passes, taken: Any, incoming: Any, kept: Any, outgoing: Any) -> tuple[Any, Any]:
    given = iter(outgoing)
    received = [next(given) if is_float(spec) else None for spec in passes.stage.outgoing]
    ones = [jnp.ones(()) if number == 0 else None for number in passes.stage.results]
    own, sent = passes.backward(taken, incoming, kept, received, ones)
    return [one for one in sent if one is not None], own


@pytest.mark.parametrize(
    ("name", "which", "recompute"),
    [
        ("layers", 0, False),
        ("layers", 1, False),
        ("layers", 1, True),
        pytest.param("gpt", 0, False, marks=pytest.mark.slow),
        pytest.param("gpt", 1, False, marks=pytest.mark.slow),
        pytest.param("gpt", 1, True, marks=pytest.mark.slow),
        pytest.param("gpt", 2, False, marks=pytest.mark.slow),
        ("residual", 1, False),
    ],
)
def test_halves_equal_the_whole(name: str, which: int, recompute: bool) -> None:
    passes = Passes(stage_of(name, which), recompute=recompute)
    halved, (*taken, incoming) = Halved(passes), drawn(passes.stage.program.in_specs)
    made = jax.jit(passes.forward)(taken, incoming)
    back = taken, incoming, made.kept, [one for one in drawn(passes.stage.outgoing) if is_float(one)]
    expected = jax.jit(lambda *args: whole(passes, *args))(*back)

    _, sent, handed = jax.jit(halved.inputs)(*back)
    parts = zip(halved.left, back[1:], strict=True)
    held = [[one if at in own else None for at, one in enumerate(part)] for own, part in parts]
    own = jax.jit(halved.weights)(taken, *held, handed)
    for found in ((sent, own), jax.jit(halved.backward)(*back)[1:]):
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-6), found, expected)
    assert [(one.shape, one.dtype) for one in handed] == [(one.shape, one.dtype) for one in halved.handed]
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(own))
    assert bool(sent) == (which > 0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["layers", pytest.param("gpt", marks=pytest.mark.slow)])
def test_of_a_last_stage_the_forward_pass_may_be_part_of_both(name: str, recompute: bool) -> None:
    """And nothing is kept, nor does any product run twice."""
    passes = Passes(stage_of(name, 2), recompute=recompute)
    apart, halved = Halved(passes), Halved(passes, with_forward=True)
    *taken, incoming = drawn(passes.stage.program.in_specs)
    made = jax.jit(passes.forward)(taken, incoming)
    _, sent, own = jax.jit(apart.backward)(taken, incoming, made.kept, [])
    expected = [*made.results], sent, own

    results, sent, handed = jax.jit(halved.inputs)(taken, incoming, [], [])
    held = [one if at in halved.left.incoming else None for at, one in enumerate(incoming)]
    own = jax.jit(halved.weights)(taken, held, [], [], handed)
    assert halved.left.kept == halved.left.outgoing == ()
    for found in ((results, sent, own), jax.jit(halved.backward)(taken, incoming, [], [])):
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-6), found, expected)
    both = jax.make_jaxpr(halved.backward)(taken, incoming, [], [])
    parts = (
        jax.make_jaxpr(halved.inputs)(taken, incoming, [], []),
        jax.make_jaxpr(halved.weights)(taken, held, [], [], handed),
    )
    once = jax.make_jaxpr(passes.forward)(taken, incoming), jax.make_jaxpr(apart.inputs)(taken, incoming, made.kept, [])
    assert sum(map(products, parts)) == products(both)
    if not recompute:
        assert products(parts[0]) == sum(map(products, once))


def products(closed: Any) -> int:
    """How many there are, within loops too."""
    return sum(equation.primitive is dot_general_p for _, equation in equations_of(closed.jaxpr))


def test_what_is_held_between_the_halves() -> None:
    stage = stage_of("layers", 1)
    halved = Halved(Passes(stage))
    assert [stage.incoming[at].shape for at in halved.left.incoming] == [(8, 4)]
    assert halved.left.kept == ()
    assert [one.shape for one in halved.handed] == [(8, 4)]
    assert halved.kept_bytes == 2 * 8 * 4 * 4 + 4  # the gradient of a penalty came back
    passes = Passes(stage_of("gpt", 1))
    token = 4 * 5 * 2  # bytes of one number of each token
    # operands and cotangents of products to 24, 8, 16 and 8 numbers, of which one gradient came in; that of a scale
    operands, cotangents = 8 + 8 + 8 + 16, 24 + 8 + 16 + 8
    assert Halved(passes).kept_bytes == token * (operands + cotangents) + 8 * 2
    first = Passes(stage_of("gpt", 0))
    assert Halved(first).handed == ()
    came_back = 4 * 5 * 8 * 2 + 2  # of what goes through the layers, and of a mean
    assert Halved(first).kept_bytes == first.kept_bytes + came_back  # all of the way back is left


def test_the_share_of_the_second_half_is_by_operations() -> None:
    """A first stage sends nothing back; in a middle one each product has one for either half."""
    assert Halved(Passes(stage_of("layers", 0))).weights_share > 0.8
    wide = Chain(layers(3, 64).traced())
    _, middle, _ = wide.stages(wide.borders())
    assert Halved(Passes(middle)).weights_share == pytest.approx(0.5, abs=0.05)
