"""How dims are divided into parts, and these into slices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn


class Undivided(Exception):
    """A jaxpr cannot be evaluated on parts; the message says why. **Fields:** `equation`: of it, that cannot."""

    def __init__(self, why: str, equation: JaxprEqn | None = None) -> None:
        super().__init__(why)
        self.equation = equation


class Division(NamedTuple):
    """How dims are divided.

    **Fields:** `num_parts`: into how many equal parts; `index`: which one this is, an int32 scalar. `size`: of a dim
    that is padded for it, None where there is no padding. `sums`: whether results may be sums over it. `num_slices`:
    into how many a part is cut again; `slice`: which of them this is, the last of which may overlap the one before.
    `num_joined`: how many parts are taken as one; `index` counts those.
    """

    num_parts: int
    index: Any
    size: int | None = None
    sums: bool = True
    num_slices: int = 1
    slice: Any = 0
    num_joined: int = 1

    def part_size(self, size: int) -> int:
        """Returns the size of a slice of a part of a dim. **Raises:** `Undivided` where that is none."""
        if self.size is not None and size != self.size:
            raise Undivided(f"a dim of {size} would be divided with one of {self.size}")
        num = self.num_parts * self.num_slices
        if self.size is None and size % num:
            raise Undivided(f"{num} does not divide {size}")
        return -(-self._whole(size) // self.num_slices)

    def start(self, size: int) -> Any:
        """Returns where in a dim this slice starts."""
        return self.index * self._whole(size) + self.start_in_part(size)

    def start_in_part(self, size: int) -> Any:
        """Returns where in its part this slice starts."""
        part = self.part_size(size)
        return self.slice * part if self._is_even(size) else jnp.minimum(self.slice * part, self._whole(size) - part)

    def first(self, size: int) -> Any:
        """Returns the first element of a dim that is in no slice before this one."""
        return self.index * self._whole(size) + self.slice * self.part_size(size)

    def is_there(self, size: int) -> Any:
        """Returns for each element whether it is no padding, nor in the slice before, bool `[part_size]`."""
        at = self.start(size) + jnp.arange(self.part_size(size), dtype=jnp.int32)
        return at < size if self._is_even(size) else (at < size) & (at >= self.first(size))

    def cut(self, value: Any, dim: int) -> Any:
        """Returns this slice of a value along a dim, padded."""
        size, part = value.shape[dim], self.part_size(value.shape[dim])
        if more := self.num_parts // self.num_joined * self._whole(size) - size:
            value = jnp.pad(value, [(0, more if at == dim else 0) for at in range(value.ndim)])
        return jax.lax.dynamic_slice_in_dim(value, self.start(size), part, dim)

    def _whole(self, size: int) -> int:
        return self.num_joined * -(-size // self.num_parts)

    def _is_even(self, size: int) -> bool:
        return self._whole(size) % self.num_slices == 0
