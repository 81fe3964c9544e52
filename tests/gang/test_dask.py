"""Gangs on Dask, on real clusters of this machine: workers that are processes, and workers that are threads."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import numpy as np
import pytest
from dask import config

from braidax.comm.stores.store import Store, backoff
from braidax.errors import ArgumentError, CallFailed, CommError, GangError, PeerLost, WaitTimeout
from braidax.gang import Gang, dask
from braidax.gang.actor_store import ActorStore
from braidax.gang.dask import DaskGang, DaskStore
from braidax.gang.dask_store import ALIVE
from braidax.gang.on_gang import launch_on
from braidax.gang.program import Program
from tests.support.gang import clusters, staying
from tests.support.gang.launched import JOIN
from tests.support.gang.serving_tables import check_tables_are_served
from tests.support.tree import ROOT

LEAVING = """
with comm:
    assert os.environ["BRAIDAX_SECRET"] and sys.argv[1:] == ["--epochs", "3"]
    os.chdir(os.path.dirname(__file__))
    open(str(comm.rank), "w").close()
    os.environ["PATH"] += ":/elsewhere"
    os.environ["COLOR"] = "blue"
    del os.environ["HOME"]
    sys.path = [*sys.path, "/elsewhere"]
    comm.barrier()
"""


def _cluster(**options: Any) -> Iterator[distributed.Client]:
    """Starts a cluster; its client is not the default one, so that nothing finds it by chance."""
    with (
        # A cluster closes a place whose worker is away twice, so many seconds apart, though it is only being restarted.
        config.set({"distributed.deploy.lost-worker-timeout": "1h"}),
        distributed.LocalCluster(dashboard_address="127.0.0.1:0", **options) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def processes() -> Iterator[distributed.Client]:
    yield from _cluster(n_workers=3, threads_per_worker=1, processes=True)


@pytest.fixture(scope="module")
def threads() -> Iterator[distributed.Client]:
    yield from _cluster(n_workers=2, threads_per_worker=2, processes=False)


@pytest.fixture
def client(processes: distributed.Client) -> distributed.Client:
    """A cluster with all its workers, whatever another test did to them."""
    clusters.until(lambda: len(processes.nthreads()) == 3)
    return processes


@pytest.fixture
def store(client: distributed.Client) -> Iterator[DaskStore]:
    worker = max(client.nthreads())
    with client.as_current():
        made = client.submit(ActorStore, actor=True, pure=False, workers=[worker])
        distributed.wait(made, timeout=30)
        with DaskStore(f"dask:{worker}#{made.key}") as opened:
            yield opened
        client.cancel(made, force=True)


def _nothing_is_left(client: distributed.Client) -> None:
    """Waits until a cluster knows no task, and its workers no actor and no thread of ours."""

    def left(dask_worker: Any) -> tuple[int, list[str]]:
        names = [thread.name for thread in threading.enumerate()]
        return len(dask_worker.state.actors), [name for name in names if name.startswith("braidax")]

    def tasks(dask_scheduler: Any) -> int:
        return len(dask_scheduler.tasks)

    clusters.until(lambda: client.run_on_scheduler(tasks) == 0)
    clusters.until(lambda: all(each == (0, []) for each in client.run(left).values()))


def test_results_come_in_rank_order_whoever_is_first(
    client: distributed.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask, "_LEAVE_SECONDS", 20.0)
    pids = client.run(os.getpid)
    with DaskGang(client) as gang:
        assert gang.size == 3
        assert gang.workers == tuple(sorted(pids))
        assert gang.run(clusters.backwards, 2.0) == [(0, 3, 12.0), (1, 3, 12.0), (2, 3, 12.0)]
        assert gang.run(clusters.pid_of) == [pids[worker] for worker in sorted(pids)]
        begun = time.monotonic()
    assert time.monotonic() - begun < 8  # idle ranks leave when they are asked to
    _nothing_is_left(client)


def test_a_gang_takes_the_workers_it_may(client: distributed.Client) -> None:
    first, *others = sorted(client.nthreads())
    with DaskGang(client, workers=others) as gang:
        assert gang.workers == tuple(others)
        assert gang.run(clusters.backwards, 1.0) == [(0, 2, 3.0), (1, 2, 3.0)]
    with DaskGang(client, 1) as gang:
        assert gang.workers == (first,)
        assert gang.run(clusters.backwards, 1.0) == [(0, 1, 1.0)]


def test_ranks_in_one_process_are_ranks(threads: distributed.Client) -> None:
    with DaskGang(threads) as gang, DaskGang(threads, 2) as other:
        assert gang.run(clusters.pid_of) == [os.getpid()] * 2
        assert gang.run(clusters.backwards, 2.0) == [(0, 2, 6.0), (1, 2, 6.0)]
        with pytest.raises(CallFailed, match=r"rank 0 .*LookupError: nothing in rank 0"):
            gang.run(clusters.fail_in_one, 0)
        assert gang.run(clusters.backwards, 1.0) == [(0, 2, 3.0), (1, 2, 3.0)]
        gang.restart()
        assert gang.run(clusters.backwards, 1.0) == [(0, 2, 3.0), (1, 2, 3.0)]
        assert other.run(clusters.backwards, 1.0) == [(0, 2, 3.0), (1, 2, 3.0)]
    _nothing_is_left(threads)


def test_an_error_names_the_rank_and_shows_where_it_was_raised(client: distributed.Client) -> None:
    with DaskGang(client) as gang:
        workers = gang.workers
        with pytest.raises(
            CallFailed, match=r"^rank 1 \(host .*, pid \d+\): LookupError: nothing in rank 1\n"
        ) as caught:
            gang.run(clusters.fail_in_one, 1)
        assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, LookupError)
        assert 'raise LookupError(f"nothing in rank {rank}")' in caught.value.__notes__[0]
        gang.restart()
        assert gang.generation == 1
        assert gang.workers == workers
        assert gang.run(clusters.backwards, 1.0) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def test_a_killed_rank_is_named_and_the_others_keep_their_places(client: distributed.Client) -> None:
    with DaskGang(client) as gang:
        workers, pids = gang.workers, gang.run(clusters.pid_of)
        begun = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            gang.run(clusters.die_in_one, 1)
        assert time.monotonic() - begun < 20
        assert caught.value.rank == 1
        assert str(caught.value).startswith(f"rank 1 (host {gang.hosts[1]}, pid {pids[1]}) ended without an answer")
        assert workers[1] in str(caught.value)
        gang.restart()  # as soon as the nanny has brought another worker
        again = gang.run(clusters.pid_of)
        assert (again[0], again[2]) == (pids[0], pids[2])
        assert again[1] != pids[1]
        assert (gang.workers[0], gang.workers[2]) == (workers[0], workers[2])
        assert gang.run(clusters.backwards, 1.0) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
    _nothing_is_left(client)


def test_a_worker_that_only_the_scheduler_gives_up_is_named(client: distributed.Client) -> None:
    with DaskGang(client) as gang, ThreadPoolExecutor(1) as pool:
        lost, pid = gang.workers[2], gang.run(clusters.pid_of)[2]
        running = pool.submit(gang.run, clusters.wait_for_one_another)

        async def give_up(dask_scheduler: Any) -> None:
            await dask_scheduler.remove_worker(address=lost, stimulus_id="test", close=False)

        os.kill(pid, signal.SIGSTOP)
        try:
            client.run_on_scheduler(give_up)
            with pytest.raises(PeerLost, match=r"^rank 2 .* ended without an answer"):
                running.result(30)
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_rank_that_takes_too_long_is_named_in_time(client: distributed.Client) -> None:
    begun = time.monotonic()
    with DaskGang(client) as gang:
        with pytest.raises(WaitTimeout, match=r"ranks 0, 1, 2 of 3 .*timeout_seconds=0.3"):
            gang.run(clusters.wait_for_one_another, timeout_seconds=0.3)
        assert 0.3 <= time.monotonic() - begun < 15
        assert gang.run(clusters.backwards, 1.0) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


@pytest.mark.parametrize("kind", [pytest.param("processes", marks=pytest.mark.slow), "threads"])
def test_two_gangs_on_the_same_workers_do_not_wait_for_one_another(kind: str, request: pytest.FixtureRequest) -> None:
    client: distributed.Client = request.getfixturevalue(kind)
    worker = min(client.nthreads())
    with client.as_current(), ThreadPoolExecutor(1) as pool, DaskGang(client) as one, DaskGang(client) as two:
        made = client.submit(ActorStore, actor=True, pure=False, workers=[worker])
        distributed.wait(made, timeout=30)
        store = DaskStore(f"dask:{worker}#{made.key}")
        assert one.job != two.job
        waiting = pool.submit(one.run, clusters.get_there, store.address, DaskStore, "go")
        sums = two.run(clusters.add_there, store.address, DaskStore, 1)
        assert sorted(sums) == [[number] for number in range(1, two.size + 1)]
        store.set("go", b"on")
        assert waiting.result(30) == [b"on"] * one.size
        client.cancel(made, force=True)


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("raise ValueError('the value')", 1), pytest.param("sys.exit(3)", 3, marks=pytest.mark.slow)],
)
def test_a_worker_is_as_before_when_the_job_is_over(
    client: distributed.Client, tmp_path: Path, ending: str, code: int
) -> None:
    """Also when it failed: no secret stays in a worker's environment, and no folder in its `sys.path`."""
    script = tmp_path / "program.py"
    script.write_text(JOIN + LEAVING + ending)
    before = client.run(clusters.surroundings)
    told = io.StringIO()
    program = Program(str(script), ("--epochs", "3"), initialize="nothing")
    assert launch_on(DaskGang(client), program, log=told) == code, told.getvalue()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "program.py"]
    assert client.run(clusters.surroundings) == before
    assert not [name for variables, *_ in before.values() for name in variables if name.startswith("BRAIDAX_")]
    _nothing_is_left(client)


