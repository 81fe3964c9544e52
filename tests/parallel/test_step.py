"""A step on any mesh is the step on one device."""

import dataclasses
import functools
import re
from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import braidax.parallel as bx
from braidax.errors import ArgumentError, SpecError, StateError
from tests.support.parallel.models import (
    MESHES,
    ON_MESHES,
    assert_close,
    copied,
    init,
    make_batch,
    make_mesh,
    masked_loss,
    on_one_device,
    recorded_events,
    single_device,
    specs,
)

DATA = {"data": bx.DataParallel()}
ADAMW = optax.adamw(1e-2)
NUM_UPDATES = 3


def make_step(loss: Any = masked_loss, mesh: str = "4x2 explicit", **options: Any) -> bx.Step:
    options = {"init": init, "batch": specs(make_batch()), "strategies": DATA, **options}
    strategies, optimizer = options.pop("strategies"), options.pop("optimizer", ADAMW)
    return bx.parallelize(loss, optimizer, make_mesh(mesh), strategies, **options)


@functools.cache
def shared() -> bx.Step:
    """A step that several tests take updates by: it keeps no state."""
    return make_step()


def run(step: bx.Step, batches: list[Any], state: bx.State) -> tuple[bx.State, list[Any]]:
    metrics: list[Any] = []
    for batch in batches:
        state, metric = step.update(state, batch)
        metrics.append(metric)
    return state, metrics


def plain(params: Any, variables: Any, key: Any, batch: Any) -> Any:
    loss, aux = masked_loss(params, batch, key)
    return loss, (aux, variables)


@pytest.mark.parametrize("mesh", ON_MESHES)
def test_updates_equal_one_device(mesh: str) -> None:
    step = make_step(mesh=mesh)
    state = step.init(jax.random.key(1))
    batches = [make_batch(seed) for seed in range(NUM_UPDATES)]
    params, _, metrics = single_device(plain, ADAMW, state, batches)
    state, got = run(step, batches, state)
    assert_close(state.params, params)
    assert_close(got, metrics)
    assert int(state.step) == NUM_UPDATES
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("mesh", ["4x2 explicit", pytest.param("4x2 auto", marks=pytest.mark.slow)])
def test_batch_split_over_both_axes_means_the_same(mesh: str) -> None:
    both = {"data": bx.DataParallel(), "model": bx.DataParallel()}
    step = make_step(mesh=mesh, strategies=both)
    assert step.batch_shardings["ids"].spec == PartitionSpec(("data", "model"))
    state = step.init(jax.random.key(1))
    params, _, metrics = single_device(plain, ADAMW, state, [make_batch()])
    state, got = run(step, [make_batch()], state)
    assert_close(state.params, params)
    assert_close(got, metrics)


def test_a_masked_mean_is_over_the_global_batch() -> None:
    batch = make_batch()
    per_device = batch["mask"].reshape(4, 4).sum(1)
    assert len(set(per_device.tolist())) > 1, "the mask must differ per device, or the test shows nothing"
    step = make_step(lambda params, batch: (batch["mask"] * batch["target"]).sum() / batch["mask"].sum())
    metrics = step.evaluate(step.init(jax.random.key(0)), batch)
    np.testing.assert_allclose(metrics["loss"], batch["target"][batch["mask"]].mean(), rtol=1e-6)
    of_means = np.mean([batch["target"][i : i + 4][batch["mask"][i : i + 4]].mean() for i in range(0, 16, 4)])
    assert abs(float(metrics["loss"]) - of_means) > 1e-3


def test_dropout_is_the_same_on_every_mesh_and_new_at_every_step() -> None:
    def dropped(params: Any, batch: Any, key: jax.Array) -> Any:
        return 0.0 * params["weight"].sum(), {"drawn": jax.random.bernoulli(key, 0.5, batch["target"].shape)}

    drawn: list[np.ndarray] = []
    for mesh in MESHES:
        step = make_step(dropped, mesh)
        _, metrics = run(step, [make_batch()] * 2, step.init(jax.random.key(3)))
        drawn.append(np.stack([metric["drawn"] for metric in metrics]))
    state = step.init(jax.random.key(3))
    expected = [jax.random.bernoulli(jax.random.fold_in(state.key, i), 0.5, (16,)) for i in range(2)]
    for got in drawn:
        np.testing.assert_array_equal(got, expected)
    assert (drawn[0][0] != drawn[0][1]).any()


