"""Which documents share a row: best-fit-decreasing packing, in windows over a random order of the documents.

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (ICML 2024), best-fit packing: documents longer than
a row are cut into rows, and the pieces, the longest first, each go to the row with the least room that is left enough.
"""

import io
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.sampling.permutation import Permutation
from braidax.data.source import Indices
from braidax.data.storage.derived import Derived, Kept
from braidax.data.storage.room import Room
from braidax.data.transforms.text.measuring import Show
from braidax.errors import FormatError

_WINDOW = 1 << 13  # documents packed together, at least
_WINDOW_ROWS = 1 << 8  # rows they should fill, so that the last ones, which stay half empty, weigh little
_PIECE = np.dtype([("document", "<i8"), ("number", "<i4"), ("size", "<i4")])
_START_BYTES = 8


class Pieces(NamedTuple):
    """The pieces of some rows, in their order.

    **Fields:** `document`: int64 `[p]`. `number`: int64 `[p]`, which piece of its document, each but the last as long
    as a row. `size`: int64 `[p]`, in tokens. `counts`: int64 `[rows]`, pieces of each row.
    """

    document: NDArray[np.int64]
    number: NDArray[np.int64]
    size: NDArray[np.int64]
    counts: NDArray[np.int64]


class Plan:
    """The rows of a packed source.

    **Arguments:** `kept`: what `write_plan` wrote. `derived`: the file that it lies in; None for memory. `room`: keeps
    that from being removed.
    """

    def __init__(self, kept: Kept, derived: Derived | None = None, room: Room | None = None) -> None:
        self.facts = kept.facts
        self.path = None if derived is None else derived.path
        self._kept = kept
        self._derived = derived
        self._room = room
        self._border = self.facts["pieces"] * _PIECE.itemsize
        self._pieces = kept.data[: self._border].view(_PIECE)
        self._starts = kept.data[self._border :].view("<i8")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Plan, (self._kept,)) if self._derived is None else (_reopened, (self._derived,))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def rows(self, indices: Indices) -> Pieces:
        """Returns the pieces of rows, for int64 `[rows]` that are known to be in range."""
        begins = self._border + indices * _START_BYTES
        self._kept.check(np.concatenate([begins, begins + _START_BYTES]))
        starts = np.take(self._starts, indices)
        counts = np.take(self._starts, indices + 1) - starts
        ends = np.cumsum(counts)
        chosen = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)
        self._kept.check(chosen * _PIECE.itemsize)
        pieces = np.take(self._pieces, chosen)
        document, number, size = (pieces[name].astype(np.int64) for name in ("document", "number", "size"))
        return Pieces(document, number, size, counts)


def plan_in_memory(lengths: NDArray[np.int64], length: int, show: Show) -> Plan:
    """Packs documents of these lengths, int64 `[n]`, into rows of `length` tokens."""
    file = io.BytesIO()
    facts = write_plan(file.write, lengths, length, show)
    return Plan(Kept(np.frombuffer(file.getbuffer(), np.uint8), facts))


def write_plan(write: Callable[[Any], Any], lengths: NDArray[np.int64], length: int, show: Show) -> dict[str, int]:
    """Packs documents and writes the rows: the pieces in their order, then int64 `[rows + 1]`, where each row begins.

    **Arguments:** `write`: takes bytes. `lengths`: int64 `[n]`, tokens of each document; empty ones are in no row.
    `length`: tokens of a row.

    **Returns:** counts of documents, empty ones, those cut, tokens, pieces.
    """
    counts: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    for pieces, of_rows, num_documents in _windows(lengths, length):
        write(pieces.data)
        counts.append(of_rows)
        show(num_documents)
    starts = np.cumsum(np.concatenate(counts), dtype="<i8")
    write(starts.data)
    return {
        "documents": len(lengths),
        "empty": int((lengths == 0).sum()),
        "cut": int((lengths > length).sum()),
        "tokens": int(lengths.sum()),
        "pieces": int(starts[-1]),
    }


def _windows(lengths: NDArray[np.int64], length: int) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], int]]:
    """Yields for each window of documents its pieces row by row, int64 `[rows]` pieces of each row, and its
    documents."""
    total = len(lengths)
    order = Permutation(total, seed=0, epoch=0)
    mean = max(1.0, float(lengths.mean())) if total else 1.0
    width = max(_WINDOW, int(_WINDOW_ROWS * length / mean))
    for start in range(0, total, width):
        documents = order(np.arange(start, min(start + width, total), dtype=np.int64))
        pieces = _cut(documents, lengths[documents], length)
        row = np.arange(len(pieces))
        loose = np.flatnonzero(pieces["size"] < length)
        row[loose] += len(pieces)
        falling = loose[np.argsort(-pieces["size"][loose], kind="stable")]
        row[falling] = len(pieces) + _best_fit(pieces["size"][falling].tolist(), length)
        _, first, row, counts = np.unique(row, return_index=True, return_inverse=True, return_counts=True)
        by_row = np.lexsort((row, first[row]))  # rows in the order of their first documents, and these in their own
        yield pieces[by_row], counts[np.argsort(first, kind="stable")], len(documents)


def _cut(documents: NDArray[np.int64], sizes: NDArray[np.int64], length: int) -> NDArray[Any]:
    """Cuts documents into pieces as long as a row, and what is left behind them."""
    num_pieces = -(-sizes // length)
    pieces = np.empty(int(num_pieces.sum()), _PIECE)
    pieces["document"] = np.repeat(documents, num_pieces)
    pieces["number"] = np.arange(len(pieces)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    pieces["size"] = np.minimum(np.repeat(sizes, num_pieces) - pieces["number"] * np.int64(length), length)
    return pieces


def _best_fit(sizes: list[int], length: int) -> NDArray[np.int64]:
    """Returns the row of each piece, int64 `[n]`, by best fit; `sizes` fall from `length` at most to 1 at least.

    The room that is left in each row is kept sorted, as one number together with the row's: a search, a removal and an
    insertion a piece, about a microsecond.
    """
    many = len(sizes) + 1
    rooms: list[int] = []
    rows: list[int] = []
    num_rows = 0
    for size in sizes:
        found = bisect_left(rooms, size * many)
        if found < len(rooms):
            room, row = divmod(rooms.pop(found), many)
        else:
            room, row = length, num_rows
            num_rows += 1
        rows.append(row)
        if room - size >= sizes[-1]:  # else nothing that comes would fit
            insort(rooms, (room - size) * many + row)
    return np.array(rows, np.int64)


def _reopened(derived: Derived) -> Plan:
    kept = derived.load()
    if kept is None:
        raise FormatError(f"{derived.path}: the plan of a packed source is gone, or another one; pack the source again")
    return Plan(kept, derived)
