"""Losses in stages for the tests of what runs schedules, with what one device computes of them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from braidax.parallel.compute.accumulate import Runs, all_gradients_of
from braidax.parallel.compute.metrics import MetricDims
from braidax.parallel.given.loss import Loss
from braidax.parallel.stages.running.executor import Found, Pipelined
from braidax.parallel.stages.running.feeding import Given
from braidax.parallel.stages.schedules import Schedule
from braidax.program import Chain, Program, Stage
from tests.support.program.cutting.models import draw, gpt


@dataclass(frozen=True, eq=False)
class Case:
    """A loss `(params, batch, key, variables)`, and its arguments on one device."""

    loss: Callable[..., Any]
    params: Any
    variables: Any
    batch: Any
    key: Any = field(default_factory=lambda: jax.random.key(7))

    def traced(self, microbatches: int) -> Program:
        """The loss on one microbatch."""
        one = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // microbatches, *leaf.shape[1:]), leaf.dtype), self.batch
        )
        return Loss(self.loss).trace(self.params, self.variables, self.key, one, train=True)

    def expected(self, microbatches: int) -> tuple[Any, Any, Any]:
        """Gradients, variables and metrics of one device with these microbatches."""
        return _expected(self, microbatches)


@functools.lru_cache(maxsize=16)
def _expected(case: Case, microbatches: int) -> tuple[Any, Any, Any]:
    program = case.traced(microbatches)
    dims = MetricDims(program, microbatches=microbatches)
    run = jax.jit(lambda *args: all_gradients_of(program, *args, runs=Runs(), metric_dims=dims))
    gradients, _, variables, metrics = run(case.params, case.variables, case.key, case.batch)
    return gradients, variables, metrics


@functools.cache
def mlp(count: int = 8, width: int = 4, samples: int = 16) -> Case:
    """Layers with dropout, weights that the first and the last share, a value that goes past all; a masked mean."""

    def loss(params: Any, batch: Any, key: Any, variables: Any) -> Any:
        x = first = batch["x"] @ params["tied"]
        for at in range(count):
            x = jnp.tanh(x @ params[f"w{at}"] + params[f"b{at}"])
            x = x * jax.random.bernoulli(jax.random.fold_in(key, at), 0.9, x.shape)
        x = x @ params["tied"].T + 0.1 * first
        wrong = ((x.sum(-1) - batch["y"]) ** 2) * batch["mask"]
        value = wrong.sum() / batch["mask"].sum() + 1e-2 * jnp.sum(params["w1"] ** 2)
        return value, {"x": x, "kept": batch["mask"].sum(), "variables": {"seen": variables["seen"] + 1}}

    params = {f"w{at}": draw(width, width, seed=at) + jnp.eye(width) for at in range(count)}
    params |= {f"b{at}": draw(width, seed=20 + at) for at in range(count)}
    params["tied"] = draw(width, width, seed=40) + jnp.eye(width)
    params["unread"] = draw(3)
    batch = {"x": draw(samples, width, seed=50), "y": draw(samples, seed=51)}
    batch["mask"] = jnp.asarray(np.arange(samples) % 3 != 0, jnp.float32)
    return Case(loss, params, {"seen": jnp.zeros((), jnp.int32)}, batch)


def small_gpt(num_layers: int = 4, samples: int = 16) -> Case:
    """Scanned and rematerialized layers, tied embeddings, dropout: in 16 bits but for the sum."""
    made = gpt(num_layers)
    params, variables, key, _ = made.args

    def loss(params: Any, batch: Any, key: Any, variables: Any) -> Any:
        value, metrics = made.loss(params, variables, key, batch)
        return value, {"means": metrics["means"], "variables": {"steps": metrics["steps"]}}

    random = np.random.default_rng(3)
    batch = {
        "ids": jnp.array(random.integers(0, 16, (samples, 5)).astype(np.int32)),
        "mask": jnp.array(random.random((samples, 5)) < 0.8),
    }
    return Case(loss, params, variables, batch, key)


@functools.cache
def looped(num_layers: int = 4, width: int = 4, samples: int = 16) -> Case:
    """Layers in a loop, whose weights are stacked."""

    def layer(x: Any, weights: Any) -> Any:
        return jnp.tanh(x @ weights["w"] + weights["b"]), None

    def loss(params: Any, batch: Any, key: Any, variables: Any) -> Any:
        x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        return (((x @ params["head"]).sum(-1) - batch["y"]) ** 2).mean(), {"variables": variables}

    layers = {"w": draw(num_layers, width, width, seed=1), "b": draw(num_layers, width, seed=2)}
    batch = {"x": draw(samples, width, seed=50), "y": draw(samples, seed=51)}
    return Case(loss, {"layers": layers, "head": draw(width, width, seed=3)}, {}, batch)


def stages_of(program: Program, count: int) -> tuple[Stage, ...]:
    """Cuts a loss into so many stages, at evenly chosen places."""
    chain = Chain(program)
    borders = chain.borders()
    return chain.stages([borders[(at + 1) * len(borders) // count] for at in range(count - 1)])


def meshes_of(count: int, inner: int = 1) -> list[Mesh]:
    """Meshes of so many devices each."""
    devices = np.array(jax.devices()[: count * inner]).reshape(count, inner)
    return [Mesh(one, ("data",)) for one in devices]


def pipelined(case: Case, schedule: Schedule, *, inner: int = 1, recompute: Sequence[bool] = ()) -> Pipelined:
    """A case in the stages of a schedule, on so many devices a stage."""
    program = case.traced(schedule.num_microbatches)
    stages, meshes = stages_of(program, schedule.num_stages), meshes_of(schedule.num_devices, inner)
    return Pipelined(program, stages, schedule, meshes, batch_axes=("data",), recompute=recompute)


def placed(run: Pipelined, case: Case) -> tuple[Any, list[Any]]:
    """Parameters and variables of a case where a pipeline has them."""
    pieces = run.ownership.divide(jax.tree.leaves(case.params))
    leaves = enumerate(jax.tree.leaves(case.variables))
    on = [[jax.device_put(one, home.whole) for one in own] for own, home in zip(pieces, run.homes, strict=True)]
    return on, [jax.device_put(np.array(one), run.variable_home(at).whole) for at, one in leaves]


def gradients_of(run: Pipelined, case: Case) -> Found:
    """What a pipeline finds for a case."""
    return run.gradients(*placed(run, case), *key_and_batch(run, case))


def key_and_batch(run: Pipelined, case: Case) -> tuple[Any, list[Given]]:
    """Key and batch of a case as a pipeline takes them."""
    key = jax.device_put(jax.random.key_data(case.key), run.homes[0].whole)
    return key, [Given(leaf, None) for leaf in jax.tree.leaves(case.batch)]


def check(run: Pipelined, case: Case, expected: Any, *, atol: float = 1e-6) -> None:
    """Checks that gradients, variables and metrics are those of one device."""
    found = gradients_of(run, case)
    gradients, variables, metrics = expected
    leaves = jax.tree.leaves(gradients)
    pieces = [[np.array(one) for one in own] for own in found.gradients]
    for one, other in zip(run.ownership.join(pieces, len(leaves)), leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)
        assert one.dtype == other.dtype
    jax.tree.map(np.testing.assert_array_equal, found.variables, jax.tree.leaves(variables))
    loss, *others = found.results
    np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-6)
    wanted = jax.tree.leaves({name: value for name, value in metrics.items() if name != "loss"})
    for one, other in zip(others, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=atol)
