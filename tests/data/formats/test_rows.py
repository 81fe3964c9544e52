"""Rows that are filled with text and bytes, by compiled code and by Python, which do the same."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from braidax.data.formats import rows as rows_module
from braidax.data.formats.rows import Rows
from braidax.data.leaves import Flat
from braidax.data.storage.files import compiled

BYTE = np.dtype(np.uint8)


def filled(pieces: Sequence[bytes], width: int, kind: Any) -> tuple[int, list[bytes], list[int]]:
    """Fills rows in reverse, but for the last one."""
    rows = Rows.of(Flat(kind, BYTE), np.full((len(pieces) + 1, width), 7, np.uint8), np.full(width, 0x2A, np.uint8))
    rows.held[:] = -1
    count = rows[np.arange(len(pieces))[::-1]].place_each(pieces)
    return count, [bytes(row) for row in rows.values], rows.held.tolist()


@example(["🙂🙂"], 7, 0)
@given(st.lists(st.text(max_size=12), max_size=6), st.integers(1, 20), st.sampled_from([0, 61, 130]))
def test_rows_hold_whole_characters(texts: list[str], width: int, more: int) -> None:
    texts, width = ["x" * more + text for text in texts], width + more
    heads = [text.encode()[:width].decode(errors="ignore").encode() for text in texts][::-1]
    expected = [piece.ljust(width, b"*") for piece in heads] + [b"\x07" * width]
    for way in (compiled, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows_module, "compiled", way)
            found = filled([text.encode() for text in texts], width, "text")
        assert found == (len(texts), expected, [*map(len, heads), -1])


@given(
    st.lists(st.one_of(st.binary(max_size=9), st.text(max_size=5).map(str.encode)), max_size=4),
    st.sampled_from([b"", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe0\x9f\x80", b"\xf0\x8f\xbf\xbf"]),
    st.integers(1, 12),
)
def test_what_is_no_utf_8_is_told_as_python_tells_it(pieces: list[bytes], odd: bytes, width: int) -> None:
    pieces = [*pieces, b"01234567" + odd]
    quick = filled(pieces, width, "text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "compiled", lambda: None)
        assert filled(pieces, width, "text") == quick
    for piece in pieces[: quick[0]]:
        if len(piece) <= width:
            piece.decode()
    if quick[0] < len(pieces):
        with pytest.raises(UnicodeDecodeError):
            pieces[quick[0]].decode()
    rows = [piece[:width].ljust(width, b"*") for piece in pieces[::-1]]
    assert filled(pieces, width, "bytes")[1] == [*rows, b"\7" * width]


def test_buffers_that_do_not_fit_are_refused() -> None:
    reads = compiled()
    assert reads is not None
    good: list[Any] = [b"abcd", [0, 2], [2, 2], [1, 0], np.zeros((2, 3), np.uint8), np.zeros(2, np.int64), b"...", True]

    def pad(*changes: tuple[int, Any]) -> int:
        given = list(good)
        for place, value in changes:
            given[place] = value
        return reads.pad(*(np.array(one, np.int64) if isinstance(one, list) else one for one in given))

    assert pad() == 2
    assert good[4].tobytes() == b"cd.ab."
    assert good[5].tolist() == [2, 2]
    for change in [
        (1, [0, 3]), (1, [0, -1]), (1, [0]), (2, [2, 2**62]), (2, [-1, 2]), (3, [1, 2]), (3, [-1, 0]), (3, [0]),
        (4, np.zeros((2, 2), np.uint8)), (4, np.zeros((3, 3), np.uint8)), (5, np.zeros(1, np.int64)), (6, b"...."),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="expected pieces that are in the data, and a place among the rows"):
            pad(change)
