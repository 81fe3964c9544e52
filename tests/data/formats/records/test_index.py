import os
import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import xxhash

import braidax.data.storage.derived as derived
import braidax.data.storage.progress as progress
from braidax.data.formats.records.index import Chunk, RecordIndex
from braidax.data.storage import LocalFiles
from braidax.data.storage.derived import cache_folder
from braidax.errors import FormatError


def scan(file: IO[bytes], name: str) -> Iterator[Chunk]:
    """Records of 4 bytes, two at a time."""
    offset = 0
    while data := file.read(8):
        offsets = np.arange(offset, offset + len(data), 4)
        yield offsets, np.minimum(4, offset + len(data) - offsets)
        offset += len(data)


def refuse(file: IO[bytes], name: str) -> Iterator[Chunk]:
    raise AssertionError(f"{name} is scanned again")
    yield


def write(folder: Path, *sizes: int) -> LocalFiles:
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        (folder / f"{number:03}.bin").write_bytes(bytes(range(size)))
    return LocalFiles(sorted(folder.glob("*.bin")))


def rows(index: RecordIndex) -> list[tuple[int, int, int]]:
    found = index.ranges(np.arange(len(index)))
    return list(zip(*(field.tolist() for field in found), strict=True))


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_records_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path.with_name(f"{tmp_path.name} cache")))
    files = write(tmp_path, 10)
    index = RecordIndex.build(files, scan, kind="fours")
    assert rows(index) == [(0, 0, 4), (0, 4, 4), (0, 8, 2)]
    assert index.starts.tolist() == [0, 3]
    assert [field.dtype for field in index.ranges(np.array([2, 0]))] == [np.int64] * 3
    assert listing(tmp_path) == [".000.bin.fours.index", "000.bin"]
    assert not tmp_path.with_name(f"{tmp_path.name} cache").exists()
    assert index.describe().startswith(f"{tmp_path / '.000.bin.fours.index'} (")


def test_records_of_many_files_in_their_order(tmp_path: Path) -> None:
    files = write(tmp_path, 4, 0, 9, *range(20))
    index = RecordIndex.build(files, scan, kind="fours")
    sizes = [4, 0, 9, *range(20)]
    expected = [(file, at, min(4, size - at)) for file, size in enumerate(sizes) for at in range(0, size, 4)]
    assert rows(index) == expected
    order = np.array([5, 0, len(expected) - 1, 5])
    assert [tuple(row) for row in np.stack(index.ranges(order)).T.tolist()] == [expected[at] for at in order]
    assert len([name for name in listing(tmp_path) if not name.endswith(".bin")]) == 1


def test_an_index_is_built_once(tmp_path: Path) -> None:
    built = RecordIndex.build(write(tmp_path, 10, 3), scan, kind="fours")
    found = RecordIndex.build(LocalFiles(sorted(tmp_path.glob("*.bin"))), refuse, kind="fours")
    assert rows(found) == rows(built)
    assert rows(pickle.loads(pickle.dumps(found))) == rows(built)
    next(tmp_path.glob(".*.index")).unlink()
    with pytest.raises(FormatError, match="the index is gone or was built anew since it was opened; open the data"):
        pickle.loads(pickle.dumps(built))


def test_an_index_moves_with_its_folder(tmp_path: Path) -> None:
    built = RecordIndex.build(write(tmp_path / "old", 10), scan, kind="fours")
    (tmp_path / "old").rename(tmp_path / "new")
    assert rows(RecordIndex.build(LocalFiles([tmp_path / "new" / "000.bin"]), refuse, kind="fours")) == rows(built)


