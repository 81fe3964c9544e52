"""Writes MDS folders byte for byte as MosaicML Streaming's MDSWriter does, values already encoded."""

import bz2
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

EXTENSIONS = {"brotli": "br", "zstd": "zstd", "snappy": "snappy", "gzip": "gz", "bz2": "bz2"}


def static_size(encoding: str) -> int | None:
    kind, _, details = encoding.partition(":")
    dtype, _, dims = details.partition(":")
    if kind == "ndarray":
        return int(np.prod([int(dim) for dim in dims.split(",")])) * np.dtype(dtype).itemsize if dims else None
    if kind == "int":
        return 8
    return np.dtype(kind).itemsize if kind.startswith(("int", "uint", "float")) else None


def write_mds(
    folder: Path,
    encodings: Mapping[str, str],
    samples: Sequence[Mapping[str, bytes]],
    *,
    per_shard: int = 100,
    codec: str | None = None,
    hashes: Sequence[str] = (),
) -> Path:
    """Writes samples, of the encoded value of each column; returns the folder."""
    folder.mkdir(parents=True)
    names = sorted(encodings)
    extension = EXTENSIONS[codec] if codec else None
    config = {
        "version": 2,
        "format": "mds",
        "compression": extension,
        "hashes": list(hashes),
        "size_limit": None,
        "column_names": names,
        "column_encodings": [encodings[name] for name in names],
        "column_sizes": [static_size(encodings[name]) for name in names],
    }
    head = json.dumps(config, sort_keys=True).encode()
    entries: list[dict[str, Any]] = []
    for number, start in enumerate(range(0, len(samples), per_shard)):
        encoded = [encode(encodings, sample) for sample in samples[start : start + per_shard]]
        offsets = np.cumsum([0, *map(len, encoded)]) + 4 * (len(encoded) + 2) + len(head)
        raw = np.array([len(encoded), *offsets], "<u4").tobytes() + head + b"".join(encoded)
        name = f"shard.{number:05}.mds"
        entry: dict[str, Any] = {"samples": len(encoded), "raw_data": described(name, raw, hashes), "zip_data": None}
        if codec:
            packed = compress(raw, codec)
            entry["zip_data"] = described(f"{name}.{extension}", packed, hashes)
            (folder / f"{name}.{extension}").write_bytes(packed)
        else:
            (folder / name).write_bytes(raw)
        entries.append(config | entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}, sort_keys=True))
    return folder


def encode(encodings: Mapping[str, str], sample: Mapping[str, bytes]) -> bytes:
    names = sorted(encodings)
    sizes = [len(sample[name]) for name in names if static_size(encodings[name]) is None]
    return np.array(sizes, "<u4").tobytes() + b"".join(sample[name] for name in names)


def described(name: str, data: bytes, hashes: Sequence[str]) -> dict[str, Any]:
    digests = {algorithm: hashlib.new(algorithm, data).hexdigest() for algorithm in hashes}
    return {"basename": name, "bytes": len(data), "hashes": digests}


def compress(data: bytes, codec: str) -> bytes:
    if codec in ("gzip", "bz2"):
        return {"gzip": gzip.compress, "bz2": bz2.compress}[codec](data)
    import pyarrow

    return pyarrow.compress(data, codec, asbytes=True)
