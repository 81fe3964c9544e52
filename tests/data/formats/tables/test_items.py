"""Single numbers of mapped Arrow batches, gathered as items: what they are, and which record an error names."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from braidax.data.formats.tables import items
from braidax.data.formats.tables.arrow import ArrowSource, open_arrow
from braidax.data.source import widened
from braidax.data.storage import mapped as memory
from braidax.errors import RecordError
from tests.support.data.formats.arrow import stream, uncompressed
from tests.support.data.formats.reading import read

ROWS = 90


def table(start: int = 0) -> Any:
    rows = np.arange(start, start + ROWS)
    return pa.table(
        {
            "byte": rows.astype(np.int8),
            "short": rows.astype(np.uint16),
            "id": rows,
            "half": rows.astype(np.float16),
            "double": rows / 4,
            "gap": pa.array([None if row == start + 3 else row for row in rows.tolist()], pa.int32()),
            "flag": rows % 2 == 0,
            "pair": pa.array(np.stack([rows, -rows], axis=1).tolist(), pa.list_(pa.int32(), 2)),
        }
    )


def opened(folder: Path) -> ArrowSource:
    stream(folder / "0.arrow", table(), 40)
    uncompressed(folder / "1.arrow", table(ROWS))
    source = open_arrow(folder)
    assert isinstance(source, ArrowSource)
    return source


@pytest.mark.parametrize("places", [1, 360, 1 << 15])
def test_numbers_of_every_width_from_many_batches_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    monkeypatch.setattr(items, "_PLACES", places)  # of one leaf, of two, of all at a time
    source = opened(tmp_path)
    assert source._items is not None
    assert {leaf.name for leaf in source._items._leaves} == {"byte", "short", "id", "half", "double"}
    for order in ([*range(2 * ROWS)], [2 * ROWS - 1, 0, 39, 40, 41, ROWS, ROWS - 1, 0], [5], []):
        window, wide = read(source, order), read(widened(source), order)
        rows = np.array(order, np.int64)
        for name, dtype in {"byte": "i1", "short": "u2", "id": "i4", "half": "f2", "double": "f4"}.items():
            np.testing.assert_array_equal(window[name], (rows / 4 if name == "double" else rows).astype(dtype))
            assert window[name].dtype == np.dtype(dtype)
        assert wide["id"].dtype == np.int64
        np.testing.assert_array_equal(wide["id"], rows)
        np.testing.assert_array_equal(window["gap.is_valid"], rows % ROWS != 3)
        np.testing.assert_array_equal(window["gap"], np.where(rows % ROWS == 3, 0, rows))
        np.testing.assert_array_equal(window["flag"], rows % 2 == 0)
        np.testing.assert_array_equal(window["pair"].reshape(-1, 2), np.stack([rows, -rows], axis=1))


def test_a_number_that_does_not_fit_is_named_by_its_file_and_record(tmp_path: Path) -> None:
    for number in range(2):
        ids = np.arange(10) + (1 << 40) * ((np.arange(10) == 7) & (number == 1))
        uncompressed(tmp_path / f"{number}.arrow", pa.table({"x": np.arange(10, dtype=np.int32), "id": ids}))
    source = open_arrow(tmp_path)
    assert read(source, [16, 7])["id"].tolist() == [6, 7]
    with pytest.raises(RecordError, match=r"1\.arrow, record 7: leaf 'id' holds 1099511627783 \(int64\)"):
        read(source, [16, 17, 0])
    assert read(widened(source), [17])["id"].tolist() == [(1 << 40) + 7]


def test_what_lies_unaligned_is_read_as_before(tmp_path: Path) -> None:
    """A mapped file may be of any writer: places decide, not the format."""
    source = opened(tmp_path)
    expected = read(source)
    for direct in source._leaves:
        if direct.leaf.name == "half":
            direct._base = direct._base + 1  # pyright: ignore
    source._take(source._leaves)
    assert source._items is not None
    assert "half" not in {leaf.name for leaf in source._items._leaves}
    np.testing.assert_array_equal(read(source)["short"], expected["short"])


def test_cold_files_are_asked_for_items_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_FITTING", 0.0)
    source = open_arrow(
        uncompressed(tmp_path / "a.arrow", pa.table({"x": np.arange(100_000), "y": np.arange(100_000)}))
    )
    assert isinstance(source, ArrowSource)
    asked: list[int] = []
    monkeypatch.setattr(memory, "ask_ahead", lambda descriptor, offset, length: asked.append(offset))
    source.prepare(np.array([5, 99_000]))
    assert asked == []
    source._memory._ahead.saw(1, 1)  # pyright: ignore
    source.prepare(np.array([5, 99_000]))
    assert len(asked) == 4
    asked.clear()
    assert read(source, [99_000, 5])["y"].tolist() == [99_000, 5]
    assert len(asked) == 4
