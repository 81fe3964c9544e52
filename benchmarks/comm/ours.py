"""Our communicator as an endpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from benchmarks.comm.endpoint import Endpoint, Operation
from braidax.comm import connect
from braidax.comm.stores.file import FileStore


@final
class Ours(Endpoint):
    """A rank of a job that meets in a folder. **Arguments:** `transport`: `tcp` or `ucx`. **Fields:** `comm`."""

    def __init__(self, transport: str, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.comm = connect(FileStore(str(folder)), rank=rank, size=size, transport=transport)

    def sender(self, array: NDArray[np.uint8], peer: int) -> Operation:
        return partial(self.comm.send_buffer, array, peer)

    def receiver(self, array: NDArray[np.uint8], peer: int) -> Operation:
        return partial(self.comm.recv_buffer, array, peer)

    def all_to_all(self, parts: NDArray[np.uint8]) -> Callable[[], NDArray[np.uint8]]:
        return partial(self.comm.all_to_all_into, parts, np.empty_like(parts))

    def all_reduce(self, array: NDArray[np.float32]) -> Callable[[], NDArray[np.float32]]:
        return partial(self.comm.all_reduce, array, out=np.empty_like(array))

    def barrier(self) -> None:
        self.comm.barrier()

    def close(self) -> None:
        self.comm.barrier()
        self.comm.close()
