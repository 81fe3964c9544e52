"""Servers that are lost where none is spare: other processes take their place, and training comes to the same bits."""

import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jax
import pytest

import braidax.parallel as bx
from braidax.errors import CommError, GangError, PeerLost
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from braidax.parallel.served.meetings.meeting import Meeting
from tests.support.gang.clusters import until
from tests.support.parallel.models import copied
from tests.support.parallel.served.losing import assert_equal, make_step, own_pid
from tests.support.parallel.served.models import zipf_batches
from tests.support.parallel.workers import teams

NUM_STEPS = 9
KILLED = {2: 1, 6: 2}  # servers, by step: of part 1 there is then but what the first one was given anew
LOOKED = (4, 5, 8)  # steps before which lost ones are to be there again
NOBODY: Mapping[int, int] = {}


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[3]


def there_again(step: Any) -> None:
    """Waits until other processes have come in place of all servers that are lost."""
    until(lambda: not step._servers._asking.lost() or bool(step._servers._asking.wanted()))


def trained(step: Any, killed: Mapping[int, int] = NOBODY) -> Any:
    """Trains, and returns all losses and the dense state. **Arguments:** `killed`: processes, by step."""
    state, losses = step.init(jax.random.key(0)), list[float]()
    placed = [place(batch, step.batch_shardings) for batch in zipf_batches(NUM_STEPS)]
    for number, (batch, coming) in enumerate(zip(placed, [*placed[1:], None], strict=True)):
        if number in killed:
            os.kill(killed[number], signal.SIGKILL)
        if number in LOOKED and killed:
            there_again(step)
        state, metrics = step.update(state, batch, coming=coming)
        losses.append(float(metrics["loss"]))
    return losses, copied(step.to_dense(state))


def test_another_process_takes_the_place_of_a_lost_one(gang: LocalGang, caplog: pytest.LogCaptureFixture) -> None:
    pids = gang.run(own_pid)
    with make_step(gang, "adagrad") as step:
        undisturbed = trained(step)
        assert_equal(trained(step, {number: pids[rank] for number, rank in KILLED.items()}), undisturbed)
    for rank in KILLED.values():
        assert f"another process has taken the place of server {rank} in " in caplog.text
    found = gang.run(own_pid)  # the gang goes on with them, for other calls and other steps
    assert [rank for rank in range(3) if found[rank] != pids[rank]] == [1, 2]


