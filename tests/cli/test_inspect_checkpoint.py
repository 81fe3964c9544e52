"""`braidax inspect` on checkpoints: what is there, and whether it verifies."""

import importlib.metadata
import io
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from typer.testing import CliRunner

import braidax as bx
from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.format.reading import read_manifest
from braidax.cli import app, inspect_checkpoint
from braidax.parallel.plan.placements import Replicated
from braidax.parallel.plan.plan import Plan, PlannedAxis, PlannedVariable
from tests.support.checkpoint.saving import Tables, commit, commit_as_many

VERSION = importlib.metadata.version("braidax")


def run(*arguments: str | Path) -> tuple[int, str]:
    """Returns exit code and output, blanks collapsed."""
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, re.sub(r"[ ─━┃│|]+", " ", result.output)


def state() -> dict[str, Any]:
    place = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))
    return {
        "params": {"kernel": jax.device_put(np.arange(64.0, dtype=np.float32).reshape(16, 4), place)},
        "tables": Tables(np.zeros((4, 4, 2), np.float16), {"table": 13}),
        "half": jnp.ones((3, 5), jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(0), 3),
        "epoch": 3,
        "scale": 0.5,
    }


def flip(file: Path, where: int) -> None:
    content = bytearray(file.read_bytes())
    content[where] ^= 1
    file.write_bytes(content)


def place_of(folder: Path, leaf: str, process: int = 0) -> int:
    """Returns where a leaf begins in a data file."""
    return next(tensor.offset for tensor in read_manifest(folder, process).tensors if tensor.path == leaf)


def test_it_shows_checkpoints_and_the_leaves_of_the_newest(tmp_path: Path) -> None:
    with bx.Checkpointer(tmp_path, bx.Every(1), keep=5) as saver:
        for _ in range(2):
            saver.update(state())
    long_ago = time.time() - 2 * 86400 - 3 * 3600 - 60
    os.utime(tmp_path / "step-00000001" / manifest_file(0), (long_ago, long_ago))
    code, output = run(tmp_path)
    assert code == 0
    assert re.search(rf"2 step-00000002 1 {VERSION} \d+ s [\d,]+ verified", output)
    assert re.search(rf"1 step-00000001 1 {VERSION} 2 d 3 h [\d,]+ whole", output)
    assert output.index("step-00000002") < output.index("step-00000001")
    for line in (
        "6 leaves of step-00000002, 374 bytes",
        "params/kernel float32 [16, 4] 256",
        "tables/table float16 [4, 4, 2] 64 13",
        "half bfloat16 [3, 5] 30",
        "keys key<fry> [3] 24",
        "epoch Python int 3",
        "scale Python float 0.5",
    ):
        assert line in output
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "step-00000002").iterdir())
    assert f"{num_bytes:,} verified" in output
    assert "damaged" not in output
    code, output = run(tmp_path / "step-00000001")
    assert (code, "step-00000002" in output, "6 leaves of step-00000001" in output) == (0, False, True)
    code, output = run(tmp_path, "--check", "all")
    assert (code, output.count("verified")) == (0, 2)
    code, output = run(tmp_path, "--check", "none")
    assert (code, output.count("verified"), output.count("whole")) == (0, 0, 2)


def test_a_renamed_one_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, state(), 1234567).rename(tmp_path / "best")
    monkeypatch.chdir(tmp_path)
    code, output = run("best")
    assert code == 0
    assert f"1,234,567 best 1 {VERSION} 0 s" in output


def test_a_copy_under_another_name_is_told_from_the_newest(tmp_path: Path) -> None:
    commit(tmp_path, state(), 7)
    shutil.copytree(tmp_path / "step-00000007", tmp_path / "step-00000099")
    code, output = run(tmp_path)
    assert code == 1
    assert f"7 step-00000099 1 {VERSION} 0 s" in output
    assert "other name" in output
    assert "leaves of step-00000007" in output
    assert f"error: {tmp_path}/step-00000099: holds the checkpoint of step 7, as its manifest says: it is a" in output
    assert run(tmp_path / "step-00000099")[0] == 0  # it is what was asked for


