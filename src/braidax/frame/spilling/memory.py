"""How much memory a rank may take, and what of it is for what."""

import os
from dataclasses import dataclass

from braidax.errors import ArgumentError

_SMALLEST_BYTES = 32 << 20  # below which the threads of Polars alone take more
_PAIR_BYTES = 9 << 18  # of a stream between two ranks: two pieces of 1 MiB, and what goes with them
_WINDOW_BYTES = 64 << 20  # of an exchange, beyond which it is no faster
_WINDOW_SHARE, _MOST_WINDOW_SHARE = 8, 4
_BLOCK_SHARE, _BUCKET_SHARE, _BATCH_SHARE, _KEPT_SHARE = 16, 32, 128, 16


@dataclass(frozen=True)
class Memory:
    """Bounds the memory that each rank takes to compute a table.

    What does not fit waits on disk, in files without a name: they are gone with the rank, however that ends.

    **Fields:** `limit_bytes`: of a rank, beside what it has before it begins. `spill_folder`: on a disk of each rank;
    by default that of temporary files (`$TMPDIR`), which must not be in memory itself.

    **Raises:** `ArgumentError` for a limit below 32 MiB.
    """

    limit_bytes: int
    spill_folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.limit_bytes < _SMALLEST_BYTES:
            raise ArgumentError(
                f"limit_bytes={self.limit_bytes}: expected at least {_SMALLEST_BYTES} (32 MiB), which the threads of "
                "Polars need; give a rank more, or no limit"
            )


@dataclass(frozen=True)
class Budget:
    """What of a limit is for what.

    **Fields:** `block_bytes`: a table that is joined, grouped or sorted at once. `bucket_bytes`: rows that are dealt
    into partitions at once. `batch_bytes`: rows that are computed at once. `kept_bytes`: of all tables that wait,
    before they wait on disk. `window_bytes`: of an exchange.
    """

    block_bytes: int
    bucket_bytes: int
    batch_bytes: int
    kept_bytes: int
    window_bytes: int

    @classmethod
    def of(cls, memory: Memory, size: int) -> "Budget":
        """Returns the parts of a limit. **Raises:** `ArgumentError` for one that is too small for so many ranks."""
        limit = memory.limit_bytes
        least = size * _PAIR_BYTES
        if size > 1 and least * _MOST_WINDOW_SHARE > limit:
            raise ArgumentError(
                f"limit_bytes={limit}: an exchange between {size} ranks needs more; expected at least "
                f"{least * _MOST_WINDOW_SHARE}, or fewer ranks"
            )
        window = min(_WINDOW_BYTES, max(limit // _WINDOW_SHARE, least))
        return cls(limit // _BLOCK_SHARE, limit // _BUCKET_SHARE, limit // _BATCH_SHARE, limit // _KEPT_SHARE, window)
