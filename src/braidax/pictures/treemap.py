"""Where rectangles lie that fill a plane, each as large as its weight, and as square as can be."""

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """A rectangle, down from the top left."""

    x: float
    y: float
    width: float
    height: float


def treemap(weights: Sequence[float], within: Place) -> list[Place]:
    """Returns a place for each weight, side by side, so that areas are as weights (squarified, Bruls et al. 2000).

    **Arguments:** `weights`: positive, the largest first.
    """
    if not weights:
        return []
    scale = within.width * within.height / sum(weights)
    areas, places, left = [weight * scale for weight in weights], list[Place](), within
    while len(places) < len(areas):
        rest, side = areas[len(places) :], min(left.width, left.height)
        num = 1
        while num < len(rest) and _worst(rest[: num + 1], side) <= _worst(rest[:num], side):
            num += 1
        row, left = _row(rest[:num], left)
        places += row
    return places


def _worst(areas: Sequence[float], side: float) -> float:
    """Returns the largest ratio of sides among areas in a row along a side."""
    thick = sum(areas) / side if side else 0.0
    return max((max(area / thick / thick, thick * thick / area) for area in areas), default=1.0) if thick else 1.0


def _row(areas: Sequence[float], left: Place) -> tuple[list[Place], Place]:
    """Returns the places of areas along the shorter side, and what is left."""
    x, y, width, height = left
    is_wide = width >= height
    side = height if is_wide else width
    thick = sum(areas) / side if side else 0.0
    places: list[Place] = []
    at = 0.0
    for area in areas:
        length = area / thick if thick else 0.0
        places.append(Place(x, y + at, thick, length) if is_wide else Place(x + at, y, length, thick))
        at += length
    rest = Place(x + thick, y, width - thick, height) if is_wide else Place(x, y + thick, width, height - thick)
    return places, rest
