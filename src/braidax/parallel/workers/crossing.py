"""Numbers of one server that variables on another one move by, such as the parts of a norm over all gradients."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, final

import jax

from braidax.program import Program, Term, Terms, compute, inlined, terms_of, trace


class Crossing(NamedTuple):
    """A number that crosses. **Fields:** `term`: what it is. `server`: that has all it is made of."""

    term: Term
    server: int


@final
class Crossings:
    """The numbers of an update that servers need of one another.

    A number crosses where it is a scalar, is made of what one server has, and what another one has moves by it. What
    else another one would need stays where it is.

    **Arguments:** `program`: of the whole update, flat lists in and out. `having`: by input and output which server has
    it, None for what all have. `apart`: inputs that are not as they were when a number comes to be used.

    **Fields:** `found`: in the order of servers.
    """

    def __init__(
        self,
        program: Program,
        having: tuple[Sequence[int | None], Sequence[int | None]],
        num_servers: int,
        apart: Collection[int] = (),
    ) -> None:
        self._specs = [jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype) for one in program.closed.jaxpr.invars]
        terms = Terms()
        self._inputs = [terms.given(at, spec) for at, spec in enumerate(self._specs)]
        self._outputs = terms_of(terms, inlined(program).closed, self._inputs)
        self._apart = sum(1 << at for at in apart)
        of_inputs, of_outputs = having
        self._bits = [
            sum(1 << at for at, one in enumerate(of_inputs) if one == server) for server in range(num_servers)
        ]
        crossing = dict[int, Crossing]()
        for server in range(num_servers):
            wanted = [term for term, one in zip(self._outputs, of_outputs, strict=True) if one in (None, server)]
            crossing |= self._of_others(wanted, server)
        self.found = sorted(crossing.values(), key=lambda one: (one.server, one.term.number))

    def _of_others(self, wanted: Sequence[Term], server: int) -> dict[int, Crossing]:
        """Returns the numbers that a server needs of others, by those of their terms."""
        found, todo, seen = dict[int, Crossing](), [*wanted], set[int]()
        while todo:
            term = todo.pop()
            if term.number in seen:
                continue
            seen.add(term.number)
            owners = [one for one, bits in enumerate(self._bits) if term.reads & bits]
            if owners in ([], [server]):
                continue
            if len(owners) == 1 and not term.shape and not term.is_input and not term.reads & self._apart:
                found[term.number] = Crossing(term, owners[0])
            else:
                todo += term.operands
        return found

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Of the numbers that cross."""
        return [jax.ShapeDtypeStruct((), one.term.dtype) for one in self.found]

    def given(self) -> Program:
        """Returns the update, which is given the numbers that cross behind its other inputs."""

        def update(inputs: list[Any], numbers: list[Any]) -> list[Any]:
            pairs = zip((one.term for one in self.found), numbers, strict=True)
            return compute(self._outputs, self._known(inputs) | {term.number: value for term, value in pairs})

        return trace(update, self._specs, self.specs)

    def of_server(self, server: int, inputs: Sequence[Any]) -> list[Any]:
        """Returns the numbers of a server that others need. **Arguments:** `inputs`: of the update, None where it is
        not this server's."""
        return compute([one.term for one in self.found if one.server == server], self._known(inputs))

    def _known(self, inputs: Sequence[Any]) -> dict[int, Any]:
        pairs = zip(self._inputs, inputs, strict=True)
        return {term.number: value for term, value in pairs if value is not None}
