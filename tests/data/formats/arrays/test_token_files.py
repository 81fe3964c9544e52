import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import braidax.data as sources
from braidax.errors import ArgumentError, FormatError
from tests.support.data.formats.reading import assert_equal, read


def header(magic: int, version: int, num_tokens: int) -> bytes:
    values = np.zeros(256, np.int32)
    values[:3] = magic, version, num_tokens
    return values.tobytes()


@pytest.mark.parametrize("name", ["train.bin", "a.tokens"])
def test_sequences_do_not_overlap(tmp_path: Path, name: str) -> None:
    np.arange(25, dtype=np.uint16).tofile(tmp_path / name)
    source = sources.open_tokens(tmp_path / name, np.uint16, sequence_length=6)
    assert_equal(read(source), {"tokens": np.arange(24, dtype=np.uint16).reshape(4, 6)})
    assert source.describe()["tokens"] == "25, of which the last 1 are not used (sequence_length=6)"


def test_defaults(tmp_path: Path) -> None:
    np.zeros(2049, np.uint16).tofile(tmp_path / "a.bin")
    source = sources.open_tokens(tmp_path / "a.bin", "uint16")
    assert (len(source), source.sample_spec["tokens"].shape) == (2, (1024,))


def test_another_dtype(tmp_path: Path) -> None:
    np.arange(8, dtype=np.int64).tofile(tmp_path / "a.bin")
    source = sources.open(tmp_path / "a.bin", sequence_length=4, dtype="int64")
    assert_equal(read(source), {"tokens": np.arange(8, dtype=np.int32).reshape(2, 4)})


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)])
@pytest.mark.parametrize("name", ["a.bin", "no_suffix"])
def test_header_of_llm_c(tmp_path: Path, magic: int, version: int, dtype: Any, name: str) -> None:
    ids = np.arange(10, dtype=dtype)
    (tmp_path / name).write_bytes(header(magic, version, 10) + ids.tobytes())
    source = sources.open(tmp_path / name, sequence_length=5)
    assert_equal(read(source), {"tokens": ids.reshape(2, 5)})
    assert "llm.c header" in source.describe()["format"]


@pytest.mark.parametrize(
    ("content", "options", "kind", "message"),
    [
        (
            bytes(8),
            {},
            ArgumentError,
            "holds tokens without a header, and nothing tells how they are stored; expected",
        ),
        (
            bytes(7),
            {"dtype": "uint16"},
            FormatError,
            "a.bin: 7 bytes, of which 0 are a header, are no whole number of uint16",
        ),
        (bytes(6), {"dtype": "uint32"}, FormatError, "are no whole number of uint32 tokens of 4 bytes"),
        (
            bytes(8),
            {"sequence_length": 5, "dtype": "uint16"},
            FormatError,
            "holds 4 tokens of uint16, fewer than one",
        ),
        (bytes(8), {"sequence_length": 0}, ArgumentError, "sequence_length=0: expected at least 1"),
        (bytes(8), {"dtype": "float32"}, ArgumentError, "dtype='float32': expected an integer dtype"),
        (bytes(8), {"dtype": "uint17"}, ArgumentError, "dtype='uint17':"),
        (header(20240520, 1, 9) + bytes(16), {}, FormatError, "the header promises 9 tokens, the file holds 8"),
        (header(20240520, 2, 8) + bytes(16), {}, FormatError, "header 20240520 has version 2, expected 1"),
        (header(20240520, 1, 8) + bytes(16), {"dtype": "uint32"}, ArgumentError, "dtype='uint32': the header of"),
        (header(20240520, 1, 8)[:10], {}, FormatError, "truncated inside the header of 1024 bytes"),
        (header(20240520, 1, 8)[:100], {}, FormatError, "100 bytes, of which 1,024 are a header"),
    ],
)
def test_bad_input(tmp_path: Path, content: bytes, options: Any, kind: type[Exception], message: str) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(kind, match=re.escape(message)):
        sources.open(tmp_path / "a.bin", **options)
