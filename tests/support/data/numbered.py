"""A source whose samples say which they are, and what tests of the loader ask of it."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from braidax.data.loader import DataLoader
from braidax.data.source import Source

Before = Callable[[np.ndarray], None]


class Numbers(Source):
    """Sample `i` holds the number `i` in two leaves; `before` sees the indices of every read first."""

    def __init__(self, num_samples: int, before: Before | None = None) -> None:
        self.num_samples = num_samples
        self.before = before
        self.dtypes: set[np.dtype[Any]] = set()

    @property
    def sample_spec(self) -> Any:
        return {"x": jax.ShapeDtypeStruct((6,), np.float32), "id": jax.ShapeDtypeStruct((), np.int32)}

    def __len__(self) -> int:
        return self.num_samples

    def read(self, indices: np.ndarray, out: Any) -> None:
        self.dtypes.add(indices.dtype)
        if self.before is not None:
            self.before(indices)
        out["x"][...] = indices[:, None] + np.arange(6) / 8
        out["id"][...] = indices

    def describe(self) -> dict[str, str]:
        return {}


class Large(Numbers):
    """The same with a mebibyte a sample, so that a batch is read in several pieces."""

    @property
    def sample_spec(self) -> Any:
        return {**super().sample_spec, "large": jax.ShapeDtypeStruct((1 << 20,), np.uint8)}

    def read(self, indices: np.ndarray, out: Any) -> None:
        super().read(indices, out)
        out["large"][...] = (indices % 251)[:, None]


def ids(batch: Any) -> list[int]:
    return np.asarray(batch["id"]).tolist()


def all_ids(loader: DataLoader) -> list[list[int]]:
    return [ids(batch) for batch in loader]


def peeked(loader: DataLoader, num_batches: int) -> list[list[int]]:
    return [indices.tolist() for indices in loader.peek(num_batches)]


def check(batch: Any) -> None:
    want = np.asarray(batch["id"])[:, None] + np.arange(6) / 8
    np.testing.assert_array_equal(np.asarray(batch["x"]), want.astype(np.float32))


def reading_threads() -> list[str]:
    """Names the loader's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("braidax")]
