"""Labels that turn out to be the same."""

from dataclasses import dataclass, field


@dataclass
class Unions:
    """Numbers from 0, joined to groups; a group is told by the least of its numbers."""

    _above: list[int] = field(default_factory=list[int])

    def new(self) -> int:
        """Returns a number of its own group."""
        self._above.append(len(self._above))
        return self._above[-1]

    def root(self, label: int) -> int:
        """Returns what tells the group of a number."""
        while self._above[label] != label:
            label = self._above[label]
        return label

    def unite(self, one: int | None, other: int | None) -> int | None:
        """Makes one group of two. **Returns:** what tells it; where one is unknown the other, None where both are."""
        if one is None or other is None:
            return other if one is None else one
        low, high = sorted((self.root(one), self.root(other)))
        self._above[high] = low
        return low
