"""Steps compiled for machines that are not here: their memory and collectives, by formula, and how they are told."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax as bx
from braidax.errors import ArgumentError
from braidax.parallel import CompiledStep
from tests.support.parallel.models import recorded_events

WIDTH, SAMPLES, DEVICES = 256, 64, 8
WEIGHT = 4 * WIDTH * WIDTH


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.random.normal(key, (WIDTH, WIDTH)) for name in ("first", "second")}


def make_step(strategy: Any, *, devices: int = DEVICES, samples: int = SAMPLES) -> bx.Step:
    def loss(params: Any, batch: Any) -> jax.Array:
        return (jnp.tanh(batch @ params["first"]) @ params["second"]).var()

    batch = jax.ShapeDtypeStruct((samples, WIDTH), jnp.float32)
    mesh = jax.make_mesh((devices,), ("data",))
    return bx.parallelize(loss, optax.adam(1e-3), mesh, {"data": strategy}, init=init, batch=batch)


@functools.cache
def compiled_once() -> CompiledStep:
    return make_step(bx.FullySharded()).compile_for("h100:8")


@pytest.fixture
def compiled(aot: None) -> CompiledStep:
    return compiled_once()


def test_memory_and_bytes_are_those_of_the_formula(compiled: CompiledStep) -> None:
    assert (compiled.target, compiled.device_kind, compiled.num_devices) == ("h100:8", "NVIDIA H100 80GB HBM3", 8)
    shards, batch = 2 * WEIGHT // DEVICES, 4 * SAMPLES * WIDTH // DEVICES
    assert compiled.held == {"parameters": shards, "optimizer": 2 * shards + 4, "variables": 0, "batch": batch}
    gradients, apply = compiled.programs["gradients"], compiled.programs["apply"]
    assert gradients.memory.arguments == pytest.approx(shards + batch, abs=256)
    assert gradients.memory.outputs == pytest.approx(shards, abs=256)
    assert apply.memory.arguments == pytest.approx(4 * shards, abs=256)
    assert apply.memory.reused == pytest.approx(3 * shards, abs=256)
    # While gradients are taken the optimizer's state is there too; while it moves, the batch.
    assert compiled.beside["gradients"] == pytest.approx(2 * shards, abs=256)
    assert compiled.beside["apply"] == pytest.approx(batch, abs=256)
    assert compiled.peak_bytes == gradients.memory.total + compiled.beside["gradients"]
    assert gradients.memory.temporaries >= WEIGHT  # of a whole weight
    # The first weight is not needed again, the last one is kept; both gradients are scattered.
    kinds = dict.fromkeys(("all-gather", "reduce-scatter"), 0.0)
    for one in compiled.collectives:
        if one.sent_bytes > 1024:
            kinds[one.kind] += one.times * one.sent_bytes
    sent = WEIGHT * (DEVICES - 1) / DEVICES
    assert kinds == {"all-gather": pytest.approx(2 * sent), "reduce-scatter": pytest.approx(2 * sent)}
    assert not apply.collectives


def test_it_is_told_in_lines_and_as_json(compiled: CompiledStep) -> None:
    told = str(compiled).splitlines()
    assert told[0] == "compiled for  h100:8: 8 × NVIDIA H100 80GB HBM3"
    options = {one.name: one.value for one in compiled.compiler_options}
    assert options["xla_gpu_enable_pipelined_all_gather"] is True
    assert told[1].startswith("compiler      xla_gpu_enable_pipelined_all_gather=True: a loop gathers the next layer's")
    assert told[4].endswith(" a device of 79.11 GiB: it fits")
    assert told[5] == "held          parameters 64 KiB, optimizer 128 KiB, batch 8 KiB"
    assert any(line.startswith("collectives   a device sends ") for line in told)
    assert any(line.startswith("gradients  reduce-scatter  8 ") for line in told)
    assert max(map(len, told)) <= 120
    tree = json.loads(compiled.to_json())
    assert (tree["target"], tree["peak_bytes"]) == ("h100:8", compiled.peak_bytes)
    (first, *_) = tree["programs"]["gradients"]["collectives"]
    assert first["sent_bytes"] == compiled.programs["gradients"].collectives[0].sent_bytes


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (lambda peak: peak // 2, ": too large; give it more devices, FullySharded() to an axis whose "),
        (lambda peak: int(peak / 0.9), ": it fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 or more"),
        (lambda peak: None, " a device: it fits, or the compiler would have refused it"),
    ],
)  # fmt: skip
def test_a_limit_is_judged(compiled: CompiledStep, limit: Callable[[int], int | None], said: str) -> None:
    judged = replace(compiled, memory_bytes=limit(compiled.peak_bytes))
    assert said in str(judged)
    assert judged.fits == ("too large" not in said)


@pytest.mark.usefixtures("aot")
def test_a_target_of_other_size() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"^target is 'h100:16', which has 16 devices, and the step's mesh 8 \(\{'data': 8\}\): make the step on "
        r'a mesh of 16 devices; they may be virtual ones, jax.config.update\("jax_num_cpu_devices", 16\) before JAX',
    ):
        make_step(bx.DataParallel()).compile_for("h100:16")


def test_a_target_that_is_none() -> None:
    with pytest.raises(ArgumentError, match=r"^target is 'cpu', expected a machine and its devices, such as h100:8 "):
        make_step(bx.DataParallel()).compile_for("cpu")


def test_for_what_is_here_it_tells_what_the_programs_of_the_step_need() -> None:
    step = make_step(bx.FullySharded())
    found = step.compile_for("here")
    needed = step.lower().gradients.compile().memory_analysis()
    assert needed is not None
    both = needed.argument_size_in_bytes + needed.temp_size_in_bytes + needed.output_size_in_bytes
    moments = 4 + 4 * WEIGHT // DEVICES  # of Adam, with its count
    assert found.programs["gradients"].memory.total + found.beside["gradients"] == pytest.approx(both + moments, abs=64)
    assert found.peak_bytes >= both
    assert str(found).startswith("compiled for  here: 8 × cpu\nmemory        ")
    assert "it fits" in str(found)


def test_what_is_compiled_for_here_is_what_runs() -> None:
    step = make_step(bx.DataParallel())
    step.compile_for("here")
    state, batch = step.init(jax.random.key(0)), np.ones((SAMPLES, WIDTH), np.float32)
    with recorded_events() as events:
        step.update(state, batch)
    assert [event for event in events if "backend_compile" in event] == []


@pytest.mark.slow
@pytest.mark.usefixtures("aot")
def test_tpus_compile_and_refuse_what_is_too_large() -> None:
    found = make_step(bx.FullySharded()).compile_for("v5e:2x4")
    assert {one.kind for one in found.collectives} >= {"all-gather", "reduce-scatter"}
    assert found.fits
    with pytest.raises(
        ArgumentError, match=r"^target is 'v5e:2x4', and the gradients of the step cannot be compiled for it: RES.*"
    ):
        make_step(bx.FullySharded(), samples=1 << 29).compile_for("v5e:2x4")


def test_a_decorated_step_is_compiled_as_one_of_a_loss_and_an_optimizer_is(compiled: CompiledStep) -> None:
    optimizer = optax.adam(1e-3)

    @bx.parallelize(jax.make_mesh((DEVICES,), ("data",)), {"data": bx.FullySharded()})
    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return (jnp.tanh(batch @ params["first"]) @ params["second"]).var()

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, opt_state = optimizer.update(gradients, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    params = jax.eval_shape(lambda: init(jax.random.key(0)))
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    train_step.prepare(state, jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32))
    found = train_step.compile_for("h100:8")
    shards, batch = 2 * WEIGHT // DEVICES, 4 * SAMPLES * WIDTH // DEVICES
    assert found.held == {"parameters": shards, "followers": 2 * shards, "others": 4, "batch": batch}
    assert found.sent_bytes == pytest.approx(compiled.sent_bytes, rel=0.01)
    assert found.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)
    assert found.compiler_options == compiled.compiler_options
    assert found.programs["apply"].memory.reused == pytest.approx(3 * shards, abs=256)
    with pytest.raises(ArgumentError, match="target is 'h100:4', which has 4 devices, and the step's mesh 8"):
        train_step.compile_for("h100:4")
