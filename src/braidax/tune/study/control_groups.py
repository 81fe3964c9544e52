"""Control groups of Linux, of either version, that hold memory, time of cores and disk down."""

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from braidax.errors import ArgumentError

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "braidax-study-"
_PERIOD_MICROSECONDS = 20_000
_END_SECONDS = 5.0  # that the kernel may take to take note of processes that have ended
_PAUSE_SECONDS = 0.02
_REMEDY = "run it as root on Linux with control groups, or leave this limit out"


@dataclass(frozen=True)
class Group:
    """A control group of this process's own making. **Fields:** `path`: its folder."""

    path: Path

    @property
    def entry(self) -> str:
        """The file that takes the number of a process that enters."""
        return str(self.path / "cgroup.procs")

    def close(self) -> None:
        """Removes it; one that something still runs in stays, and the next study removes it."""
        deadline = time.monotonic() + _END_SECONDS
        while self.path.exists():
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            if time.monotonic() >= deadline:
                return
            time.sleep(_PAUSE_SECONDS)


def make_groups(memory_bytes: int | None, cores: float | None, disk: int | None, folder: Path) -> list[Group]:
    """Makes the groups that hold these limits, by controller, none for None.

    **Arguments:** `cores`: whose time. `disk`: bytes a second. `folder`: on that disk.

    **Raises:** `ArgumentError` naming the limit that cannot be set; nothing is left behind then.
    """
    quota = None if cores is None else int(cores * _PERIOD_MICROSECONDS)
    first = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us", "blkio": "blkio.throttle.write_bps_device"}
    is_second = (_ROOT / "cgroup.controllers").exists()
    wanted: dict[str, dict[str, str]] = {}
    if memory_bytes is not None:
        swap = {} if is_second else {"memory.memsw.limit_in_bytes": str(memory_bytes)}
        name = "memory.max" if is_second else first["memory"]
        wanted["memory"] = {name: str(memory_bytes), **swap, **({"memory.swap.max": "0"} if is_second else {})}
    if quota is not None:
        second = {"cpu.max": f"{quota} {_PERIOD_MICROSECONDS}"}
        old = {"cpu.cfs_period_us": str(_PERIOD_MICROSECONDS), first["cpu"]: str(quota)}
        wanted["cpu"] = second if is_second else old
    if disk is not None:
        device = _device_of(folder)
        second = {"io.max": f"{device} rbps={disk} wbps={disk}"}
        old = {first["blkio"]: f"{device} {disk}", "blkio.throttle.read_bps_device": f"{device} {disk}"}
        wanted["io" if is_second else "blkio"] = second if is_second else old
    made: list[Group] = []
    try:
        for controller, files in wanted.items():
            made.append(_make(controller, files, is_second=is_second))
    except BaseException:
        for group in made:
            group.close()
        raise
    return made


def _make(controller: str, files: Mapping[str, str], *, is_second: bool) -> Group:
    told = {"memory": "memory", "cpu": "cores", "blkio": "disk", "io": "disk"}[controller]
    parent = _ROOT if is_second else _ROOT / controller / _own_place(controller)
    _remove_left(parent)
    group = Group(parent / f"{_PREFIX}{os.getpid()}-{controller}")
    try:
        if is_second and controller not in (_ROOT / "cgroup.subtree_control").read_text().split():
            (_ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
        group.path.mkdir()
        for name, value in files.items():
            optional = name in ("memory.memsw.limit_in_bytes", "memory.swap.max")  # where swap is counted
            with contextlib.suppress(*((FileNotFoundError, PermissionError) if optional else ())):
                if optional and not (group.path / name).exists():
                    continue
                (group.path / name).write_text(value)
    except OSError as error:
        group.close()
        raise ArgumentError(f"limit {told} cannot be set ({error}); {_REMEDY}") from error
    return group


def _own_place(controller: str) -> str:
    """Returns the path of the group that this process is in, of the first version."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                return path.strip("/")
    return ""


def _remove_left(parent: Path) -> None:
    """Removes empty groups of studies that were killed."""
    with contextlib.suppress(OSError):
        for path in parent.iterdir():
            found = re.fullmatch(rf"{_PREFIX}(\d+)-[a-z]+", path.name)
            if found and not Path(f"/proc/{found[1]}").exists():
                with contextlib.suppress(OSError):
                    path.rmdir()


def _device_of(folder: Path) -> str:
    """Returns the numbers of the whole disk that a folder is on: a group limits no partition."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    number = there.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    block = Path(f"/sys/dev/block/{name}")
    if not block.exists():
        raise ArgumentError(
            f"limit disk cannot be set: {there} is on no block device (a network or memory file system); give a folder "
            "on a disk as --out, or leave this limit out"
        )
    if (block / "partition").exists():
        return (block.resolve().parent / "dev").read_text().strip()
    return name
