"""Records: text, JSON Lines, CSV, TFRecord, ArrayRecord, WebDataset, MDS, plain and compressed.

What is right says Python's own library of the format, or a reader of a few lines.
"""

import bz2
import csv
import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import google_crc32c
import numpy as np
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordWriter

import braidax.data as data
from tests.support.data.formats.example import example
from tests.support.data.formats.mds import write_mds
from tests.support.data.fuzz.case import Case, Samples, only_file

_NUM_RECORDS = 40
_Rows = list[dict[str, Any] | None]
"""Samples; None for those that another reader refuses."""


def _record(number: int) -> dict[str, Any]:
    return {
        "id": number * 1000 - 7,
        "x": number / 4,
        "text": f'é{number}, "quoted"\n' * (number % 3),
        "flag": number % 3 == 0,
        "point": [number, -number, number << 20],
        "ragged": list(range(number % 5)),
    }


def _columns(rows: _Rows) -> Samples:
    names = list(dict.fromkeys(name for row in rows if row is not None for name in row))
    return {name: [None if row is None else row.get(name) for row in rows] for name in names}


def _or_none(read: Callable[[Any], Any], given: Any) -> Any:
    try:
        return read(given)
    except Exception:  # noqa: BLE001 (what another library raises for one sample)
        return None


def _lines(stored: bytes) -> list[bytes]:
    lines = stored.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    ended = [line.removesuffix(b"\r") for line in lines[:-1]]
    return [*ended, *([lines[-1].removesuffix(b"\r")] if lines[-1] else [])]


def _text_bytes() -> bytes:
    return "".join(f"line {number} é\n" * (number % 3) for number in range(_NUM_RECORDS)).encode()


def _text_rows(stored: bytes) -> Samples:
    return {"text": [_or_none(bytes.decode, line) for line in _lines(stored)]}


def _json_bytes() -> bytes:
    return "".join(json.dumps(_record(number)) + "\n" for number in range(_NUM_RECORDS)).encode()


def _json_rows(stored: bytes) -> Samples:
    rows = [_or_none(json.loads, line) for line in _lines(stored) if line]
    return _with_masks(_columns(rows), [not isinstance(row, dict) for row in rows])


def _with_masks(samples: Samples, is_damaged: Sequence[bool]) -> Samples:
    """Fills in what stands for a null, in columns that hold some, and says where; damaged records stay as they are."""
    found = dict(samples)
    for name, values in samples.items():
        held = [value for value in values if not _lacks(value)]
        nulls = [_lacks(value) and not damaged for value, damaged in zip(values, is_damaged, strict=True)]
        if held and any(nulls):
            filled = _filling(held)
            found[name] = [filled if null else value for value, null in zip(values, nulls, strict=True)]
            found[f"{name}.is_valid"] = [not null for null in nulls]
    return found


def _lacks(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_lacks, cast("list[Any]", value))))


def _filling(held: Sequence[Any]) -> Any:
    first = held[0]
    if isinstance(first, list):
        return np.zeros_like(first).tolist() if len({np.shape(value) for value in held}) == 1 else []
    if isinstance(first, str | bool):
        return type(first)()
    return np.nan if any(isinstance(value, float) for value in held) else 0


