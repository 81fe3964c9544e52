"""Tables by rows: ours, all-reducing everything, XLA's own way with a table split by rows, and Horovod's gathering.

The language model of LM1B with its full vocabulary; its tables are narrower and its LSTM is smaller than published, so
that all systems fit into memory. Devices are virtual and share the cores: compared are work, and the bytes that the
compiled programs exchange. Further: how the step grows with the vocabulary, and how long BERT-base takes to plan.
"""

import functools
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import braidax as bx
from benchmarks.harness import Report, arguments, take_turns
from braidax.program import find_uses, trace, without_tables
from braidax.tasks.bert import bert
from braidax.tasks.lm1b_model import Sizes, init_language_model, read_words, sample_classes, sampled_softmax

NUM_DEVICES, STEPS, RATE = 4, 20, 0.2
VOCABULARY = 793_470
OURS, DENSE, PLAIN, XLA, GATHER = "ours", "ours, all-reduced", "plain jit", "XLA, table by rows", "gather (Horovod)"
TABLES = ("embedding", "softmax/bias", "softmax/weight")

Update = Callable[[Any, Any], tuple[Any, Any]]


def sizes(vocabulary: int, width: int) -> Sizes:
    """Returns those of a model nearly all of whose parameters, and little of whose work, are in the tables."""
    return Sizes(vocabulary, width, min(width, 64), width, dropout=0.0)


@dataclass(frozen=True)
class Model:
    """A language model. **Fields:** `sizes`; `num_sampled` classes; `batch` sequences on each device."""

    sizes: Sizes
    num_sampled: int
    batch: int

    @property
    def spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Of a global batch."""
        return {"tokens": jax.ShapeDtypeStruct((NUM_DEVICES * self.batch, STEPS + 1), jnp.int32)}

    def init(self, key: jax.Array) -> Any:
        """Makes the parameters."""
        return init_language_model(key, self.sizes)

    def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
        """Returns the loss of the task, without dropout."""
        words, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        outputs = read_words(params, words, key=None, dropout=0.0)
        candidates = sample_classes(key, self.sizes.vocabulary, self.num_sampled)
        return sampled_softmax(params["softmax"], outputs, targets, candidates).mean()

    def batches(self, count: int) -> list[Any]:
        """Returns words by Zipf's law, as they come in text."""
        random = np.random.default_rng(0)
        shape = (count, *self.spec["tokens"].shape)
        words = np.exp(random.random(shape) * np.log(VOCABULARY + 1)).astype(np.int32) - 1
        return [{"tokens": np.minimum(part, self.sizes.vocabulary - 1)} for part in words]


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    report, mesh = Report(), jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    width, vocabulary = (16, 40_000) if options.quick else (128, VOCABULARY)
    model = Model(sizes(vocabulary, width), num_sampled=64, batch=32 if options.quick else 128)
    _language_model(report, model, mesh, rounds=3 if options.quick else 7)
    _growth(report, model, mesh, rounds=3 if options.quick else 7)
    _planning(report, mesh, rounds=1 if options.quick else 3)
    return report.finish(options)


def _language_model(report: Report, model: Model, mesh: Mesh, *, rounds: int) -> None:
    case = f"LM1B, V={model.sizes.vocabulary:,}, D={model.sizes.embedding}"
    batches = model.batches(rounds + 2)
    touched = np.unique(np.concatenate([batch["tokens"].ravel() for batch in batches[:1]]))
    report.add(case, OURS, "words touched by a step (alpha)", "%", [100 * len(touched) / model.sizes.vocabulary])
    systems: Mapping[str, Callable[[Model, Mesh], Running]] = {
        OURS: functools.partial(_ours, strategy=bx.Hybrid()),
        DENSE: functools.partial(_ours, strategy=bx.DataParallel()),
        PLAIN: functools.partial(_plain, table=P()),
        XLA: functools.partial(_plain, table=P("data")),
        GATHER: _gathering,
    }
    seconds: dict[str, list[float]] = {}
    sent: dict[str, int] = {}
    losses: dict[str, list[float]] = {}
    for name, make in systems.items():  # one after another: together they do not fit into memory
        running = make(model, mesh)
        placed = [jax.device_put(batch, NamedSharding(mesh, P("data"))) for batch in batches]
        seconds[name], losses[name] = running.run(placed)
        sent[name] = sum(_sent_bytes(program.as_text() or "") for program in running.programs())
        report.add(case, name, "step", "ms", [1e3 * value for value in seconds[name]])
        report.add(case, name, "sent by a device, a step", "MB", [sent[name] / 1e6])
        report.add(case, name, "memory of a device", "MB", [running.memory_bytes() / 1e6])
        print(name, f"{1e3 * statistics.median(seconds[name]):.0f} ms, {sent[name] / 1e6:.2f} MB", file=sys.stderr)
        del running, placed
    for name in (DENSE, PLAIN):
        np.testing.assert_allclose(losses[name], losses[OURS], rtol=2e-3)
    mine = statistics.median(seconds[OURS])
    report.at_least("lm1b_dense", statistics.median(seconds[PLAIN]) / mine, 10)
    report.at_least("lm1b_xla_rows", statistics.median(seconds[XLA]) / mine, 3)
    report.at_least("lm1b_gather", statistics.median(seconds[GATHER]) / mine, 1.5)
    report.at_least("bytes", sent[PLAIN] / sent[OURS], 20)


