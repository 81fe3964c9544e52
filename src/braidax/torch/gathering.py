"""Batches gathered from columns, straight into the memory of a batch's tensors, without an object for each sample."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from braidax.torch.items import Items
from braidax.torch.library import torch_library
from braidax.torch.memory import Memory


@runtime_checkable
class Table(Protocol):
    """Columns of fixed width, one row a sample."""

    @property
    def signature(self) -> Any:
        """What becomes another when the form of samples may."""
        ...

    def __len__(self) -> int: ...

    def fill(self, rows: NDArray[np.int64], out: Any) -> bool:
        """Copies rows into a batch, or returns False where that cannot be done, and what `out` holds is of no use.

        **Arguments:** `rows`: `[n]`, each in `range(len(self))`. `out`: a tensor, or a dict or list of tensors, on the
        CPU, `[n, *sample_shape]`.
        """
        ...


class GatheredItems(Items):
    """A data set whose default batches are gathered from its columns.

    They are the very ones that the data set and torch's `default_collate` make. That is tried with the first batch: its
    keys, dtypes, shapes and values have to be equal, or all batches are made the long way. So is a batch that the
    columns cannot give.

    **Arguments:** as of `Items`, `table`, and `former`: what the epoch before used, whose memory and finding go on.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        pin: Callable[[Any], Any] | None,
        table: Table,
        former: "GatheredItems | None" = None,
    ) -> None:
        super().__init__(dataset, collate_fn, batched=True, pin=pin)
        self._long_way = self.many or self._one_by_one
        self.many = self._gathered
        self.splits = False
        self._table = table
        self._signature = table.signature
        self._memory = Memory() if former is None else former._memory
        self._like: Any = None  # tensors [0, *sample_shape] in the form of a batch
        self._is_tried = False
        self._trying = threading.Lock()  # threads may have the first batches at the same time
        if former is not None and former._is_tried and former._signature == self._signature:
            self._found(former._like)

    def batch(self, samples: Any, indices: Any) -> Any:
        if isinstance(samples, _Ready):
            return samples.batch if self._pin is None else self._pin(samples.batch)
        with self._trying:
            if not self._is_tried:
                batch = self._made(samples, indices, None)
                self._compare(batch, indices)
                return batch if self._pin is None else self._pin(batch)
        return super().batch(samples, indices)

    def _one_by_one(self, indices: Any) -> Any:
        return [self._dataset[index] for index in indices]

    def _gathered(self, indices: Any) -> Any:
        batch = None if self._like is None else self._gather(indices)
        return self._long_way(indices) if batch is None else _Ready(batch)

    def _compare(self, batch: Any, indices: Any) -> None:
        leaves = _leaves(batch)
        if leaves is None:
            self._found(None)
            return
        like = _built([leaf[:0].clone() for leaf in leaves], batch)
        mine = self._gather(indices, like)
        same = mine is not None and all(map(_equal, cast("list[Any]", _leaves(mine)), leaves))
        self._found(like if same else None)

    def _found(self, like: Any) -> None:
        self._like, self._is_tried = like, True
        if like is None:
            self.many, self.splits = self._long_way, None

    def _gather(self, indices: Any, like: Any = None) -> Any:
        """Returns a batch in the form of another one, or None if the columns cannot give it."""
        like = self._like if like is None else like
        rows = np.asarray(indices)
        if rows.dtype != np.int64 or not len(rows) or rows.min() < 0 or rows.max() >= len(self._table):
            return None
        leaves = cast("list[Any]", _leaves(like))
        made = [self._memory.tensor((len(rows), *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        batch = _built(made, like)
        return batch if self._table.fill(rows, batch) else None


class _Ready(NamedTuple):
    """A batch that needs no collating."""

    batch: Any


def _leaves(batch: Any) -> list[Any] | None:
    """Returns the tensors of a batch of the forms that are gathered, or None."""
    torch = torch_library()
    held: list[Any] = [batch]
    if type(batch) is dict:
        held = list(cast("dict[str, Any]", batch).values())
    elif type(batch) is list:
        held = cast("list[Any]", batch)
    plain = all(type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.ndim for leaf in held)
    return held if plain and held else None


def _built(leaves: list[Any], like: Any) -> Any:
    if isinstance(like, dict):
        return dict(zip(cast("dict[str, Any]", like), leaves, strict=True))
    return leaves if isinstance(like, list) else leaves[0]


def _equal(mine: Any, other: Any) -> bool:
    torch = torch_library()
    if torch.equal(mine, other):
        return True
    return mine.is_floating_point() and torch.equal(mine.nan_to_num(), other.nan_to_num())
