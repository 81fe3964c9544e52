"""Candidates: every way to lay devices out along axes, and what each axis may be for."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from braidax.errors import ArgumentError
from braidax.parallel import DataParallel, Strategy

from .roles import ROLES, STAGES, TENSOR, UNUSED, Offered, is_one_to_try, takes

AXES = ("data", "model", "inner")
"""The axes of a mesh, the outermost first."""


class Candidates(NamedTuple):
    """Many candidates, one a row.

    **Fields:** `sizes`: int `[n, axes]`. `kinds`: int `[n, axes]`, places in `ROLES`, -1 for an axis of one device.
    `microbatches`: int `[n]`. `axes`: their names.
    """

    sizes: Any
    kinds: Any
    microbatches: Any
    axes: tuple[str, ...]

    def mesh(self, at: int) -> dict[str, int]:
        """Returns the axes that a candidate uses; one of one device where it uses none."""
        found = {name: int(size) for name, size in zip(self.axes, self.sizes[at], strict=True) if size > 1}
        return found or {"data": 1}

    def strategies(self, at: int) -> dict[str, Strategy]:
        """Returns what each of these is for."""
        kinds = zip(self.axes, self.kinds[at], strict=True)
        found: dict[str, Strategy] = {name: ROLES[int(kind)].make() for name, kind in kinds if kind != UNUSED}
        return found or {"data": DataParallel()}

    def distinct(self) -> "Candidates":
        """Returns those that differ where all axes have the same link: there neither their order counts, nor whether
        one axis is two of the same role. Of equals the one with the fewest axes stays."""
        roles = [np.where(self.kinds == role, self.sizes, 1).prod(1) for role in range(len(ROLES))]
        fewest_first = np.argsort((self.sizes > 1).sum(1), kind="stable")
        _, first = np.unique(np.stack([*roles, self.microbatches], 1)[fewest_first], axis=0, return_index=True)
        kept = np.sort(fewest_first[first])
        return Candidates(self.sizes[kept], self.kinds[kept], self.microbatches[kept], self.axes)


def factorizations(count: int, num_axes: int) -> list[tuple[int, ...]]:
    """Returns all ways to write a count as an ordered product."""
    if num_axes == 1:
        return [(count,)]
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    return [(size, *rest) for size in divisors for rest in factorizations(count // size, num_axes - 1)]


def candidates(
    devices: int, batch_size: int, axes: Sequence[str] = AXES, *, offered: Offered | None = None
) -> Candidates:
    """Returns every candidate that divides a batch evenly.

    Which roles axes may have beside one another is `is_one_to_try`; microbatches are powers of two.

    **Arguments:** `offered`: which roles the loss has a use for; None: those that any has.

    **Raises:** `ArgumentError` for no devices, and no samples.
    """
    for name, value in (("devices", devices), ("batch_size", batch_size)):
        if value < 1:
            raise ArgumentError(f"{name}={value}: expected a whole number of at least 1")
    offered = Offered() if offered is None else offered
    sizes, kinds, pieces = list[tuple[int, ...]](), list[tuple[int, ...]](), list[int]()
    for mesh in factorizations(devices, len(axes)):
        if any(one == 1 < two for one, two in itertools.pairwise(mesh)):
            continue  # the same, by other names
        for roles in itertools.product(*(range(len(ROLES)) if size > 1 else (UNUSED,) for size in mesh)):
            if not is_one_to_try(mesh, roles, offered):
                continue
            parts = 1
            for size, role in zip(mesh, roles, strict=True):
                parts *= 1 if role == TENSOR or role in STAGES else size
            microbatches = 1
            while batch_size % (parts * microbatches) == 0:
                if takes(mesh, roles, microbatches):
                    sizes.append(mesh)
                    kinds.append(roles)
                    pieces.append(microbatches)
                microbatches *= 2
    return Candidates(np.array(sizes), np.array(kinds), np.array(pieces), tuple(axes))
