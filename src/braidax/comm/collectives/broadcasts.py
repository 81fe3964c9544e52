"""The schedule that brings the array of one member to all."""

from collections.abc import Sequence

from braidax.comm.collectives.schedule import NOTHING, OPENING_BYTES, OUT, OWN, Part, Planning, Schedule

_PIECE_BYTES = 1 << 19  # of an array: one is sent on while the next ones are on their way


def broadcast(rank: int, size: int, num_bytes: int, root: int) -> Schedule:
    """Returns the schedule that leaves the root's `OWN` in `OUT` of all others; `OUT` of the root is empty.

    A small array goes down a binomial tree. A large one goes in pieces from each member to the next one, where that is
    shorter than the tree, in which the root sends all of it once to each of its children.

    **Arguments:** `num_bytes`: of the array.
    """
    place = (rank - root) % size  # places count from the root
    whole = Part(OUT if place else OWN, 0, num_bytes)
    parents, children = _tree(place, size)
    if num_bytes > OPENING_BYTES:
        pieces = _pieces(whole)
        if len(pieces) + size - 2 < len(pieces) * (size - 1).bit_length():
            parents = [place - 1] if place else []
            children = [place + 1] if place < size - 1 else []
        plan = Planning(rank, size)
        _in_pieces(plan, _ranks(parents, root, size), _ranks(children, root, size), pieces)
    elif place <= 1:  # what goes between these two is the first message to the next member
        plan = Planning(rank, size, carried=NOTHING if place else whole, expected_bytes=num_bytes if place else 0)
        if place:
            plan.copy(whole, plan.hear())
        _at_once(plan, [], _ranks(children if place else children[1:], root, size), whole)
    else:
        plan = Planning(rank, size)
        _at_once(plan, _ranks(parents, root, size), _ranks(children, root, size), whole)
    return plan.done()


def _at_once(plan: Planning, parents: Sequence[int], children: Sequence[int], whole: Part) -> None:
    for parent in parents:
        ticket, incoming = plan.receive_headed(parent, whole.num_bytes)
        plan.wait(ticket)
        plan.copy(whole, incoming)
    for child in children:
        plan.send_headed(child, whole)


def _in_pieces(plan: Planning, parents: Sequence[int], children: Sequence[int], pieces: Sequence[Part]) -> None:
    heads = plan.greet([], parents)
    arriving = [plan.receive(parent, piece) for parent in parents for piece in pieces]
    plan.greet(children, [])
    if parents:
        plan.wait(*heads)  # nothing is sent on before that was compared
    for index, piece in enumerate(pieces):
        if parents:
            plan.wait(arriving[index])
        for child in children:
            plan.send(child, piece)


def _pieces(whole: Part) -> list[Part]:
    starts = range(0, whole.num_bytes, _PIECE_BYTES)
    return [whole.part(start, min(start + _PIECE_BYTES, whole.num_bytes)) for start in starts]


def _tree(place: int, size: int) -> tuple[list[int], list[int]]:
    """Returns the places above and under one in the binomial tree: without its highest bit, with a higher one more."""
    above = [place - (1 << (place.bit_length() - 1))] if place else []
    bits = range(place.bit_length(), size.bit_length())
    return above, [place + (1 << bit) for bit in bits if place + (1 << bit) < size]


def _ranks(places: Sequence[int], root: int, size: int) -> list[int]:
    return [(place + root) % size for place in places]
