"""What is counted where it happens: records and bytes at the source, bytes at the sockets of a process."""

import contextlib
import math
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Box, Indices, Sliced, Source

_TCP_INFO_BYTES = 256
_BYTES_SENT = 200  # where tcpi_bytes_sent stands in it


class Tally(NamedTuple):
    """Since the start. **Fields:** `records`: of which the heaviest leaf was read; `num_bytes`: as they are stored."""

    records: int
    num_bytes: int

    def since(self, before: "Tally") -> "Tally":
        """Returns what came after another one."""
        return Tally(self.records - before.records, self.num_bytes - before.num_bytes)


@final
class Counted(Source, Sliced):
    """A source that hands all reads on, and counts them.

    **Arguments:** `inner`: a source that is `Sliced`. `heavy`: the leaf by which records are counted. `stored_bytes`:
    of that leaf in each record, int64 `[n]`; None where every number is stored as it is loaded.
    """

    def __init__(self, inner: Source, heavy: str, stored_bytes: NDArray[np.int64] | None) -> None:
        self._inner = inner
        self._sliced = cast(Sliced, inner)
        self._names = sorted(inner.sample_spec)
        self._heavy = self._names.index(heavy)
        self._stored_bytes = stored_bytes
        self._lock = threading.Lock()
        self._tally = Tally(0, 0)

    @property
    def sample_spec(self) -> Any:
        return self._inner.sample_spec

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def cut_dims(self) -> Sequence[int]:
        return self._sliced.cut_dims

    @property
    def num_bytes(self) -> int:
        """Of all records, as they are stored."""
        spec: Mapping[str, Any] = self.sample_spec
        sizes = [math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize * len(self) for _, leaf in sorted(spec.items())]
        if self._stored_bytes is not None:
            sizes[self._heavy] = int(self._stored_bytes.sum())
        return sum(sizes)

    @property
    def tally(self) -> Tally:
        """What was read so far."""
        with self._lock:
            return self._tally

    def read(self, indices: Indices, out: Any) -> None:
        self._inner.read(indices, out)
        self.count(indices, [out[name] for name in self._names])

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        self._sliced.read_slices(indices, boxes, out)
        self.count(indices, out)

    def describe(self) -> Mapping[str, str]:
        return self._inner.describe()

    def count(self, indices: Indices, out: Sequence[NDArray[Any] | None]) -> None:
        """Counts a read. **Arguments:** as those of `read_slices`."""
        heavy = out[self._heavy]
        num_bytes = sum(leaf.nbytes for leaf in out if leaf is not None)
        if heavy is not None and self._stored_bytes is not None:
            num_bytes += int(self._stored_bytes[indices].sum()) - heavy.nbytes
        with self._lock:
            records, before = self._tally
            self._tally = Tally(records + (0 if heavy is None else len(indices)), before + num_bytes)


class _Socket(NamedTuple):
    own: tuple[str, int]
    peer: tuple[str, int]
    num_bytes: int


class Sent(NamedTuple):
    """Bytes that TCP sockets of this process have sent to other processes.

    **Fields:** `data`, and `words`: through JAX's coordination service, by socket.
    """

    data: dict[str, int]
    words: dict[str, int]

    @classmethod
    def now(cls, coordinator_port: int) -> "Sent":
        """Asks the kernel for every socket; those that both ends of are here are left out."""
        found: dict[str, _Socket] = {}
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                name = str(entry.readlink())
                if name.startswith("socket:") and (seen := _asked(int(entry.name))) is not None:
                    found[name] = seen
        here = {seen.own for seen in found.values()}
        sent = cls({}, {})
        for name, seen in found.items():
            if seen.peer not in here:
                part = sent.words if coordinator_port in (seen.own[1], seen.peer[1]) else sent.data
                part[name] = seen.num_bytes
        return sent

    def since(self, before: "Sent") -> tuple[int, int]:
        """Returns what was sent after an earlier count: `data`, `words`."""
        data, words = (
            sum(count - old.get(name, 0) for name, count in new.items()) for new, old in zip(self, before, strict=True)
        )
        return data, words


def _asked(descriptor: int) -> _Socket | None:
    """Returns a connected TCP socket, None for another one. **Raises:** `OSError` for one that is not connected."""
    with socket.socket(fileno=os.dup(descriptor)) as held:
        if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
            return None
        info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        num_bytes = int(struct.unpack_from("<Q", info, _BYTES_SENT)[0])
        return _Socket(_place(held.getsockname()), _place(held.getpeername()), num_bytes)


def _place(address: Any) -> tuple[str, int]:
    """Returns address and port, the same for a socket of IPv4 and one of IPv6 that speaks it."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])
