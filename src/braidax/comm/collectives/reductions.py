"""Schedules that reduce arrays: exchanges for small ones, blocks for large ones, two levels for several hosts.

All members get the same bits: every element is reduced in one order, once, or in the mirrored order of a commutative
operation.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from braidax.comm.collectives.schedule import OPENING_BYTES, OUT, OWN, Part, Planning, Schedule

_SMALL_BYTES = OPENING_BYTES  # up to here rounds count, beyond it bytes
_PIECE_BYTES = 1 << 19  # of a block: one is reduced while the next ones are on their way
_AHEAD = 2  # pieces of a member that are received into memory of their own
_DIRECT_MEMBERS = 8  # up to here all exchange with all; beyond it blocks travel around a ring


@final
@dataclass(frozen=True)
class Members:
    """Some members of the group, which reduce among themselves.

    **Fields:** `ranks`: of them in the group. `place`: of this member among them.
    """

    ranks: Sequence[int]
    place: int

    def __len__(self) -> int:
        return len(self.ranks)

    def at(self, distance: int) -> int:
        """Returns the rank of the member so far behind this one, around."""
        return self.ranks[(self.place + distance) % len(self.ranks)]

    @property
    def others(self) -> list[int]:
        """The ranks of the other ones, the next one first."""
        return [self.at(distance) for distance in range(1, len(self.ranks))]


def all_reduce(rank: int, hosts: Sequence[int], num_bytes: int, element_bytes: int) -> Schedule:
    """Returns the schedule that leaves the reduction of all members' arrays on every member.

    **Arguments:** `hosts`: a number for each member's host. `num_bytes`: of the array. `element_bytes`: of an element.
    """
    size = len(hosts)
    own, out = Part(OWN, 0, num_bytes), Part(OUT, 0, num_bytes)
    groups = _by_host(hosts)
    has_two_levels = 1 < len(groups) < size
    if 1 < size <= _DIRECT_MEMBERS and num_bytes <= _SMALL_BYTES and not has_two_levels:
        return _directly(rank, size, own, out)
    plan = Planning(rank, size)
    everybody = Members(range(size), rank)
    if has_two_levels:
        _two_levels(plan, groups, own, out, element_bytes)
    else:
        _all_reduce(plan, everybody, own, out, element_bytes)
    return plan.done()


def reduce_scatter(rank: int, size: int, num_bytes: int, element_bytes: int) -> Schedule:
    """Returns the schedule that leaves this member's block, of `size` equal ones, of the reduction of all arrays.

    **Arguments:** as for `all_reduce`.
    """
    plan = Planning(rank, size)
    own, everybody = Part(OWN, 0, num_bytes), Members(range(size), rank)
    block = Part(OUT, 0, num_bytes // size)
    if size == 1:
        plan.copy(block, own)
    elif size <= _DIRECT_MEMBERS:
        _scatter_directly(plan, everybody, own, block, element_bytes)
    else:
        sums = plan.scratch(num_bytes)
        _ring_scatter(plan, everybody, own, sums, element_bytes)
        plan.copy(block, _blocks(sums, size, element_bytes)[rank])
    return plan.done()


def reduce(rank: int, size: int, num_bytes: int, element_bytes: int, root: int) -> Schedule:
    """Returns the schedule that leaves the reduction of large arrays on the root; `OUT` is empty elsewhere.

    **Arguments:** as for `all_reduce`. `root`: a rank.
    """
    plan = Planning(rank, size)
    own, everybody = Part(OWN, 0, num_bytes), Members(range(size), rank)
    sums = Part(OUT, 0, num_bytes) if rank == root else plan.scratch(num_bytes)
    if size == 1:
        plan.copy(sums, own)
    _scatter(plan, everybody, own, sums, element_bytes)
    blocks = _blocks(sums, size, element_bytes)
    if rank == root:
        plan.wait(*plan.greet([], everybody.others))
        plan.wait(*(plan.receive(peer, blocks[peer]) for peer in everybody.others if blocks[peer].num_bytes))
    else:
        plan.wait(*plan.greet([root], []))
        if blocks[rank].num_bytes:
            plan.send(root, blocks[rank])
    return plan.done()


def _directly(rank: int, size: int, own: Part, out: Part) -> Schedule:
    """Reduces small arrays, which each member sends to all others, in one round."""
    plan = Planning(rank, size, carried=own, expected_bytes=own.num_bytes)
    others = [(rank + distance) % size for distance in range(1, size)]
    coming = {peer: plan.receive_headed(peer, own.num_bytes) for peer in others[-2::-1]}
    sent = [plan.opening_sent, *(plan.send_headed(peer, own) for peer in others[1:])]
    arrays = {rank: own, others[-1]: plan.hear()}
    for peer, (ticket, incoming) in coming.items():
        plan.wait(ticket)
        arrays[peer] = incoming
    plan.wait(*sent)  # `out` may be what is sent
    total, sums = arrays[0], plan.scratch(own.num_bytes if size > 2 else 0)
    for peer in range(1, size):  # in one order, so that all get the same bits
        to = out if peer == size - 1 else sums
        plan.reduce(to, total, arrays[peer])
        total = to
    return plan.done()


def _all_reduce(plan: Planning, members: Members, own: Part, out: Part, element_bytes: int) -> None:
    if own.num_bytes <= _SMALL_BYTES or len(members) == 1:
        plan.copy(out, own)
        _double(plan, members, out)
    elif len(members) <= _DIRECT_MEMBERS:
        blocks = _blocks(out, len(members), element_bytes)
        _scatter_directly(plan, members, own, blocks[members.place], element_bytes, gathered=blocks)
    else:
        _ring_scatter(plan, members, own, out, element_bytes)
        _ring_gather(plan, members, out, element_bytes)


def _two_levels(plan: Planning, groups: Sequence[Sequence[int]], own: Part, out: Part, element_bytes: int) -> None:
    """Reduces inside hosts first, so that what crosses between them is as little as can be.

    With equally many members on all hosts, each reduces a share of its host's with its counterparts on the others.
    Otherwise the first of each host does it for all.
    """
    mine = next(group for group in groups if plan.rank in group)
    inside = Members(mine, mine.index(plan.rank))
    place_of_host = groups.index(mine)
    if len({len(group) for group in groups}) == 1 and own.num_bytes > _SMALL_BYTES:
        _scatter(plan, inside, own, out, element_bytes)
        share = _blocks(out, len(inside), element_bytes)[inside.place]
        across = Members([group[inside.place] for group in groups], place_of_host)
        _all_reduce(plan, across, share, share, element_bytes)
        _ring_gather(plan, inside, out, element_bytes)
        return
    plan.copy(out, own)
    _up(plan, inside, out)
    if inside.place == 0:
        across = Members([group[0] for group in groups], place_of_host)
        _all_reduce(plan, across, out, out, element_bytes)
    _down(plan, inside, out)


def _double(plan: Planning, members: Members, flat: Part) -> None:
    """Exchanges small arrays with partners at doubling distances.

    Members beyond the largest power of two lend theirs to others.
    """
    place, size = members.place, len(members)
    core = 1 << (size.bit_length() - 1)
    extra = size - core
    if place >= core:
        lender = members.ranks[place - core]
        plan.send_headed(lender, flat)
        plan.copy(flat, _heard(plan, lender, flat))
        return
    if place < extra:
        plan.reduce(flat, flat, _heard(plan, members.ranks[place + core], flat))
    distance = 1
    while distance < core:
        partner = place ^ distance
        sent = plan.send_headed(members.ranks[partner], flat)
        incoming = _heard(plan, members.ranks[partner], flat)
        plan.wait(sent)
        # The lower one's operand comes first on both sides, so that both get the same bits.
        first, second = (flat, incoming) if place < partner else (incoming, flat)
        plan.reduce(flat, first, second)
        distance *= 2
    if place < extra:
        plan.send_headed(members.ranks[place + core], flat)


def _up(plan: Planning, members: Members, flat: Part) -> None:
    """Reduces to the first member by a tree."""
    distance = 1
    while distance < len(members):
        if members.place & distance:
            _send(plan, members.ranks[members.place - distance], flat)
            return
        if members.place + distance < len(members):
            plan.reduce(flat, flat, _received(plan, members.ranks[members.place + distance], flat))
        distance *= 2


def _down(plan: Planning, members: Members, flat: Part) -> None:
    """Brings the array of the first member to all by a tree."""
    distance = 1 << (len(members) - 1).bit_length()
    while distance > 1:
        distance //= 2
        if members.place % (2 * distance) == distance:
            plan.copy(flat, _received(plan, members.ranks[members.place - distance], flat))
        elif members.place % (2 * distance) == 0 and members.place + distance < len(members):
            _send(plan, members.ranks[members.place + distance], flat)


def _heard(plan: Planning, peer: int, like: Part) -> Part:
    ticket, incoming = plan.receive_headed(peer, like.num_bytes)
    plan.wait(ticket)
    return incoming


def _send(plan: Planning, peer: int, flat: Part) -> None:
    if flat.num_bytes <= OPENING_BYTES:
        plan.wait(plan.send_headed(peer, flat))
    else:
        plan.wait(plan.send_headed(peer), plan.send(peer, flat))


def _received(plan: Planning, peer: int, like: Part) -> Part:
    if like.num_bytes <= OPENING_BYTES:
        return _heard(plan, peer, like)
    head, _ = plan.receive_headed(peer)
    incoming = plan.scratch(like.num_bytes)
    plan.wait(head, plan.receive(peer, incoming))
    return incoming


def _scatter(plan: Planning, members: Members, own: Part, out: Part, element_bytes: int) -> None:
    """Leaves its block of the reduction on each member; the other blocks of `out` hold what is not whole."""
    if len(members) <= _DIRECT_MEMBERS:
        block = _blocks(out, len(members), element_bytes)[members.place]
        _scatter_directly(plan, members, own, block, element_bytes)
    else:
        _ring_scatter(plan, members, own, out, element_bytes)


def _scatter_directly(
    plan: Planning,
    members: Members,
    own: Part,
    block: Part,
    element_bytes: int,
    gathered: Sequence[Part] = (),
) -> None:
    """Sends to each member its block, piece by piece, and reduces what comes for this one's.

    No member sends far ahead of what the others receive, so that little comes before it is asked for. Between two
    members, messages go in the order of the loop on both sides.

    **Arguments:** `block`: of the result. `gathered`: the blocks of all members, if all are to have them: each piece is
    sent on once it is reduced.
    """
    others, place = members.others, members.place
    blocks = [_pieces(each, element_bytes) for each in _blocks(own, len(members), element_bytes)]
    mine, sums = blocks[place], _pieces(block, element_bytes)
    results = [_pieces(each, element_bytes) for each in gathered] or [[]] * len(members)
    heads = plan.greet(others, others)
    room = max((piece.num_bytes for piece in mine), default=0)
    slots = [[plan.scratch(room) for _ in others] for _ in range(min(_AHEAD, len(mine)))]
    coming: dict[int, list[tuple[int, Part]]] = {}
    arriving: list[int] = []
    places = [(place + distance) % len(members) for distance in range(1, len(members))]

    def exchange(index: int) -> None:
        """Begins to send to all a piece of theirs, and to receive from all one of this member's."""
        for peer, theirs in zip(others, places, strict=True):
            if index < len(blocks[theirs]):
                plan.send(peer, blocks[theirs][index])
        if index < len(mine):
            rooms = [slot.part(0, mine[index].num_bytes) for slot in slots[index % _AHEAD]]
            coming[index] = [(plan.receive(peer, slot), slot) for peer, slot in zip(others, rooms, strict=True)]

    for index in range(_AHEAD):
        exchange(index)
    plan.wait(*heads)
    for index in range(max(map(len, blocks))):
        if index < len(mine):
            piece = mine[index]
            for ticket, slot in coming.pop(index):
                plan.wait(ticket)
                plan.reduce(sums[index], piece, slot)
                piece = sums[index]
        for peer, theirs in zip(others, places, strict=True):
            if index < len(results[place]):
                plan.send(peer, sums[index])
            if index < len(results[theirs]):
                arriving.append(plan.receive(peer, results[theirs][index]))
        exchange(index + _AHEAD)
    plan.wait(*arriving)


