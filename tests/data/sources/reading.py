"""Reads samples for the tests of the sources."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from braidax.data.sources.source import Source, allocate


def read(source: Source, indices: Sequence[int] | None = None) -> Any:
    """Reads into slots that were filled with another value before, so that what is left unwritten shows."""
    wanted = np.arange(len(source)) if indices is None else np.array(indices, np.int64)
    out = allocate(source.sample_spec, len(wanted))
    for leaf in jax.tree.leaves(out):
        if leaf.dtype == object:
            leaf[...] = "left unwritten"
        else:
            leaf.view(np.uint8)[...] = 0x5A
    source.read(wanted, out)
    return out


def assert_equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)
