"""Work of a rank that several threads share, each with what it takes next; the work is done outside of Python."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(function: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> list[Result]:
    """Returns what a function gives for each item, in their order. **Raises:** what the first one raises that fails."""
    items = list(items)
    if num_threads == 1 or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(num_threads, len(items)), "braidax-frame") as threads:
        return list(threads.map(function, items))
