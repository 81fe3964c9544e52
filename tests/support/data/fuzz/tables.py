"""Tables: Arrow, Feather, Hugging Face, Parquet. What is right says pyarrow, once it has validated all of it."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

import braidax.data as data
from tests.support.data.fuzz.case import Case, Samples, only_file

_NUM_ROWS = 60
_WRONG = object()  # a value that is damaged, which is never right


def _table(*, nulls: bool = False, dictionaries: bool = False) -> pa.Table:
    rows = range(_NUM_ROWS)
    columns: dict[str, Any] = {
        "x": pa.array(np.random.default_rng(0).normal(size=_NUM_ROWS).astype(np.float32)),
        "id": pa.array(np.arange(_NUM_ROWS)),
        "flag": pa.array([row % 3 == 0 for row in rows]),
        "tokens": pa.array([[row, row + 1, row + 2] for row in rows], pa.list_(pa.int32())),
        "fixed": pa.array([[row, row + 1] for row in rows], pa.list_(pa.float32(), 2)),
        "ragged": pa.array([list(range(row, row + row % 4)) for row in rows], pa.list_(pa.int32())),
        "text": pa.array([f"é{row}" * (row % 5) for row in rows]),
        "raw": pa.array([b"%d" % row * (row % 7) for row in rows], pa.large_binary()),
        "struct": pa.array([{"p": row, "q": f"z{row}"} for row in rows]),
    }
    if nulls:
        columns["some"] = pa.array([None if row % 17 == 5 else row for row in rows], pa.int32())
        columns["words"] = pa.array([None if row % 19 == 5 else str(row) for row in rows])
    if dictionaries:
        columns["kind"] = pa.array([f"kind {row % 5}" for row in rows]).dictionary_encode()
        columns["number"] = pa.array([row % 3 for row in rows], pa.int32()).dictionary_encode()
    return pa.table(columns)


def _stream(path: Path, table: pa.Table, **options: Any) -> None:
    with ipc.new_stream(str(path), table.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=13)


def _feather(path: Path, table: pa.Table, compression: str) -> None:
    feather.write_feather(table, path, compression=compression, chunksize=17)


def _samples(table: pa.Table) -> Samples:
    while any(pa.types.is_struct(column.type) for column in table.columns):
        table = table.flatten()
    found: dict[str, list[Any]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        values = [value for chunk in column.chunks for value in _values(chunk)]
        is_valid = [value is not None and (not isinstance(value, list) or None not in value) for value in values]
        empty = _empty(column.type, [value for value in values if isinstance(value, list)])
        found[name] = [value if valid else empty for value, valid in zip(values, is_valid, strict=True)]
        found[f"{name}.is_valid"] = is_valid
    return found


def _empty(kind: pa.DataType, lists: list[list[Any]]) -> Any:
    """Returns what stands in place of null."""
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = {len(value) for value in lists}
        return [0] * lengths.pop() if len(lengths) == 1 else []
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(kind) or pa.types.is_large_binary(kind):
        return "" if pa.types.is_string(kind) else b""
    return float("nan") if pa.types.is_floating(kind) else 0


def _values(chunk: pa.Array) -> list[Any]:
    """Returns the values of an array if it is valid; else as many wrong ones, as for text that is no UTF-8."""
    if pa.types.is_dictionary(chunk.type):
        values, indices = _values(chunk.dictionary), _values(chunk.indices)
        return [
            None if index is None else values[index] if index is not _WRONG and 0 <= index < len(values) else _WRONG
            for index in indices
        ]
    if pa.types.is_string(chunk.type):
        return [_text(value) for value in _values(chunk.view(pa.binary()))]
    try:
        chunk.validate(full=True)
    except pa.ArrowInvalid:
        return [_WRONG] * len(chunk)
    return chunk.to_pylist()


def _text(stored: Any) -> Any:
    try:
        return stored.decode() if isinstance(stored, bytes) else stored
    except UnicodeDecodeError:
        return _WRONG


def _read_arrow(folder: Path) -> Samples:
    """Reads batch by batch; from one on that cannot be read, all is wrong."""
    stored = only_file(folder).read_bytes()
    batches: list[pa.RecordBatch] = []
    try:
        if stored.startswith(b"ARROW1"):
            file = ipc.open_file(pa.py_buffer(stored))
            schema = file.schema
            for number in range(file.num_record_batches):
                batches.append(file.get_batch(number))
        else:
            stream = ipc.open_stream(pa.py_buffer(stored))
            schema = stream.schema
            batches.extend(iter(stream))
    except (pa.ArrowException, OSError):
        if not batches:
            raise
    found = _samples(pa.Table.from_batches(batches, schema))
    return {name: [*values, *[_WRONG] * (_NUM_ROWS - len(values))] for name, values in found.items()}


def _read_parquet(folder: Path) -> Samples:
    """Reads row group by row group; one that cannot be read has as many records as the footer says, all wrong."""
    file = pq.ParquetFile(only_file(folder), page_checksum_verification=True)
    found: dict[str, list[Any]] = {}
    for number in range(file.num_row_groups):
        for name in file.schema_arrow.names:
            try:
                values = _samples(file.read_row_group(number, columns=[name]))
            except (pa.ArrowException, OSError):
                whole = file.schema_arrow.empty_table().select([name])
                values = {leaf: [_WRONG] * file.metadata.row_group(number).num_rows for leaf in _samples(whole)}
            for leaf, part in values.items():
                found.setdefault(leaf, []).extend(part)
    return found


def _hugging_face(folder: Path) -> None:
    saved = folder / "saved"
    datasets.Dataset(_table().select(["x", "id", "tokens", "text"]).combine_chunks()).save_to_disk(str(saved))
    _stream(saved / "indices.arrow", pa.table({"indices": np.array([7, 3, 50, 0, 59, 20], np.uint64)}))
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}))


def _open_hugging_face(folder: Path) -> data.Source:
    return data.open(folder / "saved")


def _read_hugging_face(folder: Path) -> Samples:
    state = json.loads((folder / "saved" / "state.json").read_text())
    stored, rows = (
        pa.concat_tables([_whole(folder / "saved" / file["filename"]) for file in state[key]])
        for key in ("_data_files", "_indices_data_files")
    )
    chosen = _samples(rows)["indices"]
    return {name: [values[row] for row in chosen] for name, values in _samples(stored).items()}


def _whole(path: Path) -> pa.Table:
    stored = path.read_bytes()
    with (ipc.open_file if stored.startswith(b"ARROW1") else ipc.open_stream)(pa.py_buffer(stored)) as reader:
        return reader.read_all()


def _parquet(folder: Path, table: pa.Table, **options: Any) -> None:
    pq.write_table(table, folder / "a.parquet", row_group_size=25, **options)


CASES = [
    Case("arrow stream", lambda folder: _stream(folder / "a.arrow", _table()), read=_read_arrow),
    Case("arrow file", lambda folder: _feather(folder / "a.arrow", _table(), "uncompressed"), read=_read_arrow),
    Case("arrow nulls", lambda folder: _stream(folder / "a.arrow", _table(nulls=True)), read=_read_arrow),
    Case(
        "arrow dictionaries",
        lambda folder: _stream(folder / "a.arrow", _table(dictionaries=True)),
        read=_read_arrow,
    ),
    Case("feather lz4", lambda folder: _feather(folder / "a.feather", _table(), "lz4"), read=_read_arrow),
    Case(
        "arrow zstd nulls",
        lambda folder: _stream(folder / "a.arrow", _table(nulls=True, dictionaries=True), compression="zstd"),
        read=_read_arrow,
    ),
    Case("hugging face", _hugging_face, _open_hugging_face, _read_hugging_face),
    Case("parquet", lambda folder: _parquet(folder, _table(nulls=True)), read=_read_parquet),
    Case(
        "parquet checksums",
        lambda folder: _parquet(folder, _table(dictionaries=True), write_page_checksum=True, compression="zstd"),
        read=_read_parquet,
    ),
    Case(
        "parquet plain",
        lambda folder: _parquet(folder, _table(), use_dictionary=False, compression="none", data_page_size=256),
        read=_read_parquet,
    ),
]
