"""Which worker of a run a process of `braidax launch` is, and the samples that are its own."""

import numpy as np
import pytest

from braidax.cli.workers import OwnSamples, Seat, num_updates, seat_of
from braidax.data import open as open_source
from braidax.errors import ArgumentError
from braidax.parallel import Hybrid, ParameterServers

LAUNCHED = {"BRAIDAX_SERVERS": "2", "BRAIDAX_RANK": "1", "BRAIDAX_SIZE": "3"}


def test_workers_share_samples_evenly() -> None:
    samples = {"x": np.arange(11, dtype=np.int32)}
    found = []
    for number in range(3):
        part = Seat(number, 3).own_samples(open_source(samples))
        assert len(part) == 3
        assert part.describe()["part"] == f"{number} of 3"
        out = {"x": np.empty(3, np.int32)}
        part.read(np.array([2, 0, 1]), out)
        found.append(out["x"].tolist())
    assert found == [[6, 0, 3], [7, 1, 4], [8, 2, 5]]


def test_one_worker_has_all_samples() -> None:
    source = open_source({"x": np.arange(11, dtype=np.int32)})
    assert Seat().own_samples(source) is source
    assert not isinstance(source, OwnSamples)


def test_a_seat_is_one_beside_servers_of_the_launcher() -> None:
    strategies = {"data": ParameterServers()}
    assert seat_of(strategies, LAUNCHED) == Seat(1, 3)
    assert not seat_of(strategies, LAUNCHED).is_first
    assert seat_of(strategies, {"BRAIDAX_RANK": "1", "BRAIDAX_SIZE": "3"}) == Seat(0, 1)
    assert seat_of({"data": Hybrid(tables="servers")}, LAUNCHED) == Seat(0, 1)
    assert seat_of(strategies, {}).is_first


def test_each_push_is_an_update_where_workers_do_not_wait() -> None:
    assert num_updates(10, {"data": ParameterServers()}, Seat(0, 3)) == 10
    assert num_updates(10, {"data": ParameterServers(staleness=None)}, Seat(0, 3)) == 30
    assert num_updates(10, None, Seat()) == 10


def test_a_batch_that_workers_cannot_share_is_refused() -> None:
    assert Seat(0, 3).own_batch(12) == 4
    with pytest.raises(ArgumentError, match="--batch-size 8 for 3 workers: expected a multiple of that"):
        Seat(0, 3).own_batch(8)
