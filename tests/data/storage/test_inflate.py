import bz2
import gc
import gzip
import lzma
import os
import pickle
import re
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

import braidax
import braidax.data.storage.inflate as inflate
from braidax.data.storage import LocalFiles
from braidax.data.storage.inflate import compression_of, inflated, inflated_head
from braidax.errors import FormatError, MissingExtra, RecordError
from tests.support.data.formats.reading import read

DATA = bytes(range(256)) * 5_000


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


CODECS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (".gz", gzip.compress),
    "bzip2": (".bz2", bz2.compress),
    "xz": (".xz", lzma.compress),
    "zstd": (".zst", zstd),
}


@pytest.mark.parametrize("name", CODECS)
def test_what_was_compressed_is_found_again(tmp_path: Path, name: str) -> None:
    suffix, compress = CODECS[name]
    paths = [tmp_path / f"{number}.txt{suffix}" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(compress(DATA[number:]) + compress(b"end"))  # two members, as `cat` makes them
    assert compression_of(paths[0].read_bytes()[:6]) == name
    with paths[1].open("rb") as file:
        assert inflated_head(file, name, 5, name="x", stored_bytes=100) == DATA[1:6]
    files = inflated(LocalFiles(paths), cache=tmp_path / "cache")
    assert [Path(found).read_bytes() for found in files.contents.names] == [
        DATA[number:] + b"end" for number in range(3)
    ]
    assert [found.rpartition("-")[2] for found in files.contents.names] == ["0.txt", "1.txt", "2.txt"]


def test_it_is_done_once_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"old"))
    opened = inflated(LocalFiles([path]))
    (first,) = opened.contents.names
    with monkeypatch.context() as patch:
        patch.setattr(inflate, "_inflate", None)
        assert inflated(LocalFiles([path])).contents.names == [first]
    path.write_bytes(gzip.compress(b"new"))
    os.utime(path, ns=(0, 7))
    (second,) = inflated(LocalFiles([path])).contents.names
    gc.collect()
    assert Path(second).read_bytes() == b"new"
    assert {str(found) for found in (tmp_path / "cache").rglob("*-a")} == {first, second}  # the first is in use
    del opened
    gc.collect()
    path.write_bytes(gzip.compress(b"newest"))
    (third,) = inflated(LocalFiles([path])).contents.names
    assert [str(found) for found in (tmp_path / "cache").rglob("*-a")] == [third]


class Unstamped(LocalFiles):
    """Files of which nothing tells when they were written."""

    @property
    def stamps(self) -> list[str]:
        return [""] * len(self.names)


def test_files_without_a_stamp_are_inflated_each_time(tmp_path: Path) -> None:
    for contents in (b"old", b"new"):
        (tmp_path / "a.gz").write_bytes(gzip.compress(contents))
        (found,) = inflated(Unstamped([tmp_path / "a.gz"]), cache=tmp_path / "cache").contents.names
        assert Path(found).read_bytes() == contents


@pytest.mark.parametrize("name", CODECS)
def test_damaged_files_are_named_and_leave_nothing(tmp_path: Path, name: str) -> None:
    suffix, compress = CODECS[name]
    (tmp_path / f"a{suffix}").write_bytes(compress(DATA)[:-20])
    with pytest.raises(FormatError, match=rf"a\{suffix}: {name} data that are truncated or corrupt .*download it"):
        inflated(LocalFiles([tmp_path / f"a{suffix}"]), cache=tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_what_stands_behind_an_xz_stream(tmp_path: Path) -> None:
    """Zeros may, in whole words, and other streams; anything else is damage, and was left out in silence."""
    one, other = lzma.compress(b"one"), lzma.compress(b"other")
    for name, data, contents in (("zeros", one + bytes(8) + other + bytes(4), b"oneother"), ("empty", one, b"one")):
        (tmp_path / f"{name}.xz").write_bytes(data)
        (found,) = inflated(LocalFiles([tmp_path / f"{name}.xz"]), cache=tmp_path / "cache").contents.names
        assert Path(found).read_bytes() == contents
    (tmp_path / "a.xz").write_bytes(one + b"more")
    with pytest.raises(FormatError, match=r"a\.xz: xz data that are truncated or corrupt"):
        inflated(LocalFiles([tmp_path / "a.xz"]), cache=tmp_path / "cache")


def test_what_stands_behind_a_zstd_frame(tmp_path: Path) -> None:
    """Frames that are to be skipped may, as tools that compress in parallel write them, and others; nothing else."""
    skipped = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    (tmp_path / "a.zst").write_bytes(zstd(b"one") + skipped + zstd(b"other") + skipped)
    (found,) = inflated(LocalFiles([tmp_path / "a.zst"]), cache=tmp_path / "cache").contents.names
    assert Path(found).read_bytes() == b"oneother"
    (tmp_path / "b.zst").write_bytes(zstd(b"one") + b"more than a frame")
    with pytest.raises(FormatError, match=r"b\.zst: zstd data that are truncated or corrupt"):
        inflated(LocalFiles([tmp_path / "b.zst"]), cache=tmp_path / "cache")


def test_the_window_of_a_zstd_file_is_limited(tmp_path: Path) -> None:
    """The descriptor of a window of 2 GiB, section 3.1.1.1.2 of RFC 8878, before a last block of four bytes."""
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes([0, (31 - 10) << 3]) + b"\x21\x00\x00" + b"data")
    message = r"a\.txt\.zst: to decompress it takes a window of more than 128 MiB of memory; .*--long"
    for work in (lambda: inflated(LocalFiles([path]), cache=tmp_path / "cache"), lambda: braidax.open(path)):
        with pytest.raises(FormatError, match=message):
            work()


