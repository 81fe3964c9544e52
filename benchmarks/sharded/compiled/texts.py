"""Compiles small steps by one version of braidax, run as `python -m benchmarks.sharded.compiled.texts FILE [COUNT]`.

It asks for nothing that versions before `FullySharded` lack: `same` runs it with one of them.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import braidax as bx
from benchmarks.harness import models
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.models import Model
from braidax.tasks.bert_model import Sizes

NUM_DEVICES = 8
_DATA: Mapping[str, Any] = {"data": bx.DataParallel()}
_ROWS: Mapping[str, Any] = {"data": bx.Hybrid()}
_CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def main() -> None:
    """Writes a JSON object to a file: by case, of so many or of all, the texts of its programs and their memory."""
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    file, *count = sys.argv[1:]
    cases = [*_cases().items()][: int(count[0]) if count else None]
    found = {name: _compiled(make()) for name, make in cases}
    Path(file).write_text(json.dumps({"braidax": str(Path(bx.__file__).parent), "cases": found}))


def _compiled(step: bx.Step) -> dict[str, dict[str, Any]]:
    programs: dict[str, dict[str, Any]] = {}
    for name, lowered in step.lower()._asdict().items():
        compiled = lowered.compile()
        memory: Any = compiled.memory_analysis()
        needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        programs[name] = {"text": compiled.as_text(), "memory": needed}
    return programs


def _cases() -> dict[str, Callable[[], bx.Step]]:
    shape = Shape(512, 128, 2, 32, NUM_DEVICES)
    lm1b = models.lm1b(20_000, 32, 2 * NUM_DEVICES)
    dlrm = models.dlrm(20_000, 2 * NUM_DEVICES)
    bert = models.bert(NUM_DEVICES, Sizes(4096, 32, width=64, num_layers=2, num_heads=2))
    resnet = models.resnet((1, 1, 1, 1), 32, NUM_DEVICES)
    adamw, sgd = optax.adamw(1e-3), optax.sgd(1e-2)
    both = {"data": bx.Hybrid(), "model": bx.Hybrid()}
    beside = {"data": bx.Hybrid(), "model": bx.DataParallel()}
    return {
        "an MLP with dropout and a mask, DataParallel": lambda: _small(_masked, adamw, _DATA),
        "the same, 2 microbatches": lambda: _small(_masked, adamw, _DATA, microbatches=2),
        "the same, an axis without a strategy": lambda: _small(_masked, adamw, {**_DATA, "model": None}),
        "GPT-2's form, DataParallel": lambda: _gpt2(shape, _DATA),
        "GPT-2's form, Hybrid": lambda: _gpt2(shape, _ROWS),
        "BERT, DataParallel": lambda: _of(bert, _DATA),
        "BERT, Hybrid, AdamW": lambda: _of(bert, _ROWS),
        "ResNet, DataParallel": lambda: _of(resnet, _DATA),
        "LM1B (an LSTM, sampled softmax), DataParallel": lambda: _of(lm1b, _DATA),
        "LM1B, Hybrid, Adagrad": lambda: _of(lm1b, _ROWS),
        "DLRM, Hybrid, Adagrad": lambda: _of(dlrm, _ROWS),
        "DLRM, Hybrid, 4 x 2": lambda: _of(dlrm, both),
        "two tables, Hybrid, SGD": lambda: _small(_pooled, sgd, _ROWS),
        "two tables, Hybrid, Adam": lambda: _small(_pooled, optax.adam(1e-3), _ROWS),
        "two tables, Hybrid, clipped Adam": lambda: _small(_pooled, _CLIPPED, _ROWS),
        "two tables, Hybrid beside DataParallel, 4 x 2": lambda: _small(_pooled, sgd, beside),
        "two tables, Hybrid, 2 microbatches": lambda: _small(_pooled, sgd, _ROWS, microbatches=2),
        "a table read in a scan, Hybrid": lambda: _small(_scanned, sgd, _ROWS),
    }


def _gpt2(shape: Shape, strategies: Mapping[str, Any]) -> bx.Step:
    return _step(shape.loss, optax.adamw(1e-3), strategies, shape.init, shape.spec())


def _of(model: Model, strategies: Mapping[str, Any]) -> bx.Step:
    return _step(model.loss, model.optimizer, strategies, model.init, model.spec)


def _small(loss: Any, optimizer: Any, strategies: Mapping[str, Any], microbatches: int = 1) -> bx.Step:
    samples = 2 * NUM_DEVICES
    batch = {
        "ids": jax.ShapeDtypeStruct((samples, 5), np.int32),
        "target": jax.ShapeDtypeStruct((samples,), np.float32),
        "mask": jax.ShapeDtypeStruct((samples,), np.bool_),
    }
    return _step(loss, optimizer, strategies, _init, batch, microbatches=microbatches)


def _step(loss: Any, optimizer: Any, strategies: Mapping[str, Any], init: Any, batch: Any, **options: Any) -> bx.Step:
    shape = (NUM_DEVICES // 2, 2) if "model" in strategies else (NUM_DEVICES,)
    mesh = jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))
    given = {axis: strategy for axis, strategy in strategies.items() if strategy is not None}
    return bx.parallelize(loss, optimizer, mesh, given, init=init, batch=batch, **options)


def _init(key: jax.Array) -> Any:
    first, second, third = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(first, (4096, 16)),
        "other": jax.random.normal(second, (1000, 16)),
        "kernel": jax.random.normal(third, (16, 3)),
    }


def _masked(params: Any, batch: Any, key: jax.Array) -> Any:
    hidden = jnp.tanh(params["other"][batch["ids"]].mean(1) @ params["kernel"])
    hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
    losses = (hidden.sum(-1) - batch["target"]) ** 2
    return (losses * batch["mask"]).sum() / batch["mask"].sum(), {"kept": batch["mask"].sum()}


def _pooled(params: Any, batch: Any) -> Any:
    read = params["table"][batch["ids"]].mean(1) + jnp.take(params["other"], batch["ids"][:, 0], axis=0)
    return ((jnp.tanh(read @ params["kernel"]).sum(-1) - batch["target"]) ** 2).mean()


def _scanned(params: Any, batch: Any) -> Any:
    def turn(state: jax.Array, ids: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(state + params["table"][ids]), None

    state, _ = jax.lax.scan(turn, jnp.zeros((2 * NUM_DEVICES, 16)), batch["ids"].T)
    return (((state @ params["kernel"]).sum(-1) - batch["target"]) ** 2).mean()


if __name__ == "__main__":
    main()
