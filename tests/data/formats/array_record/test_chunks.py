import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import zstandard

import braidax.data as data
from braidax.data.formats.array_record import chunks
from braidax.data.formats.array_record.chunks import chunk_places, record_contents
from braidax.data.formats.array_record.source import open_array_record
from braidax.data.storage import LocalFiles
from braidax.data.storage.files import compiled, joined
from braidax.errors import ArgumentError, FormatError, MissingExtra, RecordError
from tests.support.data.formats.array_record import written
from tests.support.data.formats.reading import read
from tests.support.data.storage.faulty_server import serving

BINDING: Any = compiled()
UNCACHED = data.Remote(cache_bytes=0)
KEY = b"Riegeli/records\nRiegeli/records\n"
BLOCK, BLOCK_HEADER, CHUNK_HEADER = 1 << 16, 24, 40


def own(*paths: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Opens files without the format's library."""
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    return open_array_record(LocalFiles(paths), **options)


def of_length(number: int, length: int) -> bytes:
    """A record of few values, which zstd makes shorter."""
    return np.random.default_rng(number).integers(0, 16, length, np.uint8).tobytes()


@pytest.mark.parametrize("by_lanes", [True, False])
def test_hashes_are_those_of_highway_hash(by_lanes: bool) -> None:
    """Against the vectors that its authors publish, for the key 0, 1, 2, … and bytes 0, 1, 2, …"""
    found = [BINDING.highway(bytes(range(32)), bytes(range(size)), by_lanes) for size in range(4)]
    assert found == [0x907A56DE22C26E53, 0x7EAB43AAC7CDDD78, 0xB8D0569AB0B53D62, 0x5C6BEFAB8A463D80]
    first = bytes.fromhex("83af70d10d884a3f00000000000000004000000000000000")
    assert BINDING.highway(KEY, first[8:24], by_lanes).to_bytes(8, "little") == first[:8]  # of every file of Riegeli
    assert BINDING.highway(KEY, b"", by_lanes).to_bytes(8, "little") == bytes.fromhex("e19f13c0e9b1c372")


def test_both_ways_to_hash_agree_for_any_length() -> None:
    content = np.random.default_rng(0).bytes(3_000)
    for size in (*range(200), 2_999, 3_000):
        assert BINDING.highway(KEY, content[:size], True) == BINDING.highway(KEY, content[:size], False), size
    with pytest.raises(ValueError, match="expected a key of 32 bytes"):
        BINDING.highway(KEY[:31], b"", True)


@pytest.mark.parametrize("options", ["group_size:1", "group_size:1,uncompressed", "group_size:1,zstd:19"])
def test_records_are_read_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    """Of any length, also of none, and however they lie between the headers of blocks."""
    lengths = [0, 1, 3_000, 200_000, 65_472, 65_473, 65_536, 1 << 20, *range(300, 900), *[97] * 3_000, 0]
    records = [of_length(number, length) for number, length in enumerate(lengths)]
    path = written(tmp_path / "a.array_record", records, options)
    empty = written(tmp_path / "b.array_record", [])
    source = own(path, empty, path, monkeypatch=monkeypatch)
    assert len(source) == 2 * len(records)
    for again in (source, pickle.loads(pickle.dumps(source))):
        order = np.random.default_rng(1).permutation(2 * len(records)).tolist()
        assert read(again, [*order, 5, 5])["record"].tolist() == [(records * 2)[number] for number in [*order, 5, 5]]
    assert source[3]["record"] == records[3]


@pytest.mark.parametrize(
    "options", ["group_size:1,brotli", "group_size:1,snappy", "group_size:1,transpose", "group_size:4"]
)
def test_what_is_written_otherwise_is_left_to_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    records = [of_length(number, 500) for number in range(30)]
    others = [of_length(number, 700) for number in range(30, 50)]
    path = written(tmp_path / "a.array_record", records, options)
    plain = written(tmp_path / "b.array_record", others)
    source = open_array_record(LocalFiles([path, plain]), columns=["record"])
    order = np.random.default_rng(1).permutation(50).tolist()
    assert read(source, order)["record"].tolist() == [(records + others)[number] for number in order]
    source.prepare(np.arange(-2, 60))
    with pytest.raises(MissingExtra, match=r'reading ArrayRecord needs .*"braidax\[array-record\]"'):
        read(own(path, monkeypatch=monkeypatch, columns=["record"]), [0])


def test_without_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.array_record", [b"x"])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=r"reading ArrayRecord needs the module 'zstandard'"):
        open_array_record(LocalFiles([path]))


@pytest.mark.parametrize("options", ["group_size:1", "group_size:1,uncompressed"])
def test_a_byte_that_changed_is_seen(tmp_path: Path, options: str) -> None:
    """Wherever it lies in a chunk; the others are read."""
    records = [of_length(number, 60) for number in range(4)]
    whole = written(tmp_path / "a.array_record", records, options).read_bytes()
    places = chunk_places(LocalFiles([tmp_path / "a.array_record"]), 0)
    assert places is not None
    assert len(places) == 5
    for place in range(int(places[1]), int(places[2])):
        path = tmp_path / "b.array_record"
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        source = open_array_record(LocalFiles([path]), columns=["record"])
        assert read(source, [0, 2, 3])["record"].tolist() == [records[0], records[2], records[3]]
        with pytest.raises(RecordError, match=r"b.array_record, record 1: cannot be read"):
            read(source, [1])


def wrapped(values: bytes, *, kind: bytes = b"r", num_records: int = 1, num_bytes: int | None = None) -> bytes:
    """A chunk with hashes that hold, at the beginning of a block."""
    header = struct.pack(
        "<QQQQ",
        len(values),
        BINDING.highway(KEY, values, True),
        kind[0] | num_records << 8,
        len(values) if num_bytes is None else num_bytes,
    )
    return bytes(BLOCK_HEADER) + struct.pack("<Q", BINDING.highway(KEY, header, True)) + header + values


def test_chunks_that_lie_are_not_believed() -> None:
    """Their hashes hold: anyone can make them."""
    frame = zstandard.ZstdCompressor().compress(b"abc")
    good = wrapped(b"\0\1\3abc", num_bytes=3)
    assert record_contents(joined([good]), np.zeros(1, np.int64)) == [b"abc"]
    assert record_contents(joined([good]), np.full(1, 7)) == [None]  # it is not at the beginning of a block
    packed = wrapped(b"z\1\3\3" + frame, num_bytes=3)
    wrong = [
        good[:60],
        good[:-1],
        b"",
        wrapped(b""),
        wrapped(b"\0"),
        wrapped(b"\0\1\3abc", num_bytes=4),
        wrapped(b"\0\1\3abc", num_bytes=-1 & (1 << 64) - 1),
        wrapped(b"\0\7\3abc", num_bytes=3),
        wrapped(b"\0" + b"\xff" * 9 + b"\1" + b"abc", num_bytes=3),
        wrapped(b"\0\1\3abc", num_bytes=3, kind=b"t"),
        wrapped(b"\0\1\3abc", num_bytes=3, num_records=2),
        wrapped(b"b\1\3abc", num_bytes=3),
        wrapped(b"z\1\3\4" + frame, num_bytes=4),
        wrapped(b"z\1\3\2" + frame, num_bytes=2),
        wrapped(b"z\1\3\3" + frame[:-1], num_bytes=3),
        wrapped(b"z\1\3\xff\xff\xff\xff\xff\xff\xff\x3f" + frame, num_bytes=(1 << 55) - 1),
        wrapped(b"z\1\3\3", num_bytes=3),
        wrapped(b"z\1\3\x83", num_bytes=3),
    ]
    for content in wrong:
        assert record_contents(joined([content]), np.zeros(1, np.int64)) == [None], content
    places = np.zeros(2, np.int64)
    assert [*map(bytes, record_contents(joined([good, packed]), places))] == [b"abc", b"abc"]
    assert record_contents(joined([good, wrong[-1]]), places) == [b"abc", None]
    rows = np.zeros((2, 8), np.int64)
    jumping = wrapped(b"z\x5a\3\3", num_bytes=3)  # its values would begin in the chunk behind it, where there is a 3
    chunks_of_two = joined([jumping, wrapped(b"\3" * 9)])
    data = chunks_of_two.data.copy()
    BINDING.unwrap(data, chunks_of_two.starts, chunks_of_two.lengths, places, rows)
    assert rows[:, 0].tolist() == [-1, -1]
    with pytest.raises(ValueError, match="expected chunks that are in the data, and a row for each"):
        BINDING.unwrap(np.zeros(9, np.uint8), places, places + 10, places, np.zeros((2, 8), np.int64))
    with pytest.raises(ValueError, match="expected chunks that are in the data"):
        BINDING.unwrap(np.zeros(9, np.uint8), places, places, places, np.zeros((2, 7), np.int64))


def listed(offsets: list[int], *, about: list[int] | None = None, place: int = 1 << 17, num_records: int = 1) -> bytes:
    """The end of a file: a list of chunks, and where it begins."""

    def number(value: int) -> bytes:
        found = bytearray()
        while value > 0x7F:
            found.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*found, value])

    facts = [1, len(offsets), len(offsets)] if about is None else about
    head = b"".join(bytes([tag]) + number(fact) for tag, fact in zip((8, 16, 24), facts, strict=True))
    head = b"\x0a" + number(len(head)) + head
    chunks = [b"\x08" + number(offset) + b"\x10\3\x18" + number(num_records) for offset in offsets]
    sizes = b"".join(number(len(message)) for message in (head, *chunks))
    values = head + b"".join(chunks)
    listing = wrapped(
        b"\0" + number(len(sizes)) + sizes + values, num_records=len(offsets) + 1, num_bytes=len(values)
    ).ljust(BLOCK, b"\0")
    last = (b"\x08" + number(place) + b"\x10" + number(0x71930E704FDAE05E)) * 3
    return listing + wrapped(b"\0\3\0\0\0" + last, num_records=3, num_bytes=len(last)).ljust(BLOCK, b"\0")


