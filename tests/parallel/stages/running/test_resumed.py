"""A run of two processes of which one is killed goes on, bit for bit, in the same stages and in others."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braidax as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.data import Cursor, DataLoader
from tests.support.checkpoint.saving import read_all
from tests.support.comm.stores.servers import free_port
from tests.support.parallel.models import copied
from tests.support.parallel.stages.running.of_two import SAMPLES
from tests.support.parallel.stages.running.resumed import SOURCE, make, run
from tests.support.tree import ROOT

LIMIT_SECONDS = 300.0


def of_two(root: Path, victim: int = -1) -> list[tuple[int, str]]:
    """Trains in two processes. **Returns:** how each has ended, and what it has printed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(["src", "."])}
    command, port = [sys.executable, "-m", "tests.support.parallel.stages.running.resumed"], str(free_port())
    both = [
        subprocess.Popen(
            [*command, str(root), port, str(process), str(victim)],
            env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        told = [one.communicate(timeout=LIMIT_SECONDS) for one in both]
    finally:
        for one in both:
            with one:  # which waits for it, and closes what it was read from
                one.kill()
    found = [(one.returncode, words) for one, (words, _) in zip(both, told, strict=True)]
    assert victim >= 0 or [code for code, _ in found] == [0, 0], told
    return found


def losses(root: Path) -> dict[int, float]:
    """Of each update as it was made last."""
    lines = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def saved(root: Path) -> list[str]:
    return sorted(each.name for each in (root / "saved").glob("step-*"))


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(other[path], value, strict=True, err_msg=path)


def by_hand(step: Any, content: Mapping[str, Any]) -> Any:
    """A state of what a checkpoint has, put where a step wants it, with no checkpointer."""

    rows = dict[str, int]()

    def put(path: Any, spec: Any, on: Any) -> Any:
        name = f"0/{jax.tree_util.keystr(path, simple=True, separator='/')}"
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.wrap_key_data(content[name]), on)
        if name in content:
            return jax.device_put(content[name], on)
        whole, begin = name.rpartition("/")[0], rows.get(name.rpartition("/")[0], 0)
        rows[whole] = begin + spec.shape[0]
        return jax.device_put(content[whole][begin : begin + spec.shape[0]], on)

    return jax.tree_util.tree_map_with_path(put, step.state_specs, step.state_shardings)


@pytest.mark.slow
def test_a_process_is_killed_and_the_run_goes_on_in_the_same_stages_or_others(tmp_path: Path) -> None:
    whole, broken, other = (tmp_path / name for name in ("whole", "broken", "other"))
    for folder in (whole, broken, other):
        folder.mkdir()
    of_two(whole)
    (code, words), (killed, begun) = of_two(broken, victim=1)
    assert (code, killed) == (1, -9)
    now, process, message = json.loads(words)
    assert now - float(begun) < 30.0
    assert process == 1
    assert message == (
        "process 1, which has stages [1], has ended: start all processes again, and restore the last checkpoint"
    )
    assert saved(broken) == ["step-00000002"]  # the one that was under way is none
    before = read_all(broken / "saved" / "step-00000002")
    same(read_all(whole / "saved" / "step-00000002"), before)
    shutil.copytree(broken / "saved", other / "saved")

    of_two(broken)
    assert saved(broken) == saved(whole) == [f"step-{number:08d}" for number in (2, 4, 6, 7)]
    for name in saved(whole):
        same(read_all(whole / "saved" / name), read_all(broken / "saved" / name))
    assert losses(broken) == losses(whole)
    assert [*losses(whole)] == [1, 2, 3, 4, 5, 6, 7]

    step = make("ZB-V", 2)  # four stages, of which the last has no layer, in this process
    with Checkpointer(other / "saved", Every(1)) as saver:
        state, cursor = saver.restore((step.state_specs, Cursor(0, 0, 0)))
    assert [piece.shape[0] for piece in state.params["layers"]] == [2, 3, 1]
    with Checkpointer(tmp_path / "again", Every(1)) as saver:
        saver.save((state, cursor))
    same(read_all(tmp_path / "again" / "step-00000000"), before)
    after = run(step, other)
    straight, found = by_hand(step, before), list[float]()
    jax.tree.map(np.testing.assert_array_equal, straight.params, state.params)
    with DataLoader(bx.open(SOURCE), step.mesh, step.batch_shardings, batch_size=SAMPLES, seed=0, epochs=1) as loader:
        for batch in [*loader][2:]:
            straight, metrics = step.update(straight, batch)
            found.append(float(metrics["loss"]))
    assert {**dict(enumerate(found, 3))} == losses(other)
    np.testing.assert_allclose(found, [*losses(whole).values()][2:], rtol=2e-5)
    for one, two in zip(jax.tree.leaves(copied(straight)), jax.tree.leaves(copied(after)), strict=True):
        np.testing.assert_array_equal(one, two)
