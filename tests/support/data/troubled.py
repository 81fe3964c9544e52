"""Sources for worker processes: records that raise, crash or hang, and what a test can see of the processes."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge

from braidax.data.source import VARYING, Source
from braidax.errors import FormatError, RecordError

NUM_SAMPLES = 100_000
RAISES_KEY_ERROR, RAISES_FORMAT_ERROR, RAISES_ITS_OWN, LEAVES = 90_000, 90_001, 90_002, 90_003
KILLED, CRASHES_ONCE, HANGS, SAYS_TIMEOUT = 90_004, 90_005, 90_006, 90_007


class OwnError(RecordError):
    """An error of a user, which cannot be pickled."""

    def __init__(self, record: int, reason: str) -> None:
        super().__init__(f"record {record}: {reason}")


class Troubled(Source):
    """Sample `i` holds `i` in several leaves; some records are trouble.

    **Arguments:** `folder`: where the processes that were in trouble leave their numbers, one file each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.large = np.arange(NUM_SAMPLES, dtype=np.float32) / 4
        self.epoch = 0
        self.prepared: list[int] = []

    @property
    def sample_spec(self) -> Any:
        return {
            "id": jax.ShapeDtypeStruct((), np.int32),
            "x": jax.ShapeDtypeStruct((3,), np.float32),
            "half": jax.ShapeDtypeStruct((2,), jax.dtypes.bfloat16),
            "nothing": jax.ShapeDtypeStruct((0,), np.float32),
            "process": jax.ShapeDtypeStruct((), np.int32),
            "text": VARYING,
        }

    def __len__(self) -> int:
        return NUM_SAMPLES

    def read(self, indices: np.ndarray, out: Any) -> None:
        for record in indices[indices >= RAISES_KEY_ERROR].tolist():
            self._meet_trouble(record)
        with self.lock:
            out["id"][...] = indices + self.epoch
        out["x"][...] = self.large[indices][:, None] + np.arange(3)
        out["half"][...] = (indices % 128)[:, None]
        out["process"][...] = os.getpid()
        for row, index in enumerate(indices.tolist()):
            out["text"][row] = f"sample {index}"

    def _meet_trouble(self, record: int) -> None:
        mark = self.folder / f"{record} {os.getpid()}"
        before = list(self.folder.glob(f"{record} *"))
        mark.touch()
        if record == RAISES_KEY_ERROR:
            raise KeyError("spoiled")
        if record == RAISES_FORMAT_ERROR:
            error = FormatError("a.bin: truncated")
            error.offset = 17
            raise error
        if record == RAISES_ITS_OWN:
            raise OwnError(record, "mine")
        if record == LEAVES:
            raise SystemExit(3)
        if record == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if record == CRASHES_ONCE and not before:
            ctypes.string_at(0)
        if record == HANGS:
            threading.Event().wait()
        if record == SAYS_TIMEOUT:
            raise TimeoutError("mount")

    def describe(self) -> Mapping[str, str]:
        return {"format": "troubled"}

    def at(self, seed: int | None, epoch: int) -> "Troubled":
        other = Troubled(self.folder)
        other.epoch = 1000 * (seed or 0) + epoch
        other.prepared = self.prepared
        return other

    def prepare(self, indices: np.ndarray) -> None:
        self.prepared.extend(indices.tolist())


class Surroundings(Source):
    """One sample: what a worker process finds around it, as text."""

    @property
    def sample_spec(self) -> Any:
        return VARYING

    def __len__(self) -> int:
        return 1

    def read(self, indices: np.ndarray, out: Any) -> None:
        facts = {
            "hears no interrupt": hears_no_interrupt(os.getpid()),
            "threads": os.environ["OMP_NUM_THREADS"],
            "x64": jax.config.jax_enable_x64,
            "backends": xla_bridge.backends_are_initialized(),
            "folder": Path.cwd(),
        }
        out[0] = ", ".join(f"{name}: {fact}" for name, fact in facts.items())

    def describe(self) -> Mapping[str, str]:
        return {}


class UnpacksNowhereElse:
    """An object that can be pickled, and unpickled in one process only."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"x": np.float32(index)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["home"] != os.getpid():
            raise LookupError("no key for this host")
        self.__dict__.update(state)


def children(parent: int) -> list[int]:
    """Returns the processes whose parent it is, ended ones that nobody reaped included."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return sorted(found)


def eventually(condition: Callable[[], bool], *, seconds: float) -> bool:
    """Asks again and again, for so long at most, whether something holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


def exists(process: int) -> bool:
    """Says whether there is such a process, ended ones that nobody reaped included."""
    return Path(f"/proc/{process}").exists()


def runs(process: int) -> bool:
    """Says whether a process runs; one that ended runs no more, though nobody may have reaped it."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def hears_no_interrupt(process: int) -> bool:
    """Says whether a process blocks or ignores SIGINT, or is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return True
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigIgn"))]
    return any(mask >> (signal.SIGINT - 1) & 1 for mask in masks)
