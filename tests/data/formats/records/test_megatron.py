"""Megatron's indexed tokens: sequences and stretches of one length; whatever the index says is checked first."""

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import braidax as bx
import braidax.data as sources
from braidax.data.source import stamp_of
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.formats.megatron import CODES, write
from tests.support.data.formats.reading import read
from tests.support.data.storage.faulty_server import serving

SEQUENCES = [[1, 2, 3], [], [40], [5, 6, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", CODES)
def test_each_sequence_is_a_sample(tmp_path: Path, dtype: str, modes: bool) -> None:
    source = bx.open(write(tmp_path / "a", SEQUENCES, dtype, modes=modes))
    assert source.sample_spec == {"tokens": sources.VARYING}
    found = read(source)["tokens"]
    assert [ids.tolist() for ids in found] == SEQUENCES
    assert found[0].dtype == (np.int32 if dtype == "int64" else np.dtype(dtype))
    assert source.describe()["documents"] == "5"
    assert source.describe()["format"] == f"Megatron indexed tokens, {dtype}"


def test_several_files_pickled_and_packed(tmp_path: Path) -> None:
    write(tmp_path / "a", SEQUENCES)
    write(tmp_path / "b", [[100, 101]])
    source = pickle.loads(pickle.dumps(bx.open(str(tmp_path / "*.idx"))))
    assert [ids.tolist() for ids in read(source)["tokens"]] == [*SEQUENCES, [100, 101]]
    rows = read(sources.padded(bx.open(tmp_path / "b.idx"), 4, leaf="tokens"))
    assert rows["tokens"].tolist() == [[100, 101, 0, 0]]
    with pytest.raises(FormatError, match=r"c\.idx: says that its tokens are int32, expected uint16 as in .*a\.idx"):
        bx.open([tmp_path / "a.idx", write(tmp_path / "c", [[1]], "int32")])


def test_stretches_of_one_length_go_on_over_the_borders(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", SEQUENCES), write(tmp_path / "b", [[1, 2], [3, 4, 5]])
    source = bx.open([first, second], sequence_length=4)
    assert read(source)["tokens"].tolist() == [[1, 2, 3, 40], [5, 6, 7, 8], [1, 2, 3, 4]]
    assert source.sample_spec["tokens"].dtype == np.uint16
    with pytest.raises(
        FormatError, match=r"a\.bin: no file of 1 holds as many tokens of uint16 as .*sequence_length=12"
    ):
        bx.open(first, sequence_length=12)
    with pytest.raises(ArgumentError, match="sequence_length=0: expected at least 1 token"):
        bx.open(first, sequence_length=0)
    shared = write(tmp_path / "c", [[1, 2], [3, 4]], offsets=[2, 0])
    assert [ids.tolist() for ids in read(bx.open(shared))["tokens"]] == [[2, 3], [1, 2]]
    with pytest.raises(
        FormatError, match=r"c\.idx: sequence 0 begins at byte 2, and the ones before it end at 0; .*packed"
    ):
        bx.open(shared, sequence_length=2)


def test_an_object_store_has_them_too(tmp_path: Path) -> None:
    write(tmp_path / "a", SEQUENCES)
    contents = {f"data/a{suffix}": (tmp_path / f"a{suffix}").read_bytes() for suffix in (".idx", ".bin")}
    with serving(contents) as server:
        remote = sources.Remote(cache_bytes=0)
        found = read(bx.open(f"{server.url}/data/a.idx", remote=remote))["tokens"]
        assert [ids.tolist() for ids in found] == SEQUENCES
        rows = read(bx.open(f"{server.url}/data/a.idx", sequence_length=5, remote=remote))["tokens"]
        assert rows.tolist() == [[1, 2, 3, 40, 5], [6, 7, 8, 9, 10]]


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "behind the end": ({"offsets": [0, 6, 6, 8, 20]}, r"sequence 4 is said to have 2 tokens of uint16 from byte 20 on"),
    "before the beginning": ({"offsets": [-2, 6, 6, 8, 18]}, r"sequence 0 is said .* from byte -2 on"),
    "between tokens": ({"offsets": [0, 6, 7, 8, 18]}, r"sequence 2 is said .* from byte 7 on"),
    "overflow": ({"offsets": [0, 6, 2**63 - 2, 8, 18]}, r"sequence 2 is said .* from byte 9,223,372,036,854,775,806"),
    "negative length": ({"lengths": [3, 0, -1, 5, 2]}, r"sequence 2 is said to have -1 tokens"),
    "long": ({"lengths": [3, 0, 1, 5, 2**31 - 1]}, r"sequence 4 is said to have 2,147,483,647 tokens .*22 bytes; copy"),
    "many sequences": (
        {"count": 2**60},
        r"1,152,921,504,606,846,976 sequences and 6 borders .*; the file has 142: copy",
    ),
    "fewer sequences": ({"count": 4}, r"4 sequences and 6 borders of documents take 130 bytes, .*; the file has 142"),
    "version": ({"version": 2}, r"has version 2 and dtype 8; expected version 1 and one of"),
    "floats": ({"code": 7}, r"has version 1 and dtype 7; expected version 1 and one of the integers 1, 2, 3, 4, 5, 8"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, what: str) -> None:
    changes, words = HOSTILE[what]
    with pytest.raises(FormatError, match=rf"a\.idx: {words}"):
        bx.open(write(tmp_path / "a", SEQUENCES, **changes))


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", SEQUENCES)
    whole = path.read_bytes()
    for length in (9, 33, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"a\.idx: .*copy it again"):
            bx.open(path)
    path.write_bytes(whole)
    path.with_suffix(".bin").write_bytes(bytes(20))
    with pytest.raises(FormatError, match=r"sequence 4 is said to have 2 tokens .* but .*a\.bin has 20 bytes"):
        bx.open(path)
    path.with_suffix(".bin").unlink()
    with pytest.raises(FormatError, match=r"a\.bin"):
        bx.open(path)
    path.rename(tmp_path / "b.index")
    with pytest.raises(FormatError, match=r"b\.index: is an index of Megatron .*; expected a name that ends in \.idx"):
        bx.open(tmp_path / "b.index")
    with pytest.raises(FormatError, match="holds 0 records"):
        bx.open(write(tmp_path / "c", [[]], lengths=[], offsets=[], count=0))


def test_what_does_not_fit_names_the_sequence_and_another_index_is_another_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [[1], [2**40]], "int64")
    source = bx.open(path)
    with pytest.raises(RecordError, match=r"a\.bin, record 1 .*'tokens'"):
        read(source)
    before = stamp_of(source)
    index = bytearray(path.read_bytes())
    index[34:42] = struct.pack("<ii", 0, 1)
    path.write_bytes(index)
    assert stamp_of(bx.open(path)) != before
    with pytest.raises(ArgumentError, match="dtype='uint16'"):
        bx.open(path, dtype="uint16")
