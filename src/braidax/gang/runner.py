"""What runs a program as a rank: `python -m braidax.gang.runner`, with arguments as `Program.command` gives them.

It joins `jax.distributed`, if that is wanted, and then is `python SCRIPT`. A program that raises ends the process at
once: JAX would wait at the exit for ranks that wait for this one.
"""

import contextlib
import os
import re
import runpy
import socket
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn
from urllib.parse import urlsplit

from braidax.comm import Store, open_store
from braidax.comm.stores.store import ScopedStore
from braidax.errors import Aborted, BraidaxError, CallFailed, PeerLost
from braidax.gang.meeting import MEETING, hosting
from braidax.gang.member import is_consequence
from braidax.gang.program import Program
from braidax.gang.routes import address_towards
from braidax.gang.standstill import naming_standstill
from braidax.lifeline import LIFELINE, end_with

NUM_FAILED = "launch/num-failed"
FIRST_FAILED = "launch/first-failed"
CONSEQUENCE = "launch/consequence"
COORDINATOR = "launch/coordinator"
"""Keys of the store: how many ranks failed by themselves, which did first, which (behind a slash) only because another
one did, and where JAX's coordinator is.
"""

_THREADS_PER_DEVICE = 2
_MIN_DEVICES = 32  # virtual ones, as many as a program may make by itself
_FORCED_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_START_SECONDS = 300.0  # that the others may take to start, on slow disks and busy hosts


def main() -> None:
    """Runs the program that the arguments of this process name, and exits as it does."""
    if LIFELINE in os.environ:
        end_with(int(os.environ.pop(LIFELINE)))
    program = Program.parse(sys.argv[1:])
    try:
        with hosting(os.environ):
            if program.initialize == "jax":
                initialize_jax(os.environ, program.devices_per_process)
            run(program)
    except SystemExit as ended:
        if ended.code in (None, 0):
            raise
        if not isinstance(ended.code, int):
            sys.stderr.write(f"{ended.code}\n")
        _leave(ended.code if isinstance(ended.code, int) else 1, ended)
    except BaseException as error:  # noqa: BLE001 (whatever the program raises)
        error.__traceback__ = _below_runner(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        _leave(130 if isinstance(error, KeyboardInterrupt) else 1, error)


def run(program: Program) -> None:
    """Runs a program in this process, as `python` would; with JAX, a program that stands still says so."""
    if program.initialize == "jax":
        with naming_standstill(f"rank {os.environ['BRAIDAX_RANK']}"):
            _run(program)
    else:
        _run(program)


def _run(program: Program) -> None:
    if program.kind == "module":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = [program.target, *program.arguments]
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program.target).resolve().parent))
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
    os.environ.setdefault("PJRT_NPROC", str(num_threads(environ, devices_per_process)))
    with scoped_store(environ) as store:
        if rank == 0:
            address = _free_address(environ)
            store.set(COORDINATOR, address.encode())
        else:
            address = store.get(COORDINATOR, timeout_seconds=_START_SECONDS).decode()
    jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")


def num_threads(environ: Mapping[str, str], devices_per_process: int | None) -> int:
    """Returns how many threads XLA on CPU is to have.

    It launches steps and runs collectives on one pool: when steps run ahead, a pool of as few threads as devices is
    full of those that wait for a peer, and what the peer waits for gets none. How many devices there are is known when
    the program has made them, and the pool cannot grow then: so it is large enough for what programs make.

    **Arguments:** `environ`: its `XLA_FLAGS` may name a number of devices. `devices_per_process`: that were asked for.
    """
    forced = max((int(found) for found in _FORCED_DEVICES.findall(environ.get("XLA_FLAGS", ""))), default=0)
    return max(os.cpu_count() or 1, _THREADS_PER_DEVICE * max(devices_per_process or 0, forced, _MIN_DEVICES))


@contextlib.contextmanager
def scoped_store(environ: Mapping[str, str], *, timeout_seconds: float = 60.0) -> Generator[Store, None, None]:
    """Opens the store that `environ` names, for the keys of its job and generation."""
    secret = environ.get("BRAIDAX_SECRET")
    with open_store(
        environ["BRAIDAX_STORE"],
        secret=None if secret is None else bytes.fromhex(secret),
        timeout_seconds=timeout_seconds,
    ) as store:
        yield ScopedStore(store, job=environ["BRAIDAX_JOB"], generation=int(environ["BRAIDAX_GENERATION"]))


def _free_address(environ: Mapping[str, str]) -> str:
    """Returns a free port of this host, at the address by which it reaches the store: there others reach it too."""
    host = environ.get("BRAIDAX_ADDRESS", "").partition(",")[0]
    if not host:
        host = address_towards(urlsplit(environ["BRAIDAX_STORE"]).hostname or socket.gethostname())
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _leave(code: int, error: BaseException) -> NoReturn:
    """Ends the process, and leaves in the store whether it failed by itself."""
    if MEETING not in os.environ:  # nobody would ask
        with contextlib.suppress(BraidaxError, KeyError), scoped_store(os.environ, timeout_seconds=2.0) as store:
            rank = os.environ["BRAIDAX_RANK"]
            if is_consequence(error, (PeerLost, Aborted, CallFailed)):
                store.set(f"{CONSEQUENCE}/{rank}", b"")
            elif store.add(NUM_FAILED, 1) == 1:
                store.set(FIRST_FAILED, rank.encode())
    with contextlib.suppress(OSError, ValueError):  # nobody reads them any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _below_runner(traceback: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the program's own first line on."""
    below = traceback
    while below is not None and below.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        below = below.tb_next
    return below or traceback


if __name__ == "__main__":
    main()
