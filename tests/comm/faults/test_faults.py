"""Drawn trials: whatever ranks do, when one of them dies, freezes or is cut off, all others learn which, in time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.comm.faults.crew import Harbor
from tests.support.comm.faults.trials import MAX_SIZE, Fault, drawn, live_through, run_trials
from tests.support.comm.ranks import by_day, in_turns
from tests.support.comm.relay import Relay
from tests.support.comm.transports.tcps import IN_C, IN_PYTHON, OF_BOTH

FAULTS: list[Fault] = ["kill", "stop", "cut"]
SEEDS: dict[Fault, range] = {"kill": range(2), "stop": range(1), "cut": range(1)}  # silence takes seconds


@pytest.fixture(scope="module")
def harbor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbor]:
    made = Harbor(lambda: tmp_path_factory.mktemp("crew"), size=MAX_SIZE)
    yield made
    made.close()


@pytest.mark.parametrize(("fault", "transport"), in_turns(FAULTS, [IN_C, OF_BOTH], every=2))
def test_every_survivor_learns_who_is_lost_and_joins_again(fault: Fault, transport: str, harbor: Harbor) -> None:
    trials = [drawn(fault, seed, transport=transport) for seed in SEEDS[fault]]
    with Relay() as relay, harbor.crew() as crew:
        assert len(live_through(crew, relay, trials)) == len(trials)


# A stop and a cut, which are silence, by day above, where nothing streams.
@pytest.mark.parametrize("fault", by_day(FAULTS, "kill"))
def test_so_it_is_in_the_middle_of_streams_and_requests(fault: Fault, harbor: Harbor) -> None:
    trials = [drawn(fault, seed, operations="streams") for seed in SEEDS[fault]]
    with Relay() as relay, harbor.crew() as crew:
        assert len(live_through(crew, relay, trials)) == len(trials)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", [IN_C, IN_PYTHON, "ucx"])
@pytest.mark.parametrize("fault", FAULTS)
def test_so_it_is_in_many_streams_and_requests(fault: Fault, transport: str, tmp_path: Path) -> None:
    seeds = range(2000, 2060)
    assert len(run_trials(fault, seeds, tmp_path, num_crews=2, transport=transport, operations="streams")) == 60


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", [IN_C, IN_PYTHON, "ucx"])
@pytest.mark.parametrize("fault", FAULTS)
def test_so_it_is_in_many_trials(fault: Fault, transport: str, tmp_path: Path) -> None:
    assert len(run_trials(fault, range(1000, 1100), tmp_path, num_crews=3, transport=transport)) == 100
