import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from braidax.checkpoint import persist
from braidax.checkpoint.manifest import DATA_FILE, MANIFEST_FILE, Manifest
from braidax.checkpoint.snapshot import Snapshot, hold
from braidax.errors import CheckpointError

LEFTOVER = ".step-00000007.0123456789abcdef.unfinished"


def a_snapshot(fill: float = 1.0) -> Snapshot:
    return hold({"w": np.full((4, 3), fill, np.float32), "b": np.arange(5, dtype=np.int8), "n": 3, "r": -0.1}).copy()


def read_all(folder: Path) -> dict[str, Any]:
    manifest = persist.read_manifest(folder)
    with persist.reader(folder, manifest) as reader:
        return {
            entry.leaf.path: reader.read(entry, entry.tensor) if entry.tensor else entry.number
            for entry in manifest.entries
        }


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = persist.commit(tmp_path, a_snapshot(), 7)
    assert folder == tmp_path / "step-00000007"
    assert names(tmp_path) == ["step-00000007"]
    assert names(folder) == [DATA_FILE, MANIFEST_FILE]
    content = read_all(folder)
    np.testing.assert_array_equal(content["w"], np.ones((4, 3), np.float32))
    np.testing.assert_array_equal(content["b"], np.arange(5, dtype=np.int8))
    assert (content["n"], content["r"]) == (3, -0.1)


def test_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    tree = {
        name: np.asarray(jnp.arange(6).reshape(2, 3).astype(name))
        for name in ("bool", "int8", "int16", "int32", "uint8", "uint32", "float16", "float32", "complex64")
    }
    tree |= {"float64": np.arange(3.0), "int64": np.int64(-5), "empty": np.zeros((0, 2))}
    path = persist.commit(tmp_path, hold(tree).copy(), 1) / DATA_FILE
    read = safetensors.numpy.load_file(path)
    assert set(read) == set(tree)
    for name, want in tree.items():
        assert read[name].dtype == want.dtype
        np.testing.assert_array_equal(read[name], want, strict=False)
        assert read[name].shape == want.shape