def _ring_scatter(plan: Planning, members: Members, own: Part, out: Part, element_bytes: int) -> None:
    """Lets blocks travel once around, to each of which every member adds its own."""
    size, place = len(members), members.place
    own_blocks, sums = _blocks(own, size, element_bytes), _blocks(out, size, element_bytes)
    after, before = members.at(1), members.at(-1)
    heads = plan.greet([after], [before])
    slots = [plan.scratch(_piece_bytes(element_bytes)) for _ in range(_AHEAD)]
    outgoing = deque(_pieces(own_blocks[(place - 1) % size], element_bytes))
    for _ in range(min(_AHEAD, len(outgoing))):
        plan.send(after, outgoing.popleft())
    for step in range(size - 1):
        number = (place - step - 2) % size
        mine, totals = _pieces(own_blocks[number], element_bytes), _pieces(sums[number], element_bytes)
        rooms = [slots[index % _AHEAD].part(0, piece.num_bytes) for index, piece in enumerate(mine)]
        coming = deque(plan.receive(before, room) for room in rooms[:_AHEAD])
        plan.wait(*(heads if step == 0 else ()))
        for index, (total, piece, room) in enumerate(zip(totals, mine, rooms, strict=True)):
            plan.wait(coming.popleft())
            plan.reduce(total, room, piece)
            if index + _AHEAD < len(mine):
                coming.append(plan.receive(before, rooms[index + _AHEAD]))
            if step < size - 2:
                outgoing.append(total)
            if outgoing:  # one for each that has come: so nobody is far ahead
                plan.send(after, outgoing.popleft())
    while outgoing:
        plan.send(after, outgoing.popleft())


