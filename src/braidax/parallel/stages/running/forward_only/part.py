"""What one stage computes of a function of a state."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from braidax.parallel.dense.passes import dense_passes
from braidax.parallel.plan.layout import Layout
from braidax.parallel.stages.running.feeding import impl_of
from braidax.parallel.stages.running.home import Home
from braidax.parallel.stages.running.owning.ownership import Ownership, Piece, Rows
from braidax.parallel.stages.running.stage_programs import BATCH, KEY, PARAMS, VARIABLES
from braidax.program import FollowingPart, batch_dims_of_results, trace

_INCOMING = BATCH + 1


class Taken(NamedTuple):
    """Of a leaf of parameters that is read: the pieces of it, by owner, and the rows of these, or all."""

    pieces: tuple[tuple[int, Piece], ...]
    rows: Rows | None


@final
class ForwardPart:
    """A part of a function, compiled for the home of its stage at its first call.

    **Arguments:** `counts`: of the leaves of each argument of the function. `ownership`, `layouts`: of pieces of
    parameters. `dims`: of values that go from stage to stage, by number, which one goes along the samples; those that
    this part sends are put in.
    """

    def __init__(
        self,
        part: FollowingPart,
        home: Home,
        counts: Sequence[int],
        ownership: Ownership,
        layouts: Mapping[tuple[int, Piece], Layout],
        dims: dict[int, int | None],
    ) -> None:
        self.part, self.home = part, home
        first = [sum(counts[:at]) for at in range(len(counts))]
        leaves: list[list[int]] = [[] for _ in counts]
        self._taken: list[Taken] = []
        for number, rows in part.leaves:
            argument = max(at for at, begin in enumerate(first) if begin <= number and counts[at])
            leaves[argument].append(number - first[argument])
            if argument == PARAMS:
                self._taken.append(_taken(ownership, number, rows))
        self.variables, self.batch, self.has_key = leaves[VARIABLES], leaves[BATCH], bool(leaves[KEY])
        self.pieces = tuple(dict.fromkeys(one for taken in self._taken for one in taken.pieces))
        self._layouts = [layouts[one] for one in self.pieces]
        self.pieces_lie = tuple(home.lies(one) for one in self._layouts)
        self._find_dims(dims)

    def _find_dims(self, dims: dict[int, int | None]) -> None:
        home, part, incoming = self.home, self.part, [dims[at] for at in self.part.incoming]
        divided: dict[int, Any] = {BATCH: 0, _INCOMING: incoming}
        self._program = part.program
        if home.is_divided:
            places = dict(zip(self.pieces, self._layouts, strict=True))
            specs = jax.tree.leaves(part.program.in_specs[PARAMS])
            pairs = zip(self._taken, specs, strict=True)
            lie = [
                places[one.pieces[0]] if len(one.pieces) == 1 and one.rows is None else Layout.whole(spec.shape)
                for one, spec in pairs
            ]
            self._program = dense_passes(part.program, lie, home.mesh, home.batch_axes, divided)
        *args, values = self._program.in_specs
        traced = trace(lambda *given: self._program(*given), *args, values, mesh=home.traced_on)
        found = batch_dims_of_results(traced, divided, islands=True)
        self._key_impl: Any = impl_of(jax.tree.leaves(args[KEY])[0]) if self.has_key else None
        whole = (home.whole,)
        self.samples_lie = tuple(home.along(one.shape, 0) for one in jax.tree.leaves(args[BATCH]))
        of_values = (home.along(one.shape, dim) for one, dim in zip(values, incoming, strict=True))
        self.incoming_lies: tuple[Sharding, ...] = tuple(of_values)
        specs = jax.tree.leaves(self._program.out_specs)
        on = tuple(home.along(one.shape, dim) for one, dim in zip(specs, found, strict=True))
        count = len(part.outgoing)
        dims.update(zip(part.outgoing, found, strict=False))
        self.outputs_lie = on[count:]
        given = (whole * len(self.variables), whole * self.has_key, self.samples_lie)
        self.run = home.compile(self._run, (self.pieces_lie, *given, self.incoming_lies), (on[:count], on[count:]))

    def _run(
        self,
        pieces: Sequence[Any],
        variables: Sequence[Any],
        key: Sequence[Any],
        samples: Sequence[Any],
        incoming: Sequence[Any],
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        pairs = zip(self.pieces, self._layouts, pieces, strict=True)
        held = {one: layout.load(array) for one, layout, array in pairs}
        leaves: list[Any] = []
        for taken in self._taken:
            own = [held[one] for one in taken.pieces]
            whole = own[0] if len(own) == 1 else jnp.concatenate(own)
            leaves.append(whole if taken.rows is None else whole[slice(*taken.rows)])
        typed = [jax.random.wrap_key_data(one, impl=self._key_impl) for one in key]
        given = [*leaves, *variables, *typed, *samples]
        args = jax.tree.unflatten(jax.tree.structure(self._program.in_specs[:-1]), given)
        outgoing, outputs = self._program(*args, tuple(incoming))
        return tuple(outgoing), tuple(outputs)


def _taken(ownership: Ownership, leaf: int, rows: Rows | None) -> Taken:
    """Returns what is read of a leaf: of the pieces in which it lies those that have any of these rows."""
    own = [(stage, one) for stage, pieces in enumerate(ownership.pieces) for one in pieces if one.leaf == leaf]
    own.sort(key=lambda one: one[1].rows or (0, 0))
    if len(own) == 1 or rows is None:
        return Taken(tuple(own), rows)
    found = [(at, one.rows) for at, (_, one) in enumerate(own) if one.rows and _overlap(one.rows, rows)]
    (_, (begin, _)), (_, (_, end)) = found[0], found[-1]
    inner = (rows[0] - begin, rows[1] - begin)
    return Taken(tuple(own[at] for at, _ in found), None if inner == (0, end - begin) else inner)


def _overlap(one: Rows, other: Rows) -> bool:
    return one[0] < other[1] and other[0] < one[1]