def _growth(report: Report, model: Model, mesh: Mesh, *, rounds: int) -> None:
    large, small = (
        _ours(Model(sizes(size, model.sizes.embedding), model.num_sampled, model.batch), mesh, bx.Hybrid())
        for size in (model.sizes.vocabulary, model.sizes.vocabulary // 4)
    )
    batches = model.batches(2)
    limit = model.sizes.vocabulary // 4 - 1
    batches = [
        {"tokens": jax.device_put(np.minimum(b["tokens"], limit), NamedSharding(mesh, P("data")))} for b in batches
    ]
    for running in (large, small):
        running.run(batches)

    def turn(running: Running) -> Callable[[], float]:
        return lambda: statistics.median(running.run(batches, warmup=0)[0])

    figures = take_turns({"V": turn(large), "V / 4": turn(small)}, rounds=rounds)
    for name, values in figures.items():
        report.add("growth", name, "step", "ms", [1e3 * value for value in values])
    report.at_most("growth", statistics.median(figures["V"]) / statistics.median(figures["V / 4"]), 1.2)


def _planning(report: Report, mesh: Mesh, *, rounds: int) -> None:
    task = bert()
    batch = task.train.batch_spec(task.batch_size)
    seconds: list[float] = []
    for _ in range(rounds):
        jax.clear_caches()
        start = time.perf_counter()
        bx.parallelize(task.loss, task.optimizer(100), mesh, {"data": bx.Hybrid()}, init=task.init, batch=batch)
        seconds.append(time.perf_counter() - start)
    report.at_most("trace", report.add("BERT-base", OURS, "trace and plan", "s", seconds), 5)


class Running:
    """A system under way. **Arguments:** `state`; `update`: gives the next one, and the loss; `programs`: compiled."""

    def __init__(self, state: Any, update: Update, programs: Callable[[], Sequence[Any]]) -> None:
        self._state, self._update = state, update
        self.programs = functools.cache(programs)

    def memory_bytes(self) -> int:
        """Returns the most that any of the programs needs on a device."""
        analyses = [program.memory_analysis() for program in self.programs()]
        return max(
            one.argument_size_in_bytes + one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes
            for one in analyses
        )

    def run(self, batches: Sequence[Any], *, warmup: int = 2) -> tuple[list[float], list[float]]:
        """Takes a step with each batch; returns seconds of each behind the warm-up, and all losses."""
        seconds: list[float] = []
        losses: list[float] = []
        for number, batch in enumerate(batches):
            start = time.perf_counter()
            self._state, loss = self._update(self._state, batch)
            jax.block_until_ready(self._state)
            if number >= warmup:
                seconds.append(time.perf_counter() - start)
            losses.append(float(loss))
        return seconds, losses


def _optimizer() -> optax.GradientTransformation:
    return optax.adagrad(RATE, initial_accumulator_value=1 / STEPS**2)


def _ours(model: Model, mesh: Mesh, strategy: Any) -> Running:
    step = bx.parallelize(model.loss, _optimizer(), mesh, {"data": strategy}, init=model.init, batch=model.spec)

    def update(state: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = step.update(state, batch)
        return state, metrics["loss"]

    return Running(step.init(jax.random.key(0)), update, lambda: [part.compile() for part in step.lower()])


def _plain(model: Model, mesh: Mesh, table: P) -> Running:
    """One `jax.jit` around `value_and_grad` and the optimizer; XLA chooses all collectives."""
    if table != P():  # a dim is split evenly, or not at all
        rows = -(-model.sizes.vocabulary // NUM_DEVICES) * NUM_DEVICES
        model = Model(sizes(rows, model.sizes.embedding), model.num_sampled, model.batch)
    whole, optimizer = NamedSharding(mesh, P()), _optimizer()

    def first(key: jax.Array) -> Any:
        params = model.init(key)
        return params, optimizer.init(params)

    def shard(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, table) if leaf.shape[:1] == (model.sizes.vocabulary,) else whole

    key = jax.random.key(0)
    held = jax.tree.map(shard, jax.eval_shape(first, key))

    def step(state: Any, batch: Any, number: jax.Array) -> Any:
        params, opt_state = state
        key = jax.random.fold_in(jax.random.split(jax.random.key(0))[1], number)
        loss, gradients = jax.value_and_grad(model.loss)(params, batch, key)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    split = NamedSharding(mesh, P("data"))
    jitted = jax.jit(step, in_shardings=(held, split, whole), out_shardings=(held, whole), donate_argnums=0)
    state = jax.jit(lambda key: first(jax.random.split(key)[0]), out_shardings=held)(key)
    count = iter(range(1_000_000))
    specs = jax.eval_shape(first, key), model.spec, jax.ShapeDtypeStruct((), jnp.int32)
    return Running(
        state,
        lambda state, batch: jitted(state, batch, jnp.int32(next(count))),
        lambda: [jitted.lower(*specs).compile()],
    )


def _gathering(model: Model, mesh: Mesh) -> Running:
    """Horovod's rule: tables on all devices; all gather ids and row gradients, and each updates its own copy."""
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    specs = jax.eval_shape(model.init, jax.random.key(0))
    program = trace(model.loss, specs, model.spec, jax.eval_shape(lambda: jax.random.key(0)))
    rows = without_tables(program, [uses for uses in find_uses(program) if uses.name in TABLES])
    fed, optimizer = rows.fed(), _optimizer()

    def parted(params: Any) -> tuple[Any, dict[str, jax.Array]]:
        softmax = params["softmax"]
        dense = {"embedding": None, "lstm": params["lstm"], "softmax": {"weight": None, "bias": None}}
        named = {"embedding": params["embedding"], "softmax/bias": softmax["bias"], "softmax/weight": softmax["weight"]}
        return dense, named

    def first(key: jax.Array) -> Any:
        dense, tables = parted(model.init(jax.random.split(key)[0]))
        sums = {name: jnp.full_like(table, 1 / STEPS**2) for name, table in tables.items()}
        return dense, optimizer.init(dense), tables, sums

    def step(state: Any, batch: Any, number: jax.Array) -> Any:
        dense, opt_state, tables, sums = state
        key = jax.random.fold_in(jax.random.split(jax.random.key(0))[1], number)
        ids = rows.ids(dense, batch, key)
        taken = tuple(tables[one.name][x] for one, x in zip(rows.lookups, ids, strict=True))
        loss, (gradients, of_rows) = jax.value_and_grad(fed, argnums=(0, 3))(dense, batch, key, taken)
        updates, opt_state = optimizer.update(gradients, opt_state, dense)
        for name in tables:
            members = [at for at, one in enumerate(rows.lookups) if one.name == name]
            all_ids, all_rows = (
                jnp.concatenate([jax.lax.with_sharding_constraint(part[at], whole) for at in members])
                for part in (ids, of_rows)
            )
            unique, places = jnp.unique(all_ids, size=len(all_ids), fill_value=len(tables[name]), return_inverse=True)
            summed = jnp.zeros_like(all_rows).at[places].add(all_rows)
            total = sums[name].at[unique].get(mode="fill", fill_value=1.0) + summed**2
            sums[name] = sums[name].at[unique].set(total, mode="drop")
            tables[name] = tables[name].at[unique].add(-RATE * summed * jax.lax.rsqrt(total + 1e-7), mode="drop")
        return (optax.apply_updates(dense, updates), opt_state, tables, sums), loss

    jitted = jax.jit(step, in_shardings=(whole, split, whole), out_shardings=whole, donate_argnums=0)
    state = jax.jit(first, out_shardings=whole)(jax.random.key(0))
    count = iter(range(1_000_000))
    lowered = jax.eval_shape(first, jax.random.key(0)), model.spec, jax.ShapeDtypeStruct((), jnp.int32)
    return Running(
        state,
        lambda state, batch: jitted(state, batch, jnp.int32(next(count))),
        lambda: [jitted.lower(*lowered).compile()],
    )


_COLLECTIVE = re.compile(
    r"= (\(?[a-z0-9\[\],{} /*=_]+\)?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"([a-z]+)(\d+)\[([\d,]*)\]")


def _sent_bytes(text: str) -> int:
    """Returns what a device sends in one run of a compiled program, by its collectives' shapes (rings, full exchange).

    Loops are counted once: the ones here run further rounds of an exchange, which normally do not take place.
    """
    total = 0.0
    for shapes, kind in _COLLECTIVE.findall(text):
        size = sum(
            int(bits) // 8 * int(np.prod([int(dim) for dim in dims.split(",") if dim], dtype=np.int64))
            for _, bits, dims in _SHAPE.findall(shapes)
        )
        others = (NUM_DEVICES - 1) / NUM_DEVICES
        total += size * {"all-reduce": 2 * others, "reduce-scatter": NUM_DEVICES - 1, "collective-permute": 1}.get(
            kind, others
        )
    return int(total)


if __name__ == "__main__":
    sys.exit(main())
