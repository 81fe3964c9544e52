"""Schedules that move arrays of equal sizes between all members, and the barrier."""

from braidax.comm.collectives.schedule import NOTHING, OPENING_BYTES, OUT, OWN, Part, Planning, Schedule

_DIRECT_MEMBERS = 8  # up to here each sends to all; beyond it what is gathered travels


def barrier(rank: int, size: int) -> Schedule:
    """Returns the schedule that ends when all have come: log2(size) rounds (Hensgen, Finkel and Manber 1988)."""
    plan = Planning(rank, size)
    if size > 1:
        plan.hear()
    distance = 2
    while distance < size:
        sent = plan.send_headed((rank + distance) % size)
        heard, _ = plan.receive_headed((rank - distance) % size)
        plan.wait(sent, heard)
        distance *= 2
    return plan.done()


def all_to_all(rank: int, size: int, block_bytes: int) -> Schedule:
    """Returns the schedule that gives block `i` of each member to member `i`, all pairs at once."""
    own, out = _blocks(OWN, size, block_bytes), _blocks(OUT, size, block_bytes)
    others = [(rank + distance) % size for distance in range(1, size)]
    sources = others[::-1]  # the one before this one first
    return _direct(rank, size, {peer: own[peer] for peer in others}, {peer: out[peer] for peer in sources}, own, out)


def all_gather(rank: int, size: int, block_bytes: int) -> Schedule:
    """Returns the schedule that leaves the arrays of all members, by rank, on every one.

    A few members send to all others; many gather small arrays by Bruck's algorithm (1997) and large ones around a ring.
    """
    own, out = Part(OWN, 0, block_bytes), _blocks(OUT, size, block_bytes)
    if size <= _DIRECT_MEMBERS:
        others = [(rank + distance) % size for distance in range(1, size)]
        arriving = {peer: out[peer] for peer in others[::-1]}
        return _direct(rank, size, dict.fromkeys(others, own), arriving, [own] * size, out)
    if size * block_bytes <= OPENING_BYTES:
        return _bruck(rank, size, block_bytes, own, out)
    return _ring(rank, size, own, out)


def _direct(
    rank: int, size: int, sent: dict[int, Part], received: dict[int, Part], own: list[Part], out: list[Part]
) -> Schedule:
    """Sends something to each other member, and receives something from each; `own[rank]` becomes `out[rank]`."""
    is_small = out[rank].num_bytes <= OPENING_BYTES
    after, before = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        plan = Planning(rank, size)
        plan.copy(out[rank], own[rank])
        return plan.done()
    carried, expected_bytes = (sent[after], received[before].num_bytes) if is_small else (NOTHING, 0)
    plan = Planning(rank, size, carried=carried, expected_bytes=expected_bytes)
    if not is_small:
        heads = plan.greet(list(sent), list(received))
        arriving = [plan.receive(peer, part) for peer, part in received.items()]
        for peer, part in sent.items():
            plan.send(peer, part)
        plan.copy(out[rank], own[rank])
        plan.wait(*heads, *arriving)
        return plan.done()
    heard = {peer: plan.receive_headed(peer, part.num_bytes) for peer, part in received.items() if peer != before}
    for peer, part in sent.items():
        if peer != after:
            plan.send_headed(peer, part)
    plan.copy(out[rank], own[rank])
    plan.copy(out[before], plan.hear())
    for peer, (ticket, incoming) in heard.items():
        plan.wait(ticket)
        plan.copy(out[peer], incoming)
    return plan.done()


def _bruck(rank: int, size: int, block_bytes: int, own: Part, out: list[Part]) -> Schedule:
    """Doubles what each member has, in every round from one that is twice as far before it."""
    plan = Planning(rank, size, carried=own, expected_bytes=block_bytes)
    gathered = plan.scratch(size * block_bytes)  # from this member's own one backward in rank
    blocks = [gathered.part(index * block_bytes, (index + 1) * block_bytes) for index in range(size)]
    plan.copy(blocks[0], own)
    plan.copy(blocks[1], plan.hear())
    distance = 2
    while distance < size:
        count = min(distance, size - distance)
        num_bytes = count * block_bytes
        sent = plan.send_headed((rank + distance) % size, gathered.part(0, num_bytes))
        ticket, incoming = plan.receive_headed((rank - distance) % size, num_bytes)
        plan.wait(ticket)
        plan.copy(gathered.part(distance * block_bytes, distance * block_bytes + num_bytes), incoming)
        plan.wait(sent)
        distance *= 2
    for index, block in enumerate(blocks):
        plan.copy(out[(rank - index) % size], block)
    return plan.done()


def _ring(rank: int, size: int, own: Part, out: list[Part]) -> Schedule:
    plan = Planning(rank, size)
    after, before = (rank + 1) % size, (rank - 1) % size
    plan.send(after, own)
    plan.hear()
    for step in range(1, size):
        block = out[(rank - step) % size]
        plan.wait(plan.receive(before, block))
        if step < size - 1:
            plan.send(after, block)
    plan.copy(out[rank], own)
    return plan.done()


def _blocks(place: int, size: int, block_bytes: int) -> list[Part]:
    return [Part(place, index * block_bytes, block_bytes) for index in range(size)]