@pytest.fixture
def staying_gang(client: distributed.Client) -> Iterator[DaskGang]:
    with DaskGang(client) as gang:
        yield gang


@pytest.mark.parametrize("check", staying.one_of_three(1), ids=lambda check: check.__name__)
def test_a_gang_on_dask_stays(staying_gang: DaskGang, tmp_path: Path, check: Callable[[Gang, Path], None]) -> None:
    check(staying_gang, tmp_path)


@pytest.mark.parametrize("seed", staying.seeds(quick=1, nightly=20))
def test_kills_of_workers_at_random_moments(staying_gang: DaskGang, seed: int) -> None:
    staying.kill_at_random_moments(staying_gang, seed)


@pytest.mark.slow  # tables on local gangs are served in tests/parallel/served
def test_tables_are_served(staying_gang: DaskGang) -> None:
    check_tables_are_served(staying_gang)


def test_the_store_is_replaced_with_the_worker_that_it_lay_on(staying_gang: DaskGang) -> None:
    staying_gang.put("x", ["a", "b", "c"])
    with pytest.raises(PeerLost):
        staying_gang.run(clusters.die_in_one, 0)
    staying_gang.replace()
    assert staying_gang.run(staying.total, 1.0) == [3.0] * 3
    assert staying_gang.get("x", ranks=[1, 2]) == ["b", "c"]


