"""How the libraries read: each function opens what was written, and returns what fetches samples by their numbers.

Libraries that have no access at random read a file once, in its order, through a buffer that holds all of it: theirs
return batches instead.
"""

import importlib
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.formats.written import PHOTO, TOKENS, Arrays

Order = NDArray[np.int64]
Fetch = Callable[[Order], Arrays]
Open = Callable[[Path, int], Fetch]
"""Opens a path with so many threads of the library's own."""

_MEGATRON_HEAD = struct.Struct("<9sQBQQ")
_RECORD_HEAD = struct.Struct("<Q4x")


def taken(arrays: Mapping[str, Any]) -> Fetch:
    """Fetches rows of arrays."""
    return lambda order: {name: np.take(array, order, axis=0) for name, array in arrays.items()}


def parquet(path: Path, threads: int) -> Fetch:
    """pyarrow: the table in memory."""
    import pyarrow.parquet

    return _of_arrow(pyarrow.parquet.read_table(path, use_threads=threads > 1).combine_chunks())


def arrow_mapped(path: Path, threads: int) -> Fetch:
    """pyarrow: the batches of a mapped file."""
    import pyarrow as pa

    return _of_arrow(pa.ipc.open_file(pa.memory_map(str(path))).read_all())


def arrow(path: Path, threads: int) -> Fetch:
    """pyarrow: all batches as one, in memory."""
    import pyarrow as pa

    return _of_arrow(pa.ipc.open_file(pa.memory_map(str(path))).read_all().combine_chunks())


def feather(path: Path, threads: int) -> Fetch:
    """pyarrow: the table in memory."""
    import pyarrow.feather

    return _of_arrow(pyarrow.feather.read_table(path, use_threads=threads > 1).combine_chunks())


def csv_pyarrow(path: Path, threads: int) -> Fetch:
    """pyarrow: the table in memory, its columns in 32 bits."""
    import pyarrow as pa
    from pyarrow import csv

    options = csv.ConvertOptions(column_types=_kinds(_names(path), pa.int32(), pa.float32()))
    table = csv.read_csv(path, csv.ReadOptions(use_threads=threads > 1), convert_options=options)
    return _of_arrow(table.combine_chunks())


def csv_polars(path: Path, threads: int) -> Fetch:
    """Polars: the table in memory, its columns in 32 bits; it has as many threads as there are cores."""
    import polars as pl

    kinds: Any = _kinds(_names(path), pl.Int32, pl.Float32)
    return _of_polars(pl.read_csv(path, schema_overrides=kinds))


def json_pyarrow(path: Path, threads: int) -> Fetch:
    """pyarrow: the table in memory, its columns in 32 bits."""
    import pyarrow as pa
    from pyarrow import json

    options = json.ParseOptions(explicit_schema=pa.schema(_kinds(_keys(path), pa.int32(), pa.float32())))
    table = json.read_json(path, json.ReadOptions(use_threads=threads > 1), options)
    return _of_arrow(table.combine_chunks())


def json_polars(path: Path, threads: int) -> Fetch:
    """Polars: the table in memory, its columns in 32 bits; it has as many threads as there are cores."""
    import polars as pl

    kinds: Any = _kinds(_keys(path), pl.Int32, pl.Float32)
    return _of_polars(pl.read_ndjson(path, schema=kinds))


def hugging_face(path: Path, threads: int) -> Fetch:
    """Hugging Face: many rows in one call, as Arrow: its format "numpy" makes 64 bits of integers."""
    import datasets

    dataset: Any = datasets.load_from_disk(str(path)).with_format("arrow")

    def fetch(order: Order) -> Arrays:
        rows = dataset[order.tolist()]
        return {name: rows.column(name).to_numpy() for name in rows.column_names}

    return fetch


def npy_mapped(path: Path, threads: int) -> Fetch:
    """NumPy: rows of a mapped file."""
    return taken({"data": np.asarray(np.load(path, mmap_mode="r"))})


def npy(path: Path, threads: int) -> Fetch:
    """NumPy: rows of an array in memory."""
    return taken({"data": np.load(path)})


def npz(path: Path, threads: int) -> Fetch:
    """NumPy: rows of arrays in memory."""
    with np.load(path) as archive:
        return taken({name: archive[name] for name in archive.files})