def test_the_folder_of_a_run_leads_to_its_checkpoints(tmp_path: Path) -> None:
    with bx.Checkpointer(tmp_path / "digits" / "checkpoints", bx.Every(1)) as saver:
        saver.update(state())
    lines = [
        '{"step": 100, "time": 1.0, "loss": 9.0}',
        '{"step": 250, "epoch": 1, "time": 2.0, "loss": 0.25}',
        '{"step": 250, "epoch": 1, "time": 3.0, "test_accuracy": 0.96}',
        '{"step": 250, "time": 4.0, "resumed": true}',
        '{"step": 25',
    ]
    metrics = tmp_path / "digits" / "metrics.jsonl"
    for text in ("{}", "", "\xff", "7", '{"step": "last"}'):
        metrics.write_text(text)
        assert "metrics.jsonl" not in run(tmp_path / "digits")[1]
    metrics.write_text(f'{{"step": 1, "note": "{"x" * 70_000}"}}\n' + "\n".join(lines))
    code, output = run(tmp_path / "digits")
    assert "metrics.jsonl: step 250 epoch 1 loss 0.25 test_accuracy 0.96\n" in output
    assert code == 0
    assert f"checkpoints in {tmp_path}/digits/checkpoints" in output
    assert f"1 step-00000001 1 {VERSION} 0 s" in output
    assert "verified" in output


def test_notes_are_shown_and_a_plan_as_its_table(tmp_path: Path) -> None:
    variable = PlannedVariable("params/w", (4, 2), "float32", 32, (Replicated(),), "dense")
    plan = Plan((PlannedAxis("data", 8, "data parallel"),), ("data",), 1, (variable,))
    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver:
        saver.notes |= {"plan": plan.to_json(), "who": '{"a": 1}'}
        saver.update(state())
    code, output = run(tmp_path)
    assert code == 0
    assert " ".join(["plan:", *str(plan).split()]) in " ".join(output.split())
    assert 'who: {"a": 1}' in output
    with bx.Checkpointer(tmp_path / "own", bx.Every(1)) as saver:
        saver.notes["plan"] = "by hand"
        saver.update(state())
    assert "plan: by hand" in run(tmp_path / "own")[1]


def test_a_folder_of_runs_shows_a_line_of_each(tmp_path: Path) -> None:
    for name, num_updates in (("digits/checkpoints", 3), ("own", 1200)):
        with bx.Checkpointer(tmp_path / name, bx.Every(1)) as saver:
            saver.restore(0)
            saver.num_updates = num_updates - 1
            saver.update(state())
    shutil.copytree(tmp_path / "own" / "step-00001200", tmp_path / "own" / "step-00009999")
    with bx.Checkpointer(tmp_path / "new", bx.Every(1)):
        pass
    (tmp_path / "notes").mkdir()
    code, output = run(tmp_path)
    assert code == 0
    first, second = (
        sum(file.stat().st_size for file in (tmp_path / name).rglob("step-*/*")) for name in ("digits", "own")
    )
    assert f"digits/checkpoints 3 1 {first:,} 0 s whole" in output
    assert f"own 1,200 2 {second:,} 0 s whole" in output
    assert "new 0 0" in output
    assert "notes" not in output
    assert "give one of these folders to see more of it" in output


def test_every_process_is_read(tmp_path: Path) -> None:
    folder = commit_as_many(tmp_path, state(), 2)
    code, output = run(tmp_path)
    assert code == 0
    assert "1 step-00000001 2 0" in output
    flip(folder / data_file(1), place_of(folder, "params/kernel", 1) + 5)
    code, output = run(tmp_path)
    assert code == 1
    assert "params/kernel float32 [16, 4] 256 damaged" in output
    assert f"error: {folder / data_file(1)}: leaf 'params/kernel' has the checksum" in output


