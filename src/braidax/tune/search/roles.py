"""What an axis of a mesh may be for, as the search prices it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from braidax.parallel import (
    DataParallel,
    FullySharded,
    Hybrid,
    Pipeline,
    RotatedTensorParallel,
    Strategy,
    TensorParallel,
)


class Role(NamedTuple):
    """One of the roles. **Fields:** its `name` in tables. `make`: its strategy."""

    name: str
    make: Callable[[], Strategy]


ROLES = (
    Role("data", DataParallel),
    Role("fully_sharded", FullySharded),
    Role("rotated", RotatedTensorParallel),
    Role("tensor", TensorParallel),
    Role("hybrid", Hybrid),
    Role("1F1B", functools.partial(Pipeline, "1F1B")),
    Role("ZB-H1", functools.partial(Pipeline, "ZB-H1")),
    Role("interleaved", functools.partial(Pipeline, "Interleaved1F1B")),
)
"""A candidate holds places in this."""

DATA, FULLY_SHARDED, ROTATED, TENSOR, HYBRID, ONE_EACH, HALVED, INTERLEAVED = range(len(ROLES))
UNUSED = -1
STAGES = (ONE_EACH, HALVED, INTERLEAVED)
"""Those that cut the loss."""


class Offered(NamedTuple):
    """Which roles a loss has a use for. **Fields:** `tables`: whether it reads some by rows. `most_stages`: into how
    many it can be cut, 1 if not at all."""

    tables: bool = False
    most_stages: int = 1


def is_one_to_try(mesh: tuple[int, ...], roles: tuple[int, ...], offered: Offered) -> bool:
    """Returns whether axes of these sizes may have these roles.

    One axis at most is a ring, one tensor parallel, one for rows of tables, and one of stages. Beside an axis for rows
    another one for samples would be for rows too, and behind one that shards everything there would be no table left.
    """
    stages = [(size, role) for size, role in zip(mesh, roles, strict=True) if role in STAGES]
    if max(roles.count(ROTATED), roles.count(TENSOR), roles.count(HYBRID), len(stages)) > 1:
        return False
    if HYBRID in roles and (DATA in roles or not offered.tables):
        return False
    if HYBRID in roles and FULLY_SHARDED in roles[: roles.index(HYBRID)]:
        return False
    return all(size * (2 if role == INTERLEAVED else 1) <= offered.most_stages for size, role in stages)


def takes(mesh: tuple[int, ...], roles: tuple[int, ...], microbatches: int) -> bool:
    """Returns whether a batch may be in so many pieces: one stage behind the other takes two or more, and schedules
    that interleave stages as many as there are devices, or a multiple."""
    for size, role in zip(mesh, roles, strict=True):
        if (role in STAGES and microbatches < 2) or (role == INTERLEAVED and microbatches % size):
            return False
    return True
