"""Rows of one length that formats fill with values of varying size, without an object for each sample."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.leaves import Flat, Indices
from braidax.data.storage.files import Bytes, compiled, joined


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one length, for a source to fill in place of the object array of a leaf of varying size.

    **Fields:** `flat`: what they are filled with. `values`: uint8 `[n, bytes]`, C-contiguous. `held`: int64 `[n]`, how
    many bytes of each row are its sample's. `blank`: uint8 `[bytes]`, what a row has behind these. `places`: int64
    `[m]`, which of the rows are to be filled.
    """

    flat: Flat
    values: NDArray[np.uint8]
    held: NDArray[np.int64]
    blank: NDArray[np.uint8]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, flat: Flat, values: NDArray[Any], blank: NDArray[Any]) -> "Rows":
        """Returns the rows of an array. **Arguments:** `values`: `[n, length, *shape]`. `blank`: one such row."""
        assert values.flags.c_contiguous, "a source fills contiguous arrays"
        num = len(values)
        return cls(
            flat,
            values.view(np.uint8).reshape(num, blank.nbytes),
            np.empty(num, np.int64),
            blank.reshape(-1).view(np.uint8),
            np.arange(num),
        )

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, which: slice | Indices) -> "Rows":
        return replace(self, places=self.places[which])

    @property
    def most_bytes(self) -> int:
        """Bytes of a piece that are looked at: of text one more than fits, which tells where a character ends."""
        return self.blank.nbytes + (self.flat.kind == "text")

    def clear(self) -> None:
        """Makes the rows those of samples that are empty."""
        self.values[self.places] = self.blank
        self.held[self.places] = 0

    def place(self, data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        """Fills the rows with the heads of pieces of memory, of text with whole characters.

        **Arguments:** `data`: uint8 `[bytes]`. `starts`, `lengths`: int64 `[m]`, of the piece for each row, in bytes.

        **Returns:** how many rows were filled: all, or those before the first whose text is no UTF-8.
        """
        reads, is_text = compiled(), self.flat.kind == "text"
        places = np.ascontiguousarray(self.places)
        if reads is not None:
            return reads.pad(data, starts, lengths, places, self.values, self.held, self.blank, is_text)
        pieces = zip(places.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        for row, (place, start, length) in enumerate(pieces):
            piece = data[start : start + min(length, self.most_bytes)]
            size = _head(piece, len(self.blank)) if is_text else min(len(piece), len(self.blank))
            if size < 0:
                return row
            self.values[place, :size], self.values[place, size:] = piece[:size], self.blank[size:]
            self.held[place] = size
        return len(places)

    def place_each(self, pieces: Sequence[Bytes]) -> int:
        """Fills the rows with the heads of pieces that lie apart. **Returns:** as `place`."""
        return self.place(*joined(pieces))


Target = NDArray[Any] | Rows
"""Where a source puts a leaf: an array, or the rows that are to be filled with a leaf of varying size."""


def _head(piece: NDArray[np.uint8], width: int) -> int:
    """Returns how many bytes the whole characters have that fit in a width; -1 for what is no UTF-8."""
    size = min(len(piece), width)
    if len(piece) > width:
        while width - 3 < size and size > 0 and piece[size] & 0xC0 == 0x80:
            size -= 1
    try:
        str(piece[:size].data, "utf-8")
    except UnicodeDecodeError:
        return -1
    return size
