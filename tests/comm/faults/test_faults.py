"""Drawn trials: whatever ranks do, when one of them dies, freezes or is cut off, all others learn which, in time."""

from pathlib import Path

import pytest

from tests.comm.faults.trials import Fault, run_trials
from tests.comm.ranks import in_turns
from tests.comm.transports.tcps import IN_C, IN_PYTHON, OF_BOTH

FAULTS: list[Fault] = ["kill", "stop", "cut"]


@pytest.mark.parametrize(("fault", "transport"), in_turns(FAULTS, [IN_C, OF_BOTH], every=2))
def test_every_survivor_learns_who_is_lost_and_joins_again(fault: Fault, transport: str, tmp_path: Path) -> None:
    assert len(run_trials(fault, range(6), tmp_path, num_crews=2, transport=transport)) == 6


@pytest.mark.parametrize("fault", FAULTS)
def test_so_it_is_in_the_middle_of_streams_and_requests(fault: Fault, tmp_path: Path) -> None:
    assert len(run_trials(fault, range(5), tmp_path, num_crews=1, operations="streams")) == 5


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
