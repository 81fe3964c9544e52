"""Systems that train GPT-2's shape with sharded states: ours, XLA with the same shardings, and by hand."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import braidax as bx
from benchmarks.harness.gpt2 import Shape, normed
from braidax.program import Collective, collectives_of

TENSOR, MEGATRON = "ours, TensorParallel", "Megatron's way, shard_map by hand"
OURS, XLA, BY_HAND = "ours, FullySharded", "jax.jit, the same shardings", "shard_map by hand"
HELD = "jax.jit, activations constrained"
OPTIMIZER = optax.adamw(1e-3)


class System(NamedTuple):
    """A step in two programs.

    **Fields:** `compiled`: that of the gradients. `begin()`: makes a state. `update(state, batch)`: gives the next one.
    """

    compiled: Any
    begin: Callable[[], Any]
    update: Callable[[Any, Any], Any]

    def memory_bytes(self) -> int:
        """Returns arguments and temporaries of the gradients."""
        analysis = self.compiled.memory_analysis()
        return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes

    def peak_bytes(self, step: bx.Step) -> int:
        """Returns what a device holds while gradients are computed: also what they are, and the optimizer's state.

        **Arguments:** `step`: whose states are split as those of this system are.
        """
        found = self.compiled.memory_analysis()
        beside = sum(_on_a_device(leaf) for leaf in jax.tree.leaves(step.state_specs.opt_state))
        return self.memory_bytes() + found.output_size_in_bytes - found.alias_size_in_bytes + beside

    def collectives(self) -> tuple[Collective, ...]:
        """Returns those of the gradients."""
        return collectives_of(self.compiled.as_text() or "")

    def steps(self, batches: Sequence[Any]) -> Callable[[], float]:
        """Returns what takes a step with the next batch, and gives its seconds; one that does not count is taken."""
        state, coming = self.update(self.begin(), batches[0]), itertools.cycle(batches)
        jax.block_until_ready(state)

        def step() -> float:
            nonlocal state
            start = time.perf_counter()
            state = jax.block_until_ready(self.update(state, next(coming)))
            return time.perf_counter() - start

        return step


def ours(shape: Shape, mesh: Mesh, strategies: Mapping[str, Any], *, microbatches: int = 1) -> tuple[bx.Step, System]:
    """A step of braidax, of any strategies; and how it is measured."""
    step = bx.parallelize(
        lambda params, batch: shape.loss(params, batch),
        OPTIMIZER,
        mesh,
        strategies,
        init=shape.init,
        batch=shape.spec(),
        microbatches=microbatches,
    )

    def update(state: Any, batch: Any) -> Any:
        return step.update(state, batch)[0]

    return step, System(step.lower().gradients.compile(), lambda: step.init(jax.random.key(0)), update)


def xla(shape: Shape, mesh: Mesh, like: bx.Step) -> System:
    """`jax.jit` around `value_and_grad`, variables and gradients split as ours are; XLA chooses all collectives."""
    return _of(jax.value_and_grad(lambda params, batch: shape.loss(params, batch)), shape, mesh, like)


def held(shape: Shape, mesh: Mesh, like: bx.Step) -> System:
    """The same, told that what goes from layer to layer is split by samples."""
    split = NamedSharding(mesh, PartitionSpec(like.plan.batch_axes))

    def loss(params: Any, batch: Any) -> jax.Array:
        return shape.loss(params, batch, lambda x: jax.lax.with_sharding_constraint(x, split))

    return _of(jax.value_and_grad(loss), shape, mesh, like)


def by_hand(shape: Shape, mesh: Mesh, like: bx.Step) -> System:
    """One `shard_map` over samples and shards: each layer's weights are gathered in the loop's body."""
    specs = jax.tree.map(lambda sharding: sharding.spec, like.state_shardings.params)
    axes = tuple(mesh.axis_names)

    def whole(leaf: Any, spec: Any, skipped: int = 0) -> Any:
        for dim, names in reversed(list(enumerate(spec))):
            for name in reversed((names,) if isinstance(names, str) else names or ()):
                leaf = jax.lax.all_gather(leaf, name, axis=dim - skipped, tiled=True)
        return leaf

    def layer(x: Any, w: Any) -> Any:
        return shape.layer(x, {name: whole(leaf, specs["layers"][name], 1) for name, leaf in w.items()})

    def local(params: Any, batch: Any) -> Any:
        wte = whole(params["wte"], specs["wte"])
        x = wte[batch["ids"]] + whole(params["wpe"], specs["wpe"])
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return jax.lax.pmean(shape.head(x, params["last"], wte, batch["ids"]), axes)

    def gradients(params: Any, batch: Any) -> Any:
        inputs = (specs, PartitionSpec(axes))
        mapped: Any = jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=PartitionSpec())
        return jax.value_and_grad(mapped)(params, batch)

    return _of(gradients, shape, mesh, like)


def megatron(shape: Shape, mesh: Mesh, like: bx.Step) -> System:
    """One `shard_map` over samples and heads: activations are whole along "model", and summed behind each block."""
    specs = jax.tree.map(lambda sharding: sharding.spec, like.state_shardings.params)

    def copied(x: Any) -> Any:
        return jax.lax.pcast(x, "model", to="varying")  # its gradient is summed

    def layer(x: Any, w: Any) -> Any:
        mixed = shape.attention(copied(normed(x, w["first"])), w)
        x = x + jax.lax.psum(mixed, "model") + w["out_bias"]
        wide = shape.wider(copied(normed(x, w["second"])), w)
        return x + jax.lax.psum(wide, "model") + w["down_bias"], None

    def rows(wte: Any, ids: Any) -> Any:
        at = ids - jax.lax.axis_index("model") * len(wte)
        own = (at >= 0) & (at < len(wte))
        return jax.lax.psum(jnp.where(own[..., None], wte[jnp.clip(at, 0, len(wte) - 1)], 0), "model")

    def entropy(logits: Any, labels: Any) -> Any:
        largest = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "model")
        total = jax.lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), "model")
        at = labels - jax.lax.axis_index("model") * logits.shape[-1]
        own = (at >= 0) & (at < logits.shape[-1])
        picked = jnp.take_along_axis(logits, jnp.clip(at, 0, logits.shape[-1] - 1)[..., None], -1)[..., 0]
        return (jnp.log(total) + largest - jax.lax.psum(jnp.where(own, picked, 0), "model")).mean()

    def local(params: Any, batch: Any) -> Any:
        x = rows(params["wte"], batch["ids"]) + params["wpe"]
        x, _ = jax.lax.scan(shape.kept(layer), x, params["layers"])
        logits = copied(normed(x, params["last"]))[:, :-1] @ params["wte"].T
        return jax.lax.pmean(entropy(logits, batch["ids"][:, 1:]), "data")

    def gradients(params: Any, batch: Any) -> Any:
        mapped: Any = jax.shard_map(
            local, mesh=mesh, in_specs=(specs, PartitionSpec("data")), out_specs=PartitionSpec()
        )
        return jax.value_and_grad(mapped)(params, batch)

    return _of(gradients, shape, mesh, like)


def _of(fn: Callable[..., Any], shape: Shape, mesh: Mesh, like: bx.Step) -> System:
    held, whole = like.state_shardings, NamedSharding(mesh, PartitionSpec())
    gradients = jax.jit(fn, in_shardings=(held.params, like.batch_shardings), out_shardings=(whole, held.params))

    def apply(params: Any, opt_state: Any, gradients: Any) -> Any:
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    applied = jax.jit(apply, out_shardings=(held.params, held.opt_state), donate_argnums=(0, 1))

    def begin() -> Any:
        state = like.init(jax.random.key(0))
        return state.params, state.opt_state

    def update(state: Any, batch: Any) -> Any:
        params, opt_state = state
        _, found = gradients(params, batch)
        return applied(params, opt_state, found)

    def spec(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.tree.map(spec, jax.eval_shape(shape.init, jax.random.key(0)), held.params)
    batch = jax.tree.map(spec, shape.spec(), like.batch_shardings)
    return System(gradients.lower(params, batch).compile(), begin, update)


def place(shape: Shape, like: bx.Step, seed: int) -> Any:
    """A batch on the devices."""
    return jax.tree.map(
        lambda leaf, on: jax.make_array_from_callback(leaf.shape, on, lambda at: np.asarray(leaf)[at]),
        shape.samples(seed),
        like.batch_shardings,
    )


def _on_a_device(spec: Any) -> int:
    part = spec.sharding.shard_shape(spec.shape)
    return jax.ShapeDtypeStruct(part, spec.dtype).size * spec.dtype.itemsize
