"""Rows of tables that grow, as those who train see them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.numpy import dtype
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.on_servers.growing.seen_shard import Which

from .programs import TableForm
from .servers import Servers
from .wire import Message

_BLOCK_BYTES = 16 << 20  # of rows in a message
_KEPT_OF = 16  # bytes of an id, and when it was touched


class Listed(NamedTuple):
    """What servers have of some ids. **Fields:** `step`: how many updates they have seen. `key`: numbers of the key of
    `init`. `shared`: numbers by which rows move. `arrays`: of each id, in order, as of `SeenShard.listed`."""

    step: int
    key: NDArray[Any]
    shared: list[NDArray[Any]]
    arrays: dict[str, NDArray[Any]]


def list_rows(servers: Servers, form: TableForm, which: Which, first: int, last: int) -> Listed:
    """Reads what servers have of the ids from `first` on and below `last`. **Arguments:** `which`: of it."""
    parts, answer = list[dict[str, NDArray[Any]]](), None
    for answer in list_blocks(servers, form, which, (first, last)):
        parts.append({name: one for name, one in answer.arrays.items() if name != "key" and "shared/" not in name})
    assert answer is not None, "each server has answered"
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    _, order = np.unique(joined["ids"], return_index=True)  # all servers have the same changes
    shared = [answer.arrays[f"shared/{at}"].copy() for at in range(form.num_shared)]
    key, arrays = answer.arrays["key"].copy(), {name: one[order] for name, one in joined.items()}
    return Listed(int(answer.fields["step"]), key, shared, arrays)


def list_blocks(
    servers: Servers,
    form: TableForm,
    which: Which,
    ids: tuple[int, int],
    *,
    since: Sequence[int] | None = None,
    block_bytes: int = _BLOCK_BYTES,
) -> Iterator[Message]:
    """Yields what servers have of some ids, at least one answer of each; of one server they come in order.

    **Arguments:** `ids`: the first, and that behind the last. `since`: of each server, the step from which on they were
    touched; None is ever. `block_bytes`: of rows in a message.
    """
    most = max(1, block_bytes // _row_bytes(form, which))
    starts = [ids[0]] * servers.num_servers
    while True:
        fields = [
            {"table": form.name, "which": which, "start": one, "stop": ids[1], "most": most, "since": step}
            for one, step in zip(starts, since or [-1] * len(starts), strict=True)
        ]
        answers = servers.ask("list", fields.__getitem__)
        yield from answers
        starts = [int(one.arrays["ids"][-1]) + 1 if len(one.arrays["ids"]) == most else ids[1] for one in answers]
        if starts == [ids[1]] * len(starts):
            return


def put_rows(servers: Servers, form: TableForm, which: Which, arrays: dict[str, NDArray[Any]]) -> None:
    """Undoes `list_rows`, where servers have forgotten all rows. **Arguments:** `arrays`: by id, in order."""
    if which == "changes":
        servers.tell("put", {"table": form.name, "which": which}, lambda _: arrays)
        return
    most, size = max(1, _BLOCK_BYTES // _row_bytes(form, which)), servers.num_servers
    own = [np.flatnonzero(arrays["ids"] % size == part) for part in range(size)]
    for start in range(0, max(map(len, own)), most):

        def block(part: int, start: int = start) -> dict[str, NDArray[Any]]:
            return {name: one[own[part][start : start + most]] for name, one in arrays.items()}

        servers.tell("put", {"table": form.name, "which": which}, block)


def _row_bytes(form: TableForm, which: Which) -> int:
    if which not in ("rows", "values"):
        return _KEPT_OF + 4
    kept = sum(int(np.prod(one.shape)) * dtype(one.dtype).itemsize for one in form.kept if which == "rows")
    return _KEPT_OF + form.width * dtype(form.dtype).itemsize + kept


def check_has_all_rows(forms: Mapping[str, TableForm], what: str) -> None:
    """Raises `ArgumentError` where a table grows, and `what` needs all rows."""
    if growing := [name for name, form in forms.items() if form.seen is not None]:
        raise ArgumentError(
            f"{what} reads or writes tables with all their rows, and {growing} grow as seen: expected "
            f"step.seen_rows(name), which returns (ids, rows) of what is there, or step.tables in a checkpoint"
        )
