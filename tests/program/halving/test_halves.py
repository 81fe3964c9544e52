"""Backward passes in two halves: the same gradients, each product once, and few bytes in between."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p, scan_p

from braidax.program import Program, bodies, bytes_of, cost_of, trace
from braidax.program.halving.halves import Halves, halves
from braidax.program.prune import prune
from tests.support.program.cutting.models import draw


class Case(NamedTuple):
    """A stage `(params, x) -> y`, what it is given, and the bytes that go from one half to the other."""

    stage: Callable[..., Any]
    params: Any
    x: Any
    held_bytes: int


class Halved(NamedTuple):
    """The halves of a backward pass, which takes parameters, what came in, and gradients of what is sent."""

    whole: Program
    halves: Halves
    args: tuple[Any, ...]


ROWS, WIDTH, LAYERS = 6, 4, 3
ONE = ROWS * WIDTH * 4  # bytes of an activation


def weights(count: int, *, seed: int = 0) -> list[Any]:
    return [draw(WIDTH, WIDTH, seed=seed + at) for at in range(count)]


def residual_mlp() -> Case:
    """Normed residual layers with dropout and a bias; `tanh` twice of one product."""

    def stage(params: Any, x: Any) -> Any:
        for at, (up, down, scale) in enumerate(params):
            h = jax.nn.standardize(x) * scale
            h = jnp.tanh(h @ up + scale)
            h = h * jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), at), 0.8, h.shape)
            x = x + h @ down
        return x

    params = [(*weights(2, seed=2 * at), draw(WIDTH, seed=20 + at)) for at in range(LAYERS)]
    # operands and cotangents of two products a layer, of which one is that of the layer behind; scales
    return Case(stage, params, draw(ROWS, WIDTH, seed=50), LAYERS * (4 * ONE + 4 * WIDTH))


def block(x: Any, given: Any) -> Any:
    """Attention of one head, and two products."""
    one, two, three, four, scale = given
    h = jax.nn.standardize(x) * scale
    mixed = jax.nn.softmax(jnp.where(jnp.tri(ROWS, dtype=bool), (h @ one) @ (h @ two).T, -1e9)) @ h
    x = x + mixed @ three
    return x + jax.nn.gelu(x @ four) @ four.T, x.mean()


def gpt(*, again: bool, unrolled: bool = False) -> Case:
    layer = jax.checkpoint(block) if again else block

    def stage(params: Any, x: Any) -> Any:
        if not unrolled:
            return jax.lax.scan(layer, x, params)
        means: list[Any] = []
        for at in range(LAYERS):
            x, mean = layer(x, jax.tree.map(lambda leaf, at=at: leaf[at], params))
            means.append(mean)
        return x, jnp.stack(means)

    stacks = [jnp.stack(weights(LAYERS, seed=4 * at)) for at in range(4)]
    # of five products, with h of two of them and what goes through the layer once
    return Case(stage, (*stacks, draw(LAYERS, WIDTH, seed=9)), draw(ROWS, WIDTH, seed=50), LAYERS * (9 * ONE + 16))


def shared_in_loop() -> Case:
    """What all steps share adds up from step to step; loops in loops."""

    def stage(params: Any, x: Any) -> Any:
        def inner(x: Any, scale: Any) -> Any:
            return jnp.tanh(x @ params["deep"] * scale), None

        def outer(x: Any, own: Any) -> Any:
            x, _ = jax.lax.scan(jax.checkpoint(inner), x @ params["shared"], own)
            return x, None

        return jax.lax.scan(outer, x, params["scales"])[0]

    shared, deep = (one + jnp.eye(WIDTH) for one in weights(2))
    params = {"shared": shared, "deep": deep, "scales": 1 + draw(2, 3, seed=2)}
    return Case(stage, params, draw(ROWS, WIDTH, seed=50), 2 * 3 * (2 * ONE + 4) + 2 * 2 * ONE)


def tied() -> Case:
    """Ids look rows up, and the table is the head's, too; ids are made from integers that came in."""

    def stage(table: Any, given: Any) -> Any:
        ids, x = given
        x = jnp.tanh(x + table[(ids + 1) % 8])
        return jax.nn.log_softmax(x @ table.T)

    given = jnp.arange(ROWS, dtype=jnp.int32), draw(ROWS, WIDTH, seed=50)
    return Case(stage, draw(8, WIDTH), given, ROWS * 4 + 2 * ONE + 2 * ONE)


