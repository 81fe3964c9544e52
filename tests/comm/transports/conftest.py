"""Ranks of UCX, which the tests of its messages and of what is given up share."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.support.comm.transports.ucx_ranks import Rank, Ranks


@pytest.fixture
def together() -> Iterator[Callable[..., Ranks]]:
    """Returns a function that starts ranks, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*functions: Callable[[Rank], object], environment: dict[str, str] | None = None) -> Ranks:
            ranks = Ranks(*functions, environment=environment)
            stack.callback(ranks.end)
            return ranks

        yield start
