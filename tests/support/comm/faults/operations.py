"""What ranks do until something happens to one of them: operations drawn alike on all ranks, with results checked."""

import random
from collections.abc import Callable

import numpy as np

from braidax.comm import Communicator

Operation = Callable[[Communicator, random.Random], None]
_LARGEST = 19  # powers of two: 2¹⁹ float64 are 4 MiB


def barrier(comm: Communicator, draw: random.Random) -> None:
    comm.barrier()


def all_reduce(comm: Communicator, draw: random.Random) -> None:
    array = _array(comm, draw)
    _check(comm.all_reduce(array), comm.size * array + _excess(comm))


def all_reduce_beside_work(comm: Communicator, draw: random.Random) -> None:
    array = _array(comm, draw)
    request = comm.start.all_reduce(array, np.maximum)
    other = comm.start.barrier()
    _check(np.sort(array[::-1]), array)  # work that has nothing to do with it
    other.wait()
    _check(request.wait(), array + comm.size - 1 - comm.rank)


def reduce(comm: Communicator, draw: random.Random) -> None:
    array, root = _array(comm, draw), draw.randrange(comm.size)
    reduced = comm.reduce(array, root=root)
    _check(reduced, comm.size * array + _excess(comm) if comm.rank == root else np.empty(0))


def reduce_scatter(comm: Communicator, draw: random.Random) -> None:
    block = _array(comm, draw)
    expected = comm.size * (block - comm.rank) + _sum(comm) + comm.size * 7 * comm.rank
    whole = np.concatenate([block + 7 * rank for rank in range(comm.size)])
    _check(comm.reduce_scatter(whole), expected)


def all_reduce_in_place(comm: Communicator, draw: random.Random) -> None:
    array = _array(comm, draw)
    expected = comm.size * array + _excess(comm)
    _check(comm.all_reduce(array, out=array), expected)


def all_to_all_into(comm: Communicator, draw: random.Random) -> None:
    block = _array(comm, draw)
    blocks = np.stack([block + 3 * rank for rank in range(comm.size)])
    expected = np.stack([block - comm.rank + rank + 3 * comm.rank for rank in range(comm.size)])
    _check(comm.all_to_all_into(blocks, np.empty_like(blocks)), expected)


def all_gather(comm: Communicator, draw: random.Random) -> None:
    array = _array(comm, draw)
    for rank, gathered in enumerate(comm.all_gather(array)):
        _check(gathered, array + rank - comm.rank)


def gather(comm: Communicator, draw: random.Random) -> None:
    array, root = _array(comm, draw), draw.randrange(comm.size)
    gathered = comm.gather(array, root=root)
    _check(np.array(len(gathered)), np.array(comm.size if comm.rank == root else 0))
    for rank, each in enumerate(gathered):
        _check(each, array + rank - comm.rank)


def broadcast(comm: Communicator, draw: random.Random) -> None:
    array, root = _array(comm, draw), draw.randrange(comm.size)
    _check(comm.broadcast(array, root=root), array + root - comm.rank)


def broadcast_into(comm: Communicator, draw: random.Random) -> None:
    array, root = _array(comm, draw), draw.randrange(comm.size)
    expected = array + root - comm.rank
    _check(comm.broadcast_into(array, root=root), expected)


def all_to_all(comm: Communicator, draw: random.Random) -> None:
    array = _array(comm, draw)
    for rank, part in enumerate(comm.all_to_all([array + 7 * rank for rank in range(comm.size)])):
        _check(part, array + rank - comm.rank + 7 * comm.rank)


def around(comm: Communicator, draw: random.Random) -> None:
    """Sends to the right, receives from the left."""
    array, right, left = _array(comm, draw), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    request = comm.start.send(array, right, tag=5)
    _check(comm.recv(left, tag=5), array + left - comm.rank)
    request.wait()


def buffers_around(comm: Communicator, draw: random.Random) -> None:
    """The same by buffers; a send may wait for its receive, so that some ranks receive first."""
    array, right, left = _array(comm, draw), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    place = np.empty_like(array)
    if comm.rank % 2 == 0:
        comm.send_buffer(array, right, tag=6)
    num_bytes = comm.recv_buffer(place, left, tag=6)
    if comm.rank % 2:
        comm.send_buffer(array, right, tag=6)
    _check(np.array(num_bytes), np.array(array.nbytes))
    _check(place, array + left - comm.rank)


OPERATIONS: list[Operation] = [
    barrier,
    all_reduce,
    all_reduce_beside_work,
    all_reduce_in_place,
    all_to_all_into,
    reduce,
    reduce_scatter,
    all_gather,
    gather,
    broadcast,
    broadcast_into,
    all_to_all,
    around,
    buffers_around,
]


def _array(comm: Communicator, draw: random.Random) -> np.ndarray:
    """Returns whole numbers, so that sums are exact: on all ranks the same ones plus the rank."""
    return np.arange(int(2 ** draw.uniform(0, _LARGEST)), dtype=np.float64) + comm.rank


def _sum(comm: Communicator) -> int:
    return comm.size * (comm.size - 1) // 2


def _excess(comm: Communicator) -> int:
    """Returns what the sum over ranks has beyond `size` times this rank's array."""
    return _sum(comm) - comm.size * comm.rank


def _check(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found, expected)
