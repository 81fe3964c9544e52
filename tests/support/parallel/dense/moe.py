"""Small mixtures of experts, as their authors write them: routed within groups, dense, by a loop, or sorted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.parallel.dense.models import BATCH, LENGTH, WIDTH, Model
from tests.support.parallel.drawn import drawn

HIDDEN, CAPACITY = 48, 3


def _batch(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shape = (BATCH, LENGTH, WIDTH)
    return {"x": random.normal(size=shape).astype(np.float32), "y": random.normal(size=shape).astype(np.float32)}


def _init(num_experts: int, *lead: int) -> Callable[[jax.Array], Any]:
    def init(key: jax.Array) -> Any:
        d, f, e = WIDTH, HIDDEN, num_experts
        shapes = {"router": (d, e), "up": (e, d, f), "down": (e, f, d), "gate": (e, d, f)}
        leaves = drawn(key, *((*lead, *shape) for shape in shapes.values()))
        made = {name: leaf * shape[-2] ** -0.5 for leaf, (name, shape) in zip(leaves, shapes.items(), strict=True)}
        return {**made, "up_bias": jnp.full((*lead, e, f), 0.1), "down_bias": jnp.full((*lead, e, d), 0.1)}

    return init


def _routed(x: jax.Array, logits: jax.Array, num_picked: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns what each token takes of each place of each expert, `[g, s, e, c]`, and what balances experts."""
    num_experts, gates = logits.shape[-1], jax.nn.softmax(logits)
    combine = jnp.zeros((*logits.shape, capacity))
    taken = jnp.zeros((len(logits), 1, num_experts))
    left, balance = gates, jnp.zeros(())
    for at in range(num_picked):
        mask = jax.nn.one_hot(jnp.argmax(left, -1), num_experts)
        if at == 0:
            balance = num_experts * (mask.mean((0, 1)) * gates.mean((0, 1))).sum()
        place = (jnp.cumsum(mask, 1) - 1 + taken) * mask
        taken = taken + mask.sum(1, keepdims=True)
        mask = mask * (place < capacity)
        where = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
        combine = combine + (gates * mask)[..., None] * where[:, :, None]
        left = left * (1 - mask)
    return combine, balance