@pytest.mark.parametrize("change", ["size", "time", "kind", "truncated", "other footer", "no index at all"])
def test_a_stale_or_damaged_index_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "000.bin"
    built = RecordIndex.build(write(tmp_path, 10), scan, kind="fours")
    stored = tmp_path / ".000.bin.fours.index"
    kind, expected = "fours", rows(built)
    if change == "size":
        path.write_bytes(bytes(5))
        expected = [(0, 0, 4), (0, 4, 1)]
    elif change == "time":
        os.utime(path, ns=(0, 1))
    elif change == "kind":
        kind = "other"
    elif change == "truncated":
        stored.write_bytes(stored.read_bytes()[16:])
    elif change == "other footer":
        stored.write_bytes(stored.read_bytes().replace(b'"num_records": [3]', b'"num_records": [4]'))
    else:
        stored.write_bytes(b"mine")
    with pytest.raises(AssertionError, match=r"000\.bin is scanned again"):
        RecordIndex.build(LocalFiles([path]), refuse, kind=kind)
    assert rows(RecordIndex.build(LocalFiles([path]), scan, kind=kind)) == expected
    assert rows(RecordIndex.build(LocalFiles([path]), refuse, kind=kind)) == expected


class Unstamped(LocalFiles):
    """Files of which nothing tells when they were written."""

    @property
    def stamps(self) -> list[str]:
        return [""] * len(self.names)


def test_files_without_a_stamp_are_scanned_each_time(tmp_path: Path) -> None:
    files = Unstamped(write(tmp_path, 10).names)
    expected = rows(RecordIndex.build(files, scan, kind="fours"))
    with pytest.raises(AssertionError, match=r"000\.bin is scanned again"):
        RecordIndex.build(files, refuse, kind="fours")
    assert rows(RecordIndex.build(files, scan, kind="fours")) == expected


def test_a_file_that_is_replaced_before_it_is_scanned_is_an_error(tmp_path: Path) -> None:
    files = write(tmp_path, 10)
    (tmp_path / "new").write_bytes(bytes(20))
    (tmp_path / "new").replace(tmp_path / "000.bin")  # what was opened is still there, under no name
    with pytest.raises(
        FormatError, match=r"000\.bin: changed while it was open: 20 bytes, expected 10 .*open it again"
    ):
        RecordIndex.build(files, scan, kind="fours")
    assert listing(tmp_path) == ["000.bin"]


def test_a_scan_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(file: IO[bytes], name: str) -> Iterator[Chunk]:
        yield np.array([0]), np.array([4])
        raise OSError(5, "gone")

    for sizes in ((10,), (10, 10, 10)):
        files = write(tmp_path, *sizes)
        with pytest.raises(FormatError, match=r"000\.bin: cannot be read while its index is built .*gone"):
            RecordIndex.build(files, fail, kind="fours")
        assert [name for name in listing(tmp_path) if not name.endswith(".bin")] == []


def test_a_failing_file_ends_the_others(tmp_path: Path) -> None:
    files = write(tmp_path, *[10] * 20)
    scanned: list[str] = []
    failed = threading.Event()

    def fail(file: IO[bytes], name: str) -> Iterator[Chunk]:
        scanned.append(name)
        if name.endswith("000.bin"):
            failed.set()
            raise FormatError(f"{name}: is damaged")
        assert failed.wait(10)
        yield np.array([0]), np.array([4])

    with pytest.raises(FormatError, match=r"000\.bin: is damaged"):
        RecordIndex.build(files, fail, kind="fours")
    assert len(scanned) < 20


