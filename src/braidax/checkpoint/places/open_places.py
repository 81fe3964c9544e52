"""The places of a run: which of them take a checkpoint, and which has the newest."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast, final

from braidax.checkpoint.places.folder import Folder
from braidax.checkpoint.places.place import NothingValid, OpenPlace, Place, Returned, Skipped
from braidax.checkpoint.processes import Processes
from braidax.errors import ArgumentError, BraidaxError, CheckpointError

_logger = logging.getLogger(__name__)
_KEPT = 3


@final
class OpenPlaces:
    """The places of a run, open. **Arguments:** `given`: as of `given_places`. `processes`: that save together."""

    def __init__(self, given: Sequence[Place], processes: Processes) -> None:
        self._every = [place.every for place in given]
        self._places: list[OpenPlace] = []
        try:
            for place in given:
                self._places.append(place.open(processes.another(), self._places))
        except BaseException:
            self.close(lambda places: None)
            raise

    @property
    def all(self) -> tuple[OpenPlace, ...]:
        """All of them."""
        return tuple(self._places)

    @property
    def path(self) -> Path:
        """The folder of the first."""
        return Path(self._places[0].where)

    @property
    def skipped(self) -> list[Skipped]:
        """The checkpoints that the last `restore` found invalid."""
        return [skipped for place in self._places for skipped in place.skipped]

    def taking(self, number: int, *, is_first: bool) -> tuple[OpenPlace, ...]:
        """Returns who takes a checkpoint. **Arguments:** `number`: how many have been due, this one included."""
        pairs = zip(self._every, self._places, strict=True)
        return tuple(place for every, place in pairs if is_first or number % every == 0)

    def check_restored(self) -> None:
        """Raises `CheckpointError` where a new run would mix its checkpoints with those of an earlier one."""
        for place in self._places:
            if place.earlier:
                raise CheckpointError(
                    f"{place.where}: has checkpoints of an earlier run, the newest {place.earlier}, which a new one "
                    "would mix with; call restore(like) first to go on from it, or give another place"
                )

    def newest(self) -> int | None:
        """Returns how many updates the newest checkpoint has seen, None without one."""
        steps = [place.newest() for place in self._places]
        return max((step for step in steps if step is not None and step >= 0), default=None)

    def restore(self, like: Any, only: Sequence[str] | None) -> Returned | None:
        """Restores the newest checkpoint that verifies, None where there is none; all go on from there.

        **Raises:** as `OpenPlace.restore`.
        """
        said = [(place.newest(), place) for place in self._places]
        candidates = [(newest, place) for newest, place in said if newest is not None]
        found: Returned | None = None
        damaged: list[NothingValid] = []
        for newest, place in sorted(candidates, key=lambda each: -each[0]):
            if found is not None and found.step >= newest:
                break
            try:
                found = place.restore(like, only, -1 if found is None else found.step) or found
            except NothingValid as error:
                damaged.append(error)
        if found is None:
            if damaged:
                raise damaged[0]
            return None
        if len(self._places) > 1:
            _logger.info("restored the checkpoint of update %d in %s", found.step, found.path.parent)
        for place in self._places:
            place.go_on(found.step)
        return found

    def limit(self, timeout_seconds: float) -> None:
        """Sets the limit of every wait."""
        for place in self._places:
            place.limit(timeout_seconds)

    def close(self, settle: "Callable[[Iterable[OpenPlace]], Exception | None]") -> Exception | None:
        """Gives all free. **Arguments:** `settle`: waits for the jobs of some. **Returns:** what went wrong."""
        failures: list[Exception | None] = []
        for place in self._places:
            try:
                failures.append(settle([place]))
            except BraidaxError as error:
                failures.append(error)
            finally:
                place.close()
        return first_of(failures)


def withdraw(places: Iterable[OpenPlace], name: str, step: int, reason: str) -> None:
    """Ends the others' wait for this process. **Arguments:** as of `OpenPlace.withdraw`."""
    for place in places:
        with contextlib.suppress(BraidaxError):  # where nobody can be told, nobody waits
            place.withdraw(name, step, reason)


def given_places(
    places: str | os.PathLike[str] | Place | Sequence[Place],
    keep: int | None,
    keep_every: int | None,
    keep_best: int,
) -> Sequence[Place]:
    """Returns the places that are meant by the arguments of `Checkpointer`. **Raises:** `ArgumentError`."""
    if isinstance(places, str | os.PathLike):
        return [Folder(places, keep=_KEPT if keep is None else keep, keep_every=keep_every, keep_best=keep_best)]
    found = cast("Sequence[object]", places if isinstance(places, Sequence) else [places])
    strangers = [each for each in found if not isinstance(each, Place) or isinstance(each, type)]
    if strangers or not found:
        told = f"have {strangers[0]!r}" if strangers else "are none"
        raise ArgumentError(f"places= {told}: expected a path, or Folder, Bucket and Neighbors of braidax.checkpoint")
    if (keep, keep_every, keep_best) != (None, None, 0):
        raise ArgumentError(
            f"keep={keep!r}, keep_every={keep_every!r}, keep_best={keep_best!r}: expected them of a path alone; give "
            'them to one of places=, such as Folder("runs/a", keep=3)'
        )
    given = cast("list[Place]", list(found))
    if not any(place.every == 1 for place in given):
        raise ArgumentError(
            f"places= have every={[place.every for place in given]}: expected one that takes all checkpoints that are "
            "due, every=1; else make the interval longer"
        )
    return given


def first_of(failures: Sequence[Exception | None]) -> Exception | None:
    """Returns the first of what went wrong; the others go to the log."""
    found = [failure for failure in failures if failure is not None]
    for other in found[1:]:
        _logger.error("%s", other)
    return found[0] if found else None
