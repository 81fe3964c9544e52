"""Folders that hold secrets: only their user may enter them."""

import os
import stat
from pathlib import Path


def exposure(folder: Path) -> str | None:
    """Returns what lets others at the files of a folder, in words that follow its name; None where nothing does.

    **Raises:** `OSError` when it is not there or is no folder.
    """
    state = folder.stat()
    if not stat.S_ISDIR(state.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    if state.st_uid != os.getuid():
        return f"belongs to user {state.st_uid}, and this process runs as user {os.getuid()}"
    if state.st_mode & 0o077:
        return f"is open to others (its mode is {stat.S_IMODE(state.st_mode):04o})"
    return None
