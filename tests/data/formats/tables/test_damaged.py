"""Tables of which single bytes are wrong: what was changed is known, and so is what it must say. See also the fuzz."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest

import braidax.data as data
from braidax.data.formats.tables.ipc import Batch, _message, read_layout
from braidax.data.storage.limits import LIMIT
from braidax.data.storage.mapped import Mapped
from braidax.errors import ArgumentError, FormatError
from tests.support.data.formats.reading import read

NUM_ROWS = 40


def table() -> pa.Table:
    kinds = pa.array([f"kind {row % 4}" for row in range(NUM_ROWS)]).dictionary_encode()
    return pa.table(
        {"x": np.arange(NUM_ROWS, dtype="f4"), "text": [str(row) * 3 for row in range(NUM_ROWS)], "kind": kinds}
    )


def stream(path: Path, stored: pa.Table, **options: Any) -> Path:
    with ipc.new_stream(str(path), stored.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(stored, max_chunksize=10)
    return path


def file(path: Path, stored: pa.Table) -> Path:
    feather.write_feather(stored, path, compression="uncompressed", chunksize=10)
    return path


def batch_of(path: Path, number: int) -> Batch:
    return read_layout(Mapped([path]), 0).batches[number]


def put(path: Path, place: int, stored: bytes) -> None:
    with path.open("r+b") as opened:
        opened.seek(place)
        opened.write(stored)


@pytest.mark.parametrize("write", [stream, file])
def test_a_body_that_ends_behind_its_file(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(tmp_path / "a.arrow", table().select(["x"]))
    batch = batch_of(path, 3)
    message = _message(path.read_bytes()[batch.place : batch.place + 8 + 512])
    put(path, batch.place + 8 + message._at(3), (1 << 20).to_bytes(8, "little"))
    with pytest.raises(FormatError, match=rf"{path}: the Arrow metadata .*(behind the file's end|left in the file)"):
        data.open(path)


def test_offsets_of_text_are_checked_when_a_batch_is_first_read(tmp_path: Path) -> None:
    path = stream(tmp_path / "a.arrow", table().select(["x", "text"]))
    offsets = int(batch_of(path, 1).buffers[3, 0])
    put(path, offsets + 4 * 5, (40).to_bytes(4, "little"))  # record 14 would end with what is 15's
    source = data.open(path, columns=["text"])
    assert read(source, [3, 35])["text"].tolist() == ["333", "353535"]
    with pytest.raises(FormatError, match=rf"{path}: column 'text' has offsets \d+ to \d+ into \d+ values"):
        read(source, [12])
    assert read(data.open(path, columns=["x"]), [12])["x"].tolist() == [12]


def test_an_index_into_no_dictionary(tmp_path: Path) -> None:
    path = stream(tmp_path / "a.arrow", table().select(["kind"]))
    put(path, int(batch_of(path, 2).buffers[1, 0]) + 4, (1 << 20).to_bytes(4, "little"))
    source = data.open(path)
    assert read(source, [5])["kind"].tolist() == ["kind 1"]
    message = rf"{path}: record batch 2 \(records 20 to 29\) is corrupt \(.*1048576.*\); write or copy the file again"
    with pytest.raises(FormatError, match=message):
        read(source, [25])


def test_what_is_decompressed_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stream(tmp_path / "a.arrow", pa.table({"text": ["x" * 4000] * NUM_ROWS}), compression="zstd")
    assert read(data.open(path), [0])["text"].tolist() == ["x" * 4000]
    monkeypatch.setenv(LIMIT, "30000")
    message = (
        rf"{path}, record batch 0: \d+ compressed bytes become 40,0\d\d or more; expected at most 30,000: .*{LIMIT}"
    )
    with pytest.raises(FormatError, match=message):
        read(data.open(path), [0])
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(ArgumentError, match=f"{LIMIT}='much': expected a number of bytes"):
        read(data.open(path), [0])


def test_a_column_of_the_same_name_as_another(tmp_path: Path) -> None:
    path = stream(tmp_path / "a.arrow", pa.table([[1.0], [2.0]], names=["x", "x"]))
    with pytest.raises(FormatError, match=rf"{path}: has several columns of the names \['x'\]"):
        data.open(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pa.array([1, -1]), "selects record -1 of 40; it belongs to other files"),
        (pa.array([1, None]), "the indices mapping holds int64 and 1 nulls; expected the numbers of rows"),
        (pa.array(["1"]), "the indices mapping holds string and 0 nulls"),
    ],
)
def test_an_indices_mapping_of_no_rows(tmp_path: Path, rows: pa.Array, message: str) -> None:
    stream(tmp_path / "data.arrow", table())
    stream(tmp_path / "indices.arrow", pa.table({"indices": rows}))
    files = {"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(files))
    with pytest.raises(FormatError, match=rf"{tmp_path}/indices\.arrow: {re.escape(message)}"):
        data.open(tmp_path)


def test_checksums_of_parquet_pages(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    pq.write_table(table().select(["x"]), path, row_group_size=20, write_page_checksum=True, **options)
    place = path.read_bytes().index(np.float32(25).tobytes())
    put(path, place, np.float32(26).tobytes())
    source = data.open(path)
    assert read(source, [3])["x"].tolist() == [3]
    with pytest.raises(FormatError, match=rf"{path}: row group 1 \(records 20 to 39\) is corrupt \(.*CRC"):
        read(source, [21])


class Kms(encryption.KmsClient):
    """Keys that are no secret."""

    def __init__(self, config: Any) -> None:
        encryption.KmsClient.__init__(self)

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)


@pytest.mark.parametrize("is_plain", [True, False])
def test_encrypted_parquet_is_refused(tmp_path: Path, is_plain: bool) -> None:
    """Once its plain columns were chosen, pyarrow ended the process."""
    path = tmp_path / "a.parquet"
    config = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"key": ["text"]}, plaintext_footer=is_plain
    )
    factory = encryption.CryptoFactory(Kms)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), config)
    stored = table().select(["x", "text"])
    with pq.ParquetWriter(path, stored.schema, encryption_properties=properties) as writer:
        writer.write_table(stored)
    with pytest.raises(FormatError, match=rf"{path}: columns or the footer .* are encrypted, and there is no key"):
        data.open(path, columns=["x"])
