"""Units computed part by part give what the program gives; what cannot be is left, with the reason."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.program import Division, Program, Rotatable, RotatedUnit, evaluate, find_experts, rotatable, trace

N, B, T, D, HIDDEN, HEADS, WORDS, EXPERTS = 4, 6, 5, 8, 12, 4, 21, 16
Loss = Callable[[Any, Any], jax.Array]


def _params(*shapes: tuple[int, ...]) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(0.4 * random.normal(size=shape), jnp.float32) for shape in shapes]


def _batch() -> dict[str, jax.Array]:
    random = np.random.default_rng(1)
    x, ids = random.normal(size=(B, T, D)), random.integers(0, WORDS, (B, T))
    return {"x": jnp.asarray(x, jnp.float32), "ids": jnp.asarray(ids, jnp.int32)}


def found(loss: Loss, params: Any, dims: dict[int, int]) -> tuple[Program, Rotatable]:
    program = trace(loss, params, _batch())
    return program, rotatable(program, dims, N, {1: 0}, 1)


def part_by_part(found: Rotatable) -> Callable[..., Any]:
    """The program with units computed as a ring does it, one part behind the other, on one device."""

    def computed(unit: RotatedUnit, inputs: Sequence[Any]) -> list[Any]:
        def args(index: int) -> list[Any]:
            return [_part(one, unit.weights[at].divided, index) if at in unit.weights else one
                    for at, one in enumerate(inputs)]  # fmt: skip

        batch, tops = Division(1, 0, sums=False), list[Any]()
        divisions = [Division(N, index, unit.size) for index in range(N)]
        for at, division in enumerate(divisions):
            seen = unit.maxima_of(args(at), division, batch) if unit.tops else []
            tops = [jnp.maximum(*pair) for pair in zip(tops, seen, strict=True)] if tops else seen
        parts = [unit.part(args(at), division, batch, tops) for at, division in enumerate(divisions)]
        alone = unit.of_maxima(args(0), divisions[0], batch, tops)[0] if unit.tops else {}
        outputs: list[Any] = []
        for at, (result, var) in enumerate(zip(unit.results, unit.outputs, strict=True)):
            several = [part[at] for part in parts]
            if at in alone:
                outputs.append(alone[at])
            elif result.stacked is None:
                outputs.append(sum(several))
            else:
                outputs.append(jnp.concatenate(several, result.stacked)[tuple(map(slice, var.aval.shape))])  # pyright: ignore
        return outputs

    rules = {path: lambda _, inputs, unit=unit: computed(unit, inputs) for path, unit in found.units.items()}

    def run(*args: Any) -> Any:
        return evaluate(found.program.closed, rules, jax.tree.leaves(args))[0][0]

    return run


def _part(value: Any, dim: int, index: int) -> Any:
    part = -(-value.shape[dim] // N)
    more = part * N - value.shape[dim]
    value = jnp.pad(value, [(0, more if at == dim else 0) for at in range(value.ndim)])
    return jax.lax.dynamic_slice_in_dim(value, index * part, part, dim)


def assert_alike(loss: Loss, params: Any, made: Rotatable) -> None:
    batch = _batch()
    expected = jax.jit(jax.value_and_grad(loss))(params, batch)
    got = jax.jit(jax.value_and_grad(part_by_part(made)))(params, batch)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), got, expected)


def _mlp(params: Any, batch: Any) -> jax.Array:
    up, bias, down = params
    return ((jax.nn.relu(batch["x"] @ up + bias) @ down) ** 2).mean()


def _gated(params: Any, batch: Any) -> jax.Array:
    gate, up, down = params
    mask = jnp.arange(HIDDEN) != 3
    return ((jax.nn.silu(batch["x"] @ gate) * (batch["x"] @ up) * mask @ down) ** 2).mean()


def _attention(params: Any, batch: Any) -> jax.Array:
    """Causal, by heads, in a loop that is computed again."""

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", jnp.tanh(x), w[at]) for at in range(3))
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), jnp.einsum("bthk,bshk->bhts", q, k), -1e9)
        mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
        return x + jnp.einsum("bthk,hkd->btd", mixed, w[3]), None

    return (jax.lax.scan(layer, batch["x"], params)[0] ** 2).mean()


def _cross_entropy(params: Any, batch: Any) -> jax.Array:
    (table,) = params
    logits = 3 * batch["x"] @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:]).mean()


def _log_softmax(params: Any, batch: Any) -> jax.Array:
    """With a bias, and labels that are read of what is normalized."""
    table, bias = params
    log_probs = jax.nn.log_softmax(batch["x"] @ table + bias)
    return -jnp.take_along_axis(log_probs, batch["ids"][..., None], axis=-1).mean()


def _column(params: Any, batch: Any) -> jax.Array:
    """One product, whose columns lie side by side, and are normalized behind it."""
    (weight,) = params
    y = batch["x"] @ weight
    return ((y - y.mean(-1, keepdims=True)) ** 3).mean()


def _convolutions(params: Any, batch: Any) -> jax.Array:
    first, second = params
    dims = ("NWC", "WIO", "NWC")
    hidden = jax.nn.relu(jax.lax.conv_general_dilated(batch["x"], first, (1,), "SAME", dimension_numbers=dims))
    return (jax.lax.conv_general_dilated(hidden, second, (1,), "SAME", dimension_numbers=dims) ** 2).mean()


def _picked(params: Any, batch: Any, gates: jax.Array) -> jax.Array:
    """The best expert of each token, with 3 places for the tokens of a sample."""
    up, bias, down = params
    mask = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = ((jnp.cumsum(mask, 1) - 1) * mask).sum(-1).astype(jnp.int32)
    combine = (gates * mask)[..., None] * jax.nn.one_hot(place, 3)[:, :, None]
    given = jnp.einsum("gsec,gsd->gecd", jnp.sign(combine), batch["x"])
    hidden = jnp.tanh(jnp.einsum("gecd,edf->gecf", given, up) + bias[:, None])
    made = jnp.einsum("gsec,gecd->gsd", combine, jnp.einsum("gecf,efd->gecd", hidden, down))
    balance = (mask.mean((0, 1)) * gates.mean((0, 1))).sum()
    return (made**2).mean() + 0.1 * balance


def _mixture(params: Any, batch: Any) -> jax.Array:
    *experts, router = params
    return _picked(experts, batch, jax.nn.softmax(batch["x"] @ router))


def _mixture_of_best(params: Any, batch: Any) -> jax.Array:
    """Every expert on every token, of which the two best count."""
    up, bias, down, router = params
    gates, picked = jax.lax.top_k(batch["x"] @ router, 2)
    weights = (jax.nn.softmax(gates)[..., None] * jax.nn.one_hot(picked, EXPERTS)).sum(-2)
    hidden = jnp.tanh(jnp.einsum("bsd,edf->bsef", batch["x"], up) + bias)
    return (jnp.einsum("bsef,efd,bse->bsd", hidden, down, weights) ** 2).mean()


_EXPERTS = [(EXPERTS, D, HIDDEN), (EXPERTS, HIDDEN), (EXPERTS, HIDDEN, D), (D, EXPERTS)]
_CASES: dict[str, tuple[Loss, Any, dict[int, int], list[tuple[int, bool]]]] = {
    "columns, then rows": (_mlp, [(D, HIDDEN), (HIDDEN,), (HIDDEN, D)], {0: 1, 1: 0, 2: 0}, [(3, True)]),
    "gates": (_gated, [(D, HIDDEN), (D, HIDDEN), (HIDDEN, D)], {0: 1, 1: 1, 2: 0}, [(3, True)]),
    "heads": (
        _attention, [*[(2, D, HEADS, 3)] * 3, (2, HEADS, 3, D)], {0: 2, 1: 2, 2: 2, 3: 1}, [(4, True)],
    ),
    "a vocabulary that nothing divides": (_cross_entropy, [(WORDS, D)], {0: 0}, [(1, True)]),
    "a log-softmax": (_log_softmax, [(D, WORDS), (WORDS,)], {0: 1, 1: 0}, [(2, True)]),
    "columns": (_column, [(D, HIDDEN)], {0: 1}, [(1, False)]),
    "rows": (_column, [(D, HIDDEN)], {0: 0}, [(1, True)]),
    "experts that are picked": (_mixture, _EXPERTS, {0: 0, 1: 0, 2: 0}, [(3, True)]),
    "experts, and what picks them": (_mixture, _EXPERTS, {0: 0, 1: 0, 2: 0, 3: 1}, [(1, False), (3, True)]),
    "the best of all experts": (_mixture_of_best, _EXPERTS, {0: 0, 1: 0, 2: 0}, [(3, True)]),
    "channels": (_convolutions, [(3, D, HIDDEN), (3, HIDDEN, D)], {0: 2, 1: 1}, [(2, True)]),
}  # fmt: skip


NIGHTLY = ("experts that are picked",)  # beside those of which what picks them is divided, too


@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.slow) if x in NIGHTLY else x for x in _CASES])
def test_parts_make_the_whole(case: str) -> None:
    loss, shapes, dims, units = _CASES[case]
    params = _params(*shapes)
    _, made = found(loss, params, dims)
    told = [(len(unit.weights), all(one.stacked is None for one in unit.results)) for unit in made.units.values()]
    assert (told, made.left) == (units, {})
    assert_alike(loss, params, made)


def test_nothing_of_a_vocabulary_comes_out() -> None:
    _, made = found(_cross_entropy, _params((WORDS, D)), {0: 0})
    (unit,) = made.units.values()
    assert {var.aval.shape for var in unit.outputs} == {(B, T - 1), (B, T - 1, 1)}  # pyright: ignore
    assert (unit.size, len(unit.tops), len(unit.maxima.shifts)) == (WORDS, 1, 1)


def test_masks_of_experts_are_made_in_parts() -> None:
    _, made = found(_mixture, _params(*_EXPERTS), {0: 0, 1: 0, 2: 0})
    (unit,) = made.units.values()
    taken = [(var.aval.shape, unit.taken[at].cut) for at, var in enumerate(unit.jaxpr.invars) if at not in unit.weights]  # pyright: ignore
    of_experts = ((B, T, EXPERTS), 2)  # gates, and which is picked, both of which the balance needs, too
    assert sorted(taken, key=str) == [of_experts, of_experts, ((B, T, 3), None), ((B, T, D), None)]


def test_what_is_not_made_of_less_is_made_before() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        up, down, rows = params
        scaled = jnp.tanh(batch["x"] * 3)  # as long as what it is made of: no part of it is made on a ring
        hidden = jax.nn.relu(batch["x"] @ up)
        kept = hidden * jax.random.bernoulli(jax.random.key(3), 0.9, hidden.shape)
        return (((kept @ down) + scaled @ rows) ** 2).mean()

    params = _params((D, HIDDEN), (HIDDEN, D), (D, D))
    _, made = found(loss, params, {0: 1, 1: 0, 2: 0})
    names = [{equation.primitive.name for equation in unit.jaxpr.eqns} for unit in made.units.values()]
    assert len(names) == 2
    assert {"random_bits", "tanh"} & names[0].union(*names) == set()
    assert_alike(loss, params, made)


def test_what_all_samples_have_made_is_on_no_ring() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        up, bias, down, router = params
        given = jnp.einsum("bte,btd->ed", jax.nn.softmax(batch["x"] @ router), batch["x"])
        made = jnp.einsum("ef,efd->ed", jnp.tanh(jnp.einsum("ed,edf->ef", given, up) + bias), down)
        return ((batch["x"] @ made.T) ** 2).mean()

    _, made = found(loss, _params(*_EXPERTS), {0: 0, 2: 0})
    assert made.units == {}
    assert made.left[0] == "it multiplies what all samples have made, which no device has a part of"


def test_what_experts_do_is_found() -> None:
    program = trace(_mixture, _params(*_EXPERTS), _batch())
    _, (one,) = find_experts(program, {1: 0}, 2)
    moved = (B, EXPERTS, 3, D)
    assert (one.dims, one.count) == ({0: 0, 1: 0, 2: 0}, EXPERTS)
    assert one.num_bytes == 2 * 4 * np.prod(moved)
    assert [at for at in one.inputs if at is not None] == [(0, 1)]
    assert [{*at} for at in one.outputs if at is not None] == [{0, 2}]  # as einsum puts them
    assert find_experts(program, {1: 0}, 4)[1] == []  # devices do not divide the samples
    assert find_experts(trace(_mlp, _params((D, HIDDEN), (HIDDEN,), (HIDDEN, D)), _batch()), {1: 0}, 2)[1] == []


def test_labels_out_of_range_are_what_they_were() -> None:
    params = _params((WORDS, D))

    def loss(params: Any, batch: Any) -> jax.Array:
        return _cross_entropy(params, {**batch, "ids": batch["ids"].at[0, 1].set(WORDS)})

    _, made = found(loss, params, {0: 0})
    assert len(made.units) == 1
    batch = _batch()
    assert np.isnan(jax.jit(loss)(params, batch))
    assert np.isnan(jax.jit(part_by_part(made))(params, batch))


def _normalized_hidden(params: Any, batch: Any) -> jax.Array:
    up, down = params
    hidden = batch["x"] @ up
    return ((hidden / jnp.sqrt((hidden**2).mean(-1, keepdims=True))) @ down).mean()


def _highest(params: Any, batch: Any) -> jax.Array:
    """A maximum that has a gradient."""
    up, down = params
    hidden = batch["x"] @ up
    return ((jnp.exp(hidden - hidden.max(-1, keepdims=True)) @ down) ** 2).mean()


def _pairs(params: Any, batch: Any) -> jax.Array:
    up, down = params
    hidden = batch["x"] @ up
    return (jnp.einsum("btf,btg->bfg", hidden, hidden) ** 2).mean() + (hidden @ down).mean()


def _statistics(params: Any, batch: Any) -> jax.Array:
    """Of the whole batch."""
    up, down = params
    hidden = batch["x"] @ up
    return (((hidden - hidden.mean(0)) @ down) ** 2).mean()


def _in_a_branch(params: Any, batch: Any) -> jax.Array:
    up, down = params
    hidden = batch["x"] @ up
    return (jax.lax.cond(batch["ids"][0, 0] > 3, jnp.tanh, jnp.sin, hidden) @ down).mean()


@pytest.mark.parametrize("loss", [_normalized_hidden, _highest, _pairs, _statistics, _in_a_branch])
def test_what_needs_all_parts_stands_alone(loss: Loss) -> None:
    params = _params((D, HIDDEN), (HIDDEN, D))
    _, made = found(loss, params, {0: 1, 1: 0})
    assert sorted(len(unit.weights) for unit in made.units.values()) == [1, 1]
    assert made.left == {}
    assert_alike(loss, params, made)


def test_what_no_product_uses_is_left() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        table, scale, both = params
        x = table[batch["ids"]] * scale

        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ both), None

        return (jax.lax.scan(step, x, None, length=2)[0] ** 2).mean()

    _, made = found(loss, _params((WORDS, D), (D,), (D, D)), {0: 1, 1: 0, 2: 1})
    assert made.units == {}
    assert made.left[0] == "its rows are looked up"
    assert made.left[1].startswith("no product uses it at test_rotation.py:")
    assert set(made.left) == {0, 1, 2}