@pytest.mark.parametrize("mesh", ["8 explicit", pytest.param("4x2 auto", marks=pytest.mark.slow)])
def test_microbatches_equal_one_device_with_the_same_ones(mesh: str) -> None:
    num = 2

    def accumulated(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        def one(index: int) -> Any:
            part = jax.tree.map(lambda leaf: leaf[index::num], batch)
            return masked_loss(params, part, jax.random.fold_in(key, index))

        loss, aux = jax.tree.map(lambda *leaves: sum(leaves) / num, *map(one, range(num)))
        return loss, (aux, variables)

    step = make_step(mesh=mesh, microbatches=num)
    state = step.init(jax.random.key(1))
    batches = [make_batch(seed) for seed in range(NUM_UPDATES)]
    params, _, metrics = single_device(accumulated, ADAMW, state, batches)
    state, got = run(step, batches, state)
    assert_close(state.params, params)
    assert_close(got, metrics)


def test_microbatches_move_no_samples_between_devices() -> None:
    text = make_step(microbatches=4).lower().gradients.compile().as_text()
    assert re.findall(r"all-to-all|all-gather|collective-permute", text) == []
    assert "all-reduce" in text


def test_variables_thread_through_microbatches() -> None:
    def counted(params: Any, batch: Any, variables: Any) -> Any:
        mean = 0.5 * variables["mean"] + 0.5 * batch["target"].mean()
        return (params["weight"] ** 2).sum(), {"variables": {"mean": mean}}

    step = make_step(counted, init=lambda key: (init(key), {"mean": jnp.zeros(())}), microbatches=2)
    batch = make_batch()
    state, metrics = step.update(step.init(jax.random.key(0)), batch)
    expected = 0.5 * (0.5 * batch["target"][0::2].mean()) + 0.5 * batch["target"][1::2].mean()
    np.testing.assert_allclose(state.variables["mean"], expected, rtol=1e-5)
    assert set(metrics) == {"loss"}


def test_nothing_is_computed_before_init() -> None:
    with recorded_events() as events:
        step = make_step()
    assert any("jaxpr_trace" in event for event in events)
    assert [event for event in events if "backend_compile" in event] == []
    assert [v.path for v in step.plan.variables] == ["params/embedding", "params/weight"]
    assert step.batch_shardings["mask"] == NamedSharding(make_mesh(), PartitionSpec("data"))
    with recorded_events() as events:
        step.init(jax.random.key(0))
    assert any("backend_compile" in event for event in events)


def test_steady_state_neither_retraces_nor_compiles() -> None:
    traced: list[int] = []

    def loss(params: Any, batch: Any) -> Any:
        traced.append(1)
        return masked_loss(params, batch, jax.random.key(0))

    step = make_step(loss)
    state, _ = step.update(step.init(jax.random.key(0)), make_batch())
    step.evaluate(state, make_batch())
    before = len(traced)
    with recorded_events() as events:
        for seed in range(3):
            state, _ = step.update(state, make_batch(seed))
            step.evaluate(state, make_batch(seed))
    assert len(traced) == before == 2  # update and evaluate, once each
    assert [event for event in events if "compile" in event or "trace" in event] == []


def test_the_old_state_gives_its_memory_to_the_new_one() -> None:
    step = shared()
    old = step.init(jax.random.key(0))
    new, _ = step.update(old, make_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.step, old.params, old.opt_state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    memory = step.lower().apply.compile().memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((new.step, new.params, new.opt_state)))
    assert memory.alias_size_in_bytes == held
    assert step.lower().gradients.compile().memory_analysis().alias_size_in_bytes == 0


def test_before_apply_runs_while_the_old_state_is_whole() -> None:
    step = shared()
    state = step.init(jax.random.key(0))
    seen: list[Any] = []

    def snapshot() -> None:
        seen.append(copied(state))

    expected = copied(state)
    new, _ = step.update(state, make_batch(), before_apply=snapshot)
    assert_close(seen[0], expected, atol=0)
    assert float(abs(new.params["weight"] - expected.params["weight"]).max()) > 0


def test_an_error_in_before_apply_leaves_the_state_usable() -> None:
    step = shared()
    state = step.init(jax.random.key(0))

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step.update(state, make_batch(), before_apply=fail)
    assert int(step.update(state, make_batch())[0].step) == 1


def test_host_and_misplaced_batches_are_brought_to_their_place() -> None:
    step = shared()
    batch = make_batch()
    on_one_device = jax.device_put(batch, jax.devices()[3])
    in_place = jax.device_put(batch, step.batch_shardings)
    results: list[Any] = []
    for one in (batch, on_one_device, in_place):
        state, metrics = step.update(step.init(jax.random.key(0)), one)
        results.append((copied(state), copied(metrics)))
    assert_close(results[1], results[0], atol=0)
    assert_close(results[2], results[0], atol=0)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(in_place))