@pytest.mark.parametrize("other", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_that_ends_while_another_one_is_replaced_is_replaced_next(
    staying_gang: DaskGang, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    """Its place is not given away before its rank was told of as lost, nor the new one taken for the lost one.

    The worker of rank 0 has the store.
    """
    gang, pids, began = staying_gang, staying_gang.run(clusters.pid_of), staying_gang.workers
    waited: list[float] = []

    def wait(deadline: float, seconds: float) -> float | None:
        if not waited:
            os.kill(pids[other], signal.SIGKILL)
            clusters.until(lambda: began[other] not in gang._there())
            clusters.until(lambda: other or gang._ranks._store.status not in ALIVE)
        waited.append(seconds)
        return backoff(deadline, seconds)

    monkeypatch.setattr(dask, "backoff", wait)
    with pytest.raises(PeerLost):
        gang.run(clusters.die_in_one, 1)
    begun = time.monotonic()
    with pytest.raises(PeerLost, match=rf"^rank {other} .* ended without an answer, with the Dask worker") as told:
        gang.replace()
    assert began[other] in str(told.value)
    gang.replace()
    assert time.monotonic() - begun < 30  # the limit of each is 60 s
    assert gang.workers[2 - other] == began[2 - other]
    assert gang.run(clusters.pid_of)[2 - other] == pids[2 - other]
    assert gang.run(staying.total, 1.0) == [3.0] * 3
    assert waited


def test_two_gangs_in_the_same_workers_keep_their_own(threads: distributed.Client) -> None:
    """Their ranks are threads of one process; names, kept things and communicators are each gang's own."""
    with DaskGang(threads) as one, DaskGang(threads) as two:
        one.put("x", [[1], [2]])
        two.put("x", [[3], [4]])
        for _ in range(2):
            assert one.run(staying.append, one.kept("x"), 0) == two.run(staying.append, two.kept("x"), 9)
        assert (one.get("x"), two.get("x")) == ([[1, 0, 0], [2, 0, 0]], [[3, 9, 9], [4, 9, 9]])
        with pytest.raises(ArgumentError, match=rf"kept\('x'\) is of the gang {two.job}, this one is {one.job}"):
            one.run(staying.append, two.kept("x"), 0)
        two.delete("x")
        with pytest.raises(ArgumentError, match="name='x' is not kept by this gang; it keeps nothing"):
            two.get("x")
        sums = one.submit(staying.total, 1.0), two.submit(staying.total, 2.0)
        assert [each.result(timeout_seconds=30) for each in sums] == [[2.0] * 2, [4.0] * 2]
        with pytest.raises(CallFailed):
            two.run(clusters.fail_in_one, 1)
        assert one.get("x") == [[1, 0, 0], [2, 0, 0]]
        assert one.generation == 0
    _nothing_is_left(threads)


def test_what_is_sent_to_a_thread_of_this_process_is_its_own(threads: distributed.Client) -> None:
    """Dask hands the object itself to a worker in the same process."""
    array = np.ones(1 << 20)
    with DaskGang(threads) as gang:
        gang.put("x", [array, array])
        for _ in range(2):
            assert gang.run(staying.describe, array) == [(0, True, 256.0)] * 2
        gang.get("x")[0][:] = 5
        assert gang.get("x")[0][0] == array[0] == 1.0


def test_two_programs_in_one_process_are_refused(threads: distributed.Client, tmp_path: Path) -> None:
    """They would take one another's environment, folder and arguments for their own."""
    script = tmp_path / "program.py"
    begun = tmp_path / "begun"
    script.write_text(f"open({str(begun)!r}, 'w').close()\n" + JOIN + "comm.barrier()\ncomm.close()\n")
    told = io.StringIO()
    assert launch_on(DaskGang(threads), Program(str(script), initialize="nothing"), log=told) == 1
    assert not begun.exists()
    words = rf"GangError: {script}: another program runs in this process \(pid {os.getpid()}\)"
    assert re.search(words, told.getvalue()), told.getvalue()
    assert launch_on(DaskGang(threads, 1), Program(str(script), initialize="nothing"), log=told) == 0
    assert begun.exists()
    _nothing_is_left(threads)


def test_too_few_workers_are_counted(client: distributed.Client) -> None:
    begun = time.monotonic()
    with pytest.raises(GangError) as caught:
        DaskGang(client, 4, timeout_seconds=0.3).start()
    assert 0.3 <= time.monotonic() - begun < 10
    assert str(caught.value) == (
        "size=4 ranks need a worker each, and there are 3 after timeout_seconds=0.3: the Dask cluster at "
        f"{client.scheduler.address} has 3 workers; add workers, or take fewer ranks"
    )
    with pytest.raises(GangError, match=r"there are none: .* has 3 workers, of which workers= allows 1; add workers"):
        DaskGang(client, workers=["tcp://127.0.0.1:1"])


def test_a_worker_that_starts_no_rank_is_named_in_time(client: distributed.Client) -> None:
    frozen = sorted(client.nthreads())[1]
    pid = client.run(os.getpid)[frozen]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(GangError, match="rank 1 was not started by its Dask worker in time"):
            DaskGang(client, timeout_seconds=1.0).start()
    finally:
        os.kill(pid, signal.SIGCONT)
    _nothing_is_left(client)


def test_no_rank_stays_where_one_froze_while_they_met(
    client: distributed.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = sorted(client.nthreads())[1]
    pid = client.run(os.getpid)[frozen]
    begin = dask._DaskRanks.ask

    def ask(self: Any, messages: Any) -> None:
        os.kill(pid, signal.SIGSTOP)
        begin(self, messages)

    monkeypatch.setattr(dask._DaskRanks, "ask", ask)
    monkeypatch.setattr(dask, "_LEAVE_SECONDS", 0.5)
    begun = time.monotonic()
    try:
        with pytest.raises(WaitTimeout, match=r"^rank 1 of 3 did not start and join the others within"):
            DaskGang(client, timeout_seconds=4.0).start()
        assert time.monotonic() - begun < 20
    finally:
        os.kill(pid, signal.SIGCONT)
    begun = time.monotonic()
    _nothing_is_left(client)
    assert time.monotonic() - begun < 20  # it was 30 s, until a store that is gone had not answered


CLIENT = """
import sys, distributed
from braidax.gang.dask import DaskGang
from tests.support.gang import clusters, staying
from tests.support.gang.serving_tables import check_tables_are_served

with distributed.Client(sys.argv[1], set_as_default=False) as client, DaskGang(client, timeout_seconds=600) as gang:
    print("runs", flush=True)
    gang.run(clusters.wait_for_one_another)
"""


def test_no_rank_stays_when_the_client_is_killed(client: distributed.Client) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, client.scheduler.address],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        clusters.until(lambda: all(client.run(_is_waiting).values()))
        process.kill()
    _nothing_is_left(client)


def _is_waiting() -> bool:
    """Says whether this worker's rank waits for a message."""
    ranks = [thread.ident for thread in threading.enumerate() if thread.name.startswith("braidax-rank")]
    places = sys._current_frames()
    stacks = ["".join(traceback.format_stack(places.get(rank or 0))) for rank in ranks]
    return any("wait_for_one_another" in stack for stack in stacks)


def test_a_gang_that_cannot_meet_is_not_started(client: distributed.Client) -> None:
    with pytest.raises(CallFailed, match="pigeon"):
        DaskGang(client, transport="pigeon").start()
    _nothing_is_left(client)


def test_stop_without_a_client(client: distributed.Client) -> None:
    with distributed.Client(client.scheduler.address, set_as_default=False) as other:
        gang = DaskGang(other)
        gang.start()
        assert gang.run(clusters.backwards, 1.0) == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
    _nothing_is_left(client)
    gang.stop()
    gang.stop()


def test_bad_options_are_named(client: distributed.Client) -> None:
    with pytest.raises(
        ArgumentError, match=r"client='tcp://.*: expected a distributed.Client that is not asynchronous"
    ):
        DaskGang(client.scheduler.address)
    with pytest.raises(ArgumentError, match="size=0: expected at least 1 rank"):
        DaskGang(client, 0)
    with pytest.raises(ArgumentError, match=r"timeout_seconds=0\.0: expected seconds > 0"):
        DaskGang(client, timeout_seconds=0.0)


@pytest.mark.parametrize("check", clusters.STORE_CHECKS, ids=lambda check: check.__name__)
def test_the_store_keeps_the_contract(store: DaskStore, check: Callable[[Store], None]) -> None:
    check(store)


def test_the_store_between_processes(store: DaskStore, client: distributed.Client) -> None:
    with DaskGang(client) as gang:
        clusters.check_between_processes(store, DaskStore, gang)


@pytest.mark.parametrize("end", ["the gang's", pytest.param("the worker's", marks=pytest.mark.slow)])
def test_a_store_outlives_its_users_and_not_its_gang(store: DaskStore, client: distributed.Client, end: str) -> None:
    store.set("key", b"kept")
    store.close()
    with DaskStore(store.address) as other:
        assert other.address == store.address
        assert other.get("key", timeout_seconds=0) == b"kept"
        worker, _, key = store.address.removeprefix("dask:").partition("#")
        if end == "the gang's":
            client.cancel([distributed.Future(key, client)], force=True)
        else:
            clusters.end_worker(client, worker)
        begun = time.monotonic()
        with pytest.raises(CommError, match=r"dask:tcp://.* cannot be reached: .*is the worker alive\?"):
            other.get("key", timeout_seconds=5)
        assert time.monotonic() - begun < 5


def test_a_store_whose_worker_ends_amid_an_answer_is_given_up(
    store: DaskStore, client: distributed.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Dask itself such an answer may never come, nor an error."""
    worker = store.address.removeprefix("dask:").partition("#")[0]
    with client.as_current():
        lost = distributed.ActorFuture(io_loop=client.loop)
    monkeypatch.setattr(store, "_actor", SimpleNamespace(get=lambda *_: lost))
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "key", timeout_seconds=60)
        clusters.end_worker(client, worker)
        with pytest.raises(CommError, match=r"cannot be reached: the scheduler says that it is (lost|cancelled|error)"):
            waiting.result(clusters.UNTIL_SECONDS)
    assert time.monotonic() - begun < clusters.UNTIL_SECONDS


def test_a_store_that_cannot_be_opened() -> None:
    with pytest.raises(ArgumentError, match="address='tcp://here:1': expected dask:WORKER#KEY"):
        DaskStore("tcp://here:1")
    code = "from braidax.gang.dask import DaskStore\nDaskStore('dask:tcp://here:1#x')"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "CommError: dask:tcp://here:1#x cannot be opened: No " in alone.stderr
    assert "open it in a task of the cluster, or inside `with client.as_current()`" in alone.stderr
