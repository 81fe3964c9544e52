"""What was written of rows last, in few bytes: those that are the same again need not be written again."""

import math
import secrets
from typing import Any, NamedTuple, final

import numpy as np
import xxhash
from numpy.typing import NDArray

_SEED = secrets.randbits(64)  # so that nobody can choose rows with the same fingerprint


class Known(NamedTuple):
    """Rows as they were written last. **Fields:** `ids`: int64 `[m]`, in order. `prints`: uint64 `[m, 2]`. `is_most`:
    whether more than half of them were others than before."""

    ids: NDArray[np.int64]
    prints: NDArray[np.uint64]
    is_most: bool


@final
class Fingerprints:
    """Finds which rows are others than those that were written last: by 128 bits of each, so that rows which differ are
    taken for the same with a chance of 2^-128.

    **Arguments:** `known`: what was written last; None: nothing.
    """

    def __init__(self, known: Known | None) -> None:
        self._known, self._num_others = known, 0
        self._ids, self._prints = [np.empty(0, np.int64)], [np.empty((0, 2), np.uint64)]

    def differ(self, ids: NDArray[Any], values: NDArray[Any]) -> NDArray[np.bool_]:
        """Returns which rows are others. **Arguments:** `ids`: theirs, each once in all. `values`: `[m, D]`."""
        prints = fingerprints(values)
        self._ids.append(ids.astype(np.int64))
        self._prints.append(prints)
        found = np.ones(len(ids), bool)
        if self._known is not None and len(self._known.ids):
            at = np.minimum(np.searchsorted(self._known.ids, ids), len(self._known.ids) - 1)
            found = (self._known.ids[at] != ids) | (self._known.prints[at] != prints).any(1)
        self._num_others += int(found.sum())
        return found

    def known(self) -> Known:
        """Returns all rows that were asked about, for the next time."""
        ids = np.concatenate(self._ids)
        order = np.argsort(ids)
        is_most = self._known is not None and 2 * self._num_others > len(ids)
        return Known(ids[order], np.concatenate(self._prints)[order], is_most)


def fingerprints(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Returns a number of 128 bits for each row, uint64 `[m, 2]`."""
    rows = np.ascontiguousarray(values).reshape(len(values), math.prod(values.shape[1:])).view(np.uint8)
    digests = b"".join([xxhash.xxh3_128_digest(row.data, _SEED) for row in rows])
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)
