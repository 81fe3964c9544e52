"""What ranks tell of a plan: to whoever watches, hostile or not, and without waiting for anybody."""

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.comm import Communicator
from braidax.frame import collecting
from braidax.frame.plan.nodes import read
from braidax.frame.sight.measuring import MOST_WORDS, Meter, State
from braidax.frame.sight.telling import MAX_BYTES, News, Watcher, packed, telling, unpacked
from braidax.gang import Gang, LocalGang

SECRET = b"s" * 32
MANY = (1 << 63) - 1
STATES = [State(number, "ö" * (MOST_WORDS // 2), number % 2 == 0, MANY, MANY, MANY) for number in range(65000, 65070)]
WAIT_SECONDS = 60.0


def opened(data: bytes, *, size: int = 4) -> News | None:
    return unpacked(SECRET, data, size=size)


def signed(value: Any) -> bytes:
    data = msgspec.msgpack.encode(value)
    return hmac.digest(SECRET, data, "sha256") + data


def test_what_is_told_of_many_operations_fits_into_datagrams() -> None:
    found = list(packed(SECRET, 3, 1 << 40, STATES))
    assert max(map(len, found)) <= MAX_BYTES
    news = [opened(one) for one in found]
    assert [state for one in news if one for state in one.states] == STATES
    assert {(one.rank, one.number) for one in news if one} == {(3, 1 << 40)}
    assert list(packed(SECRET, 3, 0, [])) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 31,
        b"x" * (MAX_BYTES + 1),
        next(packed(b"t" * 32, 0, 0, STATES)),
        next(packed(SECRET, 0, 0, STATES))[:-1],
        signed([0, 0, [[0, "x", True, None, 0, 0]]]) + b"\0",
        signed(None),
        signed([0, 0]),
        signed([0, 0, [[0, "x", True, None, 0]]]),
        signed([0, 0, [[0, "x", True, "1", 0, 0]]]),
        signed([4, 0, [[0, "x", True, None, 0, 0]]]),
        signed([-1, 0, [[0, "x", True, None, 0, 0]]]),
        signed([0, 0, [[0, 1, True, None, 0, 0]]]),
        signed([0, 0, [[-1, "x", True, None, 0, 0]]]),
        signed([0, 0, [[0, "x", True, -1, 0, 0]]]),
        signed([0, 0, [[0, "x", True, None, -1, 0]]]),
        signed([0, 0, [[0, "x", True, None, 0, -1]]]),
        signed([0, 0, [[0, "x", True, None, 0, 0]] * 300]),
    ],
)
def test_what_no_rank_told_is_nothing(data: bytes) -> None:
    assert opened(data) is None
    assert opened(signed([3, 0, [[69_999, "x", True, None, 0, 0]]])) is not None


@contextlib.contextmanager
def listening() -> Generator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        one.settimeout(WAIT_SECONDS)
        yield one


def test_a_rank_tells_until_the_block_ends_and_last_what_came_of_all() -> None:
    root, tables = read(pl.LazyFrame({"a": [3, 1, 2]}).sort("a"))
    meter = Meter()
    with listening() as ear, telling(meter, Watcher((ear.getsockname(),), SECRET), 2):
        meter.begins(root)
        with meter.operation(root):
            running = opened(ear.recv(MAX_BYTES))
            while running is None or running.number < 2:
                running = opened(ear.recv(MAX_BYTES))
        assert running.states == [State(1, 'Sort col("a")', True, None, 0, 0)]  # the last one in the order of the plan
        meter.gave(root, root, next(iter(tables.values())))
    assert not [one for one in threading.enumerate() if one.name == "braidax-telling"]
    with listening() as ear:
        begin = threading.active_count()
        with pytest.raises(KeyError), telling(meter, Watcher((ear.getsockname(),), SECRET), 2):
            raise KeyError
        last = opened(ear.recv(MAX_BYTES))
        assert (threading.active_count(), last and last.states) == (begin, [State(1, 'Sort col("a")', False, 3, 0, 0)])
        with telling(meter, None, 2):
            assert threading.active_count() == begin


def told_to(watcher: Watcher) -> Callable[..., Any]:
    """Returns what stands for `drawn`."""

    @contextlib.contextmanager
    def drawn(hosts: Sequence[str]) -> Generator[Watcher]:
        assert len(hosts) > 1
        yield watcher

    return drawn


def threads(comm: Communicator) -> list[str]:
    del comm
    return [one.name for one in threading.enumerate() if one.name == "braidax-telling"]


def check_is_told(gang: Gang, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Checks that ranks tell whoever listens, while one who watches has gone, and another one reads nothing."""
    go = folder / "go"

    def wait(frame: pl.DataFrame) -> pl.DataFrame:
        end = time.monotonic() + WAIT_SECONDS
        while not go.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return frame

    table = pl.DataFrame({"k": [i % 100 for i in range(5000)], "v": range(5000)})
    lazy = table.lazy().map_batches(wait, streamable=True, schema=table.schema).sort("v", descending=True)
    with listening() as gone, listening() as stalled, listening() as ear:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        addresses = tuple(one.getsockname() for one in (gone, stalled, ear))
        gone.close()
        for _ in range(1000):  # it is full
            ear.sendto(b"x" * MAX_BYTES, addresses[1])
        monkeypatch.setattr(collecting, "drawn", told_to(Watcher(addresses, SECRET)))
        found: dict[int, News] = {}

        def hear() -> None:
            while len(found) < gang.size or min(news.number for news in found.values()) < 4:
                news = unpacked(SECRET, ear.recv(MAX_BYTES), size=gang.size)
                if news is not None:
                    found[news.rank] = news
            go.touch()

        hearing = threading.Thread(target=hear)
        hearing.start()
        result = bf.collect(lazy, gang, show="bar")
        hearing.join()
    assert_frame_equal(result, table.sort("v", descending=True))
    assert sorted(found) == list(range(gang.size))
    assert all(any(state.is_running for state in news.states) for news in found.values())
    assert gang.run(threads) == [[]] * gang.size


def test_a_watcher_that_is_gone_or_stalls_changes_nothing(
    gang: LocalGang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_is_told(gang, monkeypatch, tmp_path)


@pytest.mark.slow  # ranks of a gang of processes tell above
def test_ranks_on_dask_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    from braidax.gang.dask import DaskGang

    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        DaskGang(client) as gang,
    ):
        check_is_told(gang, monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ranks_on_ray_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from braidax.gang.ray import RayGang
    from tests.support.gang.ray_cluster import ray_cluster

    with ray_cluster(num_cpus=3), RayGang(2, num_cpus=0.5, timeout_seconds=200) as gang:
        check_is_told(gang, monkeypatch, tmp_path)