@pytest.mark.slow
def test_where_not_all_meet_again_it_is_tried_anew(
    gang: LocalGang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All stay where they are, and training goes on; other processes come once more."""
    join, refused = Meeting.join, list[int]()

    def refusing(self: Meeting, rank: int, *, generation: int = 0, timeout_seconds: float | None = None) -> Any:
        if generation == 1:
            refused.append(rank)
            raise CommError("no way there")
        return join(self, rank, generation=generation, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(Meeting, "join", refusing)
    pids = gang.run(own_pid)
    with make_step(gang, "adagrad") as step:
        undisturbed = trained(step)
        assert_equal(trained(step, {number: pids[rank] for number, rank in KILLED.items()}), undisturbed)
    assert refused == [3]  # of who trains: the first time
    assert "in place of lost ones could not be met: CommError: no way there" in caplog.text
    assert "another process has taken the place of server 1" in caplog.text


@pytest.mark.slow  # one of the seeds of workers/test_killed.py is not
@pytest.mark.parametrize("staleness", [0, 1])
def test_workers_go_on_with_others_behind_the_same_update(
    gang: LocalGang, staleness: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What a server has whole is on the new one, too, and read from it; a norm of all gradients takes two rounds."""
    pids = gang.run(own_pid)

    def work(number: int, seat: Any) -> Any:
        found = list[Any]()
        strategy = bx.ParameterServers(staleness=staleness, copies=2)
        with teams.make_step(seat, strategy, optimizer="clipped adagrad", size=teams.BATCH // 2) as step:
            for disturbs in (False, number == 0):
                state = step.init(jax.random.key(0))
                for at, batch in enumerate(teams.batches(NUM_STEPS)):
                    if disturbs and at == 1:
                        os.kill(pids[1], signal.SIGKILL)
                    if disturbs and at == 3:
                        there_again(step)
                    state, _ = step.update(state, teams.own_part(batch, number, 2))
                step.finish()
                step._servers.meet()
                found.append(step.params())
                assert step._servers.num_updates() == NUM_STEPS
        return found

    (undisturbed, first), (_, second) = teams.team(gang, 2, work)
    assert "another process has taken the place of server 1 in " in caplog.text
    teams.assert_close(first, second, exactly=True)
    if staleness == 0:
        teams.assert_close(first, undisturbed, exactly=True)


@pytest.mark.slow
def test_asynchronous_workers_are_told_what_they_may_do(gang: LocalGang, caplog: pytest.LogCaptureFixture) -> None:
    pids = gang.run(own_pid)

    def work(number: int, seat: Any) -> Any:
        strategy = bx.ParameterServers(staleness=None, copies=2)
        with teams.make_step(seat, strategy, optimizer="sgd", size=teams.BATCH // 2) as step:
            state = step.init(jax.random.key(0))
            for at, batch in enumerate(teams.batches(6)):
                if at == 1 and number == 0:
                    os.kill(pids[1], signal.SIGKILL)
                if at == 4:
                    step.resize(2)  # as they are told
                state, _ = step.update(state, teams.own_part(batch, number, 2))
            step.finish()
            step._servers.meet()
            return step.params(), step._servers.num_updates(), step._servers._asking.having

    found = teams.team(gang, 2, work)
    why = "asynchronous workers never wait for one another, .*; let all call step.resize.* with one server fewer"
    assert re.search(rf"servers that are lost, \[1\], are not replaced: {why}", caplog.text)
    for params, num_updates, having in found:
        assert num_updates == 12
        assert sorted(having[0]) == sorted(having[1]) == [0, 2]  # two copies again
        teams.assert_close(params, found[0][0], exactly=True)
    gang.replace()


def test_what_keeps_a_gang_from_it_is_told_and_training_goes_on(
    gang: LocalGang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def replace(self: LocalGang, ranks: Any = (), **options: Any) -> None:
        raise GangError("the system started no 1 processes")

    pids = gang.run(own_pid)
    monkeypatch.setattr(LocalGang, "replace", replace)
    monkeypatch.setattr(sys.modules[__name__], "LOOKED", ())
    why = "the gang has started no other process: the system started no 1 processes"
    with make_step(gang, "adagrad") as step:
        undisturbed = trained(step)
        assert_equal(trained(step, {2: pids[1]}), undisturbed)
        until(lambda: f"servers that are lost, [1], are not replaced: {why}" in caplog.text)
    monkeypatch.undo()
    gang.replace()


@pytest.mark.slow  # above it is told why nobody starts others, too
def test_nobody_starts_others_where_the_meeting_is_left(gang: LocalGang, caplog: pytest.LogCaptureFixture) -> None:
    pids = gang.run(own_pid)
    with bx.open_meeting(gang, workers=1) as meeting:
        step = teams.make_step(meeting.of_worker(0), bx.ParameterServers(copies=2))
    why = "nobody starts another server, as the place where all have met is gone: keep the context of open_meeting open"
    with step:
        state = step.init(jax.random.key(0))
        for number, batch in enumerate(teams.batches(4)):
            if number == 1:
                os.kill(pids[1], signal.SIGKILL)
            if number == 3:
                until(lambda: f"servers that are lost, [1], are not replaced: {why}" in caplog.text)
                os.kill(pids[2], signal.SIGKILL)
                with pytest.raises(PeerLost, match=f"all 2 copies.*; lost servers were not replaced before: {why}"):
                    step.update(state, batch)
                break
            state, _ = step.update(state, batch)
    until(lambda: gang.lost == (1, 2))
    gang.replace()
