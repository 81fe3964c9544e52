"""Functions of users that end the process of their rank, or fail, and note that they were called."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import polars as pl


@dataclass(frozen=True)
class Dying:
    """Ends its process where it is given a row in which `v` is `at`, as often as `times` says.

    **Arguments:** `folder`: where it notes each time.
    """

    folder: str
    at: float
    times: int

    def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
        if self.at in frame["v"] and len(list(Path(self.folder).iterdir())) < self.times:
            note(self.folder)
            os.kill(os.getpid(), signal.SIGKILL)
        return frame


@dataclass(frozen=True)
class Failing:
    """Raises, and notes each time in a folder."""

    folder: str

    def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
        note(self.folder)
        raise ValueError("the function of a user")


def note(folder: str) -> None:
    """Notes a call: a file in a folder."""
    (Path(folder) / f"{len(list(Path(folder).iterdir()))}-{os.getpid()}").touch()
