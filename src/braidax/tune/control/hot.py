"""The knobs of a live loop that may be turned while it runs, each with the values that it may have."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from braidax.data import DataLoader

_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class HotKnob:
    """A knob that may be turned while a loop runs.

    **Fields:** `name`. `values`: that it may have, in order. `read`, `write`: the value now. `settling_steps`: from a
    change until steps show it.
    """

    name: str
    values: tuple[int, ...]
    read: Callable[[], int]
    write: Callable[[int], None]
    settling_steps: Callable[[], int]

    def beside(self, direction: int) -> int | None:
        """Returns the next value above or below the present one; None at the end. **Arguments:** `direction`: ±1."""
        now = self.read()
        beyond = [value for value in self.values if (value - now) * direction > 0]
        return min(beyond, key=lambda value: abs(value - now), default=None)


def loader_knobs(loader: DataLoader) -> list[HotKnob]:
    """Returns the knobs of a loader that its user has left to it: of `threads` and `prefetch` those that are None.

    Threads go from 1 to what the bounds of `loader.depth` allow, batches in flight from 1 to four times as many: their
    memory is bounded by `max_bytes`.
    """
    bounds = loader.depth.bounds
    limits = {"threads": bounds.max_threads, "prefetch": 4 * bounds.max_prefetch}
    return [
        HotKnob(
            f"loader.{name}",
            tuple(_up_to(limit)),
            partial(_read, loader, name),
            partial(_write, loader, name),
            partial(_settling, loader),
        )
        for name, limit in limits.items()
        if getattr(loader.knobs, name) is None
    ]


def hold_memory(loader: DataLoader, memory_bytes: int | None) -> None:
    """Lets batches in flight take at most so much memory of the host."""
    if memory_bytes is not None:
        loader.knobs = replace(loader.knobs, max_bytes=min(loader.knobs.max_bytes, memory_bytes))


def _up_to(limit: int) -> Iterable[int]:
    return [*(value for value in _STEPS if value < limit), limit]


def _read(loader: DataLoader, name: str) -> int:
    return getattr(loader.depth, name)


def _write(loader: DataLoader, name: str, value: int) -> None:
    setattr(loader.depth, name, value)


def _settling(loader: DataLoader) -> int:
    """Batches that are in flight already were made with what was set before."""
    return loader.depth.prefetch + 2
