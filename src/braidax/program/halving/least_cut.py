"""The values of least size that stand between where something flows from and where it is read."""

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar, final

_ENDLESS = 1 << 62

Value = TypeVar("Value", bound=Hashable)


def least_cut(
    sizes: Mapping[Value, int | None],
    arrows: Sequence[tuple[Value, Value]],
    sources: Collection[Value],
    sinks: Collection[Value],
) -> set[Value]:
    """Returns values of least total size without which no way leads from a source to a sink.

    Of several such sets it is the one next to the sinks. By Dinic's maximum flow; each value is a pair of nodes.

    **Arguments:** `sizes`: of each value, None for what may not be taken. `arrows`: from a value to one made of it.
    `sources`, `sinks`: may be taken themselves; on each way from one to the other there is a value with a size.
    """
    forward, backward = dict[Value, list[Value]](), dict[Value, list[Value]]()
    for one, other in arrows:
        forward.setdefault(one, []).append(other)
        backward.setdefault(other, []).append(one)
    between = _reached(forward, sources) & _reached(backward, sinks)
    numbers = {value: 2 + 2 * at for at, value in enumerate(value for value in sizes if value in between)}
    flow = _Flow(2 + 2 * len(numbers))
    for value, node in numbers.items():
        size = sizes[value]
        flow.connect(node, node + 1, _ENDLESS if size is None else size)
        for other in dict.fromkeys(forward.get(value, ())):
            if other in between:
                flow.connect(node + 1, numbers[other], _ENDLESS)
    for value in {*sources} & between:
        flow.connect(0, numbers[value], _ENDLESS)
    for value in {*sinks} & between:
        flow.connect(numbers[value] + 1, 1, _ENDLESS)
    flow.fill()
    behind = flow.leads_to(1)
    assert 0 not in behind, "each way has a value that may be taken"
    return {value for value, node in numbers.items() if node + 1 in behind and node not in behind}


def _reached(neighbors: Mapping[Value, Sequence[Value]], begin: Collection[Value]) -> set[Value]:
    found, waiting = {*begin}, [*begin]
    while waiting:
        for one in neighbors.get(waiting.pop(), ()):
            if one not in found:
                found.add(one)
                waiting.append(one)
    return found


@final
class _Flow:
    """A network from node 0 to node 1; edge `e ^ 1` is the way back of edge `e`."""

    def __init__(self, count: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(count)]
        self._to: list[int] = []
        self._room: list[int] = []

    def connect(self, begin: int, end: int, room: int) -> None:
        """Adds an edge."""
        for one, other, size in ((begin, end, room), (end, begin, 0)):
            self._edges[one].append(len(self._to))
            self._to.append(other)
            self._room.append(size)

    def fill(self) -> None:
        """Sends as much as goes."""
        while (levels := self._levels())[1] >= 0:
            rest = [0] * len(self._edges)
            while self._send(levels, rest):
                pass

    def leads_to(self, end: int) -> set[int]:
        """Returns the nodes from which more could go to one."""
        found, waiting = {end}, [end]
        while waiting:
            for edge in self._edges[waiting.pop()]:
                if self._room[edge ^ 1] and self._to[edge] not in found:
                    found.add(self._to[edge])
                    waiting.append(self._to[edge])
        return found

    def _levels(self) -> list[int]:
        levels, waiting = [-1] * len(self._edges), deque([0])
        levels[0] = 0
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                if self._room[edge] and levels[self._to[edge]] < 0:
                    levels[self._to[edge]] = levels[node] + 1
                    waiting.append(self._to[edge])
        return levels

    def _send(self, levels: Sequence[int], rest: list[int]) -> int:
        """Sends along one way. **Arguments:** `rest`: of each node, which of its edges was looked at last."""
        node, way = 0, list[int]()
        while node != 1:
            edges = self._edges[node]
            while rest[node] < len(edges):
                edge = edges[rest[node]]
                if self._room[edge] and levels[self._to[edge]] == levels[node] + 1:
                    break
                rest[node] += 1
            else:
                if not way:
                    return 0
                node = self._to[way.pop() ^ 1]
                rest[node] += 1
                continue
            way.append(edge)
            node = self._to[edge]
        most = min(self._room[edge] for edge in way)
        for edge in way:
            self._room[edge] -= most
            self._room[edge ^ 1] += most
        return most
