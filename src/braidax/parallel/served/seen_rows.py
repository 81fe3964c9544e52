"""Rows of tables that grow, as those who train see them."""

from typing import Any, Literal, NamedTuple

import numpy as np
from jax.numpy import dtype
from numpy.typing import NDArray

from .programs import TableForm
from .servers import Servers

_BLOCK_BYTES = 16 << 20  # of rows in a message
_KEPT_OF = 16  # bytes of an id, and when it was touched

Which = Literal["rows", "counts"]


class Listed(NamedTuple):
    """What servers have of some ids. **Fields:** `step`: how many updates they have seen. `key`: numbers of the key of
    `init`. `shared`: numbers by which rows move. `arrays`: of each id, in order, as of `SeenShard.listed`."""

    step: int
    key: NDArray[Any]
    shared: list[NDArray[Any]]
    arrays: dict[str, NDArray[Any]]


def list_rows(servers: Servers, form: TableForm, which: Which, first: int, last: int) -> Listed:
    """Reads what servers have of the ids from `first` on and below `last`, in blocks. **Arguments:** `which`: of it."""
    most = max(1, _BLOCK_BYTES // _row_bytes(form, which))
    starts, parts = [first] * servers.num_servers, list[dict[str, NDArray[Any]]]()
    while True:
        fields = [{"table": form.name, "which": which, "start": one, "stop": last, "most": most} for one in starts]
        answers = servers.ask("list", fields.__getitem__)
        names = [name for name in answers[0].arrays if name != "key" and not name.startswith("shared/")]
        parts += [{name: answer.arrays[name] for name in names} for answer in answers]
        nexts = [int(one.arrays["ids"][-1]) + 1 if len(one.arrays["ids"]) == most else last for one in answers]
        if nexts == [last] * len(nexts):
            break
        starts = nexts
    joined = {name: np.concatenate([part[name] for part in parts]) for name in names}
    order = np.argsort(joined["ids"])
    shared = [answers[0].arrays[f"shared/{at}"].copy() for at in range(form.num_shared)]
    step = min(int(answer.fields["step"]) for answer in answers)
    return Listed(step, answers[0].arrays["key"].copy(), shared, {name: one[order] for name, one in joined.items()})


def put_rows(servers: Servers, form: TableForm, which: Which, arrays: dict[str, NDArray[Any]]) -> None:
    """Undoes `list_rows`, where servers have forgotten all rows. **Arguments:** `arrays`: by id, in order."""
    most, size = max(1, _BLOCK_BYTES // _row_bytes(form, which)), servers.num_servers
    own = [np.flatnonzero(arrays["ids"] % size == part) for part in range(size)]
    for start in range(0, max(map(len, own)), most):

        def block(part: int, start: int = start) -> dict[str, NDArray[Any]]:
            return {name: one[own[part][start : start + most]] for name, one in arrays.items()}

        servers.tell("put", {"table": form.name, "which": which}, block)


def _row_bytes(form: TableForm, which: Which) -> int:
    if which == "counts":
        return _KEPT_OF + 4
    kept = sum(int(np.prod(one.shape)) * dtype(one.dtype).itemsize for one in form.kept)
    return _KEPT_OF + form.width * dtype(form.dtype).itemsize + kept
