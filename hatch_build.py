"""Compiles the bindings in C while braidax is built, where there is a compiler; it works without them.

`BRAIDAX_BINDINGS=required` makes a build fail that cannot compile them, `BRAIDAX_BINDINGS=none` makes a wheel for all
platforms. Each build says what it has, and `braidax --version` says it of what is installed.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = tuple(
    Path("src", "braidax", path)
    for path in (
        "comm/transports/tcp_binding.c",
        "comm/transports/ucx_binding.c",
        "data/sampling/permutation_binding.c",
        "data/storage/record_binding.c",
        "frame/moving/scatter_binding.c",
        "frame/summing/groups_binding.c",
        "parallel/served/rows_binding.c",
    )
)
BUILT = tuple(source.with_suffix(".abi3.so") for source in SOURCES)
TAG = "cp311-abi3"  # the stable interface of CPython: one binary for 3.11 and newer
LIMIT_SECONDS = 120
VARIABLE = "BRAIDAX_BINDINGS"
CHOICES = ("if possible", "required", "none")


class BindingHook(BuildHookInterface[Any]):
    """Compiles next to the source, from where editable installs import it and wheels take it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and marks the wheel as one of this platform; or warns and leaves it pure."""
        if self.target_name != "wheel":
            return
        chosen = choice(os.environ)
        root = Path(self.root)
        if chosen != "none" or version == "editable":  # a pure wheel takes none along, and a checkout may keep its own
            for built in BUILT:
                (root / built).unlink(missing_ok=True)
        problem = f"{VARIABLE}=none" if chosen == "none" else compiled(root)
        if problem is not None and chosen == "required":
            raise RuntimeError(f"{VARIABLE}=required, and the bindings in C cannot be compiled: {problem}")
        if problem is not None:
            self.app.display_warning(
                "braidax is installed without the transport 'ucx', Python decodes records, pads texts and moves what "
                "'tcp' sends, NumPy orders samples, splits rows of frames and moves those of tables on servers, Polars "
                "sums groups: "
                f"{problem}"
            )
            return
        self.app.display_info(f"braidax is built with {', '.join(built.name for built in BUILT)}")
        build_data["artifacts"] += [f"/{built.as_posix()}" for built in BUILT]
        build_data["pure_python"] = False
        build_data["tag"] = f"{TAG}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def choice(environment: Mapping[str, str]) -> str:
    """Returns which of `CHOICES` the environment asks for. **Raises:** `ValueError` for anything else."""
    chosen = environment.get(VARIABLE) or CHOICES[0]
    if chosen not in CHOICES:
        raise ValueError(f"{VARIABLE}={chosen!r}: expected one of {CHOICES[1:]}; mend it, or leave it unset")
    return chosen


def compiled(root: Path) -> str | None:
    """Compiles the bindings, all or none, and returns None, or why they cannot be."""
    if not sys.platform.startswith("linux"):
        return f"they are for Linux, this is {sys.platform}"
    compiler = (
        shlex.split(os.environ.get("CC", "")) or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    )
    headers = sysconfig.get_path("include")
    if not compiler:
        return "there is no C compiler (on Debian and Ubuntu: apt install gcc python3-dev)"
    if not Path(headers, "Python.h").exists():
        return f"{headers} lacks Python.h (on Debian and Ubuntu: apt install python3-dev)"
    unfinished = {root / built: root / built.with_suffix(f".{os.getpid()}") for built in BUILT}
    try:
        for source, file in zip(SOURCES, unfinished.values(), strict=True):
            options = ["-std=gnu11", "-O3", "-fPIC", "-shared", f"-I{headers}", str(root / source), "-o", str(file)]
            options += ["-ffp-contract=off", "-ldl", "-lm", "-pthread"]  # numbers are the same on all processors
            subprocess.run([*compiler, *options], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
        for built, file in unfinished.items():
            file.replace(built)  # a process that has loaded the old one keeps it
    except (OSError, subprocess.SubprocessError) as error:
        return f"{error}: {getattr(error, 'stderr', None) or ''}"
    finally:
        for file in unfinished.values():
            file.unlink(missing_ok=True)
    return None