def test_lists_of_chunks_that_lie_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"

    def places(end: bytes) -> list[int] | None:
        path.write_bytes(bytes(1 << 17) + end)
        found = chunk_places(LocalFiles([path]), 0)
        return None if found is None else found.tolist()

    assert places(listed([64, 900, 1 << 16])) == [64, 900, 1 << 16, 1 << 17]
    assert places(listed([])) == [1 << 17]
    wrong = [
        listed([64, 900, 900]),
        listed([900, 64]),
        listed([64, 1 << 17]),
        listed([64, 1 << 40]),
        listed([64, (1 << 64) - 1]),
        listed([64], about=[2, 1, 1]),
        listed([64], about=[1, 2, 2]),
        listed([64], about=[1, 1, 2]),
        listed([64, 900], about=[1, 1, 1]),
        listed([64], about=[1, 1 << 50, 1 << 50]),
        listed([64], num_records=2),
        listed([64], num_records=0),
        listed([64], place=0),
        listed([64], place=(1 << 17) + BLOCK),
        listed([64], place=1 << 60),
        listed([64], place=(1 << 64) - 5),
        listed([64], place=(1 << 17) - BLOCK),
        listed([64])[:-1],
        bytes(BLOCK),
    ]
    for number, end in enumerate(wrong):
        assert places(end) is None, number
        with pytest.raises(FormatError, match=r"a.array_record: is no ArrayRecord file, or a truncated one"):
            open_array_record(LocalFiles([path]))