def test_a_flipped_bit_is_named_with_file_and_leaf(tmp_path: Path) -> None:
    folder = commit(tmp_path, state())
    flip(folder / data_file(0), place_of(folder, "half"))
    flip(folder / data_file(0), place_of(folder, "keys") + 9)
    code, output = run(tmp_path)
    assert code == 1
    assert f"step-00000001 1 {VERSION} 0 s" in output
    assert output.count("damaged") == 3
    assert "half bfloat16 [3, 5] 30 damaged" in output
    assert "keys key<fry> [3] 24 damaged" in output
    for leaf in ("half", "keys"):
        assert re.search(rf"{folder / data_file(0)}: leaf '{leaf}' has the checksum \w+ in chunk 0, expected", output)
    code, output = run(tmp_path, "--check", "none")
    assert (code, "damaged" in output) == (0, False)


def test_every_block_of_a_large_leaf_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_checkpoint, "_BLOCK_BYTES", 1 << 16)
    folder = commit(tmp_path, {"x": np.arange(1 << 20).reshape(1 << 10, 1 << 10)})
    assert run(tmp_path)[0] == 0
    flip(folder / data_file(0), -1)
    code, output = run(tmp_path)
    assert (code, output.count("leaf 'x' has the checksum")) == (1, 1)


def test_a_torn_file_is_named_with_its_leaves(tmp_path: Path) -> None:
    first, second = (commit(tmp_path, state(), step) for step in (1, 2))
    file = first / data_file(0)
    num_bytes = file.stat().st_size
    os.truncate(file, num_bytes - 1)
    code, output = run(tmp_path)
    assert code == 1
    assert re.search(r"2 step-00000002 .* verified\s+1 step-00000001 .* damaged", output)
    assert "6 leaves of step-00000002" in output
    assert f"{file}: is of {num_bytes - 1} bytes, expected {num_bytes}: it was truncated or changed; leaves " in output
    assert "'params/kernel'" in output
    shutil.rmtree(second)
    file.unlink()
    code, output = run(tmp_path)
    assert code == 1
    assert f"error: {file}: cannot be read: " in output


def test_a_torn_manifest_is_named(tmp_path: Path) -> None:
    commit(tmp_path, state(), 1)
    folder = commit(tmp_path, state(), 2)
    os.truncate(folder / manifest_file(0), 100)
    code, output = run(tmp_path)
    assert code == 1
    assert re.search(r"2 step-00000002 \? \? 0 s [\d,]+ damaged", output)
    assert "6 leaves of step-00000001" in output
    assert f"{folder / manifest_file(0)}: is no JSON" in output
    (folder / manifest_file(0)).unlink()
    code, output = run(folder)
    assert code == 1
    assert f"{folder / manifest_file(0)}: cannot be read, so this is no finished checkpoint" in output


def test_a_terminal_shows_how_far_it_is(tmp_path: Path) -> None:
    commit(tmp_path, state())
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=120)
    inspect_checkpoint.inspect_checkpoint(tmp_path, check="newest", console=console)
    assert "checking step-00000001" in terminal.getvalue()
    assert "374/374 bytes" in terminal.getvalue()


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    with bx.Checkpointer(tmp_path / "run", bx.Every(1)):
        pass
    code, output = run(tmp_path / "run")
    assert code == 1
    assert f"error: {tmp_path / 'run'}: has no checkpoint yet; give the folder of a run" in output
    commit(tmp_path / "run", state()).rename(tmp_path / "run" / ".step-00000001.0123456789abcdef.unfinished")
    code, output = run(tmp_path / "run")
    assert (code, "1 unfinished: being written, or left by a crash" in output) == (1, True)


def test_options_of_samples_and_of_checkpoints_are_kept_apart(tmp_path: Path) -> None:
    commit(tmp_path / "run", state())
    code, output = run(tmp_path / "run", "--mesh", "data=8")
    assert code == 2
    assert "--mesh is of samples; leave it out" in re.sub(r"\s+", " ", output)
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 2)))
    code, output = run(tmp_path / "x.npz", "--check", "all")
    assert code == 2
    assert "--check is of checkpoints" in re.sub(r"\s+", " ", output)
    code, output = run(tmp_path / "x.npz")
    assert (code, "samples 4" in output) == (0, True)
