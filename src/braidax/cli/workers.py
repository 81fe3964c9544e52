"""Several workers that train one task, each with a JAX of its own, whose variables are all on servers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import jax

from braidax.cli.strategies import has_workers
from braidax.data.source import Indices, Source, prepare, source_at, stamp_of
from braidax.errors import ArgumentError
from braidax.gang.program import SERVERS
from braidax.parallel import ParameterServers, Strategy


@dataclass(frozen=True)
class Seat:
    """Which of several workers this is. **Fields:** `worker`: its number. `num_workers`: of all; 1 where one trains."""

    worker: int = 0
    num_workers: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process says and writes what belongs to all."""
        return self.worker == 0 and jax.process_index() == 0

    def own_batch(self, batch_size: int) -> int:
        """Returns how many samples of a batch are this worker's. **Raises:** `ArgumentError`."""
        if batch_size % self.num_workers:
            raise ArgumentError(
                f"--batch-size {batch_size} for {self.num_workers} workers: expected a multiple of that, of which each "
                f"has an even part"
            )
        return batch_size // self.num_workers

    def own_samples(self, source: Source) -> Source:
        """Returns the part of a source that this worker trains by."""
        return source if self.num_workers == 1 else OwnSamples(source, self.worker, self.num_workers)


def seat_of(strategies: Mapping[str, Strategy] | None, environ: Mapping[str, str]) -> Seat:
    """Returns which worker this is, of those that `braidax launch` has started beside servers."""
    if not has_workers(strategies) or SERVERS not in environ:
        return Seat()
    return Seat(int(environ["BRAIDAX_RANK"]), int(environ["BRAIDAX_SIZE"]))


def num_updates(num_steps: int, strategies: Mapping[str, Strategy] | None, seat: Seat) -> int:
    """Returns how many updates a run has of so many steps of a worker: asynchronously each push is one."""
    every = (strategies or {}).values()
    pushes = any(isinstance(one, ParameterServers) and one.staleness is None for one in every)
    return num_steps * (seat.num_workers if pushes else 1)


@final
@dataclass(frozen=True, eq=False)
class OwnSamples(Source):
    """Every `num`th sample of a source, from sample `first` on; all parts of a source are as long.

    **Fields:** `source`: of all samples. `first`: 0 to `num - 1`. `num`: of parts.
    """

    source: Source
    first: int
    num: int

    @property
    def sample_spec(self) -> Any:
        """That of the source."""
        return self.source.sample_spec

    def __len__(self) -> int:
        return len(self.source) // self.num

    def read(self, indices: Indices, out: Any) -> None:
        """Reads samples, as `Source.read`."""
        self.source.read(indices * self.num + self.first, out)

    def describe(self) -> Mapping[str, str]:
        """Tells of the source, and which part this is."""
        return {**self.source.describe(), "part": f"{self.first} of {self.num}"}

    def at(self, seed: int | None, epoch: int) -> Source:
        """Returns the part of the source as that is in an epoch."""
        return replace(self, source=source_at(self.source, seed, epoch))

    def prepare(self, indices: Indices) -> None:
        """Hands on to the source which samples will be read soon."""
        prepare(self.source, indices * self.num + self.first)

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do."""
        inside = stamp_of(self.source)
        return None if inside is None else f"{inside}/{self.first} of {self.num}"
