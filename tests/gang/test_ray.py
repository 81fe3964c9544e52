"""Gangs on Ray, on a real cluster of this machine."""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from braidax.comm.stores.store import Store
from braidax.errors import ArgumentError, CallFailed, CommError, GangError, PeerLost, WaitTimeout
from braidax.gang import Gang
from braidax.gang.actor_store import ActorStore
from braidax.gang.ray import RayGang, RayStore
from tests.support.gang import clusters, staying
from tests.support.gang.ray_cluster import SETTINGS, ray_cluster
from tests.support.gang.serving_tables import check_tables_are_served
from tests.support.tree import ROOT

# By JAX, where it runs already: Ray forks to start its processes, which then run another program.
pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


@pytest.fixture(scope="module")
def shared(cluster: None) -> Iterator[RayGang]:
    with RayGang(3, num_cpus=0.5, timeout_seconds=200) as gang:  # Ray has never run on this machine before
        yield gang


@pytest.fixture
def gang(shared: RayGang) -> RayGang:
    """A gang whose ranks live and keep nothing, whatever another test did to it."""
    shared.replace()
    for name in shared.names():
        shared.delete(name)
    return shared


@pytest.fixture
def fresh(cluster: None) -> Iterator[RayGang]:
    """A gang of one's own, to be restarted."""
    with RayGang(3, num_cpus=0.5) as gang:
        yield gang


@contextlib.contextmanager
def stored() -> Generator[str]:
    """Returns the address of a store of its own, which takes a process."""
    name = secrets.token_hex(8)
    made = ray.remote(ActorStore).options(num_cpus=0, name=name, namespace="tests", max_concurrency=100).remote()
    yield f"ray:tests/{name}"
    ray.kill(made)


@pytest.fixture(scope="module")
def address(cluster: None) -> Iterator[str]:
    """A store that tests share, each with keys of its own."""
    with stored() as address:
        yield address


@pytest.fixture
def store(address: str) -> Iterator[RayStore]:
    with RayStore(address) as opened:
        yield opened


def test_results_come_in_rank_order_whoever_is_first(gang: RayGang) -> None:
    assert gang.run(clusters.backwards, 2.0) == [(0, 3, 12.0), (1, 3, 12.0), (2, 3, 12.0)]
    assert len(set(gang.run(clusters.pid_of))) == 3
    assert len(gang.hosts) == 3


def test_an_error_names_the_rank_and_shows_where_it_was_raised(gang: RayGang) -> None:
    generation = gang.generation
    with pytest.raises(CallFailed, match=r"^rank 1 \(host .*, pid \d+\): LookupError: nothing in rank 1\n") as caught:
        gang.run(clusters.fail_in_one, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, LookupError)
    assert 'raise LookupError(f"nothing in rank {rank}")' in caught.value.__notes__[0]
    assert gang.run(clusters.backwards, 1.0) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
    assert gang.generation == generation + 1


@pytest.mark.parametrize("check", staying.one_of_three(0), ids=lambda check: check.__name__)
def test_a_gang_on_ray_stays(gang: RayGang, tmp_path: Path, check: Callable[[Gang, Path], None]) -> None:
    check(gang, tmp_path)


# By day on a local gang and on Dask.
@pytest.mark.parametrize("seed", staying.seeds(quick=0, nightly=20))
def test_kills_at_random_moments(gang: RayGang, seed: int) -> None:
    staying.kill_at_random_moments(gang, seed)


@pytest.mark.slow
def test_tables_are_served(gang: RayGang) -> None:
    check_tables_are_served(gang)


def test_the_store_is_replaced_when_it_is_gone(gang: RayGang) -> None:
    (name,) = [each["name"] for each in _stores()]
    ray.kill(ray.get_actor(name, namespace="braidax"))
    clusters.until(lambda: not _stores())
    with pytest.raises(PeerLost):
        gang.run(clusters.die_in_one, 1)
    gang.replace()
    assert len(_stores()) == 1
    assert gang.run(staying.total, 1.0) == [3.0] * 3


def test_a_killed_rank_is_named_with_its_host_and_all_may_be_restarted(fresh: RayGang) -> None:
    gang, pids, generation = fresh, fresh.run(clusters.pid_of), fresh.generation
    begun = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        gang.run(clusters.die_in_one, 2)
    assert time.monotonic() - begun < 20
    assert caught.value.rank == 2
    assert str(caught.value).startswith(f"rank 2 (host {gang.hosts[2]}, pid {pids[2]}) ended without an answer")
    assert "worker process has died" in str(caught.value)
    clusters.until(lambda: not clusters.is_running(pids[2]))
    gang.restart()
    assert gang.generation == generation + 1
    clusters.until(lambda: not any(clusters.is_running(pid) for pid in pids))
    assert not set(pids) & set(gang.run(clusters.pid_of))


def test_a_rank_that_takes_too_long_is_named_in_time(gang: RayGang) -> None:
    begun = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"ranks 0, 1, 2 of 3 .*timeout_seconds=0.3"):
        gang.run(clusters.wait_for_one_another, timeout_seconds=0.3)
    assert 0.3 <= time.monotonic() - begun < 15


