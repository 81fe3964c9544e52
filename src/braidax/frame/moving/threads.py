"""Work of a rank that several threads share, each with what it takes next; the work is done outside of Python."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(function: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> list[Result]:
    """Returns what a function gives for each item, in their order. **Raises:** what the first one raises that fails."""
    if num_threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(num_threads, "braidax-frame") as threads:  # which begins no more than there are items
        return list(threads.map(function, items))
