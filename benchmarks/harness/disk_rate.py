"""A limit on how fast this process writes to a disk, that the kernel holds it to; of what goes past the page cache."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import final

from benchmarks.harness.memory import NoLimitError

_ROOT = Path("/sys/fs/cgroup/blkio")
_LIMIT = "blkio.throttle.write_bps_device"


@final
class DiskRate:
    """The limit, which may be changed. **Arguments:** `folder`: of the control group. `device`: `major:minor`."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device

    def set(self, bytes_per_second: int) -> None:
        """Holds this process to another rate from here on; 0 is none."""
        (self._folder / _LIMIT).write_text(f"{self._device} {bytes_per_second}")


@contextlib.contextmanager
def disk_rate(folder: Path) -> Generator[DiskRate, None, None]:
    """Puts this process into a control group of its own, without a limit yet, and back into the one that it was in.

    **Arguments:** `folder`: on the disk. **Raises:** `NoLimitError` where the kernel does not let it.
    """
    group = _ROOT / f"braidax-{os.getpid()}"
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoLimitError(f"no group of processes can be made here: {error}") from error
    try:
        try:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            (group / _LIMIT).write_text(f"{device} 0")
        except OSError as error:
            raise NoLimitError(f"writes to {device} take no limit: {error}") from error
        yield DiskRate(group, device)
    finally:
        with contextlib.suppress(OSError):
            (_ROOT / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
