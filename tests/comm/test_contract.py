"""One contract for communicators: every transport, every store, 1 to 8 ranks."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from braidax.comm import Communicator, FileStore, Store, TcpStoreServer, Tuning, open_store
from braidax.comm.stores.jax import JaxStore
from braidax.comm.stores.redis import RedisStore
from tests.support.comm.exercise import exercise
from tests.support.comm.ranks import in_turns, results
from tests.support.comm.stores.servers import REDIS_PASSWORD, SECRET, coordination_service, redis_server
from tests.support.comm.transports.tcps import TCPS
from tests.support.comm.transports.worlds import MPI_SETTINGS
from tests.support.tree import ROOT


@pytest.fixture(scope="module", params=["file", "tcp", "redis", "jax"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Store]]:
    """Opens the store of one rank, in a folder, server or service of its kind."""
    folder = tmp_path_factory.mktemp(request.param)
    with contextlib.ExitStack() as stack:
        match request.param:
            case "file":
                yield lambda: FileStore(folder)
            case "tcp":
                server = stack.enter_context(TcpStoreServer(secret=SECRET))
                yield lambda: open_store(server.address, secret=SECRET)
            case "redis":
                url = f"redis://:{REDIS_PASSWORD}@127.0.0.1:{stack.enter_context(redis_server(folder))}"
                yield lambda: RedisStore(url)
            case _:
                service = stack.enter_context(coordination_service([], "jax"))
                yield lambda: JaxStore(service)


@pytest.mark.parametrize(("transport", "size"), in_turns(["in-process", *TCPS, "ucx"], [1, 2, 3, 4, 8], every=5))
def test_every_operation(transport: str, size: int) -> None:
    assert results(size, exercise, transport=transport) == ["exercised"] * size


@pytest.mark.parametrize(("transport", "size"), in_turns(["in-process", "tcp", "ucx"], [1, 3, 8], every=3))
def test_every_store(transport: str, size: int, place: Callable[[], Store]) -> None:
    """A store has done its part when all have met: what they do then is the transport's."""

    def met(comm: Communicator) -> list[int]:
        return [int(found[0]) for found in comm.all_gather(np.array([comm.rank]))]

    assert results(size, met, transport=transport, store=place, job=f"{transport}-{size}") == [list(range(size))] * size


@pytest.mark.parametrize(
    "hosts",
    ["aabb", *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in ("abc", "abab", "aaab", "aaaabbbb"))],
)
def test_every_operation_over_several_hosts(hosts: str) -> None:
    tunings = [Tuning(host=host) for host in hosts]
    assert results(len(hosts), exercise, tunings=tunings) == ["exercised"] * len(hosts)


@pytest.mark.slow  # operations over other transports above, and that this one is as they are in transports/
@pytest.mark.parametrize("size", [2, 1, 3, 4, 8])
def test_every_operation_over_mpi(size: int, tmp_path: Path) -> None:
    command = ["-n", str(size), sys.executable, "-m", "tests.support.comm.exercise", "mpi", str(tmp_path)]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "mpiexec"), *command],
        cwd=ROOT,
        env={**os.environ, **MPI_SETTINGS},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} exercised" for rank in range(size)]
