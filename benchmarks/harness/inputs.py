"""Inputs that are made once, whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def made_whole(path: Path) -> Generator[Path]:
    """Gives a place beside a file or folder that is to be made; what was made there gets its name at the end.

    Of a block that raises, or is stopped, nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield unfinished
        unfinished.rename(path)
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink(missing_ok=True)
