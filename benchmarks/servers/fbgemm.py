"""FBGEMM's kernels for CPUs, in an environment of its own: a table whose rows are moved by row-wise Adagrad."""

import subprocess
from pathlib import Path
from types import TracebackType
from typing import final

# One process: for each line that comes it looks rows up, and times the backward pass, in which the rows move.
_CHILD = """
import sys, time
import numpy as np, torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
path, num_rows, width, threads = sys.argv[1], *map(int, sys.argv[2:5])
rate, eps = map(float, sys.argv[5:7])
torch.set_num_threads(threads)
table = SplitTableBatchedEmbeddingBagsCodegen(
    [(num_rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU)],
    optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=rate, eps=eps, pooling_mode=PoolingMode.SUM,
)
table.split_embedding_weights()[0].fill_(0.5)
ids = torch.from_numpy(np.load(path)).long()
offsets = torch.arange(len(ids[0]) + 1)
gradients = torch.from_numpy(np.random.default_rng(1).normal(size=(len(ids[0]), width)).astype(np.float32))
print("ready", flush=True)
for number, _ in enumerate(sys.stdin):
    rows = table(ids[number % len(ids)], offsets)
    start = time.perf_counter()
    rows.backward(gradients)
    print(time.perf_counter() - start, flush=True)
"""


@final
class Fbgemm:
    """A process with a table. **Arguments:** `python`: of the environment. `ids`: file of `[batches, n]`."""

    def __init__(
        self, python: str, ids: Path, *, num_rows: int, width: int, threads: int, rate: float, eps: float
    ) -> None:
        arguments = [str(one) for one in (ids, num_rows, width, threads, rate, eps)]
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-c", _CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready", "it says so when its table is there"

    def apply(self) -> float:
        """Returns the seconds in which the rows of the next batch were moved."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"FBGEMM's process ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Fbgemm":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
