"""Columns of many types, and files of Arrow that hold them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc as ipc

NUM_ROWS = 50


def columns(num_rows: int = NUM_ROWS) -> dict[str, pa.Array]:
    """Returns columns of every type that is read, one of them with rows that are missing."""
    rows = range(num_rows)
    ragged = [list(range(row % 4)) for row in rows]
    return {
        "x": pa.array(np.random.default_rng(0).normal(size=num_rows)),
        "id": pa.array(np.arange(num_rows)),
        "half": pa.array(np.arange(num_rows).astype(np.float16)),
        "flag": pa.array([row % 3 == 0 for row in rows]),
        "flags": pa.array([[row % 3 == 0, row % 2 == 0, True] for row in rows], pa.list_(pa.bool_(), 3)),
        "many_flags": pa.array([[(row + bit) % 3 == 0 for bit in range(11)] for row in rows]),
        "tokens": pa.array([[row, row + 1, row + 2] for row in rows], pa.list_(pa.int32())),
        "fixed": pa.array([[row, row + 1] for row in rows], pa.list_(pa.float32(), 2)),
        "nested": pa.array([[[row, 1], [2, 3], [4, 5]] for row in rows], pa.large_list(pa.list_(pa.uint8()))),
        "ragged": pa.array(ragged),
        "ragged_pairs": pa.array(
            [[[k, row % 9] for k in ids] for row, ids in enumerate(ragged)], pa.list_(pa.list_(pa.int16()))
        ),
        "ragged_flags": pa.array([[k % 2 == 0 for k in ids] for ids in ragged], pa.list_(pa.bool_())),
        "text": pa.array(["é" * (row % 5) for row in rows]),
        "raw": pa.array([b"x" * (row % 7) for row in rows], pa.large_binary()),
        "digest": pa.array([bytes([row, row + 1]) for row in rows], pa.binary(2)),
        "struct": pa.array([{"p": row, "q": {"r": f"z{row}"}} for row in rows]),
        "image": pa.array([{"bytes": b"im%d" % row, "path": None} for row in rows]),
        "missing": pa.array([{"p": row} if row % 10 != 7 else None for row in rows]),
    }


def stream(path: Path, table: pa.Table, rows: int = 13) -> Path:
    """Writes a table as a stream, so many rows a batch. **Returns:** its path."""
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def uncompressed(path: Path, table: pa.Table) -> Path:
    """Writes a table as a file whose buffers are as they lie in memory. **Returns:** its path."""
    feather.write_feather(table, path, compression="uncompressed", chunksize=7)
    return path


def lz4(path: Path, table: pa.Table) -> Path:
    """Writes a table as a file whose buffers are compressed. **Returns:** its path."""
    feather.write_feather(table, path, compression="lz4", chunksize=7)
    return path
