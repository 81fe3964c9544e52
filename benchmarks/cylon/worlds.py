"""The processes of the systems, from the side of the one who asks them."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks.cylon.data import Files

OURS, OURS_1, OURS_4 = "ours, 2 ranks", "ours, 1 rank", "ours, 4 ranks"
OURS_UCX, OURS_DASK, OURS_RAY = "ours, 2 ranks, ucx", "ours, 2 ranks on Dask", "ours, 2 ranks on Ray"
POLARS, STREAMING = "Polars", "Polars, streaming"
DUCKDB, PANDAS, SAIL, DAFT, DAFT_RAY = "DuckDB", "pandas", "Sail", "Daft", "Daft on Ray"
DASK, RAY = "Dask", "Ray Data"

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 120.0
_LEAVE_SECONDS = 20.0
_LIMIT_SECONDS = 600.0  # of one task
_LOOK_SECONDS = 0.1  # between looks at memory
# Knows which processes are stopped, and lets them run, and so end, when the one who stopped them is gone.
_GUARD = 'while read -r line; do stopped=$line; done; [ -z "$stopped" ] || kill -CONT $stopped 2>/dev/null'


@dataclass(frozen=True)
class System:
    """What a process runs.

    **Fields:** `kind`, `options`: as `systems.opened` knows them. `peer`: whether it is in the peers' environment.
    `rests`: whether its processes are stopped while others are measured, as idle ones of Ray and Dask use the cores.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    peer: bool = True
    rests: bool = False


SYSTEMS: Mapping[str, System] = {
    OURS: System("ours", {"ranks": 2}, peer=False),
    OURS_1: System("ours", {"ranks": 1}, peer=False),
    OURS_4: System("ours", {"ranks": 4}, peer=False),
    OURS_UCX: System("ours", {"ranks": 2, "transport": "ucx"}, peer=False),
    OURS_DASK: System("ours", {"ranks": 2, "gang": "dask"}, peer=False),
    OURS_RAY: System("ours", {"ranks": 2, "gang": "ray"}, peer=False),
    POLARS: System("polars", {"mode": "in-memory"}, peer=False),
    STREAMING: System("polars", {"mode": "streaming"}, peer=False),
    DUCKDB: System("duckdb"),
    PANDAS: System("pandas"),
    SAIL: System("sail"),
    DAFT: System("daft", {"runner": "native"}),
    DAFT_RAY: System("daft", {"runner": "ray"}, rests=True),
    DASK: System("dask", rests=True),
    RAY: System("ray", rests=True),
}


class AbsentError(Exception):
    """A system cannot run here, or cannot do what it is asked; the message says why."""


@final
class World:
    """The process of one system; a context manager.

    **Arguments:** `name`: in `SYSTEMS`. `peers`: the Python of the peers' environment, None without one. `num_cores`:
    that it may use.

    **Raises:** `AbsentError` if what it needs is not installed.
    """

    def __init__(self, name: str, *, peers: str | None, num_cores: int) -> None:
        self.name = name
        self._system = SYSTEMS[name]
        if self._system.peer and peers is None:
            raise AbsentError("not installed (see --frames)")
        python = peers if self._system.peer and peers else sys.executable
        arguments = [self._system.kind, json.dumps(self._system.options), str(num_cores)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the world)
        self._unread = b""
        self._guard = subprocess.Popen(["sh", "-c", _GUARD], stdin=subprocess.PIPE, start_new_session=True)
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "benchmarks.cylon.child", *arguments],
            cwd=ROOT,
            env=_environment(num_cores, peer=self._system.peer),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            answer = self._read(_START_SECONDS)
            if "missing" in answer:
                raise AbsentError(f"not installed ({answer['missing']})")
        except BaseException:
            self.close()
            raise

    def load(self, files: Files, *, memory: bool) -> None:
        """Lets it take tables. **Raises:** `AbsentError` if it cannot."""
        with self.awake():
            self._ask({"do": "load", "files": files, "memory": memory})

    def run(self, task: str, *, scale: float = 1.0, to_caller: bool, out: Path | None = None) -> float:
        """Lets it do a task, and returns the seconds of that.

        **Arguments:** as of `System.run`. `out`: where the result is to be written afterwards, which is not timed.

        **Raises:** `AbsentError` if it cannot do that.
        """
        asked = {"do": "run", "task": task, "scale": scale, "to_caller": to_caller, "out": str(out) if out else ""}
        return float(self._ask(asked)["seconds"])

    @contextlib.contextmanager
    def awake(self) -> Generator[None]:
        """Lets its processes run, and rest afterwards if they are to."""
        if not self._system.rests:
            yield
            return
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._tell_guard(self._tree())
            self._signal(signal.SIGSTOP)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Returns how much memory its processes had at most meanwhile, without pages of files."""
        peak, done = 0, threading.Event()

        def look() -> None:
            nonlocal peak
            while not done.wait(_LOOK_SECONDS):
                peak = max(peak, sum(_held_bytes(number) for number in self._tree()))

        watch = threading.Thread(target=look)
        watch.start()
        try:
            work()
        finally:
            done.set()
            watch.join()
        return peak

    def close(self) -> None:
        """Ends it, and all that it has started."""
        tree = self._tree()
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_SECONDS)
        for number in {self._process.pid, *tree}:
            if number == self._process.pid and self._process.poll() is not None:
                continue
            if number == self._process.pid or _session(number) in tree:  # nobody else's, by a number used again
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()
        assert self._guard.stdin is not None
        if not self._guard.stdin.closed:
            self._tell_guard([])
            self._guard.stdin.close()
        self._guard.wait()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"{self.name} has ended:\n{self._said()}") from None
        answer = self._read(_LIMIT_SECONDS)
        if "unsupported" in answer:
            raise AbsentError(answer["unsupported"])
        if "error" in answer:
            raise RuntimeError(f"{self.name}, {asked.get('task', 'load')}:\n{answer['error']}")
        return answer

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"{self.name} does not answer within {seconds:g} s:\n{self._said()}")
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise RuntimeError(f"{self.name} has ended:\n{self._said()}")
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]

    def _signal(self, number: int) -> None:
        for process in self._tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _tell_guard(self, stopped: Sequence[int]) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(" ".join(map(str, stopped)).encode() + b"\n")
        self._guard.stdin.flush()

    def _tree(self) -> list[int]:
        """Returns its process and all that descend from it."""
        if self._process.poll() is not None:
            return []
        found = [self._process.pid]
        for number in found:
            with contextlib.suppress(OSError):
                for thread in Path(f"/proc/{number}/task").iterdir():
                    found += [int(child) for child in (thread / "children").read_text().split()]
        return found


def _environment(num_cores: int, *, peer: bool) -> dict[str, str]:
    environment = {**os.environ, "POLARS_MAX_THREADS": str(num_cores), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"DO_NOT_TRACK": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONUNBUFFERED": "1"}
    own = os.pathsep.join(path for path in sys.path if path)
    environment["PYTHONPATH"] = str(ROOT) if peer else own
    return environment


def _held_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
        return 1024 * sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    return 0


def _session(process: int) -> int:
    with contextlib.suppress(OSError):
        return os.getsid(process)
    return -1
