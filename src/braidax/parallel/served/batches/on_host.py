"""Gradients of rows summed over the processes of a host: a row that several of them read leaves it once."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.comm import Communicator
from braidax.errors import CommError, PeerLost
from braidax.parallel.served.batches.batch_rows import BatchRows
from braidax.parallel.served.meetings.world import trainer_lost
from braidax.parallel.served.row_memory import sum_by_id
from braidax.parallel.served.wire import Message, packed, unpacked

Gradients = tuple[Mapping[str, BatchRows], dict[str, NDArray[Any]]]
"""By table which rows have gradients, and these, `[u, D]`."""


def summed_on_host(
    host: Communicator, rows: Mapping[str, BatchRows], gradients: Mapping[str, NDArray[Any]], step: int
) -> Gradients:
    """Sums the gradients of an update over the processes of a host, all of which call it, in their order.

    **Arguments:** `host`: of them, which nobody else uses meanwhile. `rows`, `gradients`: of this process. `step`: the
    update.

    **Returns:** the first process has the sums, all others have no row. **Raises:** `PeerLost` where one of them is
    gone; `CommError` where one sends what belongs to another update, or to other tables.

    **Source:** local aggregation: Kim et al., Parallax, EuroSys 2019.
    """
    try:
        return _summed(host, rows, gradients, step)
    except PeerLost as error:
        raise trainer_lost(str(error), error.rank, error.host) from error


def _summed(
    host: Communicator, rows: Mapping[str, BatchRows], gradients: Mapping[str, NDArray[Any]], step: int
) -> Gradients:
    if host.rank:
        host.send(packed("gradients", {"step": step, "tables": [*rows]}, _arrays(rows, gradients)), 0)
        nobody = np.zeros(0, np.int32)
        return {name: one.others(nobody) for name, one in rows.items()}, {
            name: one[:0] for name, one in gradients.items()
        }
    every = [(one.unique, gradients[name]) for name, one in rows.items()]
    parts = [every, *(_received(host, rank, rows, gradients, step) for rank in range(1, host.size))]
    found, sums = dict[str, BatchRows](), dict[str, NDArray[Any]]()
    for name, some in zip(rows, zip(*parts, strict=True), strict=True):
        unique, sums[name] = sum_by_id(some)
        found[name] = rows[name].others(unique)
    return found, sums


def _arrays(rows: Mapping[str, BatchRows], gradients: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    ids = {f"{at}/ids": one.unique for at, one in enumerate(rows.values())}
    return ids | {f"{at}/gradients": gradients[name] for at, name in enumerate(rows)}


def _received(
    host: Communicator, rank: int, rows: Mapping[str, BatchRows], gradients: Mapping[str, NDArray[Any]], step: int
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Returns ids and gradients that another process has sent, by table, checked."""
    message = unpacked(host.recv(rank))
    told = message.fields.get("step"), message.fields.get("tables")
    if told != (step, [*rows]):
        raise CommError(
            f"process {rank} of this host has sent gradients of update {told[0]} of {told[1]}, expected those of "
            f"update {step} of {[*rows]}: all processes train the same model, and take the same steps"
        )
    return [_checked(message, at, name, gradients[name], rank) for at, name in enumerate(rows)]


def _checked(message: Message, at: int, name: str, own: NDArray[Any], rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    ids, given = message.arrays.get(f"{at}/ids"), message.arrays.get(f"{at}/gradients")
    if (
        ids is None
        or given is None
        or (ids.dtype, ids.ndim) != (np.int32, 1)
        or (given.shape, given.dtype) != ((len(ids), own.shape[1]), own.dtype)
        or not (np.diff(ids, prepend=-1) > 0).all()
    ):
        raise CommError(
            f"process {rank} of this host has sent other gradients of {name} than {own.dtype}[u, {own.shape[1]}] for "
            f"u ids in order: expected all processes to train the same model"
        )
    return ids, given
