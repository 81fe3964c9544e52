"""The formats: how each is written, how ours opens it, and which libraries read it, in which ways."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

import braidax as bx
from benchmarks.formats import readers, written
from benchmarks.formats.readers import Open
from benchmarks.formats.written import IMAGE, TOKENS, Arrays

Kind = Literal["rows", "images", "tokens", "photos"]
Stream = Callable[[Path, int, int, int], Iterator[Arrays]]
"""Goes through so many samples, in batches of so many, by so many threads: all of them once, shuffled."""

BATCH: Mapping[Kind, int] = {"rows": 1024, "images": 512, "tokens": 512, "photos": 64}


@dataclass(frozen=True)
class Library:
    """Who reads a format besides.

    **Fields:** `name`; `module`: that it needs. `at_random`: opens a file, and fetches samples where they lie. `whole`:
    opens a file by reading all of it, and fetches from memory. `stream`: goes through the file once, in its order.
    """

    name: str
    module: str
    at_random: Open | None = None
    whole: Open | None = None
    stream: Stream | None = None


@dataclass(frozen=True)
class Format:
    """A format.

    **Fields:** `name`. `kind`: of its samples. `file`: its name. `write`: makes it, of arrays or, of photographs, of
    their number. `libraries`. `open`: as ours is opened. `needs`: modules that writing or opening it takes.
    """

    name: str
    kind: Kind
    file: str
    write: Callable[[Path, Any], None]
    libraries: Sequence[Library]
    open: Callable[[Path], Any] = bx.open
    needs: Sequence[str] = field(default_factory=tuple)

    @property
    def key(self) -> str:
        """What `--only` calls it."""
        return self.name.lower().replace(" ", "_").replace(",", "")


def _open_array_record(path: Path) -> Any:
    return bx.open(path, columns={"record": jax.ShapeDtypeStruct((math.prod(IMAGE),), "uint8")})


def _open_tokens(path: Path) -> Any:
    return bx.data.open_tokens(path, "uint16", sequence_length=TOKENS)


def _open_megatron(path: Path) -> Any:
    return bx.open(path, sequence_length=TOKENS)


_PYARROW = ("pyarrow",)
_WRITES_TEXT = ("polars",)

FORMATS = (
    Format(
        "Parquet",
        "rows",
        "rows.parquet",
        written.parquet,
        [Library("pyarrow", "pyarrow", whole=readers.parquet)],
        needs=_PYARROW,
    ),
    Format(
        "Arrow",
        "rows",
        "rows.arrow",
        written.arrow,
        [Library("pyarrow", "pyarrow", at_random=readers.arrow_mapped, whole=readers.arrow)],
        needs=_PYARROW,
    ),
    Format(
        "Feather, LZ4",
        "rows",
        "rows.feather",
        written.feather,
        [Library("pyarrow", "pyarrow", whole=readers.feather)],
        needs=_PYARROW,
    ),
    Format(
        "Hugging Face",
        "rows",
        "rows",
        written.hugging_face,
        [Library("datasets", "datasets", at_random=readers.hugging_face)],
        needs=("datasets",),
    ),
    Format(
        "CSV",
        "rows",
        "rows.csv",
        written.csv,
        [
            Library("pyarrow", "pyarrow", whole=readers.csv_pyarrow),
            Library("Polars", "polars", whole=readers.csv_polars),
        ],
        needs=_WRITES_TEXT,
    ),
    Format(
        "JSON Lines",
        "rows",
        "rows.jsonl",
        written.json_lines,
        [
            Library("pyarrow", "pyarrow", whole=readers.json_pyarrow),
            Library("Polars", "polars", whole=readers.json_polars),
        ],
        needs=(*_WRITES_TEXT, "msgspec"),
    ),
    Format(
        "TFRecord",
        "rows",
        "rows.tfrecord",
        written.tfrecord,
        [
            Library("tf.data", "tensorflow", stream=readers.tfrecord_tensorflow),
            Library("protobuf", "google.protobuf", whole=readers.tfrecord_protobuf),
        ],
        needs=("google_crc32c",),
    ),
    Format(
        "ArrayRecord",
        "images",
        "images.array_record",
        written.array_record,
        [Library("array_record", "array_record", at_random=readers.array_record)],
        open=_open_array_record,
        needs=("array_record",),
    ),
    Format(
        "WebDataset",
        "images",
        "images.tar",
        written.webdataset,
        [Library("webdataset", "webdataset", stream=readers.webdataset)],
    ),
    Format(
        "HDF5",
        "images",
        "images.h5",
        written.hdf5,
        [Library("h5py", "h5py", at_random=readers.hdf5_rows, whole=readers.hdf5)],
        needs=("h5py",),
    ),
    Format(
        "HDF5, chunks",
        "images",
        "chunks.h5",
        written.hdf5_chunks,
        [Library("h5py", "h5py", at_random=readers.hdf5_rows, whole=readers.hdf5)],
        needs=("h5py",),
    ),
    Format(
        "Zarr",
        "images",
        "images.zarr",
        written.zarr,
        [Library("zarr", "zarr", at_random=readers.zarr_rows, whole=readers.zarr)],
        needs=("zarr",),
    ),
    Format(
        "npy",
        "images",
        "images.npy",
        written.npy,
        [Library("NumPy", "numpy", at_random=readers.npy_mapped, whole=readers.npy)],
    ),
    Format("npz", "images", "images.npz", written.npz, [Library("NumPy", "numpy", whole=readers.npz)]),
    Format(
        "raw tokens",
        "tokens",
        "tokens.bin",
        written.raw_tokens,
        [Library("NumPy", "numpy", at_random=readers.raw_tokens, whole=readers.raw_tokens_whole)],
        open=_open_tokens,
    ),
    Format(
        "Megatron",
        "tokens",
        "tokens.idx",
        written.megatron,
        [Library("NumPy", "numpy", at_random=readers.megatron, whole=readers.megatron_whole)],
        open=_open_megatron,
    ),
    Format(
        "image folder",
        "photos",
        "photos",
        written.photos,
        [
            Library("Pillow", "PIL", at_random=readers.photos_pillow),
            Library("OpenCV", "cv2", at_random=readers.photos_opencv),
        ],
        needs=("PIL", "cv2", "simplejpeg", "numba"),
    ),
)
