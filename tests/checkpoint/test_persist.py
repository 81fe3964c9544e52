import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from braidax.checkpoint import restore_safetensors
from braidax.checkpoint.format import folders, manifest, reading
from braidax.checkpoint.format.manifest import Manifest, OtherFormat, data_file, manifest_file
from braidax.checkpoint.format.reading import Reader, read_content, read_manifest
from braidax.checkpoint.format.writing import write
from braidax.checkpoint.snapshot.hold import hold
from braidax.errors import CheckpointError
from tests.support.checkpoint.saving import commit, names, part_of, read_all

LEFTOVER = ".step-00000007.0123456789abcdef.unfinished"
DATA_FILE, MANIFEST_FILE = data_file(0), manifest_file(0)


def a_tree(fill: float = 1.0) -> dict[str, Any]:
    return {"w": np.full((4, 3), fill, np.float32), "b": np.arange(5, dtype=np.int8), "n": 3, "r": -0.1}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = commit(tmp_path, a_tree(), 7)
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
    path = commit(tmp_path, tree) / DATA_FILE
    read = safetensors.numpy.load_file(path)
    assert set(read) == set(tree)
    for name, want in tree.items():
        assert read[name].dtype == want.dtype
        np.testing.assert_array_equal(read[name], want, strict=False)
        assert read[name].shape == want.shape