def convolved() -> Case:
    def stage(params: Any, x: Any) -> Any:
        for kernel in params:
            dims = ("NHWC", "HWIO", "NHWC")
            y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
            x = x + jax.nn.relu(y - y.mean((0, 1, 2)))
        return x

    # each x, and the cotangent of each y
    return Case(stage, [draw(3, 3, 2, 2, seed=at) for at in range(2)], draw(2, 5, 5, 2, seed=9), 4 * 2 * 5 * 5 * 2 * 4)


def of_products_of_weights() -> Case:
    """A weight that is a product: its gradient goes through two more, of which neither is the first half's."""

    def stage(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ (params[0] @ params[1]))

    return Case(stage, weights(2), draw(ROWS, WIDTH, seed=50), 2 * ONE)


def branching() -> Case:
    """What cannot be divided: a `cond`."""

    def stage(params: Any, x: Any) -> Any:
        y = jax.lax.cond(x[0, 0] > 0, lambda x: x @ params[0], lambda x: jnp.sin(x @ params[1]), x)
        return y @ params[2]

    return Case(stage, weights(3), draw(ROWS, WIDTH, seed=50), 2 * ONE + 2 * 4 * WIDTH * WIDTH)


CASES = {
    "mlp": residual_mlp(),
    "gpt": gpt(again=True),
    "gpt, kept": gpt(again=False),
    "gpt, unrolled": gpt(again=True, unrolled=True),
    "shared in a loop": shared_in_loop(),
    "tied": tied(),
    "convolved": convolved(),
    "product of weights": of_products_of_weights(),
    "branching": branching(),
}


def halved(case: Case) -> Halved:
    """A backward pass as that of a stage that keeps nothing: the forward pass is run again in it."""
    moved = jax.tree.leaves(case.x)[-1]

    def back(params: Any, x: Any, given: Any) -> Any:
        def run(params: Any, moved: Any) -> Any:
            return case.stage(params, (*x[:-1], moved) if isinstance(x, tuple) else moved)

        own, sent = jax.vjp(run, params, jax.tree.leaves(x)[-1])[1](given)
        return sent, own

    given = jax.tree.map(lambda leaf: draw(*leaf.shape, seed=70), jax.eval_shape(case.stage, case.params, case.x))
    args = case.params, case.x, given
    whole = trace(back, *args)
    assert whole.out_specs[0].shape == moved.shape
    return Halved(whole, halves(whole, 1, free=range(len(jax.tree.leaves(case.params)))), args)


def products(jaxpr: Jaxpr, times: int = 1) -> Counter[Any]:
    """How often products of these shapes are computed."""
    found: Counter[Any] = Counter()
    for one in jaxpr.eqns:
        if one.primitive in (dot_general_p, conv_general_dilated_p):
            shapes = tuple(str(atom.aval) for atom in (*one.invars, *one.outvars))
            found[one.primitive.name, shapes, str(one.params.get("dimension_numbers"))] += times
        for body in bodies(one):
            found += products(body.jaxpr, times * (body.length or 1))
    return found


def flops(jaxpr: Jaxpr) -> float:
    def of_products(one: JaxprEqn) -> float:
        if one.primitive in (dot_general_p, conv_general_dilated_p):
            return cost_of(one).flops
        return sum(flops(body.jaxpr) * (body.length or 1) for body in bodies(one))

    return sum(map(of_products, jaxpr.eqns))