def test_two_gangs_do_not_meet_and_nothing_stays(gang: RayGang, store: RayStore) -> None:
    with RayGang(2, num_cpus=0.25, environment={"BRAIDAX_TEST": "here"}) as other, ThreadPoolExecutor(1) as threads:
        assert other.job != gang.job
        assert other.run(clusters.variable, "BRAIDAX_TEST") == ["here"] * 2
        assert gang.run(clusters.variable, "BRAIDAX_TEST") == [None] * 3
        waiting = threads.submit(other.run, clusters.get_there, store.address, RayStore, "go")
        assert gang.run(clusters.backwards, 1.0) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
        store.set("go", b"on")
        assert waiting.result(30) == [b"on"] * 2
        pids = other.run(clusters.pid_of)
        assert not set(pids) & set(gang.run(clusters.pid_of))
        assert len(_stores()) == 2
    clusters.until(lambda: not any(clusters.is_running(pid) for pid in pids))
    clusters.until(lambda: len(_stores()) == 1)
    clusters.until(lambda: len(_groups()) == 1)
    clusters.until(lambda: ray.available_resources()["CPU"] == 8 - 3 * 0.5)
    assert gang.run(clusters.backwards, 1.0) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def _stores() -> list[dict[str, str]]:
    return [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == "braidax"]


def _groups() -> list[Any]:
    return [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def test_a_gang_that_finds_no_room_says_what_there_is(gang: RayGang) -> None:
    with pytest.raises(GangError) as caught:
        RayGang(3, num_cpus=4, resources={"TPU": 1}, timeout_seconds=0.5).start()
    assert re.sub(r"CPU [\d.]+ of", "CPU … of", str(caught.value)) == (
        "Ray found no room for size=3 ranks of CPU 4, TPU 1 each (PACK) within timeout_seconds=0.5; free in the "
        "cluster: CPU … of 8, TPU 0 of 0; take fewer ranks, ask for less (num_cpus=, num_gpus=, resources=), or add "
        "nodes"
    )
    clusters.until(lambda: len(_groups()) == 1)
    assert len(_stores()) == 1


@pytest.mark.slow  # by day on Dask
def test_a_gang_that_cannot_meet_is_not_started(gang: RayGang) -> None:
    with pytest.raises(CallFailed, match="pigeon"):
        RayGang(1, num_cpus=0.5, transport="pigeon").start()
    clusters.until(lambda: len(_groups()) == 1)
    assert len(_stores()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_cpus": -1}, "num_cpus=-1: expected a number >= 0"),
        ({"num_gpus": float("nan")}, "num_gpus=nan: expected a number >= 0"),
        ({"resources": {"TPU": -2.0}}, r"resources\['TPU'\]=-2.0: expected a number >= 0"),
        ({"resources": {"GPU": 1.0}}, "expected no GPU there; use num_cpus= and num_gpus="),
        ({"num_cpus": 0}, "num_cpus=0: expected that a rank takes something"),
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0: expected seconds > 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RayGang(2, **options)


def test_a_bad_strategy_is_named(unchecked: None) -> None:
    with pytest.raises(
        ArgumentError, match="strategy='LOOSE': expected one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"
    ):
        RayGang(2, strategy="LOOSE")  # type: ignore[arg-type]


@pytest.mark.parametrize("check", clusters.STORE_CHECKS, ids=lambda check: check.__name__)
def test_the_store_keeps_the_contract(store: RayStore, check: Callable[[Store], None]) -> None:
    check(store)


def test_the_store_between_processes(store: RayStore, gang: RayGang) -> None:
    clusters.check_between_processes(store, RayStore, gang)


def test_a_store_outlives_its_users_and_not_its_gang(cluster: None) -> None:
    with stored() as address:
        with RayStore(address) as store:
            store.set("key", b"kept")
            with RayStore(store.address) as other:
                assert other.address == store.address == address
                assert other.get("key", timeout_seconds=0) == b"kept"
        with RayStore(address) as other:
            assert other.get("key", timeout_seconds=0) == b"kept"
            ray.kill(ray.get_actor(address.rpartition("/")[2], namespace="tests"))
            clusters.until(lambda: _raises(CommError, lambda: other.get("key", timeout_seconds=5)))
            with pytest.raises(CommError, match=r"ray:tests/\w+ cannot be reached: .*does the gang run\?"):
                other.get("key", timeout_seconds=5)
    with pytest.raises(CommError, match="ray:tests/nobody: Ray knows no such actor"):
        RayStore("ray:tests/nobody")
    with pytest.raises(ArgumentError, match="address='tcp://here:1': expected ray:NAMESPACE/NAME"):
        RayStore("tcp://here:1")


def _raises(kind: type[Exception], function: Callable[[], Any]) -> bool:
    try:
        function()
    except kind:
        return True
    return False


SCRIPT = """
import ray
from braidax.gang.ray import RayGang
from tests.support.gang.clusters import hello

gang = RayGang(2, num_cpus=0.5)
gang.start()
assert ray.is_initialized()
gang.run(hello)
input()
gang.stop()
gang.stop()
print("initialized:", ray.is_initialized(), flush=True)
input()
"""


def test_a_ray_of_its_own_is_ended_and_its_ranks_are_named_in_what_they_print() -> None:
    mark = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="braidax-", dir="/tmp")
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        **SETTINGS,
        "PYTHONUNBUFFERED": "1",  # Ray leaves what ranks write in the buffer of its driver
        "RAY_TMPDIR": folder,
        "BRAIDAX_MARK": mark,
        "PYTHONPATH": paths,
    }
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            missing = {0, 1}
            while missing:
                line = process.stdout.readline()
                assert line, "the script ended"
                found = re.search(r"\(rank (\d) pid=\d+\)\S* hello from (\d)", line)
                if found:
                    assert found[1] == found[2]
                    missing.remove(int(found[1]))
            assert len(_marked(mark)) > 3
            print(file=process.stdin, flush=True)
            assert "initialized: False\n" in iter(process.stdout.readline, "")
            clusters.until(lambda: _marked(mark) == [process.pid])
            print(file=process.stdin, flush=True)
            assert process.wait(30) == 0
        finally:
            process.kill()
            shutil.rmtree(folder, ignore_errors=True)


def _marked(mark: str) -> list[int]:
    """Returns the processes that were born with a mark in their environment."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return [pid for pid in found if clusters.is_running(pid)]