def test_zstd_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"one"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    needed = r"reading files compressed with zstd needs the module 'pyarrow', .*: pip install \"braidax\[arrow\]\""
    with pytest.raises(MissingExtra, match=needed):
        braidax.open(tmp_path / "a.txt.zst")


def of_dictionary(data: bytes, size: int) -> bytes:
    """An xz file that says that it needs a dictionary of another size, the bits of section 5.3.1 of its format."""
    header = bytearray(data[12 : 12 + 4 * data[12] + 4])
    header[header.index(b"\x21\x01") + 2] = size
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    return data[:12] + header + data[12 + len(header) :]


def test_the_memory_of_an_xz_dictionary_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = lzma.compress(b"a line\n" * 1000, preset=1)
    assert lzma.decompress(of_dictionary(data, 22)) == lzma.decompress(data)
    path = tmp_path / "a.txt.xz"
    path.write_bytes(of_dictionary(data, 37))  # 1.5 GiB
    message = rf"a\.txt\.xz: to decompress its {len(data)} bytes takes more than 1,073,741,824 bytes of memory: "
    for work in (lambda: inflated(LocalFiles([path]), cache=tmp_path / "cache"), lambda: braidax.open(path)):
        with pytest.raises(FormatError, match=message):
            work()
    monkeypatch.setenv("BRAIDAX_MAX_BYTES", str(2 << 20))
    path.write_bytes(data)  # 1 MiB
    assert len(braidax.open(path)) == 1000
    path.write_bytes(lzma.compress(b"a line\n" * 1001))  # 8 MiB
    with pytest.raises(FormatError, match="takes more than 2,097,152 bytes of memory"):
        braidax.open(path)


def test_a_bomb_of_a_few_bytes_is_ended_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 401 bytes of bzip2 came 6 GB."""
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BRAIDAX_MAX_BYTES", str(4 << 20))
    path = tmp_path / "a.jsonl.bz2"
    path.write_bytes(bz2.compress(bytes(64 << 20)))
    assert path.stat().st_size < 401
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"a\.jsonl\.bz2: .* bytes become .* or more; expected at most 4,194,304"):
        braidax.open(path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert not list((tmp_path / "cache").rglob("*a.jsonl*"))


def test_what_cannot_be_inflated_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(b"plain")
    with pytest.raises(FormatError, match=r"a\.zst: is compressed with nothing that is known, which .*; decompress it"):
        inflated(LocalFiles([tmp_path / "a.zst"]), cache=tmp_path / "cache")


def test_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"old"))
    (tmp_path / "cache").touch()
    with pytest.raises(FormatError, match=r"a: the decompressed file cannot be written .*BRAIDAX_CACHE"):
        inflated(LocalFiles([tmp_path / "a.gz"]), cache=tmp_path / "cache")


def test_what_is_wrong_inside_names_the_compressed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 1}\n{"n": \n'))
    source = braidax.open(path)
    with pytest.raises(RecordError, match=re.escape(f"{path}, record 1 (at byte 9)")):
        read(source, [1])
    assert source.describe()["files"].endswith("a.jsonl.gz")
    assert read(pickle.loads(pickle.dumps(source)), [0])["n"].tolist() == [1]
