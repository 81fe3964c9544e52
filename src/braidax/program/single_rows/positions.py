"""Where elements of large arrays are: numbers below 2^64, as two words of 32 bits, since JAX has no wider ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_HALF, _WORD = 16, 32


class Positions(NamedTuple):
    """Numbers below 2^64. **Fields:** `high`, `low`: uint32 of one shape; `high` may be a number that all share."""

    high: Any
    low: jax.Array

    def times(self, factor: int) -> "Positions":
        """Returns the products, modulo 2^64. **Arguments:** `factor`: below 2^32."""
        if factor >> _WORD:
            raise ValueError(f"factor={factor}, expected one below 2^32")
        number = np.uint32(factor)
        return Positions(_high_of_product(self.low, factor) + self.high * number, self.low * number)

    def plus(self, added: jax.Array) -> "Positions":
        """Returns the sums, modulo 2^64. **Arguments:** `added`: uint32; shapes are broadcast."""
        low = self.low + added
        return Positions(self.high + (low < added).astype(jnp.uint32), low)

    def reshaped(self, *shape: Any) -> "Positions":
        """Returns them in another shape."""
        high = jnp.broadcast_to(jnp.asarray(self.high, jnp.uint32), self.low.shape)
        return Positions(high.reshape(shape), self.low.reshape(shape))


def _high_of_product(number: jax.Array, factor: int) -> jax.Array:
    """Returns the upper 32 bits of a product of 32 bits each, by halves: none of the sums is wider than 32 bits."""
    mask = np.uint32((1 << _HALF) - 1)
    upper, lower = number >> _HALF, number & mask
    of_upper, of_lower = np.uint32(factor >> _HALF), np.uint32(factor & int(mask))
    crossed, other = upper * of_lower, lower * of_upper
    middle = ((lower * of_lower) >> _HALF) + (crossed & mask) + (other & mask)
    return upper * of_upper + (crossed >> _HALF) + (other >> _HALF) + (middle >> _HALF)
