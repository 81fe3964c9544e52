"""What is counted where it happens: records and bytes at the source, bytes at the sockets of a process."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Box, Indices, Sliced, Source, is_at_hand


class Tally(NamedTuple):
    """Since the start. **Fields:** `records`: of which the heaviest leaf was read; `num_bytes`: as they are stored."""

    records: int
    num_bytes: int

    def since(self, before: "Tally") -> "Tally":
        """Returns what came after another one."""
        return Tally(self.records - before.records, self.num_bytes - before.num_bytes)


@final
class Counted(Source, Sliced):
    """A source that hands all reads on, and counts them.

    **Arguments:** `inner`: a source that is `Sliced`. `heavy`: the leaf by which records are counted. `stored_bytes`:
    of that leaf in each record, int64 `[n]`; None where every number is stored as it is loaded.
    """

    def __init__(self, inner: Source, heavy: str, stored_bytes: NDArray[np.int64] | None) -> None:
        self._inner = inner
        self._sliced = cast(Sliced, inner)
        self._names = sorted(inner.sample_spec)
        self._heavy = self._names.index(heavy)
        self._stored_bytes = stored_bytes
        self._lock = threading.Lock()
        self._tally = Tally(0, 0)

    @property
    def sample_spec(self) -> Any:
        return self._inner.sample_spec

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def is_at_hand(self) -> bool:
        """As the source says."""
        return is_at_hand(self._inner)

    @property
    def cut_dims(self) -> Sequence[int]:
        return self._sliced.cut_dims

    @property
    def num_bytes(self) -> int:
        """Of all records, as they are stored."""
        spec: Mapping[str, Any] = self.sample_spec
        sizes = [math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize * len(self) for _, leaf in sorted(spec.items())]
        if self._stored_bytes is not None:
            sizes[self._heavy] = int(self._stored_bytes.sum())
        return sum(sizes)

    @property
    def tally(self) -> Tally:
        """What was read so far."""
        with self._lock:
            return self._tally

    def read(self, indices: Indices, out: Any) -> None:
        self._inner.read(indices, out)
        self.count(indices, [out[name] for name in self._names])

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        self._sliced.read_slices(indices, boxes, out)
        self.count(indices, out)

    def describe(self) -> Mapping[str, str]:
        return self._inner.describe()

    def count(self, indices: Indices, out: Sequence[NDArray[Any] | None]) -> None:
        """Counts a read. **Arguments:** as those of `read_slices`."""
        heavy = out[self._heavy]
        num_bytes = sum(leaf.nbytes for leaf in out if leaf is not None)
        if heavy is not None and self._stored_bytes is not None:
            num_bytes += int(self._stored_bytes[indices].sum()) - heavy.nbytes
        with self._lock:
            records, before = self._tally
            self._tally = Tally(records + (0 if heavy is None else len(indices)), before + num_bytes)
