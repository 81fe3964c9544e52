import errno
import fcntl
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy

from braidax.checkpoint.format import writing
from braidax.checkpoint.format.manifest import PAGE_BYTES, About, data_file, safetensors_header
from braidax.checkpoint.format.reading import read_content
from braidax.checkpoint.format.writing import write
from braidax.checkpoint.snapshot.hold import hold
from braidax.errors import CheckpointError
from tests.support.checkpoint.saving import commit, names, part_of, read_all

DIRECT = 1 << 30  # whatever a platform calls it


class Wrote(NamedTuple):
    is_direct: bool
    place: int
    address: int
    num_bytes: int


@dataclass
class Disk:
    """A file system that knows direct writes, and what it saw; `refuse` may raise, or shorten a write.

    Nothing of that reaches the real one below, so that the tests say the same on all.
    """

    refuse: Callable[[Wrote], int | None] = lambda wrote: None
    can_direct: bool = True
    wrote: list[Wrote] = field(default_factory=list)
    num_syncs: int = 0
    flags: int = 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    seen = Disk()

    class File(io.FileIO):
        def write(self, content: Any, /) -> int:
            address = np.frombuffer(content, np.uint8).ctypes.data
            about = Wrote(bool(seen.flags & DIRECT), self.tell(), address, len(content))
            if about.is_direct:
                for number in (about.place, about.address, about.num_bytes):
                    if number % PAGE_BYTES:
                        raise OSError(errno.EINVAL, "Invalid argument")
            num_bytes = seen.refuse(about)
            seen.wrote.append(about if num_bytes is None else about._replace(num_bytes=num_bytes))
            return super().write(content[: seen.wrote[-1].num_bytes])

    def set_flags(file: Any, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL:
            if flags & DIRECT and not seen.can_direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            seen.flags = flags
        return seen.flags

    def synced(descriptor: int) -> None:
        seen.num_syncs += 1

    def opened(self: Path, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        known = self.name == data_file(0) and mode == "xb"
        return File(self, mode) if known else actual(self, mode, *arguments, **keywords)

    actual = Path.open
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(writing, "_DIRECT", DIRECT)
    monkeypatch.setattr(writing, "_WRITE_BYTES", 4 * PAGE_BYTES)
    return seen


def a_tree(num_bytes: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)}


def check(folder: Path, tree: dict[str, Any]) -> None:
    np.testing.assert_array_equal(read_all(folder)["x"], tree["x"])
    np.testing.assert_array_equal(safetensors.numpy.load_file(folder / data_file(0))["x"], tree["x"])
    assert (folder / data_file(0)).stat().st_size == PAGE_BYTES + len(tree["x"])


def refusing(code: int, is_refused: Callable[[Wrote], bool]) -> Callable[[Wrote], None]:
    def refuse(about: Wrote) -> None:
        if is_refused(about):
            raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 4 << 20, (33 << 20) + 77])
def test_any_length_is_written_whole(tmp_path: Path, num_bytes: int) -> None:
    tree = a_tree(num_bytes)
    check(commit(tmp_path, tree), tree)  # on whatever file system this is


def test_arrays_begin_on_a_page() -> None:
    for num_arrays in (0, 1, 30, 60, 100):
        header = safetensors_header((str(number), np.zeros(2)) for number in range(num_arrays))
        assert len(header) % PAGE_BYTES == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8
        assert len(header) - len(header.rstrip(b" ")) < PAGE_BYTES


def test_whole_pages_go_past_the_page_cache_and_the_rest_does_not(tmp_path: Path, disk: Disk) -> None:
    tree = a_tree(9 * PAGE_BYTES + 77)
    check(commit(tmp_path, tree), tree)
    assert [(about.is_direct, about.place // PAGE_BYTES, about.num_bytes) for about in disk.wrote] == [
        (False, 0, PAGE_BYTES),  # the header
        (True, 1, 4 * PAGE_BYTES),
        (True, 5, 4 * PAGE_BYTES),
        (True, 9, PAGE_BYTES),
        (False, 10, 77),
    ]


def test_a_file_system_that_knows_no_direct_writes_gets_others(tmp_path: Path, disk: Disk) -> None:
    disk.can_direct = False
    tree = a_tree(9 * PAGE_BYTES + 77)
    check(commit(tmp_path, tree), tree)
    assert not any(about.is_direct for about in disk.wrote)
    assert sum(about.num_bytes for about in disk.wrote) == 10 * PAGE_BYTES + 77


def test_a_platform_that_knows_no_direct_writes_does_others(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_DIRECT", 0)
    tree = a_tree(9 * PAGE_BYTES + 77)
    check(commit(tmp_path, tree), tree)
    assert not any(about.is_direct for about in disk.wrote)
    assert sum(about.num_bytes for about in disk.wrote) == 10 * PAGE_BYTES + 77


def test_a_file_system_that_refuses_only_when_it_is_written_to_gets_others(tmp_path: Path, disk: Disk) -> None:
    disk.refuse = refusing(errno.EINVAL, lambda about: about.is_direct)
    tree = a_tree(9 * PAGE_BYTES + 77)
    check(commit(tmp_path, tree), tree)
    assert not any(about.is_direct for about in disk.wrote)


def test_short_writes_are_gone_on_with(tmp_path: Path, disk: Disk) -> None:
    disk.refuse = lambda about: min(about.num_bytes, PAGE_BYTES)
    tree = a_tree(9 * PAGE_BYTES + 77)
    check(commit(tmp_path, tree), tree)
    assert sum(about.is_direct for about in disk.wrote) == 9
    disk.wrote.clear()
    disk.refuse = lambda about: min(about.num_bytes, 512)  # after which nothing is aligned
    check(commit(tmp_path, tree, 2), tree)
    assert disk.flags == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_an_error_of_a_direct_write_is_the_error_of_the_checkpoint(tmp_path: Path, disk: Disk, code: int) -> None:
    commit(tmp_path, a_tree(9), 6)
    disk.refuse = refusing(code, lambda about: about.is_direct and about.place > PAGE_BYTES)
    expected = (
        rf"step-00000007: the checkpoint could not be written: \[Errno {code}\] {os.strerror(code)}; make room or mend "
        "the disk. Earlier checkpoints are untouched"
    )
    with pytest.raises(CheckpointError, match=expected):
        commit(tmp_path, a_tree(9 * PAGE_BYTES), 7)
    assert names(tmp_path) == ["step-00000006"]


@pytest.mark.parametrize(("flag", "can_direct", "num_syncs"), [(DIRECT, True, 1), (DIRECT, False, 4), (0, True, 4)])
def test_a_limit_holds_back_what_the_page_cache_would_take(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, flag: int, can_direct: bool, num_syncs: int
) -> None:
    monkeypatch.setattr(writing, "_DIRECT", flag)
    disk.can_direct = can_direct
    tree = a_tree(50 * PAGE_BYTES + 77)  # in 4 writes of 64 KiB at most; the last one has the tail
    part = part_of(hold(tree).copy())
    about = About(1, "", 1, None, "")
    write(tmp_path, part.owned.result(), part.checksums, about, process=0, limit_bytes_per_second=1e5 * PAGE_BYTES)
    check(tmp_path, tree)
    assert disk.num_syncs == num_syncs


def test_what_was_written_before_headers_had_whole_pages_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braidax.checkpoint.format.manifest.PAGE_BYTES", 8)
    tree = a_tree(5)
    folder = commit(tmp_path, tree)
    (tensor,) = read_content(folder).manifests[0].tensors
    assert tensor.offset < 200
    np.testing.assert_array_equal(read_all(folder)["x"], tree["x"])
