"""Model shapes that the tests of `program` share: losses `loss(params, batch)`, their parameters and a batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

V, D, B, T = 37, 6, 4, 3


@dataclass(frozen=True)
class Shape:
    """A loss with parameters and a batch, and the verdict on each of its tables.

    `late`: the ids of its lookups depend on parameters. `line`: text of the source line that decides.
    """

    make: Callable[[], tuple[Callable[..., Any], Any, Any]]
    verdicts: dict[str, str]
    late: bool = False
    line: str = ""
    says: str = ""
    tolerance: float = 1e-6
    rest: dict[str, Any] = field(default_factory=dict[str, Any])


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def ids(*shape: int, low: int = 0, high: int = V, seed: int = 1) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).integers(low, high, shape).astype(np.int32))


def batch_of(**more: Any) -> dict[str, Any]:
    return {"ids": ids(B, T, low=-V), "x": draw(B, D, seed=2), "y": draw(B, seed=3), **more}


def taken() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        rows = jnp.take(params["table"], batch["ids"], axis=0)  # taken
        return jnp.tanh(rows @ params["weight"]).sum()

    return loss, {"table": draw(V, D), "weight": draw(D, D, seed=4)}, batch_of()


def indexed() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        rows = params["table"][batch["ids"]]  # indexed
        return jnp.tanh(rows @ params["weight"]).sum()

    return loss, {"table": draw(V, D), "weight": draw(D, D, seed=4)}, batch_of()


def got_by_at() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        first = params["table"].at[batch["ids"]].get(mode="fill", fill_value=0.5)
        second = params["table"].at[batch["ids"].T].get(mode="clip")
        third = params["table"].at[batch["ids"][:, 0]].get(mode="promise_in_bounds")
        return (first.sum(1) * second.sum(0) * third).sum()

    return loss, {"table": draw(V, D)}, batch_of(ids=ids(B, T, low=-2 * V, high=2 * V))


def linen() -> Any:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            return nn.Dense(1)(nn.Embed(V, D, name="embed")(ids).mean(1))[:, 0]

    model, batch = Model(), batch_of()
    params = model.init(jax.random.key(0), batch["ids"])["params"]
    return (
        lambda params, batch: ((model.apply({"params": params}, batch["ids"]) - batch["y"]) ** 2).mean(),
        params,
        batch,
    )


def of_nnx() -> Any:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.dense = nnx.Linear(D, 1, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            return self.dense(self.embed(ids).mean(1))[:, 0]

    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def loss(params: Any, batch: Any) -> Any:
        return ((nnx.merge(graph, params)(batch["ids"]) - batch["y"]) ** 2).mean()

    return loss, nnx.to_pure_dict(state), batch_of()


def equinox() -> Any:
    embed, dense = eqx.nn.Embedding(V, D, key=jax.random.key(0)), eqx.nn.Linear(D, 1, key=jax.random.key(1))
    params, static = eqx.partition({"embed": embed, "dense": dense}, eqx.is_array)

    def loss(params: Any, batch: Any) -> Any:
        model = eqx.combine(params, static)

        def one(row: Any) -> Any:
            return model["dense"](jax.vmap(model["embed"])(row).mean(0))[0]

        return ((jax.vmap(one)(batch["ids"]) - batch["y"]) ** 2).mean()

    return loss, params, batch_of(ids=ids(B, T))


def one_scalar() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        return (params["table"][batch["ids"][1, 1]] * batch["x"][0]).sum()

    return loss, {"table": draw(V, D)}, batch_of()


def sampled_softmax() -> Any:
    def loss(params: Any, batch: Any, key: Any = None) -> Any:
        hidden = jnp.tanh(params["embedding"][batch["ids"]].mean(1))
        sampled = jax.random.randint(jax.random.key(7), (8,), 0, V)
        true = batch["ids"][:, 0] % V
        scores = hidden @ params["softmax"][sampled].T + params["bias"][sampled]
        right = (hidden * params["softmax"][true]).sum(-1) + params["bias"][true]
        logits = jnp.concatenate([right[:, None], scores], 1)
        return -jax.nn.log_softmax(logits)[:, 0].mean()

    return loss, {"embedding": draw(V, D), "softmax": draw(V, D, seed=5), "bias": draw(V, seed=6)}, batch_of()


def pooled() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        bag = params["table"][batch["ids"]]
        return (jnp.mean(bag, axis=1) * batch["x"]).sum()

    return loss, {"table": draw(V, D)}, batch_of()


def ragged() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        rows = jnp.take(params["table"], batch["flat"], axis=0)
        bags = jax.ops.segment_sum(rows, batch["segments"], num_segments=B)
        return (bags**2 * batch["x"]).sum()

    return loss, {"table": draw(V, D)}, batch_of(flat=ids(9), segments=jnp.array([0, 0, 0, 1, 1, 3, 3, 3, 3]))


def scanned() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        def layer(hidden: Any, weight_and_ids: Any) -> Any:
            weight, row = weight_and_ids
            return jnp.tanh(hidden @ weight + params["table"][row]), None

        hidden, _ = jax.lax.scan(layer, batch["x"], (params["layers"], batch["ids"].T))
        return (hidden**2).mean()

    return loss, {"table": draw(V, D), "layers": draw(T, D, D, seed=4)}, batch_of()


def tied() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        hidden = params["table"][batch["ids"]].mean(1)
        logits = hidden @ params["table"].T  # tied
        return jax.nn.logsumexp(logits, axis=-1).mean()

    return loss, {"table": draw(V, D)}, batch_of()


def cast() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        rows = params["table"].astype(jnp.bfloat16)[batch["ids"]]
        return (rows.sum(1).astype(jnp.float32) * batch["x"]).sum()

    return loss, {"table": draw(V, D)}, batch_of()


def checkpointed() -> Any:
    @jax.checkpoint
    def block(params: Any, ids: Any, hidden: Any) -> Any:
        return jnp.tanh(hidden @ params["weight"] + params["table"][ids])

    def loss(params: Any, batch: Any) -> Any:
        hidden = block(params, batch["ids"][:, 0], batch["x"])
        return (block(params, batch["ids"][:, 1], hidden) ** 2).sum()

    return loss, {"table": draw(V, D), "weight": draw(D, D, seed=4)}, batch_of()


def two_tables() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        first = jnp.take(params["first"], batch["ids"], axis=0, mode="clip")
        second = jnp.take(params["second"], batch["ids"], axis=0, mode="clip")
        return jnp.sin(first * second + first).sum()

    return loss, {"first": draw(V, D), "second": draw(V, D, seed=5)}, batch_of(ids=ids(B, T, low=-9, high=99))


def in_custom_vjp() -> Any:
    @jax.custom_vjp
    def read(table: Any, ids: Any) -> Any:
        return table[ids]

    def backward(res: Any, g: Any) -> Any:
        shape, ids = res
        return jnp.zeros(shape.shape).at[ids].add(g), None

    read.defvjp(lambda table, ids: (table[ids], (table, ids)), backward)

    def loss(params: Any, batch: Any) -> Any:
        return read(params["table"], batch["ids"]).sum()  # hidden

    return loss, {"table": draw(V, D)}, batch_of()


def stacked_tables() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        def layer(hidden: Any, table: Any) -> Any:
            return jnp.tanh(hidden + table[batch["ids"][:, 0]]), None

        return (jax.lax.scan(layer, batch["x"], params["tables"])[0] ** 2).sum()

    return loss, {"tables": draw(2, V, D)}, batch_of()


def chosen_by_carry() -> Any:
    """Ids that depend on what was computed before, inside a rematerialised scan."""

    def loss(params: Any, batch: Any) -> Any:
        @jax.checkpoint
        def step(hidden: Any, _: Any) -> Any:
            chosen = jnp.argmax(hidden @ params["weight"], axis=-1)
            return jnp.tanh(hidden + params["table"][chosen]), chosen.sum()

        hidden, _ = jax.lax.scan(step, batch["x"], None, length=4)
        return (hidden**2).sum() + params["other"][batch["ids"]].sum()

    params = {"table": draw(V, D), "weight": draw(D, V, seed=4), "other": draw(V + 1, D, seed=5)}
    return loss, params, batch_of()


def in_branches() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        def step(total: Any, row: Any) -> Any:
            rows = jax.lax.cond(
                row[0] > 0, lambda: params["table"][row] * 2, lambda: jnp.take(params["table"], row[::-1], axis=0) + 1
            )
            return total + jnp.sin(rows).sum(), None

        total, _ = jax.lax.scan(step, 0.0, batch["ids"])
        return total

    return loss, {"table": draw(V, D)}, batch_of()


def jitted() -> Any:
    """Through several jit borders, an unchanged reshape and a sharding-free copy; and a table nothing reads."""

    @jax.jit
    def embed(table: Any, ids: Any) -> Any:
        return jax.jit(lambda table: jnp.copy(table).reshape(V, D))(table)[ids]

    def loss(params: Any, batch: Any) -> Any:
        first = embed(params["table"], batch["ids"])
        return (first * embed(params["table"], batch["ids"] + 1)).sum()

    return jax.jit(loss), {"table": draw(V, D), "spare": draw(3)}, batch_of(ids=ids(B, T, high=V - 1))


def in_while() -> Any:
    def loss(params: Any, batch: Any) -> Any:
        def body(state: Any) -> Any:
            index, total = state
            return index + 1, total + jax.lax.stop_gradient(params["table"])[batch["ids"][0, 0] + index].sum()

        _, total = jax.lax.while_loop(lambda state: state[0] < batch["ids"][0, 1] % 5, body, (0, 0.0))
        return total + (batch["x"] * params["scale"]).sum()

    return loss, {"table": draw(V, D), "scale": draw(D)}, batch_of()


SHAPES: dict[str, Shape] = {
    "take": Shape(taken, {"table": "sparse", "weight": "dense"}, line="# taken"),
    "index": Shape(indexed, {"table": "sparse", "weight": "dense"}, line="# indexed"),
    "at": Shape(got_by_at, {"table": "sparse"}),
    "linen": Shape(linen, {"embed/embedding": "sparse", "Dense_0/kernel": "dense"}),
    "nnx": Shape(of_nnx, {"embed/embedding": "sparse", "dense/kernel": "dense"}),
    "equinox": Shape(equinox, {"embed/weight": "sparse", "dense/weight": "dense"}),
    "scalar": Shape(one_scalar, {"table": "sparse"}),
    "sampled softmax": Shape(sampled_softmax, {"embedding": "sparse", "softmax": "sparse", "bias": "sparse"}),
    "pooled": Shape(pooled, {"table": "sparse"}),
    "ragged": Shape(ragged, {"table": "sparse"}),
    "scan": Shape(scanned, {"table": "sparse", "layers": "dense"}),
    "tied": Shape(tied, {"table": "mixed"}, line="# tied", says="used whole by"),
    "cast": Shape(cast, {"table": "sparse"}, tolerance=2e-2),
    "remat": Shape(checkpointed, {"table": "sparse", "weight": "dense"}),
    "two tables": Shape(two_tables, {"first": "sparse", "second": "sparse"}),
    "custom_vjp": Shape(in_custom_vjp, {"table": "dense"}, line="# hidden", says="custom_vjp"),
    "stacked": Shape(stacked_tables, {"tables": "dense"}, says="scan"),
    "carry": Shape(chosen_by_carry, {"table": "sparse", "weight": "dense", "other": "sparse"}, late=True),
    "cond": Shape(in_branches, {"table": "sparse"}),
    "jit": Shape(jitted, {"table": "sparse", "spare": "unused"}),
    "while": Shape(in_while, {"table": "dense", "scale": "dense"}, says="while"),
}
SPARSE = [name for name, shape in SHAPES.items() if set(shape.verdicts.values()) & {"sparse"}]
