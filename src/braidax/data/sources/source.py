"""The contract of a source: a number of samples that can be read in any order from any thread."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray


@runtime_checkable
class Source(Protocol):
    """Samples on disk or in memory, readable at random.

    Anything with these members is a source; our own classes say so by inheriting. A path becomes one through
    `braidax.open`, and so does any object with `__len__` and `__getitem__`.
    """

    @property
    def sample_spec(self) -> Any:
        """A PyTree of `jax.ShapeDtypeStruct`: the shape and dtype of every leaf of **one** sample (no batch dim)."""
        ...

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def read(self, indices: Int64[np.ndarray, "n"], out: Any) -> None:
        """Reads samples into place.

        **Arguments:** `indices`: int64 `[n]`, in any order, repeats allowed. `out`: a PyTree like `sample_spec` of
        C-contiguous NumPy arrays `[n, *sample_shape]`; leaf `[i]` is filled with sample `indices[i]`. Called from many
        threads at once. Neither argument may be kept after the call.

        **Raises:** `RecordError` or `FormatError`, naming file, record, value and remedy.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Returns facts for people, in the order to show them, such as `{"format": …, "files": …}`."""
        ...

    def batch_spec(self, batch_size: int) -> Any:
        """Returns `sample_spec` with a leading batch dim, as `parallelize(batch=…)` takes it.

        **Arguments:** `batch_size`: samples in one global batch.
        """
        return batch_spec(self.sample_spec, batch_size)


def batch_spec(sample_spec: Any, batch_size: int) -> Any:
    """Returns a PyTree of `jax.ShapeDtypeStruct` with the dim `batch_size` put before each leaf's shape."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape), leaf.dtype), sample_spec)


def allocate(sample_spec: Any, num_samples: int) -> Any:
    """Returns a PyTree of uninitialised NumPy arrays `[num_samples, *sample_shape]`, as `Source.read` fills them."""
    return jax.tree.map(lambda leaf: np.empty((num_samples, *leaf.shape), leaf.dtype), sample_spec)


Indices = NDArray[np.int64]
