"""Workers that wait for one another end behind the same update, whoever of them wants to."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import braidax as bx
from braidax.gang import LocalGang
from tests.support.parallel.workers.teams import BATCH, batches, make_step, own_part, team

MOST = 40


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[2]


def ended(wanted: Sequence[dict[int, int]], staleness: int | None, workers: int) -> Any:
    """Returns what a worker does, which counts the updates that it takes in each of some runs, one behind the other.

    **Arguments:** `wanted`: of each run, behind how many of its updates a worker wants to end.
    """
    data = batches(MOST)

    def work(number: int, seat: Any) -> list[int]:
        with make_step(seat, bx.ParameterServers(staleness=staleness), optimizer="sgd", size=BATCH // workers) as step:
            state, found = step.init(jax.random.key(0)), list[int]()
            for run in wanted:
                taken = 0
                while not step.ends(wanted=taken >= run.get(number, MOST)):
                    state, _ = step.update(state, own_part(data[taken], number, workers))
                    taken += 1
                found.append(taken)
                step.finish()
                state = step.meet(state)
            return found

    return work


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_end_behind_the_same_update(gang: LocalGang, staleness: int) -> None:
    wanted = [{0: 3}, {1: 1}, {0: 2, 1: 2, 2: 2}, {0: 5, 2: 3}]
    found = team(gang, 3, ended(wanted, staleness, 3))
    assert found[0] == found[1] == found[2]
    for run, taken in zip(wanted, found[0], strict=True):
        first = min(run.values())
        assert first + 2 <= taken <= first + 2 * staleness + 2


@pytest.mark.slow  # above runs go on with three workers
def test_an_end_is_over_where_a_run_goes_on(gang: LocalGang) -> None:
    assert team(gang, 2, ended([{0: 3}] * 3, 0, 2)) == [[5, 5, 5]] * 2


def test_asynchronous_workers_end_when_they_want(gang: LocalGang) -> None:
    assert team(gang, 2, ended([{0: 3, 1: 7}], None, 2)) == [[3], [7]]


def test_fit_ends_all_workers_where_one_is_told(gang: LocalGang) -> None:
    """The one in the main thread is; the other one ends as if it were told, and both have taken as many updates."""
    samples = {"ids": np.zeros((400, 3), np.int32), "target": np.zeros(400, np.float32)}
    seats: list[Any] = []
    raised: list[BaseException] = []

    def fitted(seat: Any, report: Any) -> int:
        with make_step(seat, optimizer="sgd", size=4) as step:
            loader = bx.DataLoader(samples, step.mesh, step.batch_shardings, batch_size=4, seed=0, epochs=50)
            with pytest.raises(SystemExit) as caught:
                bx.fit(step, step.init(jax.random.key(0)), loader, report=report)
            raised.append(caught.value)
            return step._num_updates

    class Told(bx.Report):
        """Is told to end behind the third update."""

        seen = 0

        def update(self, metrics: Any, *, epoch: int, state: Any = None) -> None:
            super().update(metrics, epoch=epoch, state=state)
            self.seen += 1
            if self.seen == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with bx.parallel.open_meeting(gang, workers=2, timeout_seconds=60) as meeting:
        other = threading.Thread(target=lambda: seats.append(fitted(meeting.of_worker(1), None)), name="worker 1")
        other.start()
        seats.append(fitted(meeting.of_worker(0), Told(show="nothing")))
        other.join()
    assert seats == [5, 5]
    assert [getattr(one, "code", None) for one in raised] == [143, 143]
