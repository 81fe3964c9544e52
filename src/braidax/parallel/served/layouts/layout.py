"""Which servers have which parts of the tables."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """Parts of tables on servers: row `id` is in part `id % num_parts`, which `copies` servers have.

    **Fields:** `ranks`: as many servers as there are parts. `copies`: a part is on its own server and on those behind
    it.
    """

    ranks: tuple[int, ...]
    copies: int

    @property
    def num_parts(self) -> int:
        """Of each table."""
        return len(self.ranks)

    @property
    def having(self) -> list[list[int]]:
        """By part the servers that have it."""
        size = self.num_parts
        return [[self.ranks[(part + copy) % size] for copy in range(self.copies)] for part in range(size)]

    def parts_of(self, rank: int) -> list[int]:
        """Returns the parts that a server has."""
        return [part for part, ranks in enumerate(self.having) if rank in ranks]

    def replaced(self, rank: int, by: int) -> "Layout":
        """Returns it with another server in place of one."""
        return replace(self, ranks=tuple(by if one == rank else one for one in self.ranks))

    def resized(self, num_parts: int, spares: Sequence[int], lost: Collection[int]) -> "Layout":
        """Returns another number of parts, where servers keep their places, so that few rows move.

        **Arguments:** `spares`: who has no part, and takes the places that are free. `lost`: who takes none.
        """
        there = [rank if rank not in lost else -1 for rank in self.ranks]
        others = [rank for rank in (*there[num_parts:], *spares) if rank >= 0 and rank not in lost]
        kept = [*there[:num_parts], *[-1] * (num_parts - self.num_parts)]
        return replace(self, ranks=tuple(rank if rank >= 0 else others.pop(0) for rank in kept))
