"""The order of samples: a random permutation of every epoch, computed index by index in O(1) memory.

A Feistel network over `Z_a x Z_b`, with `a * b` barely above the number of samples, permutes the pairs; the few results
beyond the end are permuted again until they fall inside (cycle walking). Source: Black and Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002), the generalized Feistel construction of section 5.
"""

import functools
import hashlib
import math
import sys
from types import ModuleType

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from braidax.data.sampling.splitmix import FIRST, SECOND
from braidax.errors import ArgumentError

_ROUNDS = 10
_CHUNK = 1 << 14  # indices permuted at a time: the intermediate arrays stay in cache


class Permutation:
    """A permutation of `range(num_samples)` that depends on nothing but its arguments.

    **Arguments:** `num_samples`: how many samples, at most 2**62. `seed`: any integer, or `None` for the identity.
    `epoch`: hashed together with the seed, so that no two (seed, epoch) share an order by construction.
    """

    def __init__(self, num_samples: int, *, seed: int | None, epoch: int) -> None:
        if not 0 <= num_samples <= 1 << 62:
            raise ArgumentError(f"num_samples={num_samples} is not between 0 and 2**62")
        self.num_samples = num_samples
        self.name = f"seed {seed}, epoch {epoch}"  # of the order, among those of as many samples
        self._identity = seed is None or num_samples < 2
        self._a = max(math.isqrt(max(num_samples - 1, 0)) + 1, 1)
        self._b = max(-(-num_samples // self._a), 1)
        digest = hashlib.shake_256(f"braidax order/{seed}/{epoch}".encode()).digest(8 * _ROUNDS)
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, positions: Int64[np.ndarray, " n"]) -> NDArray[np.int64]:
        """Returns the sample indices at some positions of the order.

        **Arguments:** `positions`: int64 `[n]`, each in `range(num_samples)`.

        **Raises:** `ArgumentError` if a position is out of range.
        """
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.num_samples:
            raise ArgumentError(
                f"positions must lie in range({self.num_samples}), got {positions.min()}..{positions.max()}"
            )
        out = positions.astype(np.int64)
        if self._identity:
            return out
        quick = compiled()
        if quick is not None:
            quick.permute(out, self._keys, self._a, self._b, self.num_samples, False)
            return out
        for start in range(0, len(positions), _CHUNK):
            part = out[start : start + _CHUNK]
            part[:] = self._encipher(part.astype(np.uint64))
            beyond = np.flatnonzero(part >= self.num_samples)
            while len(beyond):
                part[beyond] = self._encipher(part[beyond].astype(np.uint64))
                beyond = beyond[part[beyond] >= self.num_samples]
        return out

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(values, np.uint64(self._b))
        scratch = np.empty((2, len(values)), np.uint64)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                _add_hash(left, right, key, np.uint64(self._a), scratch)
            else:
                _add_hash(right, left, key, np.uint64(self._b), scratch)
        left *= np.uint64(self._b)
        left += right
        return left


@functools.cache
def compiled() -> ModuleType | None:
    """Returns what does the same in C, or None where it is not compiled."""
    if sys.byteorder != "little":
        return None
    from braidax.bindings import import_binding

    return import_binding("braidax.data.sampling.permutation_binding")


def _add_hash(
    values: NDArray[np.uint64],
    others: NDArray[np.uint64],
    key: np.uint64,
    modulus: np.uint64,
    scratch: NDArray[np.uint64],
) -> None:
    """Adds to `values`, modulo `modulus`, a hash of `others` scaled to `range(modulus)`.

    The hash is 32 bits, mixed by the constants of SplitMix64.
    """
    bits, other = scratch
    np.bitwise_xor(others, key, out=bits)
    bits *= FIRST
    np.right_shift(bits, np.uint64(27), out=other)
    bits ^= other
    bits *= SECOND
    bits += key
    bits *= np.uint64(0xD6E8FEB86659FD93)
    bits >>= np.uint64(32)
    bits *= modulus
    bits >>= np.uint64(32)
    values += bits
    np.subtract(values, modulus, out=other)  # far above the modulus where the sum is below it
    np.minimum(values, other, out=values)
