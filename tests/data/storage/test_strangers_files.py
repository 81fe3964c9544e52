"""A cache deletes and overwrites what it can prove to be its own, and nothing else."""

import os
from pathlib import Path

import pytest

from braidax.data.storage.cache import PageCache
from braidax.data.storage.options import PAGE_BYTES

SEGMENT = 16 * PAGE_BYTES
DATA = bytes(range(256)) * (SEGMENT // 256)
ROOM = 4 * SEGMENT
KEYS = [f"object {number}" for number in range(12)]


def overflowing(folder: Path) -> PageCache:
    """Returns a cache that was given three times what it may hold."""
    cache = PageCache(folder, ROOM, KEYS, [SEGMENT] * len(KEYS), segment_bytes=SEGMENT)
    for number in range(len(KEYS)):
        cache.store(number, 0, memoryview(DATA))
    return cache


def segments(cache: PageCache) -> list[Path]:
    return [path for number in range(len(KEYS)) if (path := cache.path(number, 0)).exists()]


def state(folder: Path) -> dict[str, object]:
    """Returns every entry below a folder, with its contents or where it leads."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def test_strangers_files_in_the_folder_of_the_cache_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_bytes(b"ten years of work" * 9999)
    (tmp_path / "checkpoint.safetensors").write_bytes(bytes(2 * ROOM))
    (tmp_path / "lock").write_bytes(b"the only key")
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    for path in (tmp_path / "thesis" / "thesis.tex", tmp_path / "checkpoint.safetensors"):
        os.utime(path, (0, 0))  # the longest unused of all
    before = state(tmp_path)
    cache = overflowing(tmp_path)
    after = state(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert 0 < len(segments(cache)) < len(KEYS)  # it made room among its own


def test_what_only_looks_like_a_segment_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"elsewhere")
    cache = overflowing(tmp_path / "cache")
    own = segments(cache)[0]
    real = own.read_bytes()
    strangers = {
        own.with_name("notes.txt"): real,  # what a segment holds, under no segment's name
        own.with_name("0" * 32 + own.name[32:]): real,  # a segment's name, and what another one holds
        own.with_name(own.parent.name + "0" * 30 + own.name[32:]): b"mine",
        own.with_name(own.parent.name + "1" * 30 + own.name[32:]): b"",
        own.parent.with_name("xyz") / own.name: real,  # no folder of segments
        own.parent / "deeper" / own.name: real,
    }
    for path, contents in strangers.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(contents)
    link = own.with_name(own.parent.name + "2" * 30 + own.name[32:])
    link.symlink_to(outside)
    linked_folder = tmp_path / "linked"
    linked_folder.mkdir()
    (linked_folder / own.name).write_bytes(real)
    (own.parent.parent / "fe").is_dir() or (own.parent.parent / "fe").symlink_to(linked_folder)
    for path in strangers:
        os.utime(path, (0, 0))
    overflowing(tmp_path / "cache")
    assert {path: path.read_bytes() for path in strangers} == strangers
    assert link.is_symlink()
    assert outside.read_bytes() == b"elsewhere"
    assert (linked_folder / own.name).read_bytes() == real


@pytest.mark.parametrize("kind", ["file", "symlink"])
def test_what_lies_in_the_place_of_a_segment_is_not_overwritten(tmp_path: Path, kind: str) -> None:
    cache = PageCache(tmp_path / "cache", 1 << 30, ["a"], [SEGMENT], segment_bytes=SEGMENT)
    path, outside = cache.path(0, 0), tmp_path / "thesis.tex"
    path.parent.mkdir(parents=True)
    outside.write_bytes(b"ten years of work")
    if kind == "symlink":
        path.symlink_to(outside)
    else:
        path.write_bytes(b"ten years of work")
    with pytest.warns(RuntimeWarning, match="was not written by Braidax; move it away"):
        cache.store(0, 0, memoryview(DATA))
    assert outside.read_bytes() == path.read_bytes() == b"ten years of work"
    assert cache.read([(0, 0, 5)]) == [None]
