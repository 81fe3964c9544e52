"""What may change while a loader runs, and what it tells of itself."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from braidax.errors import ArgumentError


@dataclass(frozen=True)
class Knobs:
    """What may change while a loader runs.

    **Fields:** `threads`: that read, decode and transform. `prefetch`: batches in flight ahead of the one in use; 0:
    each is begun when it is asked for. None for either leaves it to `loader.depth`, which adapts it. `timeout_seconds`:
    the longest wait for one batch. `max_bytes`: of batches in flight, which holds `prefetch` down to 1 at least.
    `hedge_seconds`: when a read that is waited for is done a second time; None: when it takes much longer than the
    others; 0: always; infinity: never. `read_bytes`: that one read fills at most, which is what a thread reads, decodes
    and transforms at once; where reads are slow they are cut smaller.

    **Raises:** `ArgumentError` naming what is out of its range.
    """

    threads: int | None = None
    prefetch: int | None = None
    timeout_seconds: float = 300.0
    max_bytes: int = 1 << 30
    hedge_seconds: float | None = None
    read_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ArgumentError(f"threads={self.threads!r} is not a positive integer; None lets the loader adapt it")
        if self.prefetch is not None and self.prefetch < 0:
            raise ArgumentError(
                f"prefetch={self.prefetch!r} is not an integer from 0 on; None lets the loader adapt it"
            )
        if not 0 < self.timeout_seconds < threading.TIMEOUT_MAX:
            raise ArgumentError(f"timeout_seconds={self.timeout_seconds!r} is not a finite, positive number of seconds")
        for name in ("max_bytes", "read_bytes"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)!r} is not a positive number of bytes")
        if self.hedge_seconds is not None and not self.hedge_seconds >= 0:
            raise ArgumentError(f"hedge_seconds={self.hedge_seconds!r} is not a number of seconds from 0 on, or None")


@dataclass(frozen=True)
class Stats:
    """Where a loader's time went, and what moved, since the loader was made or its `trace` was set.

    **Fields:** `seconds`: `"wait"`, of the consumer for batches; and summed over the threads `"read"`, for fetching
    bytes, `"decode"`, for decoding and transforming, `"collate"`, for putting samples together, `"transfer"`, for
    sending batches to the devices. `num_bytes`: by the same names. `num_batches`: handed out. `num_hedges`: reads done
    a second time in the latest pass. `num_skipped`: samples read in place of bad records, as often as that was done, on
    this process. `threads`, `prefetch`: at present, where batches are read one by one.
    """

    seconds: Mapping[str, float]
    num_bytes: Mapping[str, int]
    num_batches: int
    num_hedges: int
    num_skipped: int
    threads: int
    prefetch: int
