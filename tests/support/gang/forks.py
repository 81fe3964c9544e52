"""Ranks of a `LocalGang`, workers of sources, and programs of tests, that are forks of a process which has imported
what they need: that takes longer than most of what tests ask of them. But for programs they share in what is compiled,
too. `tests/gang` has ranks as users have them, and most of `tests/data` such workers.

An order is a line of JSON, what `subprocess.Popen` would be given, with the descriptors of the fork; the answer is
the number of its process, which is a child of who gave the order, as any rank is.
"""

import atexit
import ctypes
import fcntl
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import jax
import pytest

from tests.support.compiled import share_compiled
from tests.support.tree import ROOT

LOAD_AND_SAVE = ("braidax.data", "braidax.checkpoint", "braidax.data.workers.processes.child")
"""What most forks have that load data, or save: those of all their tests are of one process."""

_ORDER_BYTES, _MAX_DESCRIPTORS = 1 << 18, 16
_SET_CHILD_SUBREAPER = 36  # of prctl
_LOST = "sys.path[:] = []"  # who has no paths is to find nothing
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
# Variables that a process reads as it begins, and tests set; others are set by Ray, Dask and OpenCV for their children.
_READ_EARLY = ("PYTHONDEVMODE", "PYTHONHOME", "PYTHONOPTIMIZE", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONWARNINGS")
_AS_MODULE = "import runpy; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
_COMPILES = "import jax; jax.config.update('jax_enable_compilation_cache', False)\n"
_FORKED = ("from braidax.gang.child import main", "from braidax.data.workers.processes.child import main")  # their code
_NOTES = "BRAIDAX_TESTED_FORKS"
"""The variable with a folder where a fork notes its environment, which for others to see is that of who forked it."""


def fork_children(
    patch: pytest.MonkeyPatch, *imported: str, codes: Sequence[str] = (), modules: Sequence[str] = ()
) -> None:
    """Lets gangs and sources that this process starts from now on have forks, for as long as the patch is there.

    **Arguments:** `imported`: modules that the forks have. `codes`, `modules`: programs that are to be forks as well:
    what those begin with that Python is given by `-c`, and the names of those that it is given by `-m`.
    """
    if sys.platform != "linux" or os.environ.get("BRAIDAX_TESTS_COMPILE") == "fully":
        return  # elsewhere nobody can adopt a grandchild, and by `make nightly` all begin anew
    start = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]

    def execute_child(popen: Any, args: Any, *more: Any) -> None:
        _, _, _, pass_fds, folder, environment, _, _, _, *pipes = more[:15]
        environment = os.environ if environment is None else environment
        words = [os.fsdecode(one) for one in args] if isinstance(args, list | tuple) else []
        if not (_can_be(words, environment) and (_is_ours(words) or _is_one_of(words, codes, modules))):
            start(popen, args, *more)
            return
        given = [standard if pipe == -1 else pipe for standard, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        group = 0 if more[-1] == 0 else os.getpgrp()
        folder = str(Path.cwd()) if folder is None else os.fsdecode(folder)
        descriptors = [*given, *pass_fds]
        popen.pid = _nursery(imported).fork(words, environment, folder, group, descriptors, [0, 1, 2, *pass_fds])
        popen._child_created = True
        popen._close_pipe_fds(*pipes)

    patch.setattr(subprocess.Popen, "_execute_child", execute_child)


def _can_be(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Says whether a fork can be what is to be started."""
    differs = any(_ENVIRONMENT.get(name) != environment.get(name) for name in _READ_EARLY)
    if differs or any(name.startswith("JAX_") for name in _ENVIRONMENT.keys() - environment.keys()):
        return False
    return not any(_LOST in one for one in arguments)


def _is_ours(arguments: Sequence[str]) -> bool:
    """Says whether it is a rank or a worker."""
    return any(words in one for one in arguments for words in _FORKED)


def _is_one_of(arguments: Sequence[str], codes: Sequence[str], modules: Sequence[str]) -> bool:
    """Says whether it is one of some programs."""
    if list(arguments[:1]) != [sys.executable]:
        return False
    flag, program, *_ = _of_program(arguments)
    return program in modules if flag == "-m" else program.startswith(tuple(codes))


def _of_program(arguments: Sequence[str]) -> Sequence[str]:
    """Returns what stands from `-c` or `-m` on."""
    at = next((at for at, word in enumerate(arguments) if word in ("-c", "-m")), None)
    return ["", ""] if at is None else arguments[at:]


@final
class _Nursery:
    """The process that forks. It ends with this one."""

    def __init__(self, imported: Sequence[str]) -> None:
        self._lock, self._prctl = threading.Lock(), ctypes.CDLL(None).prctl
        self._orders, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            command = [sys.executable, "-m", "tests.support.gang.forks", str(there.fileno()), *imported]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=_ENVIRONMENT, pass_fds=[there.fileno()], process_group=0
            )
        atexit.register(self._end)

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        group: int,
        descriptors: Sequence[int],
        numbers: Sequence[int],
    ) -> int:
        """Starts a process whose descriptors have these numbers. **Returns:** its own number.

        **Arguments:** `group`: the group that it joins; 0 is one of its own.
        """
        order = {
            "arguments": _code_and_more(arguments, environment),
            "warnings": arguments[2] if arguments[1] == "-W" else None,
            "environment": dict(environment),
            "folder": folder,
            "group": group,
            "mask": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "descriptors": numbers,
        }
        with self._lock:
            self._prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # for the fork of a fork that has ended
            try:
                socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
                return int(self._orders.recv(100))
            finally:
                self._prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _end(self) -> None:
        self._orders.close()
        self._process.wait(30)


def _code_and_more(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Returns the code that is to be run, and its arguments."""
    flag, program, *given = _of_program(arguments)
    if flag == "-c":
        return [program, *given]
    # Processes of one JAX that shared what is compiled were seen to stand still.
    code = "" if "JAX_COMPILATION_CACHE_DIR" in environment else _COMPILES
    return [f"{code}{_AS_MODULE.format(program)}", *given]


def _nursery(imported: Sequence[str]) -> _Nursery:
    """Returns one that has imported these, perhaps among others."""
    for known, nursery in _nurseries.items():
        if known.issuperset(imported):
            return nursery
    return _nurseries.setdefault(frozenset(imported), _Nursery(imported))


_nurseries = dict[frozenset[str], _Nursery]()


def _serve(orders: socket.socket) -> Any:
    """Forks a process for each order. **Returns:** in a fork its order, and in this process nothing, at the end."""
    while True:
        text, received, *_ = socket.recv_fds(orders, _ORDER_BYTES, _MAX_DESCRIPTORS)
        if not text:
            return None
        order = json.loads(text)
        told, tell = os.pipe()
        between = _fork()
        if between == 0:
            pid = _fork()
            if pid:
                os.write(tell, str(pid).encode())
                os._exit(0)
            orders.close()
            os.close(told)
            os.close(tell)
            _take_over(received, order["descriptors"])
            return order
        os.waitpid(between, 0)
        for descriptor in (*received, tell):
            os.close(descriptor)
        orders.sendall(os.read(told, 100))
        os.close(told)


def _fork() -> int:
    with warnings.catch_warnings():  # JAX warns of forks for its threads' sake: here it has begun none
        warnings.simplefilter("ignore")
        return os.fork()


def _take_over(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Gives descriptors the numbers that they are to have."""
    beyond = max([*received, *wanted]) + 1
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(kept, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _become(order: Mapping[str, Any]) -> types.CodeType:
    """Makes this process what the order says. **Returns:** the code that it is to run."""
    os.setpgid(0, order["group"])
    signal.pthread_sigmask(signal.SIG_SETMASK, order["mask"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    if order["warnings"] is not None:
        warnings.simplefilter(order["warnings"])
    for name, value in os.environ.items():
        if name.startswith("JAX_") and before.get(name) != value:
            jax.config.update(name.lower(), _as(jax.config.values[name.lower()], value))
    if _NOTES in os.environ:
        note = Path(os.environ[_NOTES], f"{os.getpid()}.environ")
        note.write_text("\0".join(f"{name}={value}" for name, value in os.environ.items()))
    code, *arguments = order["arguments"]
    sys.argv = ["-c", *arguments]
    return compile(code, "<string>", "exec")


def _as(known: Any, value: str) -> Any:
    """Returns a value as JAX reads it from the environment, given another one of its option."""
    if isinstance(known, bool):
        return value.lower() in ("1", "true")
    return type(known)(value) if isinstance(known, int | float) else value


def _main(orders: int, *imported: str) -> None:
    share_compiled()
    for name in imported:
        importlib.import_module(name)
    order = _serve(socket.socket(fileno=orders))
    if order is not None:
        code = _become(order)
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, vars(sys.modules["__main__"]))


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:])
