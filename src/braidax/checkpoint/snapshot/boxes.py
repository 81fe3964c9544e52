"""Boxes: rectangular parts of arrays."""

import itertools
import math
from collections.abc import Iterable, Sequence

Box = tuple[tuple[int, int], ...]
"""`(start, stop)` of every dim."""


def whole(shape: Sequence[int]) -> Box:
    """Returns the box that is all of an array."""
    return tuple((0, size) for size in shape)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of an index as shardings give it; missing dims are whole."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    return (*bounds, *whole(shape[len(bounds) :]))


def extents(box: Box) -> tuple[int, ...]:
    """Returns the shape of what is in a box."""
    return tuple(stop - start for start, stop in box)


def moved(box: Box, rows: int) -> Box:
    """Returns a box so many rows further along the first dim; one without dims has no rows."""
    return ((box[0][0] + rows, box[0][1] + rows), *box[1:]) if box and rows else box


def volume(box: Box) -> int:
    """Returns how many elements are in a box."""
    return math.prod(extents(box))


def overlap(one: Box, other: Box) -> Box | None:
    """Returns the elements that are in both, None where there are none."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Returns the index of a box in the array that is another box, which contains it."""
    pairs = zip(inner, outer, strict=True)
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in pairs)


def joined(boxes: Iterable[Box]) -> list[Box]:
    """Returns fewer boxes with the same elements: neighbors are put together, dim by dim.

    **Arguments:** `boxes`: without an element in common, of arrays of one rank.
    """
    found = sorted(boxes)
    num_dims = len(found[0]) if found else 0
    for dim in reversed(range(num_dims)):
        runs: dict[Box, list[tuple[int, int]]] = {}
        for box in found:
            run = runs.setdefault((*box[:dim], *box[dim + 1 :]), [])
            start, stop = box[dim]
            if run and run[-1][1] == start:
                run[-1] = (run[-1][0], stop)
            else:
                run.append((start, stop))
        found = sorted((*rest[:dim], bounds, *rest[dim:]) for rest, run in runs.items() for bounds in run)
    return found


def split(box: Box, num_parts: int) -> list[Box]:
    """Cuts a box into parts that are equal but for one row, along the first dim where that is fair, or the longest.

    **Returns:** `num_parts` boxes, or the box itself where no dim is long enough.
    """
    sizes = extents(box)
    longest = max(sizes, default=0)
    if longest < num_parts:
        return [box]
    is_fair = sizes[0] >= num_parts and (sizes[0] % num_parts == 0 or sizes[0] >= 16 * num_parts)
    dim = 0 if is_fair else sizes.index(longest)
    start = box[dim][0]
    cuts = [start + sizes[dim] * number // num_parts for number in range(num_parts + 1)]
    return [(*box[:dim], bounds, *box[dim + 1 :]) for bounds in itertools.pairwise(cuts)]


def blocks(box: Box, most: int) -> list[Box]:
    """Cuts a box into some of at most so many elements, in the order in which they lie."""
    if volume(box) <= most or volume(box) == 1:
        return [box]
    return [block for half in halves(box) for block in blocks(half, most)]


def halves(box: Box) -> list[Box]:
    """Cuts a box in two along its first dim that can be; it has more than one element."""
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    middle = (start + stop) // 2
    return [(*box[:dim], bounds, *box[dim + 1 :]) for bounds in ((start, middle), (middle, stop))]


def is_run(box: Box, shape: Sequence[int]) -> bool:
    """Says whether the elements of a box lie one behind another in an array of that shape."""
    sizes = extents(box)
    first = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[first + 1 :] == tuple(shape[first + 1 :])