def switch(
    params: Any,
    x: jax.Array,
    *,
    num_picked: int = 1,
    capacity: int = CAPACITY,
    biases: bool = False,
    gated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """A layer whose experts see a bounded number of tokens of each group (Switch, GShard)."""
    combine, balance = _routed(x, jnp.einsum("gsd,de->gse", x, params["router"]), num_picked, capacity)
    given = jnp.einsum("gsec,gsd->gecd", (combine > 0).astype(x.dtype), x)
    hidden = jnp.einsum("gecd,edf->gecf", given, params["up"])
    if biases:
        hidden = hidden + params["up_bias"][:, None]
    hidden = jax.nn.gelu(hidden)
    if gated:
        hidden = hidden * jnp.einsum("gecd,edf->gecf", given, params["gate"])
    made = jnp.einsum("gecf,efd->gecd", hidden, params["down"])
    if biases:
        made = made + params["down_bias"][:, None]
    return jnp.einsum("gsec,gecd->gsd", combine, made), balance


def by_index(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best expert of each token, whose places are written and read by their index."""
    gates = jax.nn.softmax(x @ params["router"])
    picked, num_experts = jnp.argmax(gates, -1), gates.shape[-1]
    mask = jax.nn.one_hot(picked, num_experts, dtype=jnp.int32)
    places = ((jnp.cumsum(mask, 1) - 1) * mask).sum(-1)
    at = jnp.where(places < CAPACITY, picked * CAPACITY + places, num_experts * CAPACITY)

    def put(x: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.zeros((num_experts * CAPACITY, x.shape[-1])).at[at].add(x, mode="drop")

    given = jax.vmap(put)(x, at).reshape(len(x), num_experts, CAPACITY, -1)
    hidden = jax.nn.gelu(jnp.einsum("gecd,edf->gecf", given, params["up"]))
    made = jnp.einsum("gecf,efd->gecd", hidden, params["down"]).reshape(len(x), num_experts * CAPACITY, -1)
    read = jax.vmap(lambda made, at: made.at[at].get(mode="fill", fill_value=0))(made, at)
    return read * gates.max(-1, keepdims=True), gates.mean()


def dense(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every expert on every token, weighted by gates."""
    tokens = x.reshape(-1, x.shape[-1])
    gates = jax.nn.softmax(tokens @ params["router"])
    hidden = jax.nn.gelu(jnp.einsum("td,edf->tef", tokens, params["up"]) + params["up_bias"])
    made = jnp.einsum("tef,efd->ted", hidden, params["down"])
    return jnp.einsum("te,ted->td", gates, made).reshape(x.shape), (gates.mean(0) ** 2).sum()


def best_two(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every expert on every token, of which the two best count (as Mixtral is written without kernels)."""
    gates, picked = jax.lax.top_k(x @ params["router"], 2)
    weights = (jax.nn.softmax(gates)[..., None] * jax.nn.one_hot(picked, params["up"].shape[0])).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, params["gate"])) * jnp.einsum("bsd,edf->bsef", x, params["up"])
    return jnp.einsum("bsef,efd,bse->bsd", hidden, params["down"], weights), weights.mean()


def mapped(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`vmap` over experts, each of which sees all tokens."""
    gates = jax.nn.softmax(x @ params["router"])

    def expert(w: Any) -> jax.Array:
        return jax.nn.gelu(x @ w["up"] + w["up_bias"]) @ w["down"]

    made = jax.vmap(expert)({name: params[name] for name in ("up", "up_bias", "down")})
    return jnp.einsum("ebsd,bse->bsd", made, gates), (gates.mean((0, 1)) ** 2).sum()


def looped(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A `scan` over experts."""
    gates = jax.nn.softmax(x @ params["router"])

    def expert(total: jax.Array, given: Any) -> tuple[jax.Array, None]:
        w, gate = given
        return total + gate[..., None] * (jax.nn.gelu(x @ w["up"]) @ w["down"]), None

    experts = {name: params[name] for name in ("up", "down")}
    return jax.lax.scan(expert, jnp.zeros_like(x), (experts, jnp.moveaxis(gates, -1, 0)))[0], gates.mean()


def written_out(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A Python loop over experts."""
    gates, total = jax.nn.softmax(x @ params["router"]), jnp.zeros_like(x)
    for at in range(params["up"].shape[0]):
        total = total + gates[..., at, None] * (jax.nn.gelu(x @ params["up"][at]) @ params["down"][at])
    return total, gates.mean()


def of_all_tokens(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens of the whole batch share the places of each expert."""
    made, balance = switch(params, x.reshape(1, -1, x.shape[-1]), capacity=BATCH * LENGTH // 4)
    return made.reshape(x.shape), balance


def ragged(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens of the whole batch, sorted by their expert."""
    tokens = x.reshape(-1, x.shape[-1])
    gates = jax.nn.softmax(tokens @ params["router"])
    picked = jnp.argmax(gates, -1)
    order, sizes = jnp.argsort(picked), jnp.bincount(picked, length=params["up"].shape[0])
    hidden = jax.nn.gelu(jax.lax.ragged_dot(tokens[order], params["up"], sizes))
    made = jax.lax.ragged_dot(hidden, params["down"], sizes)[jnp.argsort(order)]
    return (made * gates.max(-1, keepdims=True)).reshape(x.shape), gates.mean()


def _one(layer: Callable[..., Any]) -> Callable[..., jax.Array]:
    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        made, balance = layer(params, jnp.tanh(batch["x"]))
        return ((batch["x"] + made - batch["y"]) ** 2).mean() + 0.01 * balance

    return loss


def _stacked(layer: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Layers in a loop, computed again."""

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        @jax.checkpoint
        def step(carry: Any, w: Any) -> Any:
            x, balance = carry
            made, more = layer(w, x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-3))
            return (x + made, balance + more), None

        (x, balance), _ = jax.lax.scan(step, (batch["x"], jnp.zeros(())), params)
        return ((x - batch["y"]) ** 2).mean() + 0.01 * balance

    return loss


def _model(layer: Callable[..., Any], num_experts: int = 8, num_layers: int = 0) -> Model:
    if num_layers:
        return Model(_stacked(layer), _init(num_experts, num_layers), _batch)
    return Model(_one(layer), _init(num_experts), _batch)


_two = partial(switch, num_picked=2, biases=True)
MOES: dict[str, Model] = {
    "switch": _model(switch),
    "two, biases": _model(_two),
    "by index": _model(by_index),
    "crowded": _model(partial(switch, num_picked=2, capacity=64, biases=True)),
    "crowded, stacked": _model(partial(switch, num_picked=2, capacity=64, gated=True), num_layers=2),
    "two, gated": _model(partial(switch, num_picked=2, gated=True)),
    "stacked": _model(_two, num_layers=2),
    "dense": _model(dense),
    "dense, stacked": _model(dense, num_layers=2),
    "best two": _model(best_two),
    "mapped": _model(mapped),
    "looped": _model(looped),
    "written out": _model(written_out),
    "four experts": _model(_two, 4),
    "ten experts": _model(_two, 10),
    "seven experts": _model(_two, 7),
    "all tokens": _model(of_all_tokens),
    "ragged": _model(ragged),
}