def test_a_host_batch_may_be_overwritten_at_once() -> None:
    step = make_step(lambda params, batch: (params["weight"] ** 2).sum() * batch["target"].mean())
    state = step.init(jax.random.key(0))
    expected = float(step.evaluate(state, make_batch())["loss"])
    batch = make_batch()
    for _ in range(20):
        batch["target"][:] = make_batch()["target"]
        metrics = step.evaluate(state, batch)
        batch["target"][:] = np.nan
        assert float(metrics["loss"]) == expected


def test_a_step_runs_in_the_context_of_a_mesh_too() -> None:
    with jax.set_mesh(make_mesh()):
        step = make_step()
        state, metrics = step.update(step.init(jax.random.key(1)), make_batch())
    outside = shared()
    other, other_metrics = outside.update(outside.init(jax.random.key(1)), make_batch())
    assert_close(copied(state), copied(other), atol=0)
    assert_close(metrics, other_metrics, atol=0)


def test_train_is_told_by_name_and_evaluation_changes_nothing() -> None:
    told: list[bool] = []

    def loss(params: Any, batch: Any, variables: Any, train: bool) -> Any:
        told.append(train)
        aux = {"scale": 1.0 if train else 0.5}
        return (params["weight"] ** 2).mean(), {**aux, "variables": {"count": variables["count"] + 1}} if train else aux

    step = make_step(loss, init=lambda key: (init(key), {"count": jnp.int32(0)}))
    state, metrics = step.update(step.init(jax.random.key(0)), make_batch())
    before = copied(state)
    evaluated = step.evaluate(state, make_batch(size=8))
    assert told == [True, False]
    assert (float(metrics["scale"]), float(evaluated["scale"])) == (1.0, 0.5)
    assert set(evaluated) == {"loss", "scale"}
    assert int(state.variables["count"]) == 1
    assert_close(copied(state), before, atol=0)


def test_evaluation_takes_another_structure() -> None:
    def loss(params: Any, batch: Any) -> Any:
        weight = batch.get("mask", jnp.ones(batch["target"].shape))
        return (weight * batch["target"]).sum() / weight.sum() + 0 * params["weight"].sum()

    batch = make_batch()
    padded = batch.pop("mask")
    step = make_step(loss, batch=specs(batch))
    state = step.init(jax.random.key(0))
    masked = step.evaluate(state, {**batch, "mask": padded})
    np.testing.assert_allclose(masked["loss"], batch["target"][padded].mean(), rtol=1e-5)
    np.testing.assert_allclose(step.evaluate(state, batch)["loss"], batch["target"].mean(), rtol=1e-4)


