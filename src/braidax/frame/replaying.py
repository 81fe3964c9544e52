"""What is computed again when a rank is lost: plans from their sources, tables that ranks kept from their own plans."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, final

from braidax.errors import ArgumentError, GangError, PeerLost
from braidax.gang import Gang

MAX_REPLAYS = 2
"""How often a plan is computed again by default; a job that loses more ranks has another trouble than chance."""

Result = TypeVar("Result")
_log = logging.getLogger("braidax")


@final
class Lineage:
    """How a table that ranks keep is computed again. It keeps no rows of what it is computed from.

    **Arguments:** `name`: under which ranks keep it. `compute`: computes it, and lets ranks keep it under the name.
    `sources`: of the kept tables that it reads.

    **Fields:** `is_read`: whether frames begin with it.
    """

    def __init__(self, name: str, compute: Callable[[], Any], sources: "Sequence[Lineage]") -> None:
        self.name, self.compute, self.sources = name, compute, tuple(sources)
        self.is_read = True


@final
class Kept:
    """A table that the ranks of a gang keep, until no frame reads it any more."""

    def __init__(self, lineage: Lineage, gang: Gang) -> None:
        self.lineage = lineage
        weakref.finalize(self, _give_up, lineage, gang)


def _give_up(lineage: Lineage, gang: Gang) -> None:
    lineage.is_read = False
    gang.delete_later(lineage.name)


def replayed(gang: Gang, compute: Callable[[], Result], *, max_replays: int, tables: Sequence[Lineage] = ()) -> Result:
    """Computes something on all ranks of a gang, and again when a rank is lost: another process takes its place first.

    What `compute` did before it failed must not matter: it is called again.

    **Arguments:** `max_replays`: how often it is called again. `tables`: that it reads; those of which a rank lacks its
    part are computed again before.

    **Returns:** what `compute` does. **Raises:** what it does; `PeerLost` or `GangError` when more ranks are lost;
    `ArgumentError` for a number that cannot be.
    """
    if max_replays < 0:
        raise ArgumentError(f"{max_replays=}: expected how often to compute again when a rank is lost, 0 or more")
    replay = 0
    while True:
        generation = gang.generation
        try:
            with _whole(gang, tables):
                return compute()
        except (PeerLost, GangError) as error:
            was_replaced = gang.generation != generation  # by another thread, meanwhile
            if not (isinstance(error, PeerLost) or gang.lost or was_replaced):
                raise
            replay = _next(error, replay, max_replays)
        is_whole = False
        while not is_whole:
            try:
                gang.replace()
                is_whole = True
            except PeerLost as error:  # one more
                replay = _next(error, replay, max_replays)


def _next(error: PeerLost | GangError, replay: int, max_replays: int) -> int:
    """Returns the number of the replay that follows an error. **Raises:** the error, when there is to be none."""
    if replay == max_replays:
        if replay:
            error.add_note(f"The frame was computed again before, as often as {max_replays=} allows.")
        raise error
    told = str(error).partition("\n")[0].partition("; call replace()")[0]
    _log.warning("%s; the frame is computed again, replay %d of %d", told, replay + 1, max_replays)
    return replay + 1


@contextlib.contextmanager
def _whole(gang: Gang, tables: Sequence[Lineage]) -> Generator[None]:
    """Makes tables whole for the `with` block. What had to be computed for that alone is given up afterwards."""
    made: list[Lineage] = []
    try:
        _restore(gang, tables, made)
        yield
    finally:
        for table in made:
            if not table.is_read and table.name in gang.names():
                gang.delete(table.name)


def _restore(gang: Gang, tables: Sequence[Lineage], made: list[Lineage]) -> None:
    for table in tables:
        lacking = gang.lacking(table.name)
        if not lacking:
            continue
        _restore(gang, table.sources, made)
        table.compute()
        made.append(table)
        ranks = ", ".join(map(str, lacking))
        _log.warning("a persisted table was computed again from its plan: its part was lost on ranks %s", ranks)