def test_long_lists_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [b"%d" % number for number in range(300)]
    path = written(tmp_path / "a.array_record", records)
    monkeypatch.setattr(chunks, "_PIECE_BYTES", 37)
    assert read(own(path, monkeypatch=monkeypatch))["record"].tolist() == records


def test_many_frames_at_once_are_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 16, (500, 8, 8, 3), np.uint8)
    path = written(tmp_path / "a.array_record", [image.tobytes() for image in images])
    source = own(path, monkeypatch=monkeypatch, columns={"record": jax.ShapeDtypeStruct((8, 8, 3), "uint8")})
    order = np.random.default_rng(1).permutation(500)
    assert np.array_equal(read(source, order.tolist())["record"], images[order])


def test_records_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    records = [of_length(number, 40 * number) for number in range(200)]
    path = written(tmp_path / "a.array_record", records)
    whole = path.read_bytes()
    places = chunk_places(LocalFiles([path]), 0)
    assert places is not None
    corrupt = bytearray(whole)
    corrupt[places[7] + 60] ^= 1
    groups = written(tmp_path / "groups", records, "group_size:4").read_bytes()
    with serving({"a.array_record": whole, "b.array_record": bytes(corrupt), "groups": groups}) as server:
        source = data.open(f"{server.url}/a.array_record", remote=UNCACHED)
        order = np.random.default_rng(1).permutation(200).tolist()
        assert read(source, order)["record"].tolist() == [records[number] for number in order]
        one = data.open(f"{server.url}/b.array_record", remote=UNCACHED)
        assert read(one, [8, 6])["record"].tolist() == [records[8], records[6]]
        with pytest.raises(
            RecordError, match=r"b.array_record, record 7: is corrupt, or in a group: from a store records"
        ):
            read(one, [8, 7])
        with pytest.raises(
            ArgumentError, match=r"groups: is no ArrayRecord file, a truncated one, .* or copy it to a disk"
        ):
            data.open(f"{server.url}/groups", remote=UNCACHED)
