"""Rows on disk beside rows in memory: a table of four times the memory that the process with it may take.

As a program it has one of the two: for each number that comes it takes so many batches, and tells the seconds of one.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import final

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Report, take_turns
from benchmarks.harness.machine import num_cores
from benchmarks.harness.memory import NoLimitError, memory_limit

DISK, MEMORY = "on disk", "in memory"
TIMES, EXPONENT, WIDTH = 4, 1.05, 64
BY_FREQUENCY, HASHED = "ids by frequency", "ids hashed"
_BATCHES, _BLOCK = 8, 1 << 16
_OTHER_BYTES = 192 << 20  # JAX, programs and messages of a server


def disk_case(
    report: Report,
    folder: Path,
    *,
    limit_bytes: int,
    size: int,
    rounds: int,
    orders: tuple[str, ...] = (BY_FREQUENCY, HASHED),
) -> None:
    """Measures pulls and pushes of batches.

    **Arguments:** `folder`: on the disk. `limit_bytes`: for all that the process takes. `size`: ids of a batch.
    """
    num_rows = TIMES * limit_bytes // (4 * WIDTH)
    case = f"disk, {num_rows:,} rows of {WIDTH}, {size:,} ids, Zipf {EXPONENT}, memory limit {limit_bytes >> 20:,} MiB"
    warm = -(-limit_bytes // (4096 * size // 16))  # batches that bring about as many pages as the memory has
    num_batches = warm + _BATCHES * rounds
    for at in orders:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".braidax-disk-") as place, ExitStack() as stack:
            np.save(Path(place, "ids.npy"), zipf_ids(num_rows, (num_batches, size), hashed=at == HASHED))
            try:
                group = stack.enter_context(memory_limit(limit_bytes))
            except NoLimitError as error:
                report.missing(case, DISK, str(error))
                report.missing(case, MEMORY, "there is nothing to compare it with")
                break
            tables = {
                name: stack.enter_context(_Table(place, num_rows, name, rows_bytes(limit_bytes, num_rows), begun))
                for name, begun in {DISK: group.add, MEMORY: lambda _: None}.items()
            }
            for table in tables.values():
                table.take(warm)
            systems = {name: (lambda table=table: table.take(_BATCHES)) for name, table in tables.items()}
            for name, seconds in take_turns(systems, rounds=rounds).items():
                report.add(case, name, "time", "ms", [1e3 * one for one in seconds], at=at)
            report.add(case, DISK, "memory taken", "MiB", [group.peak_bytes / (1 << 20)], at=at)


def rows_bytes(limit_bytes: int, num_rows: int) -> int:
    """Returns the memory for rows, of all that a server may take. **Arguments:** `num_rows`: of all tables."""
    return limit_bytes - _OTHER_BYTES - 9 * num_rows  # 8 for each: the step that has moved it last


def zipf_ids(num_rows: int, shape: tuple[int, int], *, hashed: bool) -> NDArray[np.int32]:
    """Draws ids whose frequencies fall with their rank. **Arguments:** `hashed`: ranks lie anywhere in the table; in
    order of frequency otherwise, as words of a vocabulary do."""
    random, shares = np.random.default_rng(0), np.arange(1, num_rows + 1, dtype=np.float64) ** -EXPONENT
    ends = np.cumsum(shares)
    ranks = np.minimum(np.searchsorted(ends, random.random(shape) * ends[-1]), num_rows - 1)
    return (random.permutation(num_rows)[ranks] if hashed else ranks).astype(np.int32)


@final
class _Table:
    """A process with a table. **Arguments:** `place`: has the ids, and the rows on disk. `begun`: is told its pid."""

    def __init__(self, place: str, num_rows: int, where: str, memory_bytes: int, begun: Callable[[int], None]) -> None:
        command = [sys.executable, "-m", "benchmarks.servers.disk", place, str(num_rows), where, str(memory_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        begun(self._process.pid)
        self._ask("begin")

    def take(self, count: int) -> float:
        """Takes so many batches, and returns the seconds of one."""
        return float(self._ask(str(count)))

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise SystemExit(f"a process with a table ended with {self._process.wait()}")
        return answer

    def __enter__(self) -> "_Table":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def _serve(place: str, num_rows: int, where: str, memory_bytes: int) -> None:
    """Has a table. What it imports and takes counts: it begins when it is told to."""
    sys.stdin.readline()
    from benchmarks.servers.applying import table_of
    from braidax.parallel.served.batches.batch_rows import BatchRows
    from braidax.parallel.served.files.disk_rows import OnDisk
    from braidax.parallel.served.on_servers.shard import Shard
    from braidax.parallel.served.row_memory import aligned

    drawn, step = np.load(Path(place, "ids.npy"), mmap_mode="r"), 0
    size = drawn.shape[1]
    gradients = np.random.default_rng(1).normal(size=(size, WIDTH)).astype(np.float32)
    room = aligned((size, WIDTH), np.float32)
    with ThreadPoolExecutor(num_cores()) as threads:
        disk = OnDisk(place, memory_bytes) if where == DISK else None
        shard = Shard(table_of(num_rows), 0, 1, threads, disk)
        for start in range(0, num_rows, _BLOCK):
            part = slice(start, min(start + _BLOCK, num_rows))
            values = np.full((part.stop - part.start, WIDTH), 0.5, np.float32)
            shard.put(start, values, shard.lying(part)[1:-1])
        print("ready", flush=True)
        for line in sys.stdin:
            seconds = 0.0
            for _ in range(int(line)):
                rows = BatchRows({0: drawn[step]}, 1)
                start_seconds = time.perf_counter()
                shard.pull(rows.asked(0))
                summed = rows.summed(rows.summed_ids({0: gradients}, {0: room}, threads))
                shard.push(rows.asked(0), rows.of_server(summed, 0), [], step)
                seconds += time.perf_counter() - start_seconds
                step += 1
            print(seconds / int(line), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