def _ring_gather(plan: Planning, members: Members, out: Part, element_bytes: int) -> None:
    """Lets each member's own block travel once around, so that all have all."""
    size, place = len(members), members.place
    blocks = _blocks(out, size, element_bytes)
    after, before = members.at(1), members.at(-1)
    plan.wait(*plan.greet([after], [before]))
    outgoing = deque(_pieces(blocks[place], element_bytes))
    for _ in range(min(_AHEAD, len(outgoing))):
        plan.send(after, outgoing.popleft())
    for step in range(size - 1):
        pieces = _pieces(blocks[(place - step - 1) % size], element_bytes)
        coming = [plan.receive(before, piece) for piece in pieces]
        for ticket, piece in zip(coming, pieces, strict=True):
            plan.wait(ticket)
            if step < size - 2:
                outgoing.append(piece)
            if outgoing:
                plan.send(after, outgoing.popleft())
    while outgoing:
        plan.send(after, outgoing.popleft())


def _by_host(hosts: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for member, host in enumerate(hosts):
        groups.setdefault(host, []).append(member)
    return list(groups.values())


def _blocks(part: Part, num_blocks: int, element_bytes: int) -> list[Part]:
    """Divides elements among blocks, as evenly as can be."""
    num_elements = part.num_bytes // element_bytes
    bounds = [num_elements * block // num_blocks * element_bytes for block in range(num_blocks + 1)]
    return [part.part(begin, end) for begin, end in pairwise(bounds)]


def _pieces(block: Part, element_bytes: int) -> list[Part]:
    """Returns a block in pieces, the same ones on every member; none of an empty block."""
    length = _piece_bytes(element_bytes)
    return [block.part(start, min(start + length, block.num_bytes)) for start in range(0, block.num_bytes, length)]


def _piece_bytes(element_bytes: int) -> int:
    return max(1, _PIECE_BYTES // element_bytes) * element_bytes
