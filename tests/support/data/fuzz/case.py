"""What a format brings to the fuzz: how a small data set of it is written, opened, and read by somebody else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import braidax.data as data
from braidax.data.source import Source

Samples = Mapping[str, Sequence[Any]]
"""Leaf → all its samples: an array `[n, ...]`, or a list of what a varying leaf holds."""


@dataclass(frozen=True)
class Case:
    """A data set that is damaged.

    **Fields:** `name`. `write`: writes it into an empty folder; it is the same every time. `open`: opens what lies
    there; `braidax.open` of the one file, or of the folder, by default. `read`: reads all of it with another library,
    and raises what it likes for what that library refuses; without it, only the samples as written are right.
    `is_checked`: False where nothing tells a damaged value: other values are right too, in as many samples of the same
    shapes.
    """

    name: str
    write: Callable[[Path], object]
    open: Callable[[Path], Source] | None = None
    read: Callable[[Path], Samples] | None = None
    is_checked: bool = True

    def opened(self, folder: Path) -> Source:
        """Opens the data set in a folder."""
        return data.open(only_file(folder)) if self.open is None else self.open(folder)


def files_of(folder: Path) -> list[Path]:
    """Returns the files below a folder, in the order of their names, without what lies hidden there: indexes."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def only_file(folder: Path) -> Path:
    """Returns the one file of a folder, or the folder if it has several."""
    found = files_of(folder)
    return found[0] if len(found) == 1 else folder
