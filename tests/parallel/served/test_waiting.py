"""Requests that a server answers later: pulls that want updates, pushes while a checkpoint is read."""

from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest

from braidax.errors import ArgumentError
from braidax.parallel.served.on_servers.server import TableServer
from braidax.parallel.served.on_servers.told import described
from braidax.parallel.served.wire import packed, unpacked
from tests.support.parallel.served.server import OPTIMIZERS, ROWS, WIDTH, ask, form_of, push, rows_of

KEY = np.asarray(jax.random.key_data(jax.random.key(4)))


def of_two(staleness: int | None = 0, gradients: str = "averaged") -> TableServer:
    """Returns a server of two workers, which moves rows by half of their gradients."""
    server, (fields, programs) = TableServer(0, 1, 2), described({"table": form_of(OPTIMIZERS["sgd"])})
    ask(server, "make", {"tables": fields, "staleness": staleness, "gradients": gradients}, programs)
    ask(server, "bear", {}, {"key": KEY})
    return server


def moved(server: TableServer) -> float:
    """Returns by how much the third row was moved since it was born, which is the same for all its numbers."""
    born = of_two()
    (by,) = {*np.round(rows_of(server)[2] - rows_of(born)[2], 5).tolist()}
    return by


def pull(server: TableServer, at_least: int, *, rank: int = 8) -> Any:
    fields = {"run": "this", "tables": ["table"], "since": -1, "at_least": at_least}
    return server.handle(rank, packed("pull", fields, {"table": np.arange(ROWS)}))


def later(server: TableServer, step: int) -> "Future[Any]":
    """Returns the future of an answer to a push, which is not there yet."""
    fields = {"run": "this", "tables": ["table"], "num_numbers": [0], "staged": False, "step": step}
    arrays = {"0/ids": np.asarray([2]), "0/gradients": np.ones((1, WIDTH), np.float32)}
    found = server.handle(9, packed("push", fields, arrays))
    assert isinstance(found, Future)
    assert not found.done()
    return found


ONES = np.ones((1, WIDTH))


def test_a_pull_waits_for_all_who_push() -> None:
    server = of_two()
    waiting = pull(server, 1)
    assert not isinstance(pull(server, 0), Future)
    push(server, [2], ONES, 0, rank=8)
    assert not waiting.done()
    push(server, [2], 3 * ONES, 0, rank=9)
    answer = unpacked(waiting.result(0))
    assert answer.fields["step"] == 1
    np.testing.assert_array_equal(answer.arrays["table"], rows_of(server))
    assert moved(server) == -1


def early(server: TableServer, rank: int) -> Any:
    """Pushes the second update, of the others of whom this server has not heard the first one."""
    fields = {"run": "this", "tables": ["table"], "num_numbers": [0], "staged": False, "step": 1}
    arrays = {"0/ids": np.asarray([2]), "0/gradients": np.ones((1, WIDTH), np.float32)}
    return server.handle(rank, packed("push", fields, arrays))


def test_a_push_that_comes_before_those_of_others_waits_for_them() -> None:
    """A copy of a part may hear of an update when another copy has seen it, and the next one has been computed."""
    server = of_two()
    push(server, [2], ONES, 0, rank=2)
    waiting = early(server, 2)
    assert not waiting.done()
    push(server, [2], 3 * ONES, 0, rank=1)
    assert unpacked(waiting.result(0)).fields["step"] == 1
    push(server, [2], 3 * ONES, 1, rank=1)
    assert moved(server) == -2
    assert unpacked(pull(server, 2)).fields["step"] == 2


def test_a_push_that_comes_too_early_is_answered_when_the_others_are_gone() -> None:
    server = of_two()
    push(server, [2], ONES, 0, rank=2)
    waiting = early(server, 2)
    server.lose(1)
    assert unpacked(waiting.result(0)).fields["step"] == 0
    assert unpacked(pull(server, 1, rank=2)).kind == "lost"


@pytest.mark.parametrize("lost_first", [False, True])
def test_who_waits_for_one_that_is_lost_is_told(lost_first: bool) -> None:
    server = of_two()
    push(server, [2], ONES, 0, rank=2)
    if lost_first:
        server.lose(1)
        answer = unpacked(pull(server, 1, rank=2))
    else:
        waiting = pull(server, 1, rank=2)
        server.lose(1)
        answer = unpacked(waiting.result(0))
    assert (answer.kind, answer.fields["worker"]) == ("lost", 0)


def test_bounded_updates_are_complete_without_one_that_is_lost() -> None:
    server = of_two(staleness=1)
    push(server, [2], ONES, 0, rank=8)
    push(server, [2], ONES, 1, rank=8)
    waiting = pull(server, 2)
    server.lose(9)
    assert unpacked(waiting.result(0)).fields["step"] == 2
    assert moved(server) == -1


def test_what_one_has_pushed_that_is_lost_counts() -> None:
    server = of_two(staleness=1)
    push(server, [2], 3 * ONES, 0, rank=9)
    server.lose(9)
    assert push(server, [2], ONES, 0, rank=8).fields["step"] == 1
    assert moved(server) == -1


def test_asynchronous_updates_count_once_for_each_who_pushes() -> None:
    server = of_two(staleness=None)
    for rank, step, seen in [(8, 0, 1), (8, 0, 1), (9, 0, 2), (8, 1, 3), (9, 0, 3)]:
        assert push(server, [2], ONES, step, rank=rank).fields["step"] == seen
    assert moved(server) == -1.5


@pytest.mark.parametrize("staleness", [None, 0])
def test_a_copy_goes_on_where_one_has_the_last_push_of_who_is_lost(staleness: int | None) -> None:
    """Of updates that all take as one none may differ."""
    servers = [of_two(staleness=None) for _ in range(2)]
    for server, ranks in zip(servers, [(8,), (8, 9)], strict=True):
        for rank in ranks:
            push(server, [2], ONES, 0, rank=rank)
        server.lose(9)
    states = [ask(server, "state", {}) for server in servers]
    copy = of_two(staleness=staleness)
    if staleness is not None:
        with pytest.raises(ArgumentError, match=r"servers that have seen \[1, 2\] updates: expected all to have seen"):
            copy.follow(states)
        return
    copy.follow(states)
    assert push(copy, [2], ONES, 0, rank=8).fields["step"] == 2  # both are known there
    assert push(copy, [2], ONES, 0, rank=9).fields["step"] == 2
    assert push(copy, [2], ONES, 1, rank=8).fields["step"] == 3


def test_nobody_else_pushes_while_a_server_is_held() -> None:
    server = of_two(staleness=None)
    ask(server, "hold", {}, rank=8)
    with pytest.raises(ArgumentError, match="server 0 is held by rank 8: expected one at a time"):
        ask(server, "hold", {}, rank=9)
    waiting = later(server, 0)
    assert push(server, [2], ONES, 0, rank=8).fields["step"] == 1
    ask(server, "release", {}, rank=8)
    assert unpacked(waiting.result(0)).fields["step"] == 2
    ask(server, "hold", {}, rank=8)
    waiting = later(server, 1)
    server.lose(8)  # who held it is gone
    assert unpacked(waiting.result(0)).fields["step"] == 3


def test_who_waits_for_an_update_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    server = of_two()

    def fail(*_: Any) -> None:
        raise MemoryError("none is left")

    waiting = pull(server, 1)
    push(server, [2], ONES, 0, rank=8)
    monkeypatch.setattr(server.shards["table"], "push", fail)
    with pytest.raises(MemoryError):
        push(server, [2], ONES, 0, rank=9)
    with pytest.raises(ArgumentError, match="half of one update and half of another"):
        waiting.result(0)
