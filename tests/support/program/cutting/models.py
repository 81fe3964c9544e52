"""Losses that the tests of stages cut: a scanned GPT, a residual network, layers one behind the other."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from braidax.program import Program, trace


class Case(NamedTuple):
    """A loss with its arguments, of which the first is trained."""

    loss: Any
    args: tuple[Any, ...]

    def traced(self) -> Program:
        return trace(self.loss, *self.args)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 3)


def layers(count: int = 6, width: int = 4, *, scopes: bool = True) -> Case:
    """Layers of their own, a penalty of all weights, labels, and a metric of the first layer."""

    def loss(params: Any, batch: Any) -> Any:
        x: Any = batch["x"]
        first: Any = None
        for at in range(count):
            with jax.named_scope(f"layer_{at}" if scopes else "layer"):
                x = jnp.tanh(x @ params[f"w{at}"] + params[f"b{at}"])
            first = x if first is None else first
        penalty = sum(jnp.sum(params[f"w{at}"] ** 2) for at in range(count))
        value = ((x.sum(-1) - batch["y"]) ** 2).mean() + 1e-3 * penalty
        return value, {"first": first.mean(), "most": batch["y"].max(), "rate": 0.5}

    params = {f"w{at}": draw(width, width, seed=at) for at in range(count)}
    params |= {f"b{at}": draw(width, seed=20 + at) for at in range(count)}
    return Case(loss, (params, {"x": draw(8, width, seed=50), "y": draw(8, seed=51)}))


def gpt(num_layers: int = 6, *, dropout: bool = True, steps: int = 5) -> Case:
    """Scanned and rematerialised, in 16 bits but for the sum, tied embeddings, a key for each layer."""
    vocabulary, width = 16, 8

    def layer(x: Any, given: Any) -> Any:
        weights, key = given
        h = jax.nn.standardize(x) * weights["scale"]
        q, k, v = jnp.split(h @ weights["qkv"], 3, axis=-1)
        mixed = jax.nn.softmax(jnp.where(jnp.tri(steps, dtype=bool), q @ k.swapaxes(1, 2), -1e9)) @ v
        x = x + mixed @ weights["out"]
        h = jax.nn.gelu(jax.nn.standardize(x) @ weights["up"])
        if dropout:
            h = h * jax.random.bernoulli(key, 0.8, h.shape)
        return x + h @ weights["down"], h.mean()

    def loss(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        table = params["table"]
        x = jnp.take(table, batch["ids"], axis=0) + params["places"]
        weights = jax.tree.map(lambda one: one.astype(jnp.bfloat16), params["layers"])
        keys = jax.random.split(key, num_layers)
        x, means = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), (weights, keys))
        logits = jax.nn.standardize(x.astype(jnp.float32))[:, :-1] @ table.T
        right = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["ids"][:, 1:, None], -1)[..., 0]
        mask = batch["mask"][:, 1:]
        return -(right * mask).sum() / mask.sum(), {"means": means, "steps": variables["steps"] + 1}

    shapes = {"scale": (width,), "qkv": (width, 3 * width), "out": (width, width), "up": (width, 16)}
    stacks = {name: draw(num_layers, *shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}
    stacks["down"] = draw(num_layers, 16, width, seed=9)
    params = {"table": draw(vocabulary, width, seed=10), "places": draw(steps, width, seed=11), "layers": stacks}
    random = np.random.default_rng(3)
    ids = jnp.array(random.integers(0, vocabulary, (4, steps)).astype(np.int32))
    batch = {"ids": ids, "mask": jnp.array(random.random((4, steps)) < 0.8)}
    return Case(loss, (params, {"steps": jnp.zeros((), jnp.int32)}, jax.random.key(5), batch))


def residual(*, norm: bool = False) -> Case:
    """Two blocks of convolutions, the second at half the size; `norm`: by statistics of the batch."""

    def conv(x: Any, kernel: Any, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def normed(x: Any, name: str, old: Any, new: Any) -> Any:
        if not norm:
            return x
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        new[name] = 0.9 * old[name] + 0.1 * mean
        return (x - mean) * jax.lax.rsqrt(var + 1e-5)

    @jax.jit
    def blocks(params: Any, old: Any, x: Any) -> Any:
        new: dict[str, Any] = {}
        for name, stride in (("one", 1), ("two", 2)):
            with jax.named_scope(name):
                inner = jax.nn.relu(normed(conv(x, params[name]["a"], stride), f"{name}_a", old, new))
                inner = normed(conv(inner, params[name]["b"]), f"{name}_b", old, new)
                x = jax.nn.relu(inner + (x if stride == 1 else conv(x, params[name]["short"], stride)))
        return x, new

    def loss(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        x, new = blocks(params, variables, jax.nn.relu(conv(batch["image"], params["stem"])))
        logits = x.mean((1, 2)) @ params["head"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1).mean(), {"variables": new}

    names = ("stem", "one/a", "one/b", "two/a", "two/b", "two/short")
    shapes = ((3, 3, 3, 4), (3, 3, 4, 4), (3, 3, 4, 4), (3, 3, 4, 8), (3, 3, 8, 8), (1, 1, 4, 8))
    params: dict[str, Any] = {"head": draw(8, 5, seed=9)}
    for at, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        block, _, rest = name.partition("/")
        if rest:
            params.setdefault(block, {})[rest] = draw(*shape, seed=at)
        else:
            params[name] = draw(*shape, seed=at)
    old = (
        {f"{name}_{rest}": draw(4 if name == "one" else 8) for name in ("one", "two") for rest in "ab"} if norm else {}
    )
    batch = {"image": draw(4, 8, 8, 3, seed=30), "label": jnp.arange(4, dtype=jnp.int32) % 5}
    return Case(loss, (params, old, jax.random.key(0), batch))
