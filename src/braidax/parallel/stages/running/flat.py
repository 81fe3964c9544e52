"""Many small arrays in one buffer, so that a program takes few: each argument has its price at every dispatch."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

SMALL_BYTES = 64 << 10
"""What has less goes into a buffer with others: copying it out takes less time than one argument more."""


@final
class Flat:
    """The form of arrays as a few buffers: large ones as they are, small ones of a type one behind the other.

    **Arguments:** `specs`: of the arrays. `small_bytes`: from which size on an array stays what it is; by default
    `SMALL_BYTES`. `dims`: of each array, which one goes along samples; where it is the first, those of a buffer lie
    side by side, so that devices divide it as they do these. `apart`: which arrays stay what they are in any case.
    `longer`: which are needed longer than the others, and so share buffers with one another only. `turned`: which of
    two dims lie turned in buffers of their own.
    """

    def __init__(
        self,
        specs: Sequence[Any],
        *,
        small_bytes: int | None = None,
        dims: Sequence[int | None] | None = None,
        apart: Collection[int] = (),
        longer: Collection[int] = (),
        turned: Collection[int] = (),
    ) -> None:
        small_bytes = SMALL_BYTES if small_bytes is None else small_bytes
        self.specs = tuple(specs)
        dims = [None] * len(self.specs) if dims is None else dims
        small: dict[tuple[Any, int, bool], list[int]] = {}
        for at, (spec, dim) in enumerate(zip(self.specs, dims, strict=True)):
            is_small = _is_plain(spec) and math.prod(spec.shape) * np.dtype(spec.dtype).itemsize < small_bytes
            if is_small and dim in (None, 0) and at not in apart:
                rows = 1 if dim is None else spec.shape[0]
                small.setdefault((spec.dtype, rows, at in longer), []).append(at)
        groups = [(rows, group) for (_, rows, _), group in small.items() if len(group) > 1]
        self._groups = [group for _, group in groups]
        self._rows = [rows for rows, _ in groups]
        joined = {at for group in self._groups for at in group}
        self.turned = frozenset(turned) - joined
        """Which arrays lie turned."""
        self._alone = [at for at in range(len(self.specs)) if at not in joined]
        self.dims = [*(0 if rows > 1 else None for rows in self._rows), *(dims[at] for at in self._alone)]
        """Of each buffer, which dim goes along samples."""

    @property
    def alone_places(self) -> list[tuple[int, int]]:
        """The buffers that are one array, and which."""
        return [(len(self._groups) + at, array) for at, array in enumerate(self._alone)]

    def of_buffers(self, values: Sequence[Any], joined: Callable[[Any, int | None], Any]) -> list[Any]:
        """Returns for each buffer the value of the array that it is.

        **Arguments:** `joined`: gives that of a buffer of several, by its shape and the dim that goes along samples.
        """
        shapes = [one.shape for one in jax.eval_shape(self.pack, [*self.specs])[: len(self._groups)]]
        pairs = zip(shapes, self.dims, strict=False)
        return [*(joined(shape, dim) for shape, dim in pairs), *self.alone(values)]

    def holding(self, arrays: Collection[int]) -> list[int]:
        """Returns which buffers have any of these arrays."""
        held = [*self._groups, *([at] for at in self._alone)]
        return [at for at, own in enumerate(held) if any(one in arrays for one in own)]

    def small(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns those that are put together, group by group."""
        return [arrays[at] for group in self._groups for at in group]

    def alone(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns those that stay what they are."""
        return [arrays[at] for at in self._alone]

    def joined(self, small: Sequence[Any]) -> list[Any]:
        """Puts small ones together, as `small` gives them."""
        rest, found = list(small), list[Any]()
        for rows, group in zip(self._rows, self._groups, strict=True):
            own, rest = rest[: len(group)], rest[len(group) :]
            shape = (-1,) if rows == 1 else (rows, -1)
            found.append(jnp.concatenate([one.reshape(shape) for one in own], axis=-1))
        return found

    def pack(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the buffers, in one program."""
        alone = [arrays[at].T if at in self.turned else arrays[at] for at in self._alone]
        return [*self.joined(self.small(arrays)), *alone]

    def unpack(self, buffers: Sequence[Any | None], *, summed: bool = False) -> list[Any]:
        """Undoes `pack`; of a buffer that is None so are the arrays.

        **Arguments:** `summed`: whether buffers that go along samples have been, along these.
        """
        found: list[Any] = [None] * len(self.specs)
        for rows, group, buffer in zip(self._rows, self._groups, buffers, strict=False):
            if buffer is None:
                continue
            begin = 0
            for at in group:
                shape = self.specs[at].shape
                own = shape[1:] if summed and rows > 1 else shape
                end = begin + math.prod(shape) // rows
                found[at] = jax.lax.slice_in_dim(buffer, begin, end, axis=-1).reshape(own)
                begin = end
        for at, buffer in zip(self._alone, buffers[len(self._groups) :], strict=True):
            found[at] = buffer.T if at in self.turned and buffer is not None else buffer
        return found

    def added(self, buffers: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """Adds arrays to those in buffers, in the memory of these where they are given up."""
        return [buffer + more for buffer, more in zip(buffers, self.pack(arrays), strict=True)]


def _is_plain(spec: Any) -> bool:
    return not jnp.issubdtype(spec.dtype, jax.dtypes.extended)
