"""Writes the same records in every format: rows of a table, small images, tokens, photographs."""

import importlib
import io
import itertools
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

TOKENS = 512  # in a sample
IMAGE = (32, 32, 3)
PHOTO = (192, 256)  # height and width
_NUM_IDS, _NUM_NUMBERS = 8, 11  # columns of a table, beside its label
_CHUNK = 16  # samples
_DOCUMENT = 700  # tokens
_CRC_ADDED = 0xA282EAD8


def rows(num_samples: int) -> Arrays:
    """Returns the columns of a table: a label and 8 ids, int32, and 11 numbers of four digits, float32; each `[n]`."""
    rng = np.random.default_rng(0)
    found: Arrays = {"label": rng.integers(0, 2, num_samples, dtype=np.int32)}
    found |= {f"id{number}": rng.integers(0, 10**6, num_samples, dtype=np.int32) for number in range(_NUM_IDS)}
    return found | {f"x{number}": rng.random(num_samples).round(4).astype(np.float32) for number in range(_NUM_NUMBERS)}


def images(num_samples: int) -> Arrays:
    """Returns images, uint8 `[n, 32, 32, 3]` of 16 values, and labels, int32 `[n]`."""
    rng = np.random.default_rng(1)
    return {
        "image": rng.integers(0, 16, (num_samples, *IMAGE), dtype=np.uint8),
        "label": rng.integers(0, 10, num_samples, dtype=np.int32),
    }


def tokens(num_samples: int) -> Arrays:
    """Returns tokens, uint16 `[n, 512]`."""
    return {"tokens": np.random.default_rng(2).integers(0, 50_000, (num_samples, TOKENS), dtype=np.uint16)}


def parquet(path: Path, arrays: Arrays) -> None:
    """Writes Parquet of 8 row groups, by pyarrow's defaults."""
    import pyarrow.parquet

    table = _table(arrays)
    pyarrow.parquet.write_table(table, path, row_group_size=max(1, table.num_rows // 8))


def arrow(path: Path, arrays: Arrays) -> None:
    """Writes Arrow without compression, in batches of 65,536 rows."""
    import pyarrow.feather

    pyarrow.feather.write_feather(_table(arrays), str(path), compression="uncompressed")


def feather(path: Path, arrays: Arrays) -> None:
    """Writes Feather as it is by default: LZ4, in batches of 65,536 rows."""
    import pyarrow.feather

    pyarrow.feather.write_feather(_table(arrays), str(path), compression="lz4")


def hugging_face(path: Path, arrays: Arrays) -> None:
    """Writes the folder of a Hugging Face data set."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset(_table(arrays)).save_to_disk(str(path))


def csv(path: Path, arrays: Arrays) -> None:
    """Writes CSV with a header."""
    import polars

    polars.DataFrame(arrays).write_csv(path)


def json_lines(path: Path, arrays: Arrays) -> None:
    """Writes an object a line."""
    import polars

    polars.DataFrame(arrays).write_ndjson(path)


def npy(path: Path, arrays: Arrays) -> None:
    """Writes the images alone."""
    np.save(path, arrays["image"])


def npz(path: Path, arrays: Arrays) -> None:
    """Writes images and labels, without compression."""
    np.savez(path, image=arrays["image"], label=arrays["label"])


def hdf5(path: Path, arrays: Arrays) -> None:
    """Writes contiguous data sets."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def hdf5_chunks(path: Path, arrays: Arrays) -> None:
    """Writes chunks of 16 samples, deflated."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            chunks = (min(_CHUNK, len(array)), *array.shape[1:])
            file.create_dataset(name, data=array, chunks=chunks, compression="gzip", compression_opts=1)


def zarr(path: Path, arrays: Arrays) -> None:
    """Writes a group of arrays in chunks of 16 images, and of 1,024 labels, by Zarr's default codec."""
    import zarr as library

    group: Any = library.open_group(str(path), mode="w")
    for name, array in arrays.items():
        chunks = (min(_CHUNK if array.ndim > 1 else 1024, len(array)), *array.shape[1:])
        group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks)[:] = array


def tfrecord(path: Path, arrays: Arrays) -> None:
    """Writes examples of the rows of a table: a feature for each column."""
    import google_crc32c

    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + _CRC_ADDED) & 0xFFFFFFFF)

    with path.open("wb") as file:
        for values in zip(*(array.tolist() for array in arrays.values()), strict=True):
            data = _example(dict(zip(arrays, values, strict=True)))
            length = struct.pack("<Q", len(data))
            file.write(b"".join([length, masked(length), data, masked(data)]))


def array_record(path: Path, arrays: Arrays) -> None:
    """Writes the bytes of images, each a record of its own."""
    module: Any = importlib.import_module("array_record.python.array_record_module")
    writer: Any = module.ArrayRecordWriter(str(path), "group_size:1")
    for image in arrays["image"]:
        writer.write(image.tobytes())
    writer.close()


def webdataset(path: Path, arrays: Arrays) -> None:
    """Writes one tar: an `.npy` and a `.cls` a sample."""
    with tarfile.open(path, "w") as archive:
        for number, (image, label) in enumerate(zip(arrays["image"], arrays["label"].tolist(), strict=True)):
            saved = io.BytesIO()
            np.save(saved, image)
            for extension, data in {"npy": saved.getvalue(), "cls": str(label).encode()}.items():
                member = tarfile.TarInfo(f"{number:08}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def raw_tokens(path: Path, arrays: Arrays) -> None:
    """Writes ids without a header."""
    arrays["tokens"].tofile(path)


def megatron(path: Path, arrays: Arrays) -> None:
    """Writes an index of documents of 700 tokens, and the ids beside it."""
    ids = arrays["tokens"].ravel()
    ids.tofile(path.with_suffix(".bin"))
    starts = np.arange(0, len(ids), _DOCUMENT, dtype="<i8")
    lengths = np.minimum(_DOCUMENT, len(ids) - starts).astype("<i4")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(starts), len(starts) + 1)
    borders = np.arange(len(starts) + 1, dtype="<i8")
    tables = [lengths, starts * ids.itemsize, borders]
    path.write_bytes(head + b"".join(table.tobytes() for table in tables))


def photos(path: Path, num_samples: int) -> None:
    """Writes JPEG files of 256 x 192 pixels, quality 90, in ten class folders."""
    from PIL import Image

    rng, (height, width) = np.random.default_rng(3), PHOTO
    for number in range(num_samples):
        folder = path / f"class{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        pixels = np.clip(smooth + rng.integers(-12, 13, smooth.shape, dtype=np.int16), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:06}.jpg", "JPEG", quality=90)


def _table(arrays: Arrays) -> Any:
    import pyarrow

    return pyarrow.table(dict(arrays))


def _example(values: Mapping[str, int | float]) -> bytes:
    """Returns a tf.train.Example of one number a feature, as protobuf has it."""
    entries: list[bytes] = []
    for name, value in values.items():
        if isinstance(value, int):
            numbers = _field(3, _field(1, _varint(value)))
        else:
            numbers = _field(2, _field(1, struct.pack("<f", value)))
        entries.append(_field(1, _field(1, name.encode()) + _field(2, numbers)))
    return _field(1, b"".join(entries))


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    parts = list(itertools.takewhile(bool, (value >> shift for shift in range(0, 64, 7)))) or [0]
    return bytes([*((part & 127) | 128 for part in parts[:-1]), parts[-1] & 127])
