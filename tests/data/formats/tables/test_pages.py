"""What pages of Parquet say that they become is known before pyarrow makes room for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import braidax as bx
from braidax.data.formats.tables.pages import inflated_bytes
from braidax.errors import FormatError
from tests.support.data.formats.reading import read

NUM_ROWS = 10_000


def chunk_of(path: Path, column: int) -> tuple[bytes, Any]:
    found = pq.read_metadata(path).row_group(0).column(column)
    start = found.dictionary_page_offset or found.data_page_offset
    return path.read_bytes()[start : start + found.total_compressed_size], found


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_the_sizes_of_all_pages(tmp_path: Path, version: Any, compression: str, use_dictionary: bool) -> None:
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "x": rng.integers(0, 50, NUM_ROWS),
            "nulls": pa.array([None if row % 3 else row / 7 for row in range(NUM_ROWS)]),
            "text": [f"text {row % 11}" for row in range(NUM_ROWS)],
            "lists": [[row] * (row % 3) for row in range(NUM_ROWS)],
        }
    )
    options: dict[str, Any] = {"data_page_version": version, "use_dictionary": use_dictionary, "data_page_size": 4096}
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression=compression, write_page_checksum=True, **options)
    for column in range(4):
        data, about = chunk_of(path, column)
        found = inflated_bytes(data, about.num_values)
        headers = about.total_uncompressed_size - found  # which count among the bytes of the chunk
        if compression == "none":
            assert inflated_bytes(data + b"rest", about.num_values) == found
        assert 0 < headers < 0.1 * about.total_uncompressed_size + 100
        with pytest.raises(ValueError, match="ends behind its column"):
            inflated_bytes(data[:10], about.num_values)


def write(path: Path, num_rows: int) -> None:
    pq.write_table(pa.table({"x": np.arange(num_rows)}), path, compression="zstd", use_dictionary=False)


def test_a_page_that_lies_is_refused_before_it_is_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    write(path, NUM_ROWS)
    monkeypatch.setenv("BRAIDAX_MAX_BYTES", "500000")
    assert read(bx.open(path), [7])["x"].tolist() == [7]
    data, start = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0).column(0).data_page_offset
    assert data[start : start + 3] == b"\x15\x00\x15"  # its type, 0; then its bytes, of which a number takes 3
    data[start + 3 : start + 6] = b"\xfe\xff\x7f"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"a\.parquet, row group 0: .* become 1,048,575 or more; .* at most 500,000"):
        read(bx.open(path), [7])


def test_a_bomb_is_refused_also_in_a_part_of_a_struct_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRAIDAX_MAX_BYTES", "500000")
    rows = pa.StructArray.from_arrays([np.arange(100_000, dtype=np.int8), np.zeros(100_000)], ["a", "b"])
    pq.write_table(pa.table({"s": rows}), tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(FormatError, match=r"a\.parquet, row group 0: .* expected at most 500,000"):
        read(bx.open(tmp_path / "a.parquet", columns=["s.a"]), [7])
