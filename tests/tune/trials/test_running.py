"""Trials of a real training: settings take turns, and all that was opened is closed."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.checkpoint import Checkpointer, Every
from braidax.data import DataLoader
from braidax.errors import ArgumentError
from braidax.parallel import DataParallel, parallelize
from braidax.tune import Course, Setting, try_settings

SAMPLES = {"x": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)}


def test_the_setting_whose_steps_are_fastest_is_found(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    opened: list[int] = []

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    def init(key: Any) -> Any:
        return {"w": jnp.ones(4)}

    @contextmanager
    def make(setting: Setting) -> Generator[Course, None, None]:
        size, work = 8, setting["work"]
        if work == 3:
            raise ArgumentError("work=3: expected another number")

        def slow(params: Any, batch: Any) -> Any:
            long = jax.lax.fori_loop(0, work, lambda at, value: jnp.tanh(value @ value), jnp.ones((256, 256)))
            return loss(params, batch) + 0 * long[0, 0]

        batch = {"x": jax.ShapeDtypeStruct((size, 4), np.float32)}
        step = parallelize(slow, optax.sgd(0.1), mesh, {"data": DataParallel()}, init=init, batch=batch)
        opened.append(work)
        with (
            DataLoader(SAMPLES, mesh, step.batch_shardings, batch_size=size, epochs=None) as loader,
            Checkpointer(tmp_path / str(len(opened)), Every(4)) as saver,
        ):
            yield Course(step, step.init(jax.random.key(0)), loader, saver)
            opened.remove(work)

    found = try_settings(make, {"work": [1, 40, 3]}, start={"work": 40}, num_steps=16)
    assert found.best == {"work": 1}
    assert [trial.verdict for trial in found.trials] == ["cannot run: work=3: expected another number", "kept"]
    assert opened == []


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ArgumentError, match="num_steps=8: expected 16 or more, so that steps can be compared"):
        try_settings(lambda setting: pytest.fail("made"), {"x": [1, 2]}, start={"x": 1}, num_steps=8)