def hdf5_rows(path: Path, threads: int) -> Fetch:
    """h5py: rows by a list of numbers, which has to ascend."""
    import h5py

    file: Any = h5py.File(path, "r")

    def fetch(order: Order) -> Arrays:
        places = np.argsort(order)
        found: Arrays = {}
        for name, array in file.items():
            found[name] = np.empty((len(order), *array.shape[1:]), array.dtype)
            found[name][places] = array[order[places]]
        return found

    return fetch


def hdf5(path: Path, threads: int) -> Fetch:
    """h5py: rows of arrays in memory."""
    import h5py

    with h5py.File(path, "r") as file:
        arrays: Any = file
        return taken({name: arrays[name][()] for name in arrays})


def zarr_rows(path: Path, threads: int) -> Fetch:
    """Zarr: rows by a list of numbers."""
    arrays = _zarr(path)
    return lambda order: {name: array.oindex[order] for name, array in arrays.items()}


def zarr(path: Path, threads: int) -> Fetch:
    """Zarr: rows of arrays in memory."""
    return taken({name: array[:] for name, array in _zarr(path).items()})


def array_record(path: Path, threads: int) -> Fetch:
    """array_record: many records in one call, as Grain asks for them."""
    module: Any = importlib.import_module("array_record.python.array_record_module")
    reader: Any = module.ArrayRecordReader(str(path), "readahead_buffer_size:0")

    def fetch(order: Order) -> Arrays:
        joined = np.frombuffer(b"".join(reader.read(order.tolist())), np.uint8)
        return {"record": joined.reshape(len(order), -1)}

    return fetch


def raw_tokens(path: Path, threads: int) -> Fetch:
    """NumPy: stretches of a mapped file."""
    return taken({"tokens": np.asarray(np.memmap(path, np.uint16, "r")).reshape(-1, TOKENS)})


def raw_tokens_whole(path: Path, threads: int) -> Fetch:
    """NumPy: stretches of an array in memory."""
    return taken({"tokens": np.fromfile(path, np.uint16).reshape(-1, TOKENS)})