def test_where_the_folder_cannot_be_written_the_cache_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Path] = []
    real = os.open

    def opened(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and Path(path).parent in refused:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    files = write(tmp_path / "data", 10)
    refused.append(tmp_path / "data")
    index = RecordIndex.build(files, scan, kind="fours")
    assert [path.parent for path in (tmp_path / "cache").rglob("*.index")] == [
        tmp_path / "cache" / "derived" / "indexes"
    ]
    assert str(tmp_path / "cache") in index.describe()
    assert rows(RecordIndex.build(files, refuse, kind="fours")) == rows(index)
    refused.append(tmp_path / "cache" / "derived" / "indexes")
    with pytest.raises(FormatError, match=r"in none of .*data \(Permission denied\); .*set the.*BRAIDAX_CACHE"):
        RecordIndex.build(files, scan, kind="other")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("BRAIDAX_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
    monkeypatch.delenv("BRAIDAX_CACHE")
    assert cache_folder() == Path("/xdg/braidax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "braidax"


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    files = write(tmp_path, 10)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FormatError, match=r"fours\.index: the index cannot be written .*No space left.*make room"):
        RecordIndex.build(files, scan, kind="fours")
    assert listing(tmp_path) == ["000.bin"]


def test_many_threads_build_one_index(tmp_path: Path) -> None:
    files = write(tmp_path, 10, 20)
    found: list[list[tuple[int, int, int]]] = []
    threads = [
        threading.Thread(target=lambda: found.append(rows(RecordIndex.build(files, scan, kind="fours"))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert all(one == found[0] for one in found)
    assert len([name for name in listing(tmp_path) if not name.endswith(".bin")]) == 1


def test_a_long_build_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RecordIndex.build(write(tmp_path, 10), scan, kind="quiet")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    RecordIndex.build(write(tmp_path, 100), scan, kind="slow")
    shown = capsys.readouterr()
    assert "index of 000.bin" in shown.err
    assert shown.out == ""


def test_a_thousand_million_records_open_at_once(tmp_path: Path) -> None:
    (tmp_path / "000.bin").write_bytes(b"x")
    files = LocalFiles([tmp_path / "000.bin"])
    RecordIndex.build(files, scan, kind="fours")
    stored = tmp_path / ".000.bin.fours.index"
    num_bytes = 16 * 10**9
    sums = np.zeros(-(-num_bytes // 4096), np.uint64)
    last = (num_bytes - 1) // 4096 * 4096
    sums[-1] = xxhash.xxh3_64_intdigest(bytes(num_bytes - last), last)
    footer = {**_footer(stored), "facts": {"num_records": [10**9]}, "bytes": num_bytes}
    footer["sums"] = xxhash.xxh3_64_hexdigest(sums.data)
    with stored.open("wb") as file:  # a sparse file: nothing is written but its end
        file.seek(num_bytes)
        file.write(sums.data)
        derived._write_footer(file, footer)
    begun = time.process_time()
    index = RecordIndex.build(files, refuse, kind="fours")
    assert time.process_time() - begun < 2.0  # to read 16 GB takes longer, however busy the machine is
    assert len(index) == 10**9
    assert index.ranges(np.array([10**9 - 1])).length.tolist() == [0]


def _footer(path: Path) -> dict[str, Any]:
    found = derived._footer(path)
    assert found is not None
    return found


def test_no_changed_byte_of_an_index_gives_other_data(tmp_path: Path) -> None:
    files = write(tmp_path / "data", *[250] * 30)
    cache = tmp_path / "cache"
    expected = rows(RecordIndex.build(files, scan, kind="fours", cache=cache))
    (path,) = cache.glob("*.index")
    whole, rng = path.read_bytes(), random.Random(0)
    outcomes: Counter[str] = Counter()
    for _ in range(120):
        path.write_bytes(mutated(whole, rng))
        try:
            found = rows(RecordIndex.build(files, scan, kind="fours", cache=cache))
        except FormatError as error:
            outcomes["named" if str(path) in str(error) else str(error)] += 1
        else:
            assert found == expected
            outcomes["right"] += 1
    assert set(outcomes) == {"named", "right"}
    assert outcomes["named"] > 20
    assert outcomes["right"] > 20  # the footer shows it: it was built anew


def mutated(whole: bytes, rng: random.Random) -> bytes:
    """Returns other bytes: some flipped, cut off, put in, or moved."""
    place, length = rng.randrange(len(whole)), rng.randrange(1, 200)
    kind = rng.randrange(4)
    if kind == 0:
        return whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]
    if kind == 1:
        return whole[:place] + whole[place + length :]
    if kind == 2:
        return whole[:place] + rng.randbytes(length) + whole[place:]
    other = rng.randrange(len(whole))
    changed = whole[:place] + whole[other : other + length] + whole[place + length :]
    return changed if changed != whole else whole + b"x"


def test_an_index_that_is_not_ours_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    files = write(tmp_path / "data", 10)
    mine = tmp_path / "data" / ".000.bin.fours.index"
    mine.write_bytes(b"ten years of work")
    index = RecordIndex.build(files, scan, kind="fours")
    assert mine.read_bytes() == b"ten years of work"
    assert index.describe().startswith(str(tmp_path / "cache"))
    assert rows(RecordIndex.build(files, refuse, kind="fours")) == rows(index)
