import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from braidax.data.formats.records.index import Index
from braidax.data.formats.records.records import Decoder, RecordSource
from braidax.data.source import Indices, prepare
from braidax.data.storage import Files, LocalFiles, Ranges
from braidax.errors import FormatError, RecordError
from braidax.spans import Trace
from tests.support.data.formats.reading import read


class Watched(Files):
    """Two local files of ten bytes, and what was asked of them."""

    def __init__(self, folder: Path) -> None:
        for number in range(2):
            (folder / f"{number}.bin").write_bytes(bytes(range(10 * number, 10 * number + 10)))
        self._files = LocalFiles([folder / "0.bin", folder / "1.bin"])
        self.asked: list[list[tuple[int, ...]]] = []

    names: Any = property(lambda self: self._files.names)
    sizes: Any = property(lambda self: self._files.sizes)
    stamps: Any = property(lambda self: self._files.stamps)

    def read(self, ranges: Ranges) -> Any:
        return self._files.read(ranges)

    def prepare(self, ranges: Ranges) -> None:
        self.asked.append(list(zip(*(field.tolist() for field in ranges), strict=True)))

    def open(self, number: int) -> Any:
        raise AssertionError


class Pairs(Index):
    """Records of two bytes, the first one of the first file left out."""

    starts = np.array([0, 4, 9])

    def __init__(self, num_records: int = 9) -> None:
        self._num_records = num_records

    def __len__(self) -> int:
        return self._num_records

    def ranges(self, indices: Indices) -> Ranges:
        file = (indices >= 4).astype(np.int64)
        return Ranges(file, np.where(file, indices - 4, indices + 1) * 2, np.full(len(indices), 2))

    def describe(self) -> str:
        return "none at all"


class Sums(Decoder):
    """The sum of a record's bytes; 7 cannot be decoded."""

    @property
    def sample_spec(self) -> Any:
        return {"sum": jax.ShapeDtypeStruct((), np.int32)}

    def decode(self, payloads: Sequence[Any], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        for row, payload in enumerate(payloads):
            if 7 in bytes(payload):
                raise RecordError(f"{where(row)}: holds 7")
            out["sum"][row] = sum(payload)


@pytest.fixture
def source(tmp_path: Path) -> RecordSource:
    return RecordSource(Watched(tmp_path), Pairs(), Sums(), {"format": "pairs"})


def test_records_of_several_files(source: RecordSource) -> None:
    assert read(source, [8, 0, 4, 0])["sum"].tolist() == [18 + 19, 2 + 3, 10 + 11, 2 + 3]
    assert read(source, [])["sum"].tolist() == []
    assert read(pickle.loads(pickle.dumps(source)), [8])["sum"].tolist() == [37]


def test_it_describes_itself(source: RecordSource) -> None:
    assert list(source.describe().items()) == [
        ("format", "pairs"),
        ("files", "2: 0.bin, 1.bin"),
        ("samples", "9"),
        ("bytes", "20"),
        ("index", "none at all"),
    ]


def test_a_record_is_named_by_its_file(source: RecordSource, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=rf"^{tmp_path}/0\.bin, record 2 \(at byte 6\): holds 7"):
        read(source, [5, 2])
    with pytest.raises(RecordError, match=r"0\.bin \(2 file\(s\)\): there is no record 9; it holds 9 samples"):
        read(source, [9])


def test_records_are_asked_for_ahead(source: RecordSource) -> None:
    prepare(source, np.array([4, 1, -1, 9]))
    assert source._files.asked == [[(1, 0, 2), (0, 4, 2)]]


def test_decoding_is_a_span(source: RecordSource) -> None:
    trace = Trace()
    with trace.active():
        read(source, [0, 1])
    assert trace.totals()["decode"].num_bytes == 4


def test_no_records_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"0\.bin: holds 0 records in 2 file\(s\); expected at least one"):
        RecordSource(Watched(tmp_path), Pairs(0), Sums(), {"format": "pairs"})
