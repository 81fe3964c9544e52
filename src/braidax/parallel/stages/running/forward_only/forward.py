"""A function of a state, computed stage by stage where its parameters lie."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax

from braidax.parallel.plan.layout import Layout
from braidax.parallel.stages.running.feeding import Given
from braidax.parallel.stages.running.home import Home
from braidax.parallel.stages.running.owning.carried import Carried
from braidax.parallel.stages.running.owning.ownership import Ownership, Piece
from braidax.parallel.stages.running.stage_programs import BATCH, PARAMS
from braidax.program import Lies, Program, following

from .part import ForwardPart


@final
class Forward:
    """Computes a function of a state and a batch; equal to one device, on all samples at once.

    Each stage runs one program, on what it is sent by those before. Nothing waits for the devices: while a stage has
    one batch, those before it have the next.

    **Arguments:** `program`: `(params, variables, key, batch) -> result`. `homes`: of the stages. `ownership`,
    `layouts`: of parameters. `carried`: where variables lie.

    **Raises:** `ArgumentError` for a program that changes references.
    """

    def __init__(
        self,
        program: Program,
        homes: Sequence[Home],
        ownership: Ownership,
        layouts: Mapping[tuple[int, Piece], Layout],
        carried: Sequence[Carried],
    ) -> None:
        self._homes, self._ownership, self._carried = homes, ownership, carried
        self.structure = jax.tree.structure(program.out_specs)
        counts = [len(jax.tree.leaves(one)) for one in program.in_specs]
        lie: list[list[Lies]] = [[] for _ in range(counts[PARAMS])]
        for stage, own in enumerate(ownership.pieces):
            for one in own:
                lie[one.leaf].append(Lies(one.rows, stage))
        dims: dict[int, int | None] = {}
        parts = following(program, [sorted(own, key=lambda one: one.rows or (0, 0)) for own in lie])
        self._parts = [ForwardPart(one, homes[one.place], counts, ownership, layouts, dims) for one in parts]
        self._places = [{piece: at for at, piece in enumerate(own)} for own in ownership.pieces]
        placed = {at: one for one in self._parts for at in one.part.outputs}
        self.result_homes = [placed[at].home for at in range(len(placed))]
        on = {at: lie for one in self._parts for at, lie in zip(one.part.outputs, one.outputs_lie, strict=True)}
        self.results_lie = [on[at] for at in range(len(on))]
        self.num_programs = len(self._parts)
        users = {leaf: one for one in reversed(self._parts) for leaf in one.batch}
        self.batch_homes = [users[at].home if at in users else homes[0] for at in range(counts[BATCH])]
        """Of each leaf of a batch, where it is first used."""

    def __call__(
        self, pieces: Sequence[Sequence[Any]], variables: Sequence[Any], key: Any, batch: Sequence[Given]
    ) -> list[Any]:
        """Computes it; gives nothing up.

        **Arguments:** `pieces`: of parameters, of each stage those that it owns. `variables`: leaves. `key`: data of
        it, with the first stage. `batch`: leaves, which go to the stages that use them.

        **Returns:** leaves of the result, each with the stage that computes it.
        """
        values: dict[int, tuple[Home, Any]] = {}
        found: dict[int, Any] = {}
        for one in self._parts:
            home = one.home
            held = [
                self._brought(home, pieces[owner][self._places[owner][piece]], self._homes[owner], on)
                for (owner, piece), on in zip(one.pieces, one.pieces_lie, strict=True)
            ]
            lent = [
                self._brought(home, variables[at], self._homes[self._carried[at].stage], home.whole)
                for at in one.variables
            ]
            keys = home.bring([key], self._homes[0], [home.whole]) if one.has_key else ()
            samples = [
                home.place([given.array], [on])[0]
                if given.home is None
                else self._brought(home, given.array, given.home, on)
                for given, on in zip((batch[at] for at in one.batch), one.samples_lie, strict=True)
            ]
            incoming = [
                self._brought(home, values[at][1], values[at][0], on)
                for at, on in zip(one.part.incoming, one.incoming_lies, strict=True)
            ]
            outgoing, outputs = one.run(tuple(held), tuple(lent), tuple(keys), tuple(samples), tuple(incoming))
            values.update((at, (home, value)) for at, value in zip(one.part.outgoing, outgoing, strict=True))
            found.update(zip(one.part.outputs, outputs, strict=True))
        return [found[at] for at in range(len(found))]

    def _brought(self, home: Home, array: Any, source: Home, on: Any) -> Any:
        return home.bring([array], source, [on])[0]
