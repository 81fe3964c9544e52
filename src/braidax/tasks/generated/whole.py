"""A folder that has its name once all of it is there."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def written_whole(path: Path, write: Callable[[Path], None]) -> Path:
    """Writes a folder, unless it is there; whichever process is first counts. **Returns:** its path."""
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=path.parent))
    try:
        write(part)
        part.chmod(0o755)
        try:
            part.rename(path)
        except OSError:
            if not path.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path
