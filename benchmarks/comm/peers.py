"""The peers that pass messages, as endpoints: mpi4py with its buffer methods, torch.distributed with gloo."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from benchmarks.comm.endpoint import Endpoint, Operation


@final
class Mpi4py(Endpoint):
    """A rank that `mpirun` has started."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm: Any = MPI.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def sender(self, array: NDArray[np.uint8], peer: int) -> Operation:
        return partial(self._comm.Send, array, peer)

    def receiver(self, array: NDArray[np.uint8], peer: int) -> Operation:
        return partial(self._comm.Recv, array, peer)

    def all_to_all(self, parts: NDArray[np.uint8]) -> Callable[[], NDArray[np.uint8]]:
        result, exchange = np.empty_like(parts), self._comm.Alltoall

        def run() -> NDArray[np.uint8]:
            exchange(parts, result)
            return result

        return run

    def all_reduce(self, array: NDArray[np.float32]) -> Callable[[], NDArray[np.float32]]:
        result, reduce = np.empty_like(array), self._comm.Allreduce

        def run() -> NDArray[np.float32]:
            reduce(array, result)  # the sum is its default
            return result

        return run

    def barrier(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        pass  # at the end of the process, as mpi4py does


@final
class Gloo(Endpoint):
    """A rank of `torch.distributed` with the backend gloo; ranks meet in a file."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)  # what torchrun sets
        self.rank, self.size = rank, size
        self._torch: Any = torch
        self._dist: Any = torch.distributed
        self._dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size)

    def sender(self, array: NDArray[np.uint8], peer: int) -> Operation:
        return partial(self._dist.send, self._torch.from_numpy(array), peer)

    def receiver(self, array: NDArray[np.uint8], peer: int) -> Operation:
        return partial(self._dist.recv, self._torch.from_numpy(array), peer)

    def all_to_all(self, parts: NDArray[np.uint8]) -> Callable[[], NDArray[np.uint8]]:
        result, exchange = np.empty_like(parts), self._dist.all_to_all_single
        sent, received = self._torch.from_numpy(parts), self._torch.from_numpy(result)

        def run() -> NDArray[np.uint8]:
            exchange(received, sent)
            return result

        return run

    def all_reduce(self, array: NDArray[np.float32]) -> Callable[[], NDArray[np.float32]]:
        tensor, reduce = self._torch.from_numpy(array), self._dist.all_reduce

        def run() -> NDArray[np.float32]:
            reduce(tensor)  # in place; the sum is its default
            return array

        return run

    def barrier(self) -> None:
        self._dist.barrier()

    def close(self) -> None:
        self._dist.barrier()
        self._dist.destroy_process_group()
