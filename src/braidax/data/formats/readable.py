"""An object that reads as a source does, of a class that does not inherit from `Source`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from braidax.data.source import Indices, Prepared, Readable, Redrawn, Source, Stamped


@dataclass(frozen=True, eq=False, repr=False)
class ReadableSource(Source):
    """The source that such an object is; parts of samples are cut out of whole ones."""

    inside: Readable

    @property
    def sample_spec(self) -> Any:
        return self.inside.sample_spec

    def __len__(self) -> int:
        return len(self.inside)

    def read(self, indices: Indices, out: Any) -> None:
        self.inside.read(indices, out)

    def describe(self) -> Mapping[str, str]:
        return self.inside.describe()

    def at(self, seed: int | None, epoch: int) -> Source:
        """Returns the source as it is in an epoch, if the object can say."""
        if not isinstance(self.inside, Redrawn):
            return self
        moved: Any = self.inside.at(seed, epoch)
        return self if moved is self.inside else ReadableSource(moved)

    def prepare(self, indices: Indices) -> None:
        """Hands on which samples will be read soon."""
        if isinstance(self.inside, Prepared):
            self.inside.prepare(indices)

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, if the object can say."""
        return self.inside.stamp if isinstance(self.inside, Stamped) else None
