"""The machine, the versions and the command that figures depend on."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALWAYS = ("braidax", "jax", "numpy")
_GIT_SECONDS = 10.0


def num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def described(benchmark: str, distributions: Sequence[str], *, seconds: float) -> dict[str, Any]:
    """Returns what the figures depend on.

    **Arguments:** `benchmark`: its name. `distributions`: whose versions count beside `ALWAYS`. `seconds`: it took.
    """
    return {
        "cpu": _processor(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "versions": {name: version for name in (*ALWAYS, *distributions) if (version := _version(name))},
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(["python", "-m", f"benchmarks.{benchmark}", *map(_without_folder, sys.argv[1:])]),
        "seconds": round(seconds),
    }


def summary(machine: dict[str, Any]) -> str:
    """Returns it in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    return (
        f"{machine['date']}, {machine['cpu']}, {cores}, {machine['memory_gib']} GiB, "
        f"Python {machine['python']}, {versions}, commit {machine['commit']}"
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _without_folder(argument: str) -> str:
    """What others have no such folder for is left out of a page."""
    return f"…/{Path(argument).name}" if Path(argument).is_absolute() else argument
