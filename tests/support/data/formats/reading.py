"""Reads samples for the tests of the sources."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from braidax.data.source import Source, allocate


def read(source: Source, indices: Sequence[int] | None = None) -> Any:
    """Reads into slots that were filled with another value before, so that what is left unwritten shows."""
    wanted = np.arange(len(source)) if indices is None else np.array(indices, np.int64)
    out = allocate(source.sample_spec, len(wanted))
    spoil(out)
    source.read(wanted, out)
    return out


def spoil(window: Any, byte: int = 0x5A) -> None:
    """Fills a window with what no source has put there."""
    for leaf in jax.tree.leaves(window):
        if leaf.dtype == object:
            leaf[...] = f"left unwritten {byte}"
        else:
            leaf.view(np.uint8)[...] = byte


def assert_equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(_assert_equal, one, other)


def _assert_equal(one: Any, other: Any) -> None:
    if one.dtype != object:
        np.testing.assert_array_equal(one, other)
        return
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert type(left) is type(right)
        np.testing.assert_array_equal(left, right)
