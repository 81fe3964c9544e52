"""Nothing is removed or overwritten that no checkpointer has written, whatever its name."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from braidax.checkpoint import Checkpointer, Every, restore
from braidax.checkpoint.format import folders
from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.errors import CheckpointError
from tests.support.checkpoint.saving import commit, names

LIKE: dict[str, Any] = {"x": jnp.zeros(4), "n": 0}


def tree(number: int) -> dict[str, Any]:
    return {"x": jnp.full(4, number, jnp.float32), "n": number}


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def thesis(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("three years of work")


def others(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"weights of another program")
    (folder / manifest_file(0)).write_text('{"by": "another program"}')


def linked(folder: Path) -> None:
    elsewhere = folder.parent.parent / f"elsewhere-{folder.name}"
    commit(elsewhere, tree(1), int(folder.name.split("-")[1]))
    folder.symlink_to(elsewhere / folder.name)


def kept_with_notes(folder: Path) -> None:
    commit(folder.parent, tree(1), int(folder.name.split("-")[1]))
    (folder / "notes.txt").write_text("the one of the paper")


def copied(folder: Path) -> None:
    shutil.copytree(commit(folder.parent / "other", tree(1), 3), folder)


def emptied(folder: Path) -> None:
    commit(folder.parent, tree(1), int(folder.name.split("-")[1]))
    (folder / manifest_file(0)).write_bytes(b"")
    (folder / data_file(0)).write_bytes(b"")


@pytest.mark.parametrize("step", [1, 99])
@pytest.mark.parametrize("make", [thesis, others, linked, kept_with_notes, copied, emptied])
def test_what_is_not_the_runs_own_stays(
    tmp_path: Path, make: Callable[[Path], None], step: int, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, Every(1), keep=1) as saver:
        saver.num_updates = 10
        saver.update(tree(11))
    folder = root / f"step-{step:08d}"
    make(folder)
    before = content(folder)
    is_valid = make in (linked, kept_with_notes) and step == 99
    with Checkpointer(root, Every(1), keep=1) as saver:
        got = saver.restore(LIKE)
        assert (got["n"], saver.num_updates) == ((1, 99) if is_valid else (11, 11))
        with caplog.at_level(logging.WARNING, logger="braidax"):
            for number in range(1, 4):
                saver.update(tree(number))
    assert content(folder) == before
    assert caplog.text.count(f"{folder} is not removed: ") == 1
    newest = (99 if is_valid else 11) + 3
    assert {name for name in names(root) if name.startswith("step-")} == {folder.name, f"step-{newest:08d}"}
    assert restore(root, LIKE).step == newest


def test_a_copy_under_a_later_name_is_skipped_and_said_so(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        for number in (1, 2, 3):
            saver.update(tree(number))
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000099")
    with Checkpointer(tmp_path, Every(1)) as saver:
        assert saver.restore(LIKE)["n"] == 3
        assert saver.num_updates == 3
        (skipped,) = saver.skipped
        assert skipped.path.name == "step-00000099"
        assert skipped.reason == (
            f"{tmp_path}/step-00000099: holds the checkpoint of step 1, as its manifest says: it is a copy, or was "
            f"renamed; to restore it, give it the name step-00000001, or move it out of {tmp_path}"
        )
    got = restore(tmp_path, LIKE)
    assert (got.step, got.tree["n"], [each.path.name for each in got.skipped]) == (3, 3, ["step-00000099"])


def test_what_is_damaged_goes_when_it_is_known_to_be_our_own(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Every(1)) as saver:
        for number in (1, 2, 3):
            saver.update(tree(number))
    (tmp_path / "step-00000003" / manifest_file(0)).write_bytes(b"{}")
    (tmp_path / "step-00000002" / data_file(0)).unlink()
    with Checkpointer(tmp_path, Every(1), keep=1) as saver:
        assert saver.restore(LIKE)["n"] == 1
        saver.update(tree(2))
    assert names(tmp_path) == ["step-00000002-1"]


def test_a_leftover_goes_but_for_what_others_put_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine, mixed, link = (tmp_path / f".step-00000007.{digit * 16}.unfinished" for digit in "abc")
    for folder in (mine, mixed):
        folder.mkdir()
        (folder / data_file(0)).write_bytes(b"half")
    (mixed / "thesis.tex").write_text("three years of work")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / data_file(0)).write_bytes(b"of another run")
    link.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, logger="braidax"):
        folders.occupy(tmp_path).close()
    assert names(tmp_path) == sorted([mixed.name, link.name, "elsewhere"])
    assert content(mixed) == {"thesis.tex": b"three years of work"}
    assert content(tmp_path / "elsewhere") == {data_file(0): b"of another run"}
    assert f"{mixed} stays, because of thesis.tex, which no checkpointer has written" in caplog.text


@pytest.mark.parametrize("text", ["held by another program", '{"pid": 1}'])
def test_a_lock_file_of_another_program_is_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / ".lock").write_text(text)
    with pytest.raises(CheckpointError, match=r"has a file \.lock that no Checkpointer wrote, and that one would over"):
        Checkpointer(tmp_path, Every(1))
    assert (tmp_path / ".lock").read_text() == text


def test_a_lock_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis").write_bytes(b"")
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(CheckpointError, match="expected a folder that this process may create and write to"):
        Checkpointer(tmp_path / "run", Every(1))
    assert (tmp_path / "thesis").read_bytes() == b""


@pytest.mark.parametrize("left", [b"", b"\0" * 80])
def test_a_lock_that_a_crash_has_left_is_taken(tmp_path: Path, left: bytes) -> None:
    (tmp_path / ".lock").write_bytes(left)
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save(tree(1))
    Checkpointer(tmp_path, Every(1)).close()