NIGHTLY = ("gpt, kept", "gpt, unrolled")  # of which one is computed again in a loop by day


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in NIGHTLY else x for x in CASES])
def test_halves_give_the_same_with_each_product_once(name: str) -> None:
    case = CASES[name]
    made = halved(case)
    own, leaves = made.halves, jax.tree.leaves(made.args)
    sent, handed = jax.jit(own.run_first)(leaves)
    read = [leaf if at in own.second_inputs else None for at, leaf in enumerate(leaves)]
    gradients = jax.jit(own.run_second)(read, handed)
    expected = jax.tree.leaves(jax.jit(lambda *args: made.whole(*args))(*made.args))
    both = jax.jit(own.run_both)(leaves)
    for one, other, same in zip([*sent, *gradients], expected, both, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        np.testing.assert_allclose(one, same, rtol=0, atol=1e-6)
    assert sum(np.abs(one).max() > 1e-3 for one in expected) >= len(expected) - 1  # one branch is not taken

    closed, _ = prune(made.whole.closed, [True] * len(expected), [False] * len(leaves))
    first, second = own.first.jaxpr, own.second.jaxpr
    assert products(first) + products(second) == products(own.both.jaxpr)
    assert flops(first) + flops(second) == flops(closed.jaxpr) > 0
    assert flops(second) > 0

    num_free = len(jax.tree.leaves(case.params))
    left = sum(bytes_of(jax.typeof(leaves[at])) for at in own.second_inputs if at >= num_free)
    assert left + sum(map(bytes_of, own.handed)) == case.held_bytes


def test_the_second_half_of_a_loop_is_its_products_and_what_costs_little() -> None:
    case = CASES["gpt"]
    own = halved(case).halves
    (loop,) = [one for one in own.second.jaxpr.eqns if one.primitive is scan_p]
    kinds = Counter(one.primitive.name for one in loop.params["jaxpr"].eqns)
    assert kinds["dot_general"] == 5  # one, two, three, four and four.T
    assert kinds.keys() <= {"dot_general", "transpose", "add_any"}  # what a product reads is handed on as it reads it
    assert kinds["transpose"] <= 1  # of a weight that is read turned: others are products in their order
    assert loop.params["num_carry"] == 0
    first = [one for one in own.first.jaxpr.eqns if one.primitive is scan_p]
    assert [one.params["reverse"] for one in first] == [False, True]  # the stage again, and back
    assert "optimization_barrier" in str(first[1])


def test_sums_over_a_loop_are_of_the_second_half() -> None:
    own = halved(CASES["shared in a loop"]).halves
    (loop,) = [one for one in own.second.jaxpr.eqns if one.primitive is scan_p]
    assert loop.params["num_carry"] == 2  # gradients of what all steps share
    assert all(one.aval.shape != (WIDTH, WIDTH) for one in own.first.jaxpr.outvars)


def test_what_cannot_be_divided_is_where_it_is_needed_first() -> None:
    own = halved(CASES["branching"]).halves
    names = [[one.primitive.name for one in half.jaxpr.eqns] for half in (own.first, own.second)]
    assert "cond" in names[0]
    assert "cond" not in names[1]
    assert names[1].count("dot_general") == 1


def test_cheap_operations_are_repeated_and_others_are_not() -> None:
    def whole(x: Any, y: Any) -> Any:
        h = x.astype(jnp.float32)
        return (h * y).sum(), (h + 1) @ y.T, jnp.sin(h) @ y, jnp.cumsum(h, 0) @ y

    args = draw(4, 4).astype(jnp.bfloat16), draw(4, 4, seed=1)
    own = halves(trace(whole, *args), 1)
    assert own.second_inputs == (0, 1)
    assert own.handed == []
    names = [one.primitive.name for one in own.second.jaxpr.eqns]
    assert names.count("convert_element_type") == 1

    def other(x: Any, y: Any) -> Any:
        h, d = jnp.sin(x), jax.lax.digamma(x)
        return h.sum() + d.sum(), h @ y + d @ y

    own = halves(trace(other, *args), 1)
    assert [(one.shape, one.dtype) for one in own.handed] == [((4, 4), jnp.bfloat16)]
    assert "sin" in str(own.second)
    assert "digamma" not in str(own.second)


def test_what_comes_late_is_read_by_the_second_half_alone() -> None:
    def whole(x: Any, w: Any, back: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: jnp.tanh(x @ w) * 2, x, w)
        jax.debug.print("seen {}", y.sum())
        of_x, of_w = pull(back)
        jax.debug.print("back {}", of_w.sum())
        return y, of_x, of_w

    args = draw(4, 4), draw(4, 4, seed=1), draw(4, 4, seed=2)
    own = halves(trace(whole, *args), 1, free=(1,), late=(2,))
    assert own.first_inputs == (0, 1)
    assert 2 in own.second_inputs
    assert [one.shape for one in own.handed] == [(4, 4)]  # x @ w, or its tanh
    (y,), handed = own.run_first(args)
    for one, other in zip([y, *own.run_second(args, handed)], whole(*args), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert [sum(bool(one.effects) for one in half.jaxpr.eqns) for half in (own.first, own.second)] == [1, 1]


def test_what_is_made_of_what_comes_late_does_not_go_over_though_it_is_small() -> None:
    args = draw(4, 4), draw(4, 4, seed=1), draw(4, 4, seed=2)
    own = halves(trace(lambda x, w, back: (h := x @ w, (h * back).sum(1) @ w), *args), 1, free=(1,), late=(2,))
    assert own.first_inputs == (0, 1)
    assert [one.shape for one in own.handed] == [(4, 4)]


def test_what_a_loop_makes_is_made_in_the_loop_that_reads_it() -> None:
    def whole(x: Any, ws: Any, back: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.sin(jnp.tanh(x @ w)), None

        y, pull = jax.vjp(lambda x, ws: jax.lax.scan(layer, x, ws)[0], x, ws)
        return y, *pull(back)

    args = draw(4, 4), draw(3, 4, 4, seed=1), draw(4, 4, seed=2)
    own = halves(trace(whole, *args), 1, free=(1,), late=(2,))
    (loop,) = [one for one in own.second.jaxpr.eqns if one.primitive is scan_p]
    assert loop.params["reverse"]
    assert "cos" in str(loop.params["jaxpr"])
    assert sorted(one.shape for one in own.handed) == [(3, 4, 4)] * 2  # what comes in, and the tanh
    assert "tanh" not in str(loop.params["jaxpr"])  # it is handed on in place of x @ w, and so is not made again
    (y,), handed = own.run_first(args)
    for one, other in zip([y, *own.run_second(args, handed)], whole(*args), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_effects_stay_single() -> None:
    def whole(x: Any, y: Any) -> Any:
        jax.debug.print("seen {}", x.sum())
        return x * 2, x @ y

    own = halves(trace(whole, draw(2, 2), draw(2, 2, seed=1)), 1)
    assert "debug" in str(own.first)
    assert "debug" not in str(own.second)
    assert [len(half.jaxpr.effects) for half in (own.first, own.second)] == [1, 0]


@pytest.mark.parametrize("num_first", [0, 2])
def test_a_half_that_is_nothing(num_first: int) -> None:
    args = draw(2, 2), draw(2, 2, seed=1)
    own = halves(trace(lambda x, y: (jnp.sin(x) @ y, x @ y), *args), num_first)
    empty = own.second if num_first else own.first
    assert empty.jaxpr.eqns == []
    assert own.handed == []
    sent, handed = own.run_first(args)
    np.testing.assert_allclose([*sent, *own.run_second(args, handed)][0], jnp.sin(args[0]) @ args[1], rtol=1e-6)
