"""What a gang keeps under names: how functions ask for it, and which rank has what."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

from braidax.errors import ArgumentError, GangError


@final
@dataclass(frozen=True)
class Kept:
    """Stands for what each rank keeps under a name, wherever it is in the arguments of a call; made by `Gang.kept`.

    **Fields:** `name`. `job`: of the gang.
    """

    name: str
    job: str


@final
@dataclass(frozen=True)
class Handed:
    """Stands for what each rank was handed by its cluster, anywhere in the arguments of one call.

    **Fields:** `token`: under which the ranks have it until that call takes it. `job`: of the gang.
    """

    token: str
    job: str


@final
class Names:
    """Which rank of a gang has what: for each name, by rank, the number of the call that made it. One thread uses it.

    **Arguments:** `size`: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._versions: dict[str, dict[int, int]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._versions))

    def of(self, rank: int) -> Mapping[str, int]:
        """Returns what a rank has: names, and the calls that made it."""
        return {name: versions[rank] for name, versions in self._versions.items() if rank in versions}

    def note(self, name: str, ranks: Iterable[int], call: int) -> None:
        """Notes that a call made what these ranks have from now on."""
        self._versions.setdefault(name, {}).update(dict.fromkeys(ranks, call))

    def lose(self, rank: int) -> None:
        """Notes that all is gone that a rank had."""
        for versions in self._versions.values():
            versions.pop(rank, None)

    def delete(self, name: str) -> None:
        """Forgets a name. **Raises:** `ArgumentError` for one that is not there."""
        self._there(name)
        del self._versions[name]

    def lacking(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that have nothing under a name."""
        return tuple(rank for rank in range(self._size) if rank not in self._versions.get(name, {}))

    def check(self, name: str, ranks: Iterable[int]) -> None:
        """Checks that all these ranks have it.

        **Raises:** `ArgumentError` for a name that is not there; `GangError` naming the ranks that lack it.
        """
        versions = self._there(name)
        lacking = [rank for rank in ranks if rank not in versions]
        if lacking:
            raise GangError(
                f"name={name!r} is not whole any more: {listed(lacking)} of {self._size} "
                f"{'lack' if len(lacking) > 1 else 'lacks'} it, as does a rank that was lost or has not made it; put "
                f"it again, make it there by run(…, ranks=, keep={name!r}), or delete it"
            )

    def _there(self, name: str) -> dict[int, int]:
        if name not in self._versions:
            close = difflib.get_close_matches(name, self._versions, 1)
            hint = f", did you mean {close[0]!r}" if close else ""
            there = ", ".join(map(repr, sorted(self._versions))) or "nothing"
            raise ArgumentError(f"name={name!r} is not kept by this gang{hint}; it keeps {there}: put it first")
        return self._versions[name]


def check_name(name: str) -> None:
    """Checks what something is to be kept under. **Raises:** `ArgumentError`."""
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"name={name!r}: expected a text that is not empty")


def listed(ranks: Iterable[int]) -> str:
    """Returns ranks in words: `rank 1`, or `ranks 1, 3`."""
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"
