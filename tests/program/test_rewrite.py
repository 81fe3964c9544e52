"""A program with rules is the program, bit for bit, wherever no rule applies."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType

from braidax.errors import ArgumentError
from braidax.program import Program, Rule, compile_on, equation_at, evaluate, trace
from tests.support.program.losses import SHAPES, draw
from tests.support.program.paths import paths

Call = Callable[..., Any]


def same(equation: JaxprEqn, inputs: list[Any]) -> Any:
    outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return outputs if equation.primitive.multiple_results else [outputs]


def evaluated(program: Program, rules: Any) -> Call:
    """The program as a function of its arguments, through `evaluate`."""
    return lambda *args: evaluate(program.closed, rules, jax.tree.leaves(args))[0][0]


def compiled(fn: Call, *args: Any) -> Any:
    return jax.jit(jax.value_and_grad(fn)).lower(*args).compile()


def assert_same_bits(got: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", SHAPES)
def test_without_rules_every_equation_is_the_same(name: str) -> None:
    loss, params, batch = SHAPES[name].make()
    program = trace(loss, params, batch)
    again = trace(evaluated(program, {}), params, batch)
    assert str(again.closed) == str(program.closed)


@pytest.mark.parametrize("name", ["linen", "sampled softmax", "scan", "remat", "cond", "carry", "jit", "while"])
def test_entered_everywhere_the_bits_and_the_memory_are_the_same(name: str) -> None:
    loss, params, batch = SHAPES[name].make()
    program = trace(loss, params, batch)
    rules = dict.fromkeys(paths(program.closed.jaxpr), same)
    assert any(len(path) > 1 for path in rules)
    first, second = compiled(evaluated(program, rules), params, batch), compiled(loss, params, batch)
    assert_same_bits(first(params, batch), second(params, batch))
    for field in ("temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes"):
        assert getattr(first.memory_analysis(), field) == getattr(second.memory_analysis(), field)


@pytest.mark.parametrize("name", ["scan", "remat"])
@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda fn: lambda p, b: jax.vmap(fn, (None, 0))(p, b).sum()])
def test_it_may_be_rematerialised_and_batched(name: str, wrap: Callable[[Call], Call]) -> None:
    loss, params, batch = SHAPES[name].make()
    program = trace(loss, params, batch)
    rules = dict.fromkeys(paths(program.closed.jaxpr), same)
    if wrap is not jax.checkpoint:
        batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), batch)
    got, expected = (jax.jit(jax.value_and_grad(wrap(fn)))(params, batch) for fn in (evaluated(program, rules), loss))
    assert_same_bits(got, expected)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", ["carry", "cond"])
def test_on_a_mesh_it_is_the_same_program(name: str, kind: AxisType) -> None:
    loss, params, batch = SHAPES[name].make()
    program = trace(loss, params, batch)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    whole, split = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
    shardings = (jax.tree.map(lambda _: whole, params), jax.tree.map(lambda _: split, batch))

    def steps(rules: Any) -> Any:
        gradient = jax.value_and_grad(evaluated(program, rules))
        return compile_on(mesh, gradient, in_shardings=shardings, out_shardings=(whole, shardings[0]))

    args = (jax.device_put(params, shardings[0]), jax.device_put(batch, shardings[1]))
    got = steps(dict.fromkeys(paths(program.closed.jaxpr), same))(*args)
    assert_same_bits(got, steps({})(*args))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(jax.value_and_grad(loss)(params, batch)), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-6)


def nested(weight: Any, x: Any) -> Any:
    """A product inside cond, inside remat, inside scan, inside jit; and one at the top."""

    @jax.jit
    def layers(weight: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(hidden: Any, row: Any) -> Any:
            product = jax.lax.cond(row[0] > 0, lambda: hidden @ weight, lambda: hidden - 1)
            return jnp.tanh(product + row), None

        return jax.lax.scan(layer, x, jnp.array([[1.0], [-1.0], [2.0]]))[0]

    with jax.named_scope("top"):
        return (layers(weight, x) @ weight).sum()


def test_a_function_replaces_chosen_equations_only() -> None:
    weight, x = draw(3, 3), draw(3, seed=1)
    program = trace(nested, weight, x)
    inner, top = paths(program.closed.jaxpr, "dot_general")
    assert (len(inner), len(top)) == (9, 1)
    seen: list[str] = []

    def double(equation: JaxprEqn, inputs: list[Any]) -> Any:
        seen.append(equation.primitive.name)
        return [2 * result for result in same(equation, inputs)]

    got, taken = evaluate(program.closed, {top: double}, (weight, x))
    np.testing.assert_allclose(got[0], 2 * nested(weight, x), rtol=1e-6)
    assert (seen, taken) == (["dot_general"], {})


def test_rules_are_fed_and_bring_out_at_any_depth() -> None:
    """Slices of what is fed arrive step by step; a branch that was not taken brings out the number of absence."""
    weight, x = draw(3, 3), draw(3, seed=1)
    program = trace(nested, weight, x)
    inner, _ = paths(program.closed.jaxpr, "dot_general")
    taps = draw(3, 3, seed=2) / 10

    def replace(equation: JaxprEqn, inputs: list[Any], fed: Any) -> Any:
        (product,) = same(equation, inputs)
        return [product + fed["tap"]], (inputs[0], {"one": jnp.int32(1)})

    def rewritten(taps: Any, weight: Any) -> Any:
        outputs, taken = evaluate(
            program.closed, {inner: Rule(replace, absent=-7)}, (weight, x), {inner: {"tap": taps}}
        )
        return outputs[0], taken[inner]

    def by_hand(taps: Any, weight: Any) -> Any:
        hidden = [x]
        for row, tap in zip([1.0, -1.0, 2.0], taps, strict=True):
            hidden.append(jnp.tanh((hidden[-1] @ weight + tap if row > 0 else hidden[-1] - 1) + row))
        return (hidden[3] @ weight).sum(), (jnp.stack([hidden[0], jnp.full(3, -7.0), hidden[2]]), None)

    (loss, (hiddens, extra)), gradients = jax.jit(jax.value_and_grad(rewritten, argnums=(0, 1), has_aux=True))(
        taps, weight
    )
    (expected, (wanted, _)), wanted_gradients = jax.value_and_grad(by_hand, argnums=(0, 1), has_aux=True)(taps, weight)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(hiddens, wanted, rtol=1e-6)
    assert extra["one"].tolist() == [1, -7, 1]
    for one, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert not np.any(gradients[0][1])


def test_what_a_rule_closes_over_arrives_whole_and_has_a_gradient() -> None:
    weight, x = draw(3, 3), draw(3, seed=1)
    program = trace(nested, weight, x)
    both = paths(program.closed.jaxpr, "dot_general")

    def rewritten(other: Any) -> Any:
        rules = dict.fromkeys(both, lambda equation, inputs: same(equation, [inputs[0], other]))
        return evaluate(program.closed, rules, (jnp.zeros((3, 3)), x))[0][0]

    got, expected = jax.jit(jax.value_and_grad(rewritten))(weight), jax.jit(jax.value_and_grad(nested))(weight, x)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_lines_names_and_borders_stay() -> None:
    weight, x = draw(3, 3), draw(3, seed=1)
    program = trace(nested, weight, x)
    rewritten = trace(evaluated(program, dict.fromkeys(paths(program.closed.jaxpr), same)), weight, x)
    for name in ("jit", "dot_general", "remat2", "scan", "cond", "tanh"):
        for path, other in zip(paths(program.closed.jaxpr, name), paths(rewritten.closed.jaxpr, name), strict=True):
            old, new = (equation_at(p.closed.jaxpr, at) for p, at in ((program, path), (rewritten, other)))
            assert old.source_info.traceback is new.source_info.traceback
            assert str(old.source_info.name_stack) == str(new.source_info.name_stack)
            assert old.params.get("name") == new.params.get("name")
    assert "top" in str(equation_at(program.closed.jaxpr, (len(program.closed.jaxpr.eqns) - 1,)).source_info.name_stack)


def test_a_while_takes_functions_in_condition_and_body() -> None:
    def fn(x: Any) -> Any:
        return jax.lax.while_loop(lambda s: jnp.sin(s) < 0.9, lambda s: s + jnp.cos(s) * 0 + 0.25, x)

    program = trace(fn, jnp.float32(0.0))
    sine, cosine = (paths(program.closed.jaxpr, name)[0] for name in ("sin", "cos"))
    assert (sine[1], cosine[1]) == (0, 1)
    rules = {sine: lambda _, inputs: [inputs[0] / 2], cosine: lambda _, inputs: [inputs[0] * 0 + jnp.nan_to_num(1.0)]}
    assert float(evaluate(program.closed, rules, (jnp.float32(0.0),))[0][0]) == 2.0
    for rule in (Rule(lambda e, i, f: (same(e, i), i[0])), Rule(lambda e, i, f: ([i[0] + f], None))):
        with pytest.raises(ArgumentError, match="inside a while that is fed or brings out"):
            evaluate(program.closed, {cosine: rule}, (jnp.float32(0.0),), {cosine: jnp.ones(())})


def test_rules_run_under_the_mesh_of_the_caller() -> None:
    program = trace(nested, draw(3, 3), draw(3, seed=1))
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    whole = jax.NamedSharding(mesh, jax.P())
    seen: list[tuple[str, ...]] = []

    def rule(equation: JaxprEqn, inputs: list[Any]) -> Any:
        seen.append(tuple(jax.sharding.get_abstract_mesh().axis_names))
        return same(equation, inputs)

    rules = dict.fromkeys(paths(program.closed.jaxpr, "dot_general"), rule)
    compile_on(mesh, evaluated(program, rules), in_shardings=(whole, whole), out_shardings=whole)(
        draw(3, 3), draw(3, seed=1)
    )
    assert set(seen) == {("data", "model")}


def test_paths_and_feeds_that_do_not_fit_are_errors() -> None:
    loss, params, batch = SHAPES["custom_vjp"].make()
    program = trace(loss, params, batch)
    leaves = jax.tree.leaves((params, batch))
    with pytest.raises(ArgumentError, match=r"rules has a path into custom_vjp_call, which cannot be entered"):
        evaluate(program.closed, {(0, 0, 0): same}, leaves)
    with pytest.raises(ArgumentError, match=r"rules has a path through 99, expected below 2: take paths from"):
        evaluate(program.closed, {(99,): same}, leaves)
    program = trace(nested, draw(3, 3), draw(3))
    inner, _ = paths(program.closed.jaxpr, "dot_general")
    with pytest.raises(ArgumentError, match=r"rules has a path through 5, expected below 1"):
        evaluate(program.closed, {(0, 5, 0): same}, (draw(3, 3), draw(3)))
    with pytest.raises(ArgumentError, match=r"fed has a leaf \(2, 3\) for a scan of length 3: stack one slice"):
        rule = Rule(lambda equation, inputs, fed: (same(equation, inputs), None))
        evaluate(program.closed, {inner: rule}, (draw(3, 3), draw(3)), {inner: draw(2, 3)})