def _csv_bytes() -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["id", "x", "text", "flag"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(_record(number) for number in range(_NUM_RECORDS))
    return file.getvalue().encode()


def _csv_rows(stored: bytes) -> Samples:
    text = stored.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    text = text.removesuffix("\r")  # as if a newline were cut off
    text = re.sub("\r(?!\n)", "\ue000", text)  # alone it ends no record
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    rows = [[value.replace("\ue000", "\r") for value in row] for row in rows]
    names = rows[0]
    found = [row if len(row) == len(names) else [None] * len(names) for row in rows[1:]]
    columns = {name: [row[number] for row in found] for number, name in enumerate(names)}
    typed = {name: numbers for name, values in columns.items() if (numbers := _numbers(values))}
    return {**columns, **_with_masks(typed, [row[0] is None for row in found])}


def _numbers(values: Sequence[str | None]) -> list[Any]:
    """Returns a column with empty cells, whose others are all numbers, as these and None; else nothing."""
    held = [value for value in values if value]
    for number in (int, float):
        if "" in values and held and all("_" not in value and _or_none(number, value) is not None for value in held):
            return [number(value) if value else None for value in values]
    return []


def _concatenated(parts: Sequence[Samples]) -> Samples:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def _compressed(write: Callable[[], bytes], compress: Callable[[bytes], bytes], name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(compress(write()))


def _of_file(read: Callable[[bytes], Samples], expand: Callable[[bytes], bytes] = bytes) -> Callable[[Path], Samples]:
    return lambda folder: read(expand(only_file(folder).read_bytes()))


def _example(number: int) -> dict[str, Any]:
    return {
        "id": number - 7,
        "x": number / 4,
        "name": b"n%d" % number,
        "point": [number / 2, -1.0],
        "ragged": list(range(1 + number % 5)),
    }


def _message(number: int) -> bytes:
    found = _example(number)
    return example({name: value if isinstance(value, list) else [value] for name, value in found.items()})


_EXAMPLES = {_message(number): _example(number) for number in range(_NUM_RECORDS)}


def _masked(stored: bytes) -> bytes:
    crc = google_crc32c.value(stored)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _tfrecord_bytes() -> bytes:
    framed = [(struct.pack("<Q", len(message)), message) for message in _EXAMPLES]
    return b"".join(length + _masked(length) + message + _masked(message) for length, message in framed)


def _tfrecord_rows(stored: bytes) -> Samples:
    rows: _Rows = []
    while stored:
        length, message = stored[:8], stored[12 : 12 + int.from_bytes(stored[:8], "little")]
        assert stored[8:12] == _masked(length)
        check = stored[12 + len(message) : 16 + len(message)]
        assert len(check) == 4
        rows.append(_EXAMPLES[message] if check == _masked(message) else None)
        stored = stored[16 + len(message) :]
    return _columns(rows)


def _array_record(folder: Path, options: str) -> None:
    writer = ArrayRecordWriter(str(folder / "a.array_record"), options)
    for message in _EXAMPLES:
        writer.write(message)
    writer.close()


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _tar_bytes(kind: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for number in range(12):
            long = "long " * 30 if number % 4 == 0 else ""
            fields = {
                "bin": bytes([number]) * (number * 37 % 700),
                "cls": str(number).encode(),
                "json": json.dumps({"n": number}).encode(),
                "npy": _npy(np.arange(6).reshape(2, 3) + number),
            }
            for extension, stored in fields.items():
                member = tarfile.TarInfo(f"a/{long}{number:04}.{extension}")
                member.size = len(stored)
                archive.addfile(member, io.BytesIO(stored))
    return file.getvalue()


def _tar_rows(stored: bytes) -> Samples:
    rows: dict[str, Any] = {}
    with tarfile.open(fileobj=io.BytesIO(stored)) as archive:
        for member in archive:
            folder, slash, file = member.name.rpartition("/")
            stem, _, extension = file.partition(".")
            content = archive.extractfile(member)
            if content is not None and stem and extension:
                rows.setdefault(folder + slash + stem, {})[extension.lower()] = content.read()
    return _columns([{name: _tar_field(name, stored) for name, stored in row.items()} for row in rows.values()])


def _tar_field(name: str, stored: bytes) -> Any:
    kinds: dict[str, Callable[[bytes], Any]] = {
        "cls": int,
        "json": bytes.decode,
        "npy": lambda stored: np.load(io.BytesIO(stored)),
    }
    return _or_none(kinds.get(name, bytes), stored)


_MDS = {"id": "int64", "x": "float32", "text": "str", "raw": "bytes", "n": "uint8", "v": "ndarray:int16:2"}


def _mds(folder: Path, **options: Any) -> None:
    write_mds(
        folder / "mds",
        _MDS,
        [
            {
                "id": np.int64(number * 1000).tobytes(),
                "x": np.float32(number / 4).tobytes(),
                "text": ("é" * number).encode(),
                "raw": b"\0\xff" * (number % 7),
                "n": np.uint8(number).tobytes(),
                "v": np.array([number, -number], np.int16).tobytes(),
            }
            for number in range(_NUM_RECORDS)
        ],
        per_shard=15,
        **options,
    )


def _open_mds(folder: Path) -> data.Source:
    return data.open(folder / "mds")


def _read_mds(folder: Path) -> Samples:
    rows: _Rows = []
    index = json.loads((folder / "mds" / "index.json").read_text())
    expand = {"gz": gzip.decompress, "bz2": bz2.decompress, None: bytes}
    for entry in index["shards"]:
        packed = entry["zip_data"]
        name = (packed or entry["raw_data"])["basename"]
        content: Any = (folder / "mds" / name).read_bytes()
        if packed:
            codec = entry["compression"]
            size = entry["raw_data"]["bytes"]
            content = pa.decompress(content, size, codec, asbytes=True) if codec == "zstd" else expand[codec](content)
        for algorithm, digest in entry["raw_data"]["hashes"].items():
            assert hashlib.new(algorithm, content).hexdigest() == digest
        offsets = np.frombuffer(content, "<u4", entry["samples"] + 1, 4).tolist()
        names, kinds, sizes = (entry[f"column_{key}"] for key in ("names", "encodings", "sizes"))
        for start, stop in itertools.pairwise(offsets):
            values = _mds_values(content[start:stop], sizes)
            rows.append(
                None
                if values is None
                else {
                    name: _or_none(_mds_kind(kind), value)
                    for name, kind, value in zip(names, kinds, values, strict=True)
                }
            )
    return _columns(rows)


def _mds_values(stored: bytes, sizes: Sequence[int | None]) -> list[bytes] | None:
    place = 4 * sum(size is None for size in sizes)
    lengths = iter(np.frombuffer(stored[:place], "<u4").tolist())
    values: list[bytes] = []
    for size in sizes:
        length = next(lengths) if size is None else size
        values.append(stored[place : place + length])
        place += length
    return values if place == len(stored) else None


def _mds_kind(encoding: str) -> Callable[[bytes], Any]:
    kind, _, details = encoding.partition(":")
    if kind == "ndarray":
        return lambda stored: np.frombuffer(stored, details.partition(":")[0])
    known: dict[str, Callable[[bytes], Any]] = {"str": bytes.decode, "bytes": bytes}
    return known.get(kind) or (lambda stored: np.frombuffer(stored, kind)[0])


def _zstd(stored: bytes) -> bytes:
    return pa.compress(stored, "zstd", asbytes=True)


CASES = [
    Case("lines", lambda folder: (folder / "a.txt").write_bytes(_text_bytes()), read=_of_file(_text_rows)),
    Case("jsonl", lambda folder: (folder / "a.jsonl").write_bytes(_json_bytes()), read=_of_file(_json_rows)),
    Case("csv", lambda folder: (folder / "a.csv").write_bytes(_csv_bytes()), read=_of_file(_csv_rows)),
    Case(
        "csv of two files",
        lambda folder: [(folder / f"{name}.csv").write_bytes(_csv_bytes()) for name in "ab"],
        lambda folder: data.open(f"{folder}/*.csv"),
        lambda folder: _concatenated([_csv_rows((folder / f"{name}.csv").read_bytes()) for name in "ab"]),
    ),
    Case(
        "tfrecord", lambda folder: (folder / "a.tfrecord").write_bytes(_tfrecord_bytes()), read=_of_file(_tfrecord_rows)
    ),
    Case(
        "array record",
        lambda folder: _array_record(folder, "group_size:1"),
        read=lambda _: _columns(list(_EXAMPLES.values())),
    ),
    Case(
        "array record in groups",
        lambda folder: _array_record(folder, "group_size:8"),
        read=lambda _: _columns(list(_EXAMPLES.values())),
    ),
    Case("tar", lambda folder: (folder / "a.tar").write_bytes(_tar_bytes()), read=_of_file(_tar_rows)),
    Case(
        "tar of gnu",
        lambda folder: (folder / "a.tar").write_bytes(_tar_bytes(tarfile.GNU_FORMAT)),
        read=_of_file(_tar_rows),
    ),
    Case("tar.gz", _compressed(_tar_bytes, gzip.compress, "a.tar.gz"), read=_of_file(_tar_rows, gzip.decompress)),
    Case("jsonl.gz", _compressed(_json_bytes, gzip.compress, "a.jsonl.gz"), read=_of_file(_json_rows, gzip.decompress)),
    Case("csv.xz", _compressed(_csv_bytes, lzma.compress, "a.csv.xz"), read=_of_file(_csv_rows, lzma.decompress)),
    Case("csv.bz2", _compressed(_csv_bytes, bz2.compress, "a.csv.bz2"), read=_of_file(_csv_rows, bz2.decompress)),
    Case("jsonl.xz", _compressed(_json_bytes, lzma.compress, "a.jsonl.xz"), read=_of_file(_json_rows, lzma.decompress)),
    Case("lines.zst", _compressed(_text_bytes, _zstd, "a.txt.zst"), read=lambda _: _text_rows(_text_bytes())),
    Case(
        "tfrecord.gz",
        _compressed(_tfrecord_bytes, gzip.compress, "a.tfrecord.gz"),
        read=_of_file(_tfrecord_rows, gzip.decompress),
    ),
    Case("mds", _mds, _open_mds, _read_mds),
    Case("mds zstd", lambda folder: _mds(folder, codec="zstd", hashes=["sha1"]), _open_mds, _read_mds),
    Case("mds gzip", lambda folder: _mds(folder, codec="gzip"), _open_mds, _read_mds),
    Case("mds bz2", lambda folder: _mds(folder, codec="bz2"), _open_mds, _read_mds),
]
