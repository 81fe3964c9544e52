"""A program of units is the program; a rule stands in place of one, and what it names outlasts a remat."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from braidax.errors import ArgumentError
from braidax.program import (
    Path,
    Program,
    Unit,
    bodies,
    equation_at,
    evaluate,
    outline,
    trace,
    unit_path,
    with_names_saved,
)

D = 3
Graph = tuple[tuple[int, int, int], ...]
"""For each value which operation makes it, and of which two earlier ones (0: what is carried, 1: a weight)."""

_OPERATIONS: list[Callable[..., Any]] = [
    lambda x, y: x + y,
    lambda x, y: jnp.tanh(x * y),
    lambda x, y: jnp.sin(x) @ y,
    lambda x, y: jnp.where(x > 0, y, 0.5),
]


def computed(graph: Graph, x: Any, weight: Any) -> Any:
    values = [x, weight]
    for operation, one, other in graph:
        values.append(_OPERATIONS[operation](values[one], values[other]))
    return 0.5 * values[-1] + values[len(values) // 2]


def loss_of(graph: Graph, around: str) -> Callable[..., Any]:
    def body(x: Any, weight: Any) -> Any:
        return computed(graph, x, weight)

    if around in ("remat", "scan of remat"):
        body = jax.checkpoint(body)

    def loss(weights: Any, x: Any) -> Any:
        if around == "cond":
            x = jax.lax.cond(x.sum() > 0, body, lambda x, _: x, x, weights[0])
        elif around == "while":
            x = jax.lax.fori_loop(0, jnp.int32(2), lambda at, x: body(x, weights[at]), x)
        elif around.startswith("scan"):
            x, _ = jax.lax.scan(lambda x, weight: (body(x, weight), None), x, weights)
        else:
            x = body(x, weights[0])
        return (x**2).sum()

    return loss


graphs = st.integers(3, 8).flatmap(
    lambda num: st.tuples(
        *(st.tuples(st.integers(0, 3), st.integers(0, at), st.integers(0, at)) for at in range(1, num))
    )
)
ARGS = (np.random.default_rng(0).normal(size=(2, D, D)).astype(np.float32), np.eye(D, dtype=np.float32) - 0.3)

ONE = np.float32(1)


def largest_body(program: Program) -> tuple[Path, Any]:
    """The jaxpr with the most equations, and where it is."""

    def every(path: Path, jaxpr: Any) -> list[tuple[Path, Any]]:
        found = [(path, jaxpr)]
        for at, equation in enumerate(jaxpr.eqns):
            for which, body in enumerate(bodies(equation)):
                found += every((*path, at, which), body.jaxpr)
        return found

    return max(every((), program.closed.jaxpr), key=lambda one: len(one[1].eqns))


def reached(jaxpr: Any, start: Collection[int], *, back: bool = False) -> set[int]:
    """The equations that lead to some, or that these lead to."""
    steps = [
        (to, frm) if back else (frm, to)
        for frm, one in enumerate(jaxpr.eqns)
        for to, other in enumerate(jaxpr.eqns)
        if {id(v) for v in one.outvars} & {id(v) for v in other.invars}
    ]
    found, before = {*start}, set[int]()
    while found != before:
        before = set(found)
        found |= {to for frm, to in steps if frm in found}
    return found


@given(graphs, st.sampled_from(["nothing", "scan", "remat", "scan of remat", "cond", "while"]), st.data())
@settings(max_examples=15)
def test_any_convex_sets_are_units_of_the_same_values_and_gradients(graph: Graph, around: str, data: Any) -> None:
    program = trace(loss_of(graph, around), *ARGS)
    path, jaxpr = largest_body(program)
    order, units, left = range(len(jaxpr.eqns)), list[Unit](), program
    for name in ("first", "second"):
        chosen = data.draw(st.sets(st.sampled_from(order), min_size=1, max_size=4))
        hull = reached(jaxpr, chosen) & reached(jaxpr, chosen, back=True)
        if not any(hull & {*unit.equations} for unit in units):
            try:
                left = outline(program, [*units, Unit(name, path, tuple(hull))])
                units.append(Unit(name, path, tuple(hull)))
            except ArgumentError:
                assert units, "one convex set is always a unit"  # two may each need the other's results
    assert {unit.name for unit in units} == {name for name in ("first", "second") if _has(left, name)}
    if around == "while":
        assert_same(jax.jit(left)(*ARGS), jax.jit(program)(*ARGS))
    else:
        assert_same(jax.jit(jax.value_and_grad(left))(*ARGS), jax.jit(jax.value_and_grad(program))(*ARGS))


def _has(program: Program, name: str) -> bool:
    return f"name={name}" in str(program.closed)


def assert_same(got: Any, expected: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), got, expected)


@given(graphs, st.data())
def test_sets_are_refused_if_and_only_if_they_are_not_convex(graph: Graph, data: Any) -> None:
    program = trace(lambda x, weight: computed(graph, x, weight), *(ARGS[1], ARGS[1]))
    jaxpr = program.closed.jaxpr
    chosen = data.draw(st.sets(st.sampled_from(range(len(jaxpr.eqns))), min_size=1, max_size=4))
    convex = reached(jaxpr, chosen) & reached(jaxpr, chosen, back=True) == chosen
    if convex:
        outline(program, [Unit("unit", (), tuple(chosen))])
    else:
        with pytest.raises(ArgumentError, match=r"units holds 'unit', which is not convex: .* at .*: take that in"):
            outline(program, [Unit("unit", (), tuple(chosen))])


# Rules in place of units

WIDE = 5


def layers(params: Any, x: Any, *, policy: Any = None) -> Any:
    def layer(x: Any, weights: Any) -> Any:
        hidden = jnp.tanh(x @ weights["up"])
        return x + hidden @ weights["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)
    return (x**2).sum()


PARAMS = {
    "up": np.random.default_rng(1).normal(size=(2, D, WIDE)).astype(np.float32),
    "down": np.random.default_rng(2).normal(size=(2, WIDE, D)).astype(np.float32),
}


@jax.custom_vjp
def mlp(x: Any, up: Any, down: Any) -> Any:
    return jnp.tanh(x @ up) @ down


def _forward(x: Any, up: Any, down: Any) -> Any:
    hidden = checkpoint_name(jnp.tanh(x @ up), "hidden")
    return hidden @ down, (x, hidden, up, down)


def _backward(kept: Any, back: Any) -> Any:
    x, hidden, up, down = kept
    of_sum = (back @ down.T) * (1 - hidden**2)
    return of_sum @ up.T, x.T @ of_sum, hidden.T @ back


mlp.defvjp(_forward, _backward)


def pair_of(program: Program) -> Unit:
    """The two products of a layer, and what is between."""
    path, jaxpr = largest_body(program)
    products = [at for at, one in enumerate(jaxpr.eqns) if one.primitive.name == "dot_general"]
    return Unit("mlp", path, tuple(reached(jaxpr, products) & reached(jaxpr, products, back=True)))


def replaced(program: Program) -> Callable[..., Any]:
    rules = {unit_path(program, "mlp"): lambda equation, inputs: [mlp(*inputs)]}
    return lambda *args: evaluate(program.closed, rules, jax.tree.leaves(args))[0][0]


def test_a_rule_replaces_a_unit_in_a_remat_and_the_values_that_it_names_are_kept() -> None:
    args = (PARAMS, ARGS[1])
    program = trace(layers, *args)
    united = outline(program, [pair_of(program)])
    saving = with_names_saved(united, unit_path(united, "mlp"), ["hidden"])
    expected = jax.jit(jax.value_and_grad(layers))(*args)
    assert_same(jax.jit(jax.value_and_grad(replaced(united)))(*args), expected)
    assert_same(jax.jit(jax.value_and_grad(replaced(saving)))(*args), expected)
    # Two products forward, four backward; what is forgotten takes one more, and for JAX's own gradient the same.
    for loss, num in ((layers, 7), (replaced(united), 7), (replaced(saving), 6)):
        assert str(jax.make_jaxpr(jax.grad(loss))(*args)).count("dot_general[") == num


def test_names_are_saved_beside_what_a_remat_keeps() -> None:
    def loss(x: Any) -> Any:
        def inner(x: Any) -> Any:
            first = checkpoint_name(jnp.sin(x), "first")
            second = checkpoint_name(jnp.cos(first * 2), "second")
            return jnp.exp(second * 3).sum()

        return jax.checkpoint(inner, policy=jax.checkpoint_policies.save_only_these_names("first"))(x)

    def num_again(program: Any) -> int:
        return str(jax.make_jaxpr(jax.grad(program))(ARGS[1])).count(" cos ")

    program = trace(loss, ARGS[1])
    path, _ = largest_body(program)
    saving = with_names_saved(program, (*path, 0), ["second"])
    assert [num_again(program), num_again(saving)] == [3, 2]  # forward, again, and of the sine
    assert_same(jax.grad(saving)(ARGS[1]), jax.grad(loss)(ARGS[1]))


def test_effects_stay_in_their_order() -> None:
    said: list[float] = []

    def fn(x: Any) -> Any:
        jax.debug.callback(said.append, x, ordered=True)
        first = x * 2
        jax.debug.callback(said.append, first, ordered=True)
        second = first + 1
        jax.debug.callback(said.append, x + 10, ordered=True)
        return second * 3

    program = trace(fn, ONE)
    names = [one.primitive.name for one in program.closed.jaxpr.eqns]
    products = tuple(at for at, name in enumerate(names) if name == "mul")
    united = outline(program, [Unit("unit", (), (*range(products[0], products[1] + 1),))])
    assert united(ONE) == 9
    jax.effects_barrier()
    assert [float(one) for one in said] == [1, 2, 11]
    callbacks = tuple(at for at, name in enumerate(names) if "callback" in name)
    with pytest.raises(ArgumentError, match="not convex"):
        outline(program, [Unit("unit", (), (callbacks[0], callbacks[2]))])


def test_a_unit_within_a_unit() -> None:
    program = trace(layers, PARAMS, ARGS[1])
    scan = next(at for at, one in enumerate(program.closed.jaxpr.eqns) if one.primitive.name == "scan")
    both = outline(program, [Unit("model", (), (scan, scan + 1)), pair_of(program)])
    model, inner = unit_path(both, "model"), unit_path(both, "mlp")
    assert inner[: len(model)] == model
    assert equation_at(both.closed.jaxpr, inner).params["name"] == "mlp"
    assert_same(both(PARAMS, ARGS[1]), layers(PARAMS, ARGS[1]))


def by_reference(x: Any) -> Any:
    kept = jax.new_ref(x)
    kept[...] = jnp.sin(x)
    return kept[...]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([Unit("layers", (), ())], r"'layers' with the equations \[\], expected at least one"),
        ([Unit("one", (), (99,))], r"'one' with the equations \[99\], expected at least one, of the \d+ at \(\)"),
        ([Unit("one", (), (0,)), Unit("two", (), (0, 1))], "'one' with .* twice: each equation is in one unit"),
        ([Unit("one", (), (0,)), Unit("one", (), (1,))], "'one', the name of another call: give each unit one"),
        ([Unit("inner", (), (0,))], "'inner', the name of another call"),
        ([Unit("one", (0,), (0,))], r"body_path \(0,\), where no jaxpr is"),
        ([Unit("one", (0, 3), (0,))], r"body_path \(0, 3\), where no jaxpr is"),
        ([Unit("one", (7, 0), (0,))], r"body_path \(7, 0\), where no jaxpr is"),
        ([Unit("one", (), (1,))], "'one' with new_ref at .*, a use of a reference: leave it out"),
    ],
)
def test_units_that_cannot_be_are_errors(units: list[Unit], message: str) -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return jnp.sin(x)

    program = trace(lambda x: by_reference(inner(x)) * 2, ONE)
    with pytest.raises(ArgumentError, match=message):
        outline(program, units)


def test_a_unit_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="name is 'mlp', of which the program has 0 calls"):
        unit_path(trace(jnp.sin, ONE), "mlp")
