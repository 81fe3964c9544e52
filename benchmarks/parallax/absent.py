"""Rows that are first read late in a run, against rows that are read in every step."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import braidax as bx
from benchmarks.harness import Report
from benchmarks.parallax.systems import OURS

_ROWS, _WIDTH, _BATCH, _LENGTH = 200_000, 64, 256, 20


def first_read_late(report: Report, mesh: Mesh, *, num_steps: int, rounds: int) -> None:
    """Trains a table by AdamW with warm-up and cosine for some steps, then reads rows that no step has read, in turns.

    **Arguments:** `rounds`: how many steps of either kind are timed.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, num_steps // 10, 2 * num_steps, 1e-5)
    form = {"ids": jax.ShapeDtypeStruct((_BATCH, _LENGTH), np.int32), "target": jax.ShapeDtypeStruct((_BATCH,), "f4")}
    step = bx.parallelize(
        _loss, optax.adamw(rate, weight_decay=0.1), mesh, {"data": bx.Hybrid()}, init=_init, batch=form
    )
    random, state = np.random.default_rng(0), step.init(jax.random.key(0))
    target = random.normal(size=_BATCH).astype(np.float32)

    def taken(state: bx.State, first: int) -> tuple[bx.State, float]:
        """One step that reads as many rows as there are ids, from a first one on, and its seconds."""
        ids = random.permutation(np.arange(first, first + _BATCH * _LENGTH, dtype=np.int32)).reshape(_BATCH, _LENGTH)
        batch = jax.device_put({"ids": ids, "target": target}, step.batch_shardings)
        jax.block_until_ready((state, batch))
        begun = time.perf_counter()
        state, _ = step.update(state, batch)
        jax.block_until_ready(state)
        return state, time.perf_counter() - begun

    for _ in range(num_steps):
        state, _ = taken(state, 0)
    always, late = list[float](), list[float]()
    for number in range(1, rounds + 1):
        state, seconds = taken(state, 0)
        always.append(seconds)
        state, seconds = taken(state, number * _BATCH * _LENGTH)
        late.append(seconds)
    case = f"AdamW, warm-up and cosine, {_ROWS:,} rows, {_BATCH * _LENGTH:,} of them a step"
    report.add(case, OURS, "step, rows that every step reads", "ms", [1e3 * one for one in always])
    report.add(case, OURS, f"step, rows first read at step {num_steps:,}", "ms", [1e3 * one for one in late])
    report.at_most("catch_up", [first / every for first, every in zip(late, always, strict=True)], 1.2)


def _init(key: jax.Array) -> Any:
    return {"table": jax.random.normal(key, (_ROWS, _WIDTH)), "kernel": jnp.eye(_WIDTH)}


def _loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(params["table"][batch["ids"]].mean(1) @ params["kernel"])
    return ((hidden.sum(-1) - batch["target"]) ** 2).mean()
