"""Frames of Ray's data sets, and back."""

import itertools
from typing import Any

from braidax.errors import ArgumentError
from braidax.frame.clusters.partitions import as_arrow, give, take
from braidax.frame.frame import Frame
from braidax.gang import Gang
from braidax.gang.ray import RayGang
from braidax.gang.ray_store import import_ray


def from_ray(dataset: Any, gang: Gang) -> Frame:
    """Returns a frame of a data set of Ray, whose blocks the ranks read from Ray's object store, in order.

    Each rank takes as many blocks as the others; those on its host it reads where they lie. What is not computed yet is
    computed by Ray first.

    **Arguments:** `dataset`: a `ray.data.Dataset`. `gang`: a `RayGang` on the same cluster.

    **Raises:** `ArgumentError` for what is none, and naming block (as partition), column and dtype for what Polars
    cannot represent, or blocks that differ; what Ray raises for a block that fails; `GangError` for ranks and blocks
    that are lost.
    """
    if not isinstance(gang, RayGang):
        raise ArgumentError(f"gang is a {type(gang).__name__}: expected a RayGang, whose ranks read Ray's objects")
    if not isinstance(dataset, import_ray().data.Dataset):
        kind = type(dataset)
        raise ArgumentError(f"dataset is a {kind.__module__}.{kind.__qualname__}: expected a ray.data.Dataset")
    references = list(dataset.to_arrow_refs())
    if not references:
        raise ArgumentError("dataset is empty: expected one block or more, since the first one says the columns")
    bounds = [len(references) * rank // gang.size for rank in range(gang.size + 1)]
    return take(gang, references, [range(begin, end) for begin, end in itertools.pairwise(bounds)])


def to_ray(frame: Frame) -> Any:
    """Returns a `ray.data.Dataset` of a frame on a `RayGang`: a block for each rank, in order, in Ray's object store.

    The frame is computed now. The blocks are this process's, and stay behind the end of the gang.

    **Raises:** `ArgumentError` for a frame of another gang, and naming column and dtype for what Arrow cannot
    represent; otherwise as `Frame.collect`.
    """
    gang = frame.gang
    if not isinstance(gang, RayGang):
        raise ArgumentError(f"frame is one of a {type(gang).__name__}: expected one of a RayGang")
    references, _ = give(frame, gang, as_arrow)
    return import_ray().data.from_arrow_refs(references)
