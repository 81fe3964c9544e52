"""What a study switches: four overlaps, how coarse each is, and which of their mixes are measured."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from braidax.errors import ArgumentError

Factor = Literal["prefetch", "checkpoint", "sync", "pipeline"]
"""The name of what is switched on and off; `FACTORS` has all of them."""

FACTORS: tuple[Factor, ...] = get_args(Factor)
"""All that is switched: batches fetched ahead, checkpoints behind the steps, gradients summed while others are made,
and two stages in place of data parallelism."""

PAIRS: dict[str, tuple[Factor, ...]] = {
    "checkfreq-ddp": ("checkpoint", "sync"),
    "sync-prefetch": ("sync", "prefetch"),
    "pipedream-checkfreq": ("pipeline", "checkpoint"),
    "pipedream-prefetch": ("pipeline", "prefetch"),
    "full": FACTORS,
}
"""Experiments by name: which factors are crossed with one another, all others being off."""

Sync = Literal["one piece", "overlapped"]
_FIELDS: dict[Factor, str] = {
    "prefetch": "prefetch",
    "checkpoint": "checkpoint_every",
    "sync": "sync",
    "pipeline": "microbatches",
}


@dataclass(frozen=True)
class Setting:
    """One mix.

    **Fields:** `prefetch`: batches in flight ahead of the one in use; 0: each is fetched when it is asked for.
    `checkpoint_every`: steps; None: no checkpoints. `sync`: how gradients are summed over devices with other samples:
    "one piece" behind all of them, or "overlapped": of each variable once it is there. `microbatches`: that two stages
    compute in turn; None: no stages, data parallel.

    **Raises:** `ArgumentError` for numbers below 1 (`prefetch`: below 0), and another `sync`.
    """

    prefetch: int = 0
    checkpoint_every: int | None = None
    sync: Sync = "one piece"
    microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ArgumentError(f"prefetch={self.prefetch}: expected batches ahead, 0 for none")
        for name in ("checkpoint_every", "microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name}={value}: expected a number from 1 on, or None")
        if self.sync not in get_args(Sync):
            raise ArgumentError(f'sync={self.sync!r}: expected "one piece" or "overlapped"')

    @property
    def on(self) -> tuple[Factor, ...]:
        """Which factors are on."""
        return tuple(factor for factor in FACTORS if getattr(self, _FIELDS[factor]) != getattr(_OFF, _FIELDS[factor]))

    @property
    def name(self) -> str:
        """A name that no other setting has, such as `prefetch=2+checkpoint_every=5`, or `nothing`."""
        parts = [
            f"{field.name}={getattr(self, field.name)}".replace(" ", "_")
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "+".join(parts) or "nothing"

    @property
    def program(self) -> "Setting":
        """What of it needs programs of its own: settings that differ in the rest share them."""
        return Setting(sync=self.sync, microbatches=self.microbatches)

    def to_dict(self) -> dict[str, Any]:
        """Returns its fields, for JSON."""
        return asdict(self)


_OFF = Setting()


@dataclass(frozen=True)
class Levels:
    """How coarse factors are when they are on. **Fields:** as of `Setting`."""

    prefetch: int = 2
    checkpoint_every: int = 5
    sync: Sync = "overlapped"
    microbatches: int = 4

    def setting(self, on: Iterable[Factor]) -> Setting:
        """Returns the mix with some factors on, and all others off."""
        return Setting(**{_FIELDS[factor]: getattr(self, _FIELDS[factor]) for factor in on})


@dataclass(frozen=True)
class Sweep:
    """A factor by how coarse it is. **Fields:** `settings`: one for each of `values`, and off first. `beside`: what
    else is on."""

    factor: Factor
    beside: tuple[Factor, ...]
    values: tuple[int, ...]
    settings: tuple[Setting, ...]


def crossed(levels: Levels, factors: Sequence[Factor]) -> tuple[Setting, ...]:
    """Returns all mixes of some factors, the others being off: nothing first, all on last."""
    picked: list[Factor] = [factor for factor in FACTORS if factor in factors]
    subsets = (some for count in range(len(picked) + 1) for some in itertools.combinations(picked, count))
    return tuple(levels.setting(some) for some in subsets)


def sweep(levels: Levels, factor: Factor, values: Sequence[int], beside: Sequence[Factor] = ()) -> Sweep:
    """Returns a factor at several values, first off, the factors `beside` being on. **Raises:** as `Setting`."""
    if factor == "sync":
        raise ArgumentError(
            'factor="sync" has two values, which all experiments compare: expected another one to sweep'
        )
    others: list[Factor] = [one for one in beside if one != factor]
    start = levels.setting(others)
    settings = (start, *(replace(start, **{_FIELDS[factor]: value}) for value in values))
    return Sweep(factor, tuple(others), tuple(values), settings)


def parse_pairs(text: str) -> tuple[str, ...]:
    """Returns the names of experiments that a text lists, such as `checkfreq-ddp,sync-prefetch`.

    **Raises:** `ArgumentError` for a name that is none.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in PAIRS:
            raise ArgumentError(f"--pairs {text}: {name!r} is no experiment; expected some of {', '.join(PAIRS)}")
    return names