class LinenNet(linen.Module):
    """BatchNorm and dropout. **Fields:** `axis`: what code for `jax.pmap` would take statistics over."""

    axis: str | None = None

    @linen.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        hidden = linen.Dense(8)(inputs)
        hidden = linen.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis)(hidden)
        hidden = linen.Dropout(0.3, deterministic=not train)(linen.relu(hidden))
        return linen.Dense(1)(hidden)[:, 0]


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        pytest.param("4x2 explicit", None, marks=pytest.mark.slow),
        ("8 auto", None),
        pytest.param("4x2 explicit", "data", marks=pytest.mark.slow),  # below a loss has its means
        pytest.param("8 auto", "batch", marks=pytest.mark.slow),
    ],
)
def test_flax_linen_with_batch_statistics_and_dropout(mesh: str, axis: str | None) -> None:
    batches = [{"x": np.random.default_rng(i).normal(size=(16, 4)).astype(np.float32)} for i in range(NUM_UPDATES)]

    def begin(key: jax.Array) -> Any:
        made = LinenNet(axis).init(key, jnp.zeros((1, 4)), train=False)
        return made["params"], {"batch_stats": made["batch_stats"]}

    def applied(model: Any, params: Any, batch: Any, key: Any, variables: Any, train: bool) -> Any:
        every = {"params": params, **variables}
        target = jnp.sin(batch["x"].sum(1))
        if not train:
            return ((model.apply(every, batch["x"], train=False) - target) ** 2).mean()
        out, new = model.apply(every, batch["x"], train=True, rngs={"dropout": key}, mutable=["batch_stats"])
        return ((out - target) ** 2).mean(), {"variables": new}

    def loss(params: Any, batch: Any, key: jax.Array, variables: Any, train: bool) -> Any:
        return applied(LinenNet(axis), params, batch, key, variables, train)

    def reference(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        value, aux = applied(LinenNet(), params, batch, key, variables, True)
        return value, ({}, aux["variables"])

    step = make_step(loss, mesh, init=begin, batch=specs(batches[0]), optimizer=optax.sgd(0.1, momentum=0.9))
    state = step.init(jax.random.key(0))
    params, variables, metrics = single_device(reference, optax.sgd(0.1, momentum=0.9), state, batches)
    state, got = run(step, batches, state)
    assert_close(state.params, params)
    assert_close(state.variables, variables)
    assert_close(got, metrics)
    assert float(abs(state.variables["batch_stats"]["BatchNorm_0"]["mean"]).max()) > 0
    host = copied(state)
    alone = jax.jit(lambda params, variables: applied(LinenNet(), params, batches[0], None, variables, False))
    expected = alone(host.params, host.variables)
    np.testing.assert_allclose(step.evaluate(state, batches[0])["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("axis", ["batch", "data"])
def test_collectives_in_a_loss_for_pmap_mean_the_global_batch(axis: str) -> None:
    """Sums over an axis are of the batch, and the first device, which holds all of it, draws the noise."""

    def loss(params: Any, batch: Any, key: jax.Array) -> Any:
        num_parts, part = jax.lax.psum(1, axis), jax.lax.axis_index(axis)
        all_targets = jax.lax.all_gather(batch["target"], axis, tiled=True)
        noise = jax.random.normal(jax.random.fold_in(key, part), batch["target"].shape)
        error = batch["target"] - all_targets.mean() + noise * params["weight"].sum()
        kept = jax.lax.psum(batch["mask"].sum(), axis)
        value = jax.lax.psum((batch["mask"] * error**2).sum(), axis) / kept
        return value, {
            "largest": jax.lax.pmax(error.max(), axis),
            "mean": jax.lax.pmean(error.mean(), axis) / num_parts,
        }

    def reference(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        noise = jax.random.normal(jax.random.fold_in(key, 0), batch["target"].shape)
        error = batch["target"] - batch["target"].mean() + noise * params["weight"].sum()
        value = (batch["mask"] * error**2).sum() / batch["mask"].sum()
        return value, ({"largest": error.max(), "mean": error.mean()}, variables)

    step, batches = make_step(loss), [make_batch(seed) for seed in range(NUM_UPDATES)]
    state = step.init(jax.random.key(0))
    params, _, metrics = single_device(reference, ADAMW, state, batches)
    state, got = run(step, batches, state)
    assert_close(state.params, params)
    assert_close(got, metrics)


class NnxNet(nnx.Module):
    """Updates its own statistics and random state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.last(self.drop(nnx.relu(self.norm(self.first(inputs)))))[:, 0]


@pytest.mark.parametrize("mesh", ["4x2 explicit", pytest.param("8 auto", marks=pytest.mark.slow)])
def test_flax_nnx_split_and_merged(mesh: str) -> None:
    graph = nnx.split(nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0))), nnx.Param, ...)[0]
    batches = [{"x": np.random.default_rng(i).normal(size=(16, 4)).astype(np.float32)} for i in range(NUM_UPDATES)]

    def begin(key: jax.Array) -> Any:
        return nnx.split(NnxNet(nnx.Rngs(key)), nnx.Param, ...)[1:]

    def loss(params: Any, batch: Any, variables: Any) -> Any:
        model = nnx.merge(graph, params, variables, copy=True)
        value = ((model(batch["x"]) - jnp.sin(batch["x"].sum(1))) ** 2).mean()
        return value, {"variables": nnx.split(model, nnx.Param, ...)[2]}

    def reference(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        value, aux = loss(params, batch, variables)
        return value, ({}, aux["variables"])

    step = make_step(loss, mesh, init=begin, batch=specs(batches[0]), optimizer=optax.sgd(0.1))
    state = step.init(jax.random.key(0))
    params, variables, metrics = single_device(reference, optax.sgd(0.1), state, batches)
    state, got = run(step, batches, state)
    assert_close(copied(state.params), copied(params))
    assert_close(copied(state.variables), copied(variables))
    assert_close(got, metrics)
    assert float(abs(state.variables["norm"]["mean"][...]).max()) > 0
    assert int(state.variables["drop"]["rngs"]["count"][...]) == NUM_UPDATES


def test_equinox_partitioned() -> None:
    def make(key: jax.Array) -> Any:
        return eqx.nn.MLP(4, 1, 8, 2, activation=jax.nn.gelu, key=key)

    static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)[1]
    batches = [{"x": np.random.default_rng(i).normal(size=(16, 4)).astype(np.float32)} for i in range(NUM_UPDATES)]

    def loss(params: Any, batch: Any) -> Any:
        model = eqx.combine(params, static)
        return ((jax.vmap(model)(batch["x"])[:, 0] - jnp.sin(batch["x"].sum(1))) ** 2).mean()

    def reference(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        return loss(params, batch), ({}, variables)

    def begin(key: jax.Array) -> Any:
        return eqx.filter(make(key), eqx.is_inexact_array)

    step = make_step(loss, init=begin, batch=specs(batches[0]))
    state = step.init(jax.random.key(0))
    params, _, metrics = single_device(reference, ADAMW, state, batches)
    state, got = run(step, batches, state)
    assert_close(state.params, params)
    assert_close(got, metrics)


def test_losses_that_change_their_arguments_are_refused() -> None:
    def begin(key: jax.Array) -> Any:
        return NormOnly(nnx.Rngs(key))

    def loss(model: Any, batch: Any) -> Any:
        return model(batch["target"][:, None]).mean()

    with pytest.raises(StateError, match=r"params/norm/mean.* was changed in place by loss .*nnx\.split"):
        make_step(loss, init=begin)

    def rebinds(params: Any, batch: Any) -> Any:
        batch["target"] = batch["target"] / 2
        return batch["target"].mean() * params["weight"].sum()

    with pytest.raises(StateError, match=r"batch/target was changed in place by rebinds"):
        make_step(rebinds)

    def grows(params: Any, batch: Any) -> Any:
        params["new"] = jnp.ones(3)
        return params["weight"].sum()

    with pytest.raises(StateError, match="params/new was changed in place"):
        make_step(grows)


class NormOnly(nnx.Module):
    """Floating-point state only, so that it could be mistaken for parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(1, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.norm(inputs)


ONE: dict[str, Any] = {"init": lambda key: (init(key), {"mean": jnp.zeros(2)})}


@pytest.mark.parametrize(
    ("loss", "options", "error", "message"),
    [
        (lambda p, b, epoch: 0.0, {}, ArgumentError, "asks for the parameter 'epoch', expected any of key, variables"),
        (lambda p: 0.0, {}, ArgumentError, r"takes \['p'\], expected loss_fn\(params, batch\)"),
        (lambda p, b: b["target"], {}, ArgumentError, r"loss that is float32\[16\], expected a floating-point scalar"),
        (lambda p, b: b["ids"].sum(), {}, ArgumentError, r"loss that is int32\[\], expected a floating-point scalar"),
        (lambda p, b: (1.0, "x"), {}, ArgumentError, "returned aux/aux = 'x', expected an array or a number"),
        (lambda p, b: (1.0, {"loss": 2.0}), {}, ArgumentError, r"returned aux\['loss'\]"),
        (lambda p, b: (1.0, {"name": "x"}), {}, ArgumentError, "aux/name = 'x', expected an array or a number"),
        (lambda p, b: (1.0, {"variables": {}}), {}, ArgumentError, "has no parameter `variables`"),
        (lambda p, b, variables: 1.0, ONE, StateError, "asks for `variables` and does not return new ones"),
        (
            lambda p, b, variables: (1.0, {"variables": {"mean": jnp.zeros(3)}}),
            ONE,
            StateError,
            r"variables/mean is float32\[3\], expected float32\[2\]",
        ),
        (lambda p, b, variables: (1.0, {"variables": {}}), ONE, StateError, "variables/mean is missing"),
        (lambda p, b, variables: 1.0, {}, ArgumentError, r"init returned dict, expected \(params, variables\)"),
        (
            lambda p, b: 1.0,
            {"init": lambda key: {"f": jax.nn.relu, "w": jnp.ones(2)}},
            ArgumentError,
            r"params/f is .*expected an array.*eqx\.partition",
        ),
        (
            lambda p, b: 1.0,
            {"init": lambda key: {"count": jnp.int32(0)}},
            ArgumentError,
            "params/count is int32, expected floating point.*`variables`",
        ),
        (lambda p, b: 1.0, {"microbatches": 0}, ArgumentError, "microbatches is 0, expected a whole number"),
        (
            lambda p, b: 1.0,
            {"microbatches": 3},
            SpecError,
            r"batch/ids has 16 samples.*microbatches=3 for each of the 4 devices.*multiple of 12",
        ),
        (
            lambda p, b: 1.0,
            {"batch": specs(make_batch(size=18))},
            SpecError,
            r"batch/ids has 18 samples.*4 devices along the mesh axes \('data',\).*multiple of 4",
        ),
        (lambda p, b: 1.0, {"batch": {"x": jax.ShapeDtypeStruct((), "float32")}}, SpecError, "batch/x has no dims"),
        (lambda p, b: 1.0, {"batch": {}}, ArgumentError, r"batch is \{\}, expected a PyTree with at least one array"),
        (
            lambda p, b: 1.0,
            {"strategies": {"rows": bx.DataParallel()}},
            SpecError,
            r"axis 'rows', and the mesh has \('data', 'model'\)",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    loss: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_step(loss, **options)


def test_other_batches_states_and_keys_are_refused() -> None:
    step = shared()
    state = step.init(jax.random.key(0))
    batch = make_batch()
    with pytest.raises(ArgumentError, match=r"batch/ids is int32\[8, 5\], expected int32\[16, 5\].*parallelize"):
        step.update(state, make_batch(size=8))
    with pytest.raises(ArgumentError, match="batch/extra is unexpected"):
        step.update(state, {**batch, "extra": batch["mask"]})
    with pytest.raises(ArgumentError, match=r"batch/mask is missing \(expected bool\[16\]\)"):
        step.update(state, {name: batch[name] for name in ("ids", "target")})
    with pytest.raises(ArgumentError, match=r"state/params/weight is missing.*this step's init or update"):
        step.update(dataclasses.replace(state, params={"embedding": state.params["embedding"]}), batch)
    with pytest.raises(SpecError, match="batch/ids has 6 samples"):
        step.evaluate(state, make_batch(size=6))
    with pytest.raises(ArgumentError, match=r"key is uint32\[3\], expected one key<fry>.*jax\.random\.key"):
        step.init(jnp.zeros(3, jnp.uint32))
    for made, other in zip(*map(jax.tree.leaves, map(copied, (state, step.init(jax.random.PRNGKey(0))))), strict=True):
        np.testing.assert_array_equal(made, other)


def test_an_optimizer_that_changes_its_state_s_form_is_refused() -> None:
    odd = optax.GradientTransformation(
        lambda params: {"count": jnp.int32(0)}, lambda updates, state, params=None: (updates, {"count": jnp.ones(2)})
    )
    with pytest.raises(
        ArgumentError, match=r"optimizer\.update returns .*state/2/count is float32\[2\], expected int32"
    ):
        make_step(optimizer=odd)


def test_a_state_that_was_given_up_is_refused() -> None:
    step = shared()
    state = step.init(jax.random.key(0))
    step.update(state, make_batch())
    for use in (step.update, step.evaluate):
        with pytest.raises(ArgumentError, match=r"given up by an earlier update.*the state that the update returned"):
            use(state, make_batch())


def test_a_misplaced_state_is_brought_to_its_place_and_the_original_stays() -> None:
    step = shared()
    state = step.init(jax.random.key(0))
    mine = on_one_device(state)
    expected, _ = step.update(state, make_batch())
    got, _ = step.update(mine, make_batch())
    assert_close(copied(got), copied(expected), atol=0)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(mine))


def test_metrics_that_show_parameters_outlive_them() -> None:
    step = make_step(lambda params, batch: ((params["weight"] ** 2).sum(), {"weight": params["weight"]}))
    state = step.init(jax.random.key(0))
    before = copied(state.params["weight"])
    state, metrics = step.update(state, make_batch())
    state, _ = step.update(state, make_batch())
    np.testing.assert_array_equal(metrics["weight"], before)


def test_numpy_s_wide_types_are_taken_as_jax_takes_them() -> None:
    step = shared()
    batch = make_batch()
    wide = {"ids": batch["ids"].astype(np.int64), "target": batch["target"].astype(np.float64), "mask": batch["mask"]}
    _, one = step.update(step.init(jax.random.key(0)), batch)
    _, other = step.update(step.init(jax.random.key(0)), wide)
    assert_close(one, other, atol=0)


def test_half_precision_sums_are_kept_wide() -> None:
    """64 pieces, each with a gradient of 1 + 2⁻⁹: in bfloat16 their sum would round at every step."""
    step = make_step(
        lambda params, batch: (params["w"] * batch["x"].mean(0).astype(jnp.bfloat16)).sum().astype(jnp.float32),
        init=lambda key: {"w": jnp.zeros(2, jnp.bfloat16)},
        batch={"x": jax.ShapeDtypeStruct((512, 2), "float32")},
        microbatches=64,
        optimizer=optax.sgd(1.0),
    )
    values = np.tile(np.linspace(0.5, 1.5, 64, dtype=np.float32)[None, :, None], (8, 1, 2)).reshape(512, 2)
    state, _ = step.update(step.init(jax.random.key(0)), {"x": values})
    assert state.params["w"].dtype == jnp.bfloat16
    rounded = np.asarray(jnp.linspace(0.5, 1.5, 64).astype(jnp.bfloat16), np.float32).mean()
    np.testing.assert_array_equal(
        np.asarray(state.params["w"], np.float32), np.asarray(jnp.bfloat16(-rounded), np.float32)
    )