def test_safetensors_names_narrow_dtypes_and_sees_others_as_bytes(tmp_path: Path) -> None:
    tree = {name: jnp.ones((2, 3), name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4")}
    tree["key"] = jax.random.key_data(jax.random.key(0))
    path = commit(tmp_path, tree | {"z": np.ones(2, np.complex128)}) / DATA_FILE
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


def test_torch_reads_eight_bits_and_numpy_what_lies_beside_them(tmp_path: Path) -> None:
    torch, reader = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    names = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
    tree = {name: jnp.arange(4).astype(name) for name in names} | {"b": np.ones(3)}
    path = commit(tmp_path, tree) / DATA_FILE
    read = reader.load_file(path)
    for name in names:
        assert read[name].dtype == getattr(torch, name)
        assert read[name].view(torch.uint8).numpy().tobytes() == np.asarray(tree[name]).tobytes()
    with safetensors.safe_open(path, framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("b"), np.ones(3))
    got = restore_safetensors(path, tree)
    assert {name: np.asarray(leaf).tobytes() for name, leaf in got.items()} == {
        name: np.asarray(leaf).tobytes() for name, leaf in tree.items()
    }


def test_every_array_is_aligned_to_its_element(tmp_path: Path) -> None:
    tree = {str(i): np.ones(1 + i % 3, dtype) for i, dtype in enumerate(["u1", "f8", "f2", "u1", "f4", "f8", "c8"])}
    content = read_content(commit(tmp_path, tree))
    for tensor in content.manifests[0].tensors:
        assert tensor.offset % np.dtype(content.entries[tensor.path].dtype).itemsize == 0


@pytest.mark.parametrize("number", [True, False, 0, -(2**80), 0.1, -0.0, float("inf"), 5e-324])
def test_python_numbers_are_exact(tmp_path: Path, number: float) -> None:
    read = read_all(commit(tmp_path, {"n": number}))["n"]
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
    commit(tmp_path, a_tree(), 7)
    assert events[:2] == [f"fsync {DATA_FILE}", f"fsync {MANIFEST_FILE}"]
    assert events[2].endswith(".unfinished")
    assert events[3:] == ["rename", f"fsync {tmp_path.name}"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    commit(tmp_path, a_tree(), 6)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step-00000007: the checkpoint could not be written: .*No space left"):
        commit(tmp_path, a_tree(), 7)
    assert names(tmp_path) == ["step-00000006"]


def test_leftovers_of_crashes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / LEFTOVER).mkdir()
    (tmp_path / LEFTOVER / DATA_FILE).write_bytes(b"half")
    (tmp_path / LEFTOVER.replace("7.", "8.")).mkdir()
    others = [".step-00000007.unfinished", "notes", "step-00000001", ".hidden"]
    for other in others:
        (tmp_path / other).mkdir()
    folders.occupy(tmp_path).close()
    assert names(tmp_path) == sorted(others)


def test_a_folder_is_one_runs(tmp_path: Path) -> None:
    first = folders.occupy(tmp_path)
    (tmp_path / LEFTOVER).mkdir()
    with pytest.raises(
        CheckpointError,
        match=rf"path='{tmp_path}': process {os.getpid()} on .+ saves its checkpoints here: expected one .*restore",
    ):
        folders.occupy(tmp_path)
    assert (tmp_path / LEFTOVER).exists()
    folders.check_occupied(tmp_path, first.token)
    first.close()
    second = folders.occupy(tmp_path)
    with pytest.raises(CheckpointError, match="does not have what that process wrote"):
        folders.check_occupied(tmp_path, first.token)
    first.close()
    with pytest.raises(CheckpointError, match="saves its checkpoints here"):
        folders.occupy(tmp_path)
    second.close()


def test_a_lock_ends_with_its_process_though_a_child_goes_on(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from braidax.checkpoint.format import folders
lock = folders.occupy(Path(sys.argv[1]))
if os.fork() == 0:
    print("forked", flush=True)  # what Python does in a child is done
    sys.stdin.read()  # until the test ends
    os._exit(0)
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"forked\n"
        assert process.wait(60) == 0
        folders.occupy(tmp_path).close()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"path='{path}': expected a folder that this process may create"):
            folders.occupy(path)


def test_a_path_that_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"path='/proc/self': expected a folder"):
        folders.occupy(Path("/proc/self"))


def test_no_more_is_written_in_a_second_than_is_allowed(tmp_path: Path) -> None:
    tree = {"x": np.random.default_rng(0).integers(0, 255, 3 << 20, np.uint8)}
    begun = time.monotonic()
    folder = tmp_path / "limited"
    folder.mkdir()
    about = manifest.About(1, "", 1, None, "")
    snapshot = hold(tree).copy()
    write(folder, snapshot, part_of(snapshot).checksums, about, process=0, limit_bytes_per_second=10 << 20)
    assert time.monotonic() - begun >= 0.3
    np.testing.assert_array_equal(read_all(folder)["x"], tree["x"])


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
    folder = commit(tmp_path, a_tree(), 7)
    harm(folder)
    with pytest.raises(CheckpointError, match=reason):
        read_all(folder)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = commit(tmp_path, a_tree(), 7)
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
    content = read_content(commit(tmp_path, a_tree(), 7))
    (tensor,) = [tensor for tensor in content.manifests[0].tensors if tensor.path == "w"]
    with Reader(content) as reader:
        reader.read(content.entries["b"], ((0, 5),))
        os.truncate(content.folder / DATA_FILE, tensor.offset + 4)
        with pytest.raises(CheckpointError, match="ends within leaf 'w': it was truncated"):
            reader.read(content.entries["w"], ((0, 4), (0, 3)))


def test_another_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = commit(tmp_path, a_tree(), 7)
    content = read_manifest(folder).to_json()
    monkeypatch.setattr(manifest, "_FORMAT", 1)
    with pytest.raises(OtherFormat, match=r"is of format 2, written by braidax \d.*; expected format 1: read it with"):
        Manifest.from_json(json.dumps(content).encode(), name="manifest")


def test_only_the_chunks_that_are_needed_are_read_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("writing", "reading"):
        monkeypatch.setattr(f"braidax.checkpoint.format.{module}.CHUNK_BYTES", 1024, raising=False)
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 4096)
    want = np.arange(64 * 8 * 16, dtype=np.int32).reshape(64, 8, 16)  # a row is of 512 bytes
    content = read_content(commit(tmp_path, {"x": want}))
    entry = content.entries["x"]
    boxes = {
        ((0, 64), (0, 8), (0, 16)): 32,
        ((3, 5), (0, 8), (0, 16)): 2,
        ((2, 4), (0, 8), (0, 16)): 1,
        ((2, 3), (0, 8), (4, 7)): 1,
        ((0, 64), (1, 2), (5, 9)): 32,
        ((63, 64), (7, 8), (15, 16)): 1,
    }
    for box, num_chunks in boxes.items():
        with Reader(content) as reader:
            got = reader.read(entry, box)
        np.testing.assert_array_equal(got, want[tuple(slice(*bounds) for bounds in box)])
        assert reader.num_bytes == num_chunks * 1024
    flip(content.folder / DATA_FILE, -1)
    with Reader(content) as reader:
        reader.read(entry, ((0, 62), (0, 8), (0, 16)))
        with pytest.raises(CheckpointError, match=r"leaf 'x' has the checksum \w+ in chunk 31, expected"):
            reader.read(entry, ((62, 63), (0, 1), (0, 1)))


def test_what_is_named_like_a_part_of_another_leaf_is_refused(tmp_path: Path) -> None:
    header = manifest.safetensors_header
    with pytest.raises(CheckpointError, match=r"leaf 'x\[0:2\]': its path is also the name of a part of another leaf"):
        header([("x[0:2]", np.zeros(2)), ("x[0:2]", np.zeros(3))])
