"""What a server computes: gradients of a batch's rows are summed, and the rows moved by row-wise Adagrad."""

import tempfile
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from benchmarks.harness import Report, take_turns
from benchmarks.harness.machine import num_cores
from benchmarks.servers.fbgemm import Fbgemm
from braidax.parallel.given.initial import Born
from braidax.parallel.rows import row_adagrad
from braidax.parallel.served.batches.batch_rows import BatchRows
from braidax.parallel.served.on_servers.shard import Shard
from braidax.parallel.served.programs import TableForm, rules_of_own, table_form
from braidax.parallel.served.row_memory import aligned
from braidax.program import trace

OURS, FBGEMM = "ours", "FBGEMM"
WIDTH, EXPONENT, RATE, EPS = 64, 1.05, 0.1, 1e-7
_BATCHES = 8


def apply_case(report: Report, python: str | None, *, num_rows: int, sizes: tuple[int, ...], rounds: int) -> None:
    """Measures it beside FBGEMM, which does both in one pass. **Arguments:** `sizes`: ids of a batch."""
    case = f"apply, {num_rows:,} rows of {WIDTH}, Zipf {EXPONENT}"
    for size in sizes:
        drawn = np.random.default_rng(0).zipf(EXPONENT, (_BATCHES, size)) % num_rows
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_cores()) as threads:
            path = Path(folder, "ids.npy")
            np.save(path, drawn)
            systems = {OURS: _Ours(drawn, num_rows, threads).apply}
            if python is None:
                report.missing(case, FBGEMM, "--fbgemm was not given")
                _add(report, case, size, take_turns(systems, rounds=rounds))
                continue
            options = {"num_rows": num_rows, "width": WIDTH, "threads": num_cores(), "rate": RATE, "eps": EPS}
            with Fbgemm(python, path, **options) as peer:  # pyright: ignore[reportArgumentType]
                _add(report, case, size, take_turns({**systems, FBGEMM: peer.apply}, rounds=rounds))
    report.against("apply", case, "time", ours=OURS, peers=[FBGEMM])


def _add(report: Report, case: str, size: int, figures: dict[str, list[float]]) -> None:
    for system, seconds in figures.items():
        report.add(case, system, "time", "ms", [1e3 * one for one in seconds[1:]], at=f"{size:,} ids")


def table_of(num_rows: int) -> TableForm:
    """Returns a table whose rows row-wise Adagrad moves."""
    spec = jax.ShapeDtypeStruct((num_rows, WIDTH), np.float32)
    born = trace(lambda key: Born({"table": jax.numpy.full(spec.shape, 0.5)}, {}, key), jax.random.key(0))
    return table_form("table", spec, born, rules_of_own(row_adagrad(RATE, initial=0.0, eps=EPS)))


class _Ours:
    """The same with a shard of one server: what who pushes, and the server do, one after the other."""

    def __init__(self, ids: np.ndarray, num_rows: int, threads: Executor) -> None:
        self._shard, self._threads = Shard(table_of(num_rows), 0, 1, threads), threads
        self._shard.bear(np.asarray(jax.random.key_data(jax.random.key(0))))
        self._ids, self._step = ids.astype(np.int32), 0
        self._room = aligned((ids.shape[1], WIDTH), np.float32)
        self._gradients = np.random.default_rng(1).normal(size=(ids.shape[1], WIDTH)).astype(np.float32)

    def apply(self) -> float:
        ids = self._ids[self._step % len(self._ids)]
        rows = BatchRows({0: ids}, 1)  # known before the gradients are
        self._shard.pull(rows.asked(0))  # as the peer's forward pass has just read them
        start = time.perf_counter()
        summed = rows.summed(rows.summed_ids({0: self._gradients}, {0: self._room}, self._threads))
        self._shard.push(rows.asked(0), rows.of_server(summed, 0), [], self._step)
        self._step += 1
        return time.perf_counter() - start
