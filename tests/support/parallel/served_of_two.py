"""What processes train by servers: `braidax launch --module tests.support.parallel.served_of_two CASE` tells."""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import braidax.parallel as bx
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from tests.support.parallel.hybrid import init, make_batch, pooled
from tests.support.parallel.models import specs

CASES: dict[str, tuple[optax.GradientTransformation, tuple[str, ...]]] = {
    "adam": (optax.adam(3e-2), ()),
    "growing": (optax.inject_hyperparams(optax.adamw)(learning_rate=3e-2, weight_decay=0.1), ()),
    "clipped": (optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.3)), ("grad_norm",)),
}


def numbers(case: str, gang: LocalGang | None = None) -> list[float]:
    """Trains on eight devices of one process or of two, whose servers the first one has, where it is given none."""
    optimizer, metrics = CASES[case]
    mesh = jax.make_mesh((8,), ("data",))
    seen = bx.Seen(500, admit_at=2, expire_after=3) if case == "growing" else None
    strategies = {"data": bx.Hybrid(tables=bx.Served(seen=seen, spares=1))}
    with contextlib.ExitStack() as stack:
        servers = gang
        if gang is None and jax.process_index() == 0:
            servers = stack.enter_context(LocalGang(3))
        made: Any = bx.parallelize(
            pooled, optimizer, mesh, strategies, init=init, batch=specs(make_batch()), metrics=metrics, servers=servers
        )
        step = stack.enter_context(made)
        host = step._servers._world.host  # all processes are on this one, and the first pushes for them
        assert (1 if host is None else host.size) == jax.process_count()
        state, found = step.init(jax.random.key(0)), list[float]()
        batches = [place(make_batch(seed), step.batch_shardings) for seed in range(4)]
        for batch, coming in zip(batches, [*batches[1:], None], strict=True):
            if coming is not None and jax.process_count() > 1:  # which changes no number, and neither do more servers
                step.prepare(coming)
                step.resize(3 if coming is batches[2] else 2)
            if case == "growing" and coming is batches[3]:
                state.opt_state["dense"].hyperparams["learning_rate"] = np.float32(1e-2)
            state, told = step.update(state, batch)
            found += [float(told[name]) for name in ("loss", *metrics)]
        if seen is not None:
            return found + grown(step, state)
        found.append(float(step.evaluate(state, make_batch(5))["loss"]))
        check_published(step)
        return found + [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(step.to_dense(state).params)]


def grown(step: Any, state: Any) -> list[float]:
    """All processes save their part of what is there, and put it back behind another update."""
    saved, rows = step.tables.checkpoint_state(), {name: step.seen_rows(name) for name in step._forms}
    _, told = step.update(state, make_batch(4))
    step.tables.restored(saved)
    again = step.tables.checkpoint_state()["tables"]
    for name, one in saved["tables"].items():
        assert one["changes"]["ids"].shape == (1,)  # the learning rate was set once
        for two, leaf in zip(jax.tree.leaves(again[name]), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(getattr(two, "value", two), getattr(leaf, "value", leaf))
    for name, (ids, values) in rows.items():
        found = step.seen_rows(name)
        np.testing.assert_array_equal(found[0], ids)
        np.testing.assert_array_equal(found[1], values)
    return [
        float(told["loss"]),
        *(float(number) for ids, values in rows.values() for number in (ids.sum(), values.sum())),
    ]


def check_published(step: Any) -> None:
    """All processes publish, and the first one writes."""
    with tempfile.TemporaryDirectory() as folder:
        step.publish(folder)
        tables = {name: step.table(name) for name in ("table", "other")}
        if jax.process_index() == 0:
            np.testing.assert_equal(bx.read_published(folder), tables)
        else:
            assert not [*Path(folder).iterdir()]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(numbers(sys.argv[1])) + "\n")
