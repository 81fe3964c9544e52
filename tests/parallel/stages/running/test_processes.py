"""Stages that lie with two processes train as one device does."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.checkpoint.format.reading import read_manifest
from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from tests.support.checkpoint.saving import read_all
from tests.support.parallel.models import copied
from tests.support.parallel.stages.running.of_two import numbers
from tests.support.parallel.stages.running.saved_by_two import BATCH, make
from tests.support.tree import ROOT


def launched(module: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs a module on two processes of two devices each. **Returns:** the last line that each prints."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    log = io.StringIO()
    program = Program(module, tuple(arguments), kind="module", devices_per_process=2)
    assert launch_here(program, 2, log=log) == 0, log.getvalue()
    found = dict(line.split(" ", 1) for line in log.getvalue().splitlines() if line.startswith(("[0] ", "[1] ")))
    return [found["[0]"], found["[1]"]]


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ("stages", "1F1B"),
        pytest.param("samples apart", "ZB-V", marks=pytest.mark.slow),
        pytest.param("stages", "ZB-V", marks=pytest.mark.slow),
        pytest.param("stages", "Interleaved1F1B", marks=pytest.mark.slow),
        pytest.param("stages apart", "ZB-H1", marks=pytest.mark.slow),
        pytest.param("samples apart", "1F1B", marks=pytest.mark.slow),
        pytest.param("hybrid, samples apart", "ZB-H1", marks=pytest.mark.slow),
        pytest.param("hybrid, stages apart", "1F1B", marks=pytest.mark.slow),
        pytest.param("sharded, stages apart", "1F1B", marks=pytest.mark.slow),
        pytest.param("sharded, stages apart", "ZB-V", marks=pytest.mark.slow),
        pytest.param("sharded, samples apart", "ZB-H1", marks=pytest.mark.slow),
        pytest.param("2,1,1", "1F1B", marks=pytest.mark.slow),
        pytest.param("1,2,1", "ZB-H1", marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one_device(mesh: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launched("tests.support.parallel.stages.running.of_two", (mesh, schedule), monkeypatch)
    wanted = numbers("none, table" if mesh.startswith("hybrid") else "none", "")
    for told in found:
        np.testing.assert_allclose(json.loads(told), wanted, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["PipeDream", "PipeDream, vertical sync", "2BW"])
def test_two_processes_are_as_stale_as_one(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launched("tests.support.parallel.stages.running.of_two", ("stages", schedule), monkeypatch)
    wanted = numbers("stages here", schedule)
    assert len(wanted) == 9
    for told in found:
        np.testing.assert_allclose(json.loads(told), wanted, rtol=2e-5)


def test_a_process_that_is_killed_is_named_on_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one: JAX itself ends all when the first, which serves the others, is gone."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    log = io.StringIO()
    program = Program(
        "tests.support.parallel.stages.running.killed_of_two", ("1",), kind="module", devices_per_process=1
    )
    assert launch_here(program, 2, log=log) != 0
    told = [line.split(" ", 1)[1] for line in log.getvalue().splitlines() if line.startswith("[0] [")]
    assert len(told) == 1, log.getvalue()
    seconds, process, words = json.loads(told[0])
    assert seconds < 30
    assert process == 1
    assert words == (
        "process 1, which has stages [1], has ended: start all processes again, and restore the last checkpoint"
    )


@pytest.mark.slow
def test_two_processes_go_on_from_one_and_one_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = make(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), {"data": bx.DataParallel()})
    state, _ = none.update(none.init(jax.random.key(3)), BATCH)
    with Checkpointer(tmp_path / "one", Every(1)) as saver:
        saver.save((state, 5))
    ran = launched("tests.support.parallel.stages.running.saved_by_two", (str(tmp_path),), monkeypatch)
    expected, metrics = none.update(state, BATCH)
    for words in ran:
        np.testing.assert_allclose(float(words.removeprefix("loss ")), metrics["loss"], rtol=2e-5)
    # Each has written the rows of its stages, and all together are what one device has saved, bit for bit.
    content, same = (read_all(tmp_path / name / "step-00000000") for name in ("one", "same"))
    assert content.keys() == same.keys()
    for path, value in content.items():
        np.testing.assert_array_equal(same[path], value, strict=True, err_msg=path)
    written = [read_manifest(tmp_path / "same" / "step-00000000", process).tensors for process in range(2)]
    rows = [[(one.start[0], one.shape[0]) for one in own if one.path == "0/params/layers"] for own in written]
    assert rows == [[(0, 2)], [(2, 4)]]
    with Checkpointer(tmp_path / "two", Every(1)) as saver:
        state, epoch = saver.restore((none.state_specs, 0))
    assert (int(state.step), epoch) == (2, 6)
    for one, other in zip(jax.tree.leaves(copied(state)), jax.tree.leaves(copied(expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
