"""What runs a program as a rank: `python -m braidax.gang.runner`, with arguments as `Program.command` gives them.

It joins `jax.distributed`, if that is wanted, and then is `python SCRIPT`. A program that raises ends the process at once:
JAX would wait at the exit for ranks that wait for this one.
"""

import contextlib
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from braidax.errors import BraidaxError
from braidax.gang.program import Program
from braidax.lifeline import LIFELINE, end_with

FAILED = "launch/failed"
FIRST = "launch/first"
COORDINATOR = "launch/coordinator"
"""Keys of the store: how many ranks have failed by themselves, which did first, and where JAX's coordinator is."""

_START_SECONDS = 300.0  # that the others may take to start, on slow disks and busy hosts


def main() -> None:
    """Runs the program that the arguments of this process name, and exits as it does."""
    if LIFELINE in os.environ:
        end_with(int(os.environ.pop(LIFELINE)))
    program = Program.parse(sys.argv[1:])
    try:
        if program.initialize == "jax":
            initialize_jax(os.environ, program.devices_per_process)
        run(program)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code == 0:
            raise
        if not isinstance(ended.code, int):
            sys.stderr.write(f"{ended.code}\n")
        _leave(code, ended)
    except BaseException as error:  # noqa: BLE001 (whatever the program raises)
        sys.excepthook(type(error), error, _below_runner(error.__traceback__))
        _leave(130 if isinstance(error, KeyboardInterrupt) else 1, error)


def run(program: Program) -> None:
    """Runs a program in this process, as `python` would."""
    if program.kind == "module":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *program.arguments]
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program.target)))
        sys.argv = [program.target, *program.arguments]
        runpy.run_path(program.target, run_name="__main__")


def initialize_jax(environ: Mapping[str, str], devices_per_process: int | None) -> None:
    """Joins the ranks that `environ` tells of to one `jax.distributed`; its coordinator is in rank 0.

    **Arguments:** `devices_per_process`: virtual CPU devices of this process; None leaves them as they are.
    """
    import jax

    rank, size = int(environ["BRAIDAX_RANK"]), int(environ["BRAIDAX_SIZE"])
    if devices_per_process is not None:
        jax.config.update("jax_num_cpu_devices", devices_per_process)
    if "JAX_CPU_COLLECTIVES_IMPLEMENTATION" not in environ:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with _open(environ) as store:
        if rank == 0:
            address = _free_address(environ["BRAIDAX_STORE"])
            store.set(COORDINATOR, address.encode())
        else:
            address = store.get(COORDINATOR, timeout_seconds=_START_SECONDS).decode()
    jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")


def report(error: BaseException, environ: Mapping[str, str]) -> None:
    """Leaves in the store that this rank failed, unless it did so because another one did."""
    from braidax.gang.member import is_consequence

    if not is_consequence(error):
        with contextlib.suppress(BraidaxError), _open(environ, timeout_seconds=2.0) as store:
            if store.add(FAILED, 1) == 1:
                store.set(FIRST, environ["BRAIDAX_RANK"].encode())


def _leave(code: int, error: BaseException) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads them any more
        sys.stdout.flush()
        sys.stderr.flush()
    if "BRAIDAX_STORE" in os.environ:
        report(error, os.environ)
    os._exit(code)


def _open(environ: Mapping[str, str], *, timeout_seconds: float = 60.0) -> Any:
    from braidax.comm import open_store
    from braidax.comm.stores.store import ScopedStore
    ...
