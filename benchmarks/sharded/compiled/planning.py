"""How long it takes to plan BERT-base: `parallelize`, until there is a plan; nothing is compiled."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import braidax as bx
from benchmarks.harness import Report, models, say, take_turns
from benchmarks.harness.models import Model
from braidax.tasks.bert_model import Sizes, _Layer

_LIMIT_SECONDS = 3.0
_SAMPLES = 32


def plan_bert(report: Report, data: Mesh, both: Mesh, sizes: Sizes, *, rounds: int) -> None:
    """Plans BERT by each strategy in turns, with nothing in JAX's caches: with a loop over layers, and without.

    **Arguments:** `data`: a mesh of the axis "data"; `both`: of "data" and "model". `sizes`: of the model.
    """
    strategies: dict[str, tuple[Mesh, Mapping[str, Any]]] = {
        "ours, Hybrid": (data, {"data": bx.Hybrid()}),
        "ours, FullySharded": (data, {"data": bx.FullySharded()}),
        "ours, Hybrid, dense FullySharded": (data, {"data": bx.Hybrid(dense=bx.FullySharded())}),
        "ours, TensorParallel": (both, {"data": bx.DataParallel(), "model": bx.parallel.TensorParallel()}),
    }
    scanned = models.bert(_SAMPLES, sizes)
    longest = 0.0
    for model in (scanned, _written_out(scanned, sizes)):
        processor: dict[str, list[float]] = {name: [] for name in strategies}
        figures = take_turns(
            {name: _planned(model, *chosen, processor[name]) for name, chosen in strategies.items()}, rounds=rounds
        )
        for name, seconds in figures.items():
            report.add(model.name, name, "trace and plan", "s", seconds)
            report.add(model.name, name, "seconds of a core", "s", processor[name])
            longest = max(longest, statistics.median(seconds))
        say(f"{model.name}: {figures}; of a core {processor}")
    report.at_most("plan", longest, _LIMIT_SECONDS)


def _planned(model: Model, mesh: Mesh, strategies: Mapping[str, Any], processor: list[float]) -> Callable[[], float]:
    """Returns what plans a model and gives its seconds. **Arguments:** `processor`: is given those of the core."""

    def plan() -> float:
        jax.clear_caches()
        start, used = time.perf_counter(), time.process_time()
        step = bx.parallelize(model.loss, model.optimizer, mesh, strategies, init=model.init, batch=model.spec)
        assert step.plan.variables, "a plan tells variables"
        processor.append(time.process_time() - used)
        return time.perf_counter() - start

    return plan


def _written_out(like: Model, sizes: Sizes) -> Model:
    """The same with each layer in the trace: as many variables and operations as models without a loop have."""
    init, loss = models.of_bert(_Bert(sizes), sizes)
    return replace(like, name=f"{like.name}, no loop over layers", init=init, loss=loss)


class _Bert(nn.Module):
    """`braidax.tasks.bert_model.Bert` without its scan."""

    sizes: Sizes

    @nn.compact
    def __call__(self, words: jax.Array, num_words: jax.Array, *, train: bool) -> jax.Array:
        sizes, length = self.sizes, words.shape[1]
        x = nn.Embed(sizes.vocabulary, sizes.width, name="word_embedding")(words)
        x += self.param("position_embedding", nn.initializers.normal(0.02), (sizes.positions, sizes.width))[:length]
        x = nn.Dropout(sizes.dropout, deterministic=not train)(nn.LayerNorm(name="embedding_norm")(x))
        seen = (jnp.arange(length) < num_words[:, None])[:, None, None, :]
        for number in range(sizes.num_layers):
            x, _ = _Layer(sizes, train, name=f"layer_{number:02}")(x, seen)
        x = jnp.tanh(nn.Dense(sizes.width, name="pooler")(x[:, 0]))
        return nn.Dense(8, name="classifier")(nn.Dropout(sizes.dropout, deterministic=not train)(x))
