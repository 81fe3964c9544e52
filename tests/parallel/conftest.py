"""Gangs that tests of servers share: with its first step a server imports JAX, which takes longer than a test."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from braidax.gang import LocalGang
from tests.support.gang.forks import fork_children
from tests.support.parallel.served.exports import write_once
from tests.support.parallel.served.losing import mend


class _Gangs(dict[int, LocalGang]):
    """Starts a gang of so many ranks when one is asked for."""

    def __missing__(self, size: int) -> LocalGang:
        self[size] = LocalGang(size)
        self[size].start()
        return self[size]


_GANGS = _Gangs()


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forks() -> Iterator[None]:
    """Lets gangs begin with what their ranks import."""
    with pytest.MonkeyPatch.context() as patch:
        fork_children(
            patch,
            "tests.support.parallel.workers.teams",
            "braidax.parallel.served.on_servers.server",
            "scipy.linalg",  # JAX imports it for the first program that it is sent
            modules=("braidax.gang.runner", "braidax.parallel.served.on_servers"),
        )
        yield


@pytest.fixture(scope="module")
def gangs(ranks_are_forks: None) -> dict[int, LocalGang]:
    """Gangs of 1, 2 and 3 ranks, and of more for who asks before a test begins, which may leave no thread behind.

    A test that kills a rank uses `mended`; one that changes for good what a rank runs starts a gang of its own.
    """
    for size in (1, 2, 3):
        _ = _GANGS[size]
    return _GANGS


@pytest.fixture
def mended(gangs: dict[int, LocalGang]) -> Iterator[None]:
    """For a test that kills ranks of `gangs`: the next one finds others in their place."""
    yield
    for gang in gangs.values():
        mend(gang)


@pytest.fixture(scope="session", autouse=True)
def programs_written_once() -> Iterator[None]:
    """Writes programs for servers down once for all steps that send the same ones."""
    with pytest.MonkeyPatch.context() as patch:
        write_once(patch)
        yield


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends them when tests elsewhere follow, some of which look for threads that are left."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        gangs = [*_GANGS.values()]
        _GANGS.clear()
        with ThreadPoolExecutor(max(1, len(gangs))) as threads:  # each waits for its ranks to leave
            _ = [*threads.map(LocalGang.stop, gangs)]