def megatron(path: Path, threads: int) -> Fetch:
    """NumPy: stretches of the ids, mapped, whose dtype and number the index says."""
    count = _megatron_tokens(path)
    ids = np.asarray(np.memmap(path.with_suffix(".bin"), np.uint16, "r", shape=(count,)))
    return taken({"tokens": ids[: count // TOKENS * TOKENS].reshape(-1, TOKENS)})


def megatron_whole(path: Path, threads: int) -> Fetch:
    """NumPy: the same with the ids in memory."""
    ids = np.fromfile(path.with_suffix(".bin"), np.uint16, _megatron_tokens(path))
    return taken({"tokens": ids[: len(ids) // TOKENS * TOKENS].reshape(-1, TOKENS)})


def photos_pillow(path: Path, threads: int) -> Fetch:
    """Pillow: files one by one."""
    from PIL import Image

    def decoded(file: str) -> NDArray[np.uint8]:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))

    return _photos(path, decoded)


def photos_opencv(path: Path, threads: int) -> Fetch:
    """OpenCV: files one by one."""
    import cv2

    return _photos(path, lambda file: cv2.imread(file, cv2.IMREAD_COLOR_RGB))


def tfrecord_protobuf(path: Path, threads: int) -> Fetch:
    """A plain reader: the places of records found once, examples decoded by protobuf, checksums not looked at."""
    example, data, places = _example(), path.read_bytes(), list[tuple[int, int]]()
    at = 0
    while at < len(data):
        (length,) = _RECORD_HEAD.unpack_from(data, at)
        places.append((at + 12, at + 12 + length))
        at += length + 16

    def fetch(order: Order) -> Arrays:
        rows: list[dict[str, Any]] = []
        for number in order.tolist():
            start, stop = places[number]
            features = example.FromString(data[start:stop]).features.feature
            rows.append({name: _number(feature) for name, feature in features.items()})
        return {name: np.array([row[name] for row in rows], _dtype(name)) for name in rows[0]}

    return fetch


def tfrecord_tensorflow(path: Path, num_samples: int, batch_size: int, threads: int) -> Iterator[Arrays]:
    """tf.data: shuffled in a buffer of all records, whole batches parsed at once."""
    import tensorflow as tf

    kinds: Any = {
        name: tf.io.FixedLenFeature([], tf.int64 if _dtype(name) == np.int32 else tf.float32)
        for name in _features(path)
    }
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    data: Any = tf.data.TFRecordDataset(str(path)).with_options(options).shuffle(num_samples, seed=0)
    data = data.batch(batch_size, drop_remainder=True)
    data = data.map(lambda records: tf.io.parse_example(records, kinds), num_parallel_calls=threads).prefetch(2)
    for batch in data.as_numpy_iterator():
        yield {name: array.astype(_dtype(name)) for name, array in batch.items()}


def webdataset(path: Path, num_samples: int, batch_size: int, threads: int) -> Iterator[Arrays]:
    """webdataset: shuffled in a buffer of all samples, decoded by its own handlers."""
    import webdataset as wds

    samples: Any = wds.WebDataset(str(path), shardshuffle=False).decode()
    samples = samples.shuffle(num_samples, initial=num_samples).to_tuple("npy", "cls")
    for image, label in samples.batched(batch_size, partial=False):
        yield {"npy": np.asarray(image), "cls": np.asarray(label, np.int32)}


def _of_arrow(table: Any) -> Fetch:
    import pyarrow as pa

    def fetch(order: Order) -> Arrays:
        rows = table.take(pa.array(order))
        return {name: rows.column(name).to_numpy() for name in rows.column_names}

    return fetch


def _of_polars(table: Any) -> Fetch:
    def fetch(order: Order) -> Arrays:
        rows = table[order]
        return {name: rows[name].to_numpy() for name in rows.columns}

    return fetch


def _names(path: Path) -> list[str]:
    with path.open() as file:
        return file.readline().strip().split(",")


def _keys(path: Path) -> list[str]:
    import json

    with path.open() as file:
        return list(json.loads(file.readline()))


def _kinds(names: list[str], integer: Any, number: Any) -> dict[str, Any]:
    return {name: integer if _dtype(name) == np.int32 else number for name in names}


def _dtype(name: str) -> type[np.generic]:
    """Returns the dtype of a column of the table."""
    return np.float32 if name.startswith("x") else np.int32


def _zarr(path: Path) -> dict[str, Any]:
    import zarr as library

    group: Any = library.open_group(str(path), mode="r")
    return dict(group.arrays())


def _megatron_tokens(path: Path) -> int:
    """Returns how many tokens the documents of an index have."""
    with path.open("rb") as file:
        *_, num_documents, _ = _MEGATRON_HEAD.unpack(file.read(_MEGATRON_HEAD.size))
        return int(np.fromfile(file, "<i4", num_documents).sum(dtype=np.int64))


def _photos(path: Path, decoded: Callable[[str], Any]) -> Fetch:
    files = sorted(path.rglob("*.jpg"))
    names = sorted({file.parent.name for file in files})
    labels = np.array([names.index(file.parent.name) for file in files], np.int32)

    def fetch(order: Order) -> Arrays:
        out = np.empty((len(order), *PHOTO, 3), np.uint8)
        for row, number in enumerate(order.tolist()):
            out[row] = decoded(str(files[number]))
        return {"image": out, "label": labels[order]}

    return fetch


def _features(path: Path) -> list[str]:
    with path.open("rb") as file:
        (length,) = _RECORD_HEAD.unpack(file.read(_RECORD_HEAD.size))
        return sorted(_example().FromString(file.read(length)).features.feature)


def _number(feature: Any) -> float:
    return (feature.float_list if feature.HasField("float_list") else feature.int64_list).value[0]


def _example() -> Any:
    """Returns the message tf.train.Example, as TensorFlow's `example.proto` and `feature.proto` describe it."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="formats", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        made = file.message_type.add(name=name)
        for told, number, label, kind, of in fields:
            added = made.field.add(name=told, number=number, label=label, type=kind)
            if of:
                added.type_name = f".formats.{of}"
        return made

    one, many, inner = field.LABEL_OPTIONAL, field.LABEL_REPEATED, field.TYPE_MESSAGE
    message("FloatList", ("value", 1, many, field.TYPE_FLOAT, ""))
    message("Int64List", ("value", 1, many, field.TYPE_INT64, ""))
    message("Feature", ("float_list", 2, one, inner, "FloatList"), ("int64_list", 3, one, inner, "Int64List"))
    features = message("Features", ("feature", 1, many, inner, "Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=one, type=inner, type_name=".formats.Feature")
    message("Example", ("features", 1, one, inner, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("formats.Example"))
