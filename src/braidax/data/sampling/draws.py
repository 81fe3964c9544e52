"""Random numbers that belong to a sample: pure functions of seed, epoch, sample index and the place that draws them.

A key for each sample comes from a hash of seed, epoch and place, mixed with the index; its numbers are those of
SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) started with the key,
each computed on its own. So neither threads nor windows nor restarts change what a sample gets.
"""

import hashlib
import math

import numpy as np
from jaxtyping import Int64, UInt64
from numpy.typing import NDArray

from braidax.data.sampling.splitmix import GOLDEN, mixed
from braidax.errors import ArgumentError


class Draws:
    """Random numbers for a window of samples, drawn one after the other; those of a sample are its own.

    **Arguments:** `indices`: int64 `[n]`, the samples. `seed`, `epoch`: of the cursor. `place`: a name for what draws,
    so that two that draw for the same sample get different numbers.
    """

    def __init__(self, indices: Int64[np.ndarray, " n"], *, seed: int | None, epoch: int, place: str) -> None:
        digest = hashlib.shake_256(f"braidax draws/{seed}/{epoch}/{place}".encode()).digest(16)
        first, second = np.frombuffer(digest, "<u8")
        self._keys = mixed(mixed(indices.astype(np.uint64) ^ first) + second)
        self._drawn = 0

    @property
    def keys(self) -> UInt64[np.ndarray, " n"]:
        """A key for each sample, for generators of one's own: uint64 `[n]`."""
        return self._keys.copy()

    def alone(self, place: int) -> "Draws":
        """Returns the numbers of one sample of the window, from the first on."""
        found = object.__new__(Draws)
        found._keys, found._drawn = self._keys[place : place + 1], 0
        return found

    def bits(self, shape: tuple[int, ...] = ()) -> NDArray[np.uint64]:
        """Draws 64 random bits for each number: uint64 `[n, *shape]`."""
        count = math.prod(shape)
        counters = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        self._drawn += count
        return mixed(self._keys[:, None] + counters).reshape(len(self._keys), *shape)

    def random(self, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Draws numbers uniform in [0, 1): float64 `[n, *shape]`."""
        numbers = (self.bits(shape) >> np.uint64(11)).astype(np.float64)
        numbers *= 2.0**-53
        return numbers

    def uniform(self, low: float, high: float, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Draws numbers uniform in [low, high): float64 `[n, *shape]`."""
        return low + (high - low) * self.random(shape)

    def integers(self, low: int, high: int, shape: tuple[int, ...] = ()) -> NDArray[np.int64]:
        """Draws integers uniform in [low, high): int64 `[n, *shape]`.

        **Raises:** `ArgumentError` unless `low` is less than `high`, by less than 2**32.
        """
        if not 0 < high - low < 1 << 32:
            raise ArgumentError(f"integers got low={low}, high={high}; expected low < high, less than 2**32 apart")
        return low + ((self.bits(shape) >> np.uint64(32)) * np.uint64(high - low) >> np.uint64(32)).astype(np.int64)

    def normal(self, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Draws numbers of the standard normal distribution, by Box and Muller: float64 `[n, *shape]`."""
        radius = np.sqrt(-2.0 * np.log1p(-self.random(shape)))
        return (radius * np.cos(2.0 * np.pi * self.random(shape))).astype(np.float64)
