"""Sources of varying leaves in memory, for the tests of text, packing and mixtures."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from braidax.data.source import VARYING, Source, allocate


class Varying(Source):
    """Sample `i` holds `values[name][i]` in each varying leaf, and its own number in the leaf `id`.

    With `grow`, arrays become longer by one item in each epoch. `prepared` has the indices that were announced.
    """

    def __init__(self, values: Mapping[str, Sequence[Any]], *, grow: bool = False, stamp: str | None = None) -> None:
        self.values = dict(values)
        self.grow = grow
        self.stamp = stamp
        self.place: tuple[int | None, int] = (None, 0)
        self.prepared: list[int] = []
        self.num_read = 0

    @property
    def sample_spec(self) -> Any:
        return {**dict.fromkeys(self.values, VARYING), "id": jax.ShapeDtypeStruct((), np.int32)}

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def read(self, indices: np.ndarray, out: Any) -> None:
        self.num_read += len(indices)
        out["id"][...] = indices
        for name, values in self.values.items():
            for place, index in enumerate(indices.tolist()):
                value = values[index]
                if self.grow:
                    value = np.append(value, np.zeros(self.place[1], value.dtype))
                out[name][place] = value

    def describe(self) -> dict[str, str]:
        return {"format": "varying", "samples": f"{len(self):,}"}

    def at(self, seed: int | None, epoch: int) -> Source:
        if not self.grow:
            return self
        moved = Varying(self.values, grow=True)
        moved.place = (seed, epoch)
        return moved

    def prepare(self, indices: np.ndarray) -> None:
        self.prepared += indices.tolist()


def window(source: Source, *indices: int) -> Any:
    """Reads a window whose fixed leaves were filled with another value before, so that what is left unwritten shows."""
    out = allocate(source.sample_spec, len(indices))
    for leaf in jax.tree.leaves(out):
        if leaf.dtype != object:
            leaf.view(np.uint8)[...] = 0xA5
    source.read(np.array(indices, np.int64), out)
    return out


def documents(lengths: Sequence[int], dtype: Any = np.int32) -> list[np.ndarray]:
    """Returns documents of these lengths whose tokens are all different, but for their first: 1, 2, 3, …"""
    ends = np.cumsum([0, *lengths])
    return [np.arange(1 + ends[i], 1 + ends[i + 1]).astype(dtype) for i in range(len(lengths))]