def test_safetensors_names_narrow_dtypes_and_sees_others_as_bytes(tmp_path: Path) -> None:
    tree = {name: jnp.ones((2, 3), name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4")}
    tree["key"] = jax.random.key_data(jax.random.key(0))
    path = persist.commit(tmp_path, hold(tree | {"z": np.ones(2, np.complex128)}).copy(), 1) / DATA_FILE
    with safetensors.safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the object is no mapping
        seen = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    assert seen == {
        "bfloat16": ("BF16", [2, 3]),
        "float8_e4m3fn": ("F8_E4M3", [2, 3]),
        "float8_e5m2": ("F8_E5M2", [2, 3]),
        "int4": ("U8", [2, 3, 1]),
        "key": ("U32", [2]),
        "z": ("U8", [2, 16]),
    }


def test_every_array_is_aligned_to_its_element(tmp_path: Path) -> None:
    tree = {str(i): np.ones(1 + i % 3, dtype) for i, dtype in enumerate(["u1", "f8", "f2", "u1", "f4", "f8", "c8"])}
    for entry in persist.read_manifest(persist.commit(tmp_path, hold(tree).copy(), 1)).entries:
        assert entry.tensor is not None
        assert entry.tensor.offset % np.dtype(entry.tensor.dtype).itemsize == 0


@pytest.mark.parametrize("number", [True, False, 0, -(2**80), 0.1, -0.0, float("inf"), 5e-324])
def test_python_numbers_are_exact(tmp_path: Path, number: float) -> None:
    read = read_all(persist.commit(tmp_path, hold({"n": number}).copy(), 1))["n"]
    assert type(read) is type(number)
    assert repr(read) == repr(number)


def test_everything_is_durable_before_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        events.append("fsync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    persist.commit(tmp_path, a_snapshot(), 7)
    assert events[:2] == [f"fsync {DATA_FILE}", f"fsync {MANIFEST_FILE}"]
    assert events[2].endswith(".unfinished")
    assert events[3:] == ["rename", f"fsync {tmp_path.name}"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    persist.commit(tmp_path, a_snapshot(), 6)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step-00000007: the checkpoint could not be written: .*No space left"):
        persist.commit(tmp_path, a_snapshot(), 7)
    assert names(tmp_path) == ["step-00000006"]


def test_the_same_step_again_is_a_revision_that_replaces_the_first(tmp_path: Path) -> None:
    persist.commit(tmp_path, a_snapshot(1.0), 7)
    second = persist.commit(tmp_path, a_snapshot(2.0), 7)
    assert [found[:2] for found in persist.checkpoints(tmp_path)] == [(7, 1), (7, 0)]
    persist.retain(tmp_path, 3, ())
    assert names(tmp_path) == ["step-00000007-1"]
    assert read_all(second)["w"][0, 0] == 2.0


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100_000_000, 20):
        persist.commit(tmp_path, a_snapshot(), step)
    persist.retain(tmp_path, 2, [tmp_path / "step-00000010"])
    assert names(tmp_path) == ["step-00000020", "step-100000000"]


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    persist.commit(tmp_path, a_snapshot(), 1)
    persist.commit(tmp_path, a_snapshot(), 2)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(CheckpointError, match=r"step-00000001: this old checkpoint could not be removed: .*denied"):
        persist.retain(tmp_path, 1, ())


def test_leftovers_of_crashes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / LEFTOVER).mkdir()
    (tmp_path / LEFTOVER / DATA_FILE).write_bytes(b"half")
    (tmp_path / LEFTOVER.replace("7.", "8.")).mkdir()
    others = [".step-00000007.unfinished", "notes", "step-00000001", ".hidden"]
    for other in others:
        (tmp_path / other).mkdir()
    persist.prepare(tmp_path)
    assert names(tmp_path) == sorted(others)


def test_what_a_live_process_writes_is_left_alone(tmp_path: Path) -> None:
    data = tmp_path / LEFTOVER / DATA_FILE
    data.parent.mkdir()
    with data.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        persist.prepare(tmp_path)
        assert data.exists()
    persist.prepare(tmp_path)
    assert not data.parent.exists()


def test_a_folder_swept_away_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir, made = Path.mkdir, list[Path]()

    def swept(self: Path, *arguments: Any, **keywords: Any) -> None:
        mkdir(self, *arguments, **keywords)
        made.append(self)
        if len(made) == 1:
            persist.prepare(tmp_path)

    monkeypatch.setattr(Path, "mkdir", swept)
    assert persist.commit(tmp_path, a_snapshot(), 7).exists()
    assert not made[0].exists()
    assert names(tmp_path) == ["step-00000007"]


def test_a_folder_that_is_always_swept_away_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def swept(self: Path, *arguments: Any, **keywords: Any) -> None:
        mkdir(self, *arguments, **keywords)
        self.rmdir()

    monkeypatch.setattr(Path, "mkdir", swept)
    with pytest.raises(CheckpointError, match="8 unfinished folders were removed by other processes"):
        persist.commit(tmp_path, a_snapshot(), 7)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"path='{path}': expected a folder that this process may create"):
            persist.prepare(path)


def test_a_path_that_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"path='/proc/self': expected a folder"):
        persist.prepare(Path("/proc/self"))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: flip(folder / DATA_FILE, -1), "leaf 'b' has the checksum"),
        (lambda folder: flip(folder / DATA_FILE, 12), "its header is not what was written"),
        (lambda folder: flip(folder / DATA_FILE, 0), "its header is not what was written"),
        (lambda folder: os.truncate(folder / DATA_FILE, 100), "is of 100 bytes, expected"),
        (lambda folder: (folder / DATA_FILE).unlink(), "cannot be read: .*No such file"),
        (lambda folder: (folder / MANIFEST_FILE).unlink(), "so this is no finished checkpoint"),
        (lambda folder: os.truncate(folder / MANIFEST_FILE, 50), "is no JSON"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("[]"), "does not match its own checksum"),
        (lambda folder: (folder / MANIFEST_FILE).write_bytes(b"\xff\xfe\x00"), "is no JSON"),
    ],
)
def test_harm_is_noticed(tmp_path: Path, harm: Callable[[Path], object], reason: str) -> None:
    folder = persist.commit(tmp_path, a_snapshot(), 7)
    harm(folder)
    with pytest.raises(CheckpointError, match=reason):
        read_all(folder)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = persist.commit(tmp_path, a_snapshot(), 7)
    for path in (folder / DATA_FILE, folder / MANIFEST_FILE):
        whole = path.read_bytes()
        for position in range(0, len(whole), 7):
            if path.name == MANIFEST_FILE and whole[position : position + 1].isspace():
                continue
            flip(path, position)
            with pytest.raises(CheckpointError):
                read_all(folder)
            path.write_bytes(whole)
    read_all(folder)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    folder = persist.commit(tmp_path, a_snapshot(), 7)
    manifest = persist.read_manifest(folder)
    (entry,) = [entry for entry in manifest.entries if entry.leaf.path == "w"]
    assert entry.tensor is not None
    with persist.reader(folder, manifest) as reader:
        os.truncate(folder / DATA_FILE, entry.tensor.offset + 4)
        with pytest.raises(CheckpointError, match="ends within leaf 'w': it was truncated"):
            reader.read(entry, entry.tensor)


def test_a_later_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = persist.commit(tmp_path, a_snapshot(), 7)
    content = persist.read_manifest(folder).to_json()
    monkeypatch.setattr("braidax.checkpoint.manifest._FORMAT", 0)
    with pytest.raises(CheckpointError, match=r"is of format 1, written by braidax \d.*; expected format 0"):
        Manifest.from_json(json.dumps(content).encode(), name="manifest")
