"""`map`: a function of one sample, on all samples of a source."""

import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.leaves import samples_of
from braidax.data.sampling.draws import Draws
from braidax.data.source import Source
from braidax.data.transforms.mapped import mapped


def map(source: Source, function: Callable[..., Any]) -> Source:
    """Returns a source whose samples went through a function, one by one.

    A function of whole windows is many times as fast, see `mapped`; one that holds the GIL long is worth
    `DataLoader(workers="processes")`.

    **Arguments:** `function`: takes one sample, as `source[i]` returns it, but for integers of 64 bits in arrays,
    tables and records, which come as they are stored, and returns a PyTree of arrays, numbers,
    `str` and `bytes`. Its result on sample 0 sets the shapes and dtypes: Python's numbers are loaded as 32-bit ones.
    `str`, `bytes` and leaves of varying size that it hands through vary in size. With a parameter named `rng` it gets a
    `numpy.random.Generator` whose numbers depend on seed, epoch and sample alone. Called from many threads at once.

    **Raises:** `RecordError` when `function` raises or returns another shape, naming the record.
    """
    drawn = "rng" in _parameters(function)
    return mapped(source, _EachAtRandom(function) if drawn else _Each(function))


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # functions of C have no signature
        return []


class _Each:
    """A function of windows that asks one of samples."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__qualname__ = getattr(function, "__qualname__", None) or type(function).__name__

    def __call__(self, window: Any) -> Any:
        return _stacked(window, [self.function(sample) for sample in _samples(window)])


class _EachAtRandom(_Each):
    """The same with random numbers for each sample."""

    def __call__(self, window: Any, rng: Draws | None = None) -> Any:
        assert rng is not None, "mapped gives what asks for it"
        generators = [np.random.Generator(np.random.Philox(key=key)) for key in rng.keys.tolist()]
        pairs = zip(_samples(window), generators, strict=True)
        return _stacked(window, [self.function(sample, rng=generator) for sample, generator in pairs])


def _samples(window: Any) -> list[Any]:
    return samples_of(window, len(jax.tree.leaves(window)[0]))


def _stacked(window: Any, made: Sequence[Any]) -> Any:
    """Returns what was made of each sample as one window."""
    inner = [leaf for leaf in jax.tree.leaves(window) if leaf.dtype == object]
    varying = {id(value) for leaf in inner for value in leaf}
    structure = jax.tree.structure(made[0])
    for sample in made:
        if jax.tree.structure(sample) != structure:
            raise ValueError(f"one sample became {structure}, another {jax.tree.structure(sample)}")
    columns = zip(*(jax.tree.leaves(sample) for sample in made), strict=True)
    return jax.tree.unflatten(structure, [_column(values, varying) for values in columns])


def _column(values: Sequence[Any], varying: Container[int]) -> NDArray[Any]:
    if all(isinstance(value, str | bytes) or id(value) in varying for value in values):
        column = np.empty(len(values), object)
        column[:] = list(values)
        return column
    arrays = [np.asarray(value) for value in values]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ValueError(f"samples became arrays of several shapes, {shapes[0]} and {shapes[1]}; expected one")
    return np.stack(arrays)
