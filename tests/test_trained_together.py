"""Loader, step and checkpointer together in two processes, one of which is killed: the run is that of one process."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from tests.support.gang.forks import fork_children
from tests.support.trained_together import train
from tests.support.tree import ROOT


def test_a_run_of_two_processes_survives_a_death_and_equals_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")  # as tests/support/data/jax_gang.py has it
    fork_children(
        monkeypatch,
        "optax",
        "braidax.loop",
        "braidax.parallel",
        "braidax.gang.meeting",
        modules=["braidax.gang.runner"],
    )
    log = io.StringIO()
    program = Program("tests.support.trained_together", (str(tmp_path / "two"), "9"), "module", devices_per_process=2)
    assert launch_here(program, 2, restarts=1, log=log) == 0, log.getvalue()
    assert re.search(r"rank 1 \(pid \d+\) failed first: it was ended by signal 9", log.getvalue())
    train(tmp_path / "one", None)
    end = (tmp_path / "one" / "end-0").read_text()
    assert end.startswith("18 ")
    assert [(tmp_path / "two" / f"end-{rank}").read_text() for rank in range(2)] == [end, end]
    found, expected = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    )
    cut = next(place for place, line in enumerate(found) if "resumed" in line)
    assert [line["step"] for line in found[:cut]] == list(range(1, cut + 1))  # nothing is lost
    assert [line["step"] for line in found[cut + 1 :]] == list(range(found[cut]["step"] + 1, 19))
    losses = {line["step"]: line["loss"] for line in found if "loss" in line}
    np.testing.assert_allclose(list(losses.values()), [line["loss"] for line in expected], rtol=1e-5)
    kept, expected = ({path.name for path in (tmp_path / name / "checkpoints").iterdir()} for name in ("two", "one"))
    assert kept == expected
