"""Workers agree on whose gradients an update takes, whoever is lost meanwhile."""

import random
from collections.abc import Generator
from typing import Any

import pytest

from braidax.parallel.served.batches.agreeing import Agreement, agreeing
from braidax.parallel.served.on_servers.server import TableServer
from braidax.parallel.served.wire import Message, packed, unpacked

PROPOSED = [[5, 6, 7], [5, 6], [6, 7]]


class Servers:
    """Servers of one process, of which some are lost."""

    def __init__(self, count: int) -> None:
        self.servers = [TableServer(rank, count, len(PROPOSED)) for rank in range(count)]
        for server in self.servers:
            server.handle(0, packed("make", {"run": "run", "tables": [], "staleness": 1}))
        self.lost = set[int]()

    def ask(self, rank: int, members: list[int], step: int) -> list[int] | None:
        if rank in self.lost:
            return None
        answer = self.servers[rank].answer(
            0, Message("agree", {"run": "run", "about": "members", "step": step, "value": members}, {})
        )
        return list(unpacked(answer).fields["value"])


Asking = Generator[tuple[int, list[int]], list[int] | None, list[int]]


def run(seed: int) -> tuple[list[list[int]], set[int]]:
    """Lets workers ask in an order that is drawn, while servers are lost but one. **Returns:** what each worker has
    come to, and who was lost; workers that are lost come to nothing."""
    drawn = random.Random(seed)
    count, step = drawn.choice([2, 3, 4]), drawn.randrange(3)
    servers = Servers(count)
    waiting: dict[int, tuple[Asking, tuple[int, list[int]]]] = {}
    for worker, members in enumerate(PROPOSED):
        asking = agreeing(range(count), members)
        waiting[worker] = asking, next(asking)
    dying = drawn.sample(range(count), drawn.randrange(count))
    found: list[list[int]] = []
    while waiting:
        if dying and drawn.random() < 0.2:
            servers.lost.add(dying.pop())
        if len(waiting) > 1 and drawn.random() < 0.03:
            del waiting[drawn.choice([*waiting])]
            continue
        worker = drawn.choice([*waiting])
        asking, (rank, members) = waiting[worker]
        try:
            waiting[worker] = asking, asking.send(servers.ask(rank, members, step))
        except StopIteration as end:
            found.append(end.value)
            del waiting[worker]
    return found, servers.lost


def test_all_come_to_the_same() -> None:
    runs = [run(seed) for seed in range(400)]
    assert all(len({tuple(one) for one in found}) == 1 and found[0] in PROPOSED for found, _ in runs)
    assert {tuple(found[0]) for found, _ in runs} == {tuple(one) for one in PROPOSED}
    assert sum(bool(lost) for _, lost in runs) > 100


def test_a_server_keeps_the_first_of_each_step_until_it_begins_anew() -> None:
    servers = Servers(1)
    assert [servers.ask(0, members, 7) for members in PROPOSED] == [PROPOSED[0]] * 3
    assert servers.ask(0, PROPOSED[1], 8) == PROPOSED[1]
    servers.servers[0].handle(0, packed("make", {"run": "run", "tables": [], "staleness": 1}))
    assert servers.ask(0, PROPOSED[2], 7) == PROPOSED[2]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("num_members", "lost", "staleness", "asks"),
    [(3, [], 1, False), (2, [], 1, True), (3, [1], 0, True), (1, [1], None, False)],
)
def test_servers_are_asked_where_somebody_is_lost(
    num_members: int, lost: list[int], staleness: int | None, asks: bool
) -> None:
    told: list[Any] = []

    class Asked:
        layout = type("Layout", (), {"ranks": (1, 0)})

        def lost(self) -> list[int]:
            return lost

        def packed(self, kind: str, part: int, fields: Any) -> Any:
            return [kind, part, fields]

        def ask(self, rank: int, question: Any) -> Any:
            told.append((rank, *question))
            return Message("agreed", {"value": [5]}, {})

    asked: Any = Asked()
    members = [5, 6, 7][:num_members]
    assert Agreement(asked, 3, staleness).members(4, members) == ([5] if asks else members)
    first = (0, "agree", 1, {"about": "members", "step": 4, "value": members})
    assert told == ([first, (1, "agree", 0, {"about": "members", "step": 4, "value": [5]})] if asks else [])
