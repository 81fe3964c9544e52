"""What a system lets one rank do, as operations that are prepared once and then called in a loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Operation = Callable[[], Any]
"""One message or collective, all arguments bound: the loop adds nothing that the system does not do."""


class Endpoint(ABC):
    """One rank of one system."""

    rank: int
    size: int

    @abstractmethod
    def sender(self, array: NDArray[np.uint8], peer: int) -> Operation:
        """Returns what sends the array to a rank."""

    @abstractmethod
    def receiver(self, array: NDArray[np.uint8], peer: int) -> Operation:
        """Returns what receives into the array from a rank."""

    @abstractmethod
    def all_to_all(self, parts: NDArray[np.uint8]) -> Callable[[], Sequence[Any] | NDArray[np.uint8]]:
        """Returns what gives `parts[i]`, of `[size, n]`, to rank i, and returns the parts that came, by rank."""

    @abstractmethod
    def all_reduce(self, array: NDArray[np.float32]) -> Callable[[], NDArray[np.float32]]:
        """Returns what sums the arrays of all ranks, and returns the sum; it may write into the array."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have called it."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the others."""
