"""The optimizer of a pipeline whose stages update at different moments, divided among them."""

from collections.abc import Sequence
from typing import Any, final

import jax

from braidax.errors import ArgumentError
from braidax.parallel.plan.layout import Layout
from braidax.parallel.stages.running.executor import Pipelined
from braidax.parallel.stages.running.owning.divided_tree import DividedTree
from braidax.parallel.stages.schedules import Kind
from braidax.parallel.stages.schedules.versions import given_up
from braidax.program import PlacePart, Program, apart

from .stage_update import Owned, StageUpdate


@final
class StageUpdates:
    """The update of each stage; what no stage's variables go into, such as a count, every stage makes for itself.

    **Arguments:** `update`: traced `(params, opt_state, gradients, loss) -> (params, opt_state)`. `tree`: form of the
    parameters. `places`: of each leaf of the optimizer's state its stage, None: not known. `layouts`: of the leaves of
    parameters, and of those.

    **Raises:** `ArgumentError` for an optimizer that takes together what several stages have, or the loss.
    """

    def __init__(
        self,
        update: Program,
        run: Pipelined,
        tree: DividedTree,
        places: Sequence[int | None],
        layouts: Sequence[Layout],
    ) -> None:
        self._homes, self._tree = run.homes, tree
        self._structure = jax.tree.structure(update.out_specs[1])
        num_params, name = len(tree.stages), run.schedule.name
        parts, places = _parts(update, tree.stages, list(places), len(run.homes), name)
        self.places = places
        """Of each leaf of the optimizer's state its stage, None: all stages have it."""
        params = tree.pieces(list(range(num_params)))
        opt_state: list[list[int]] = [[] for _ in run.homes]
        shared: list[int] = []
        for at, place in enumerate(places, start=num_params):
            (shared if place is None else opt_state[place]).append(at)
        self._opt_state, self._shared = opt_state, shared
        gives_up = _giving_up(run)
        self.stages: list[StageUpdate] = []
        for stage, home in enumerate(run.homes):
            inputs = Owned(tuple(params[stage]), tuple(opt_state[stage]), tuple(shared))
            on = Owned(*(tuple(home.lies(layouts[at]) for at in own) for own in inputs))
            pieces = {piece: at for at, piece in enumerate(run.ownership.pieces[stage])}
            programs, begin = run.stage_programs[stage], num_params + len(places)
            made = StageUpdate(
                parts[stage], inputs, [begin + at for at in params[stage]], on,
                [pieces[piece] for _, piece in programs.read_pieces], programs, run.flushes[stage],
                gives_up=gives_up[stage],
            )  # fmt: skip
            self.stages.append(made)

    def owned(self, params: Any, opt_state: Any) -> list[Owned]:
        """Returns what each stage has of a state, and of what is shared a copy."""
        leaves: list[Any] = [*jax.tree.leaves(params), *jax.tree.leaves(opt_state)]
        lent = [leaves[at] for at in self._shared]
        copies = {home: home.bring(lent, self._homes[0], [home.whole] * len(lent)) for home in self._homes}
        pieces = zip(self._tree.pieces(params), self._opt_state, self._homes, strict=True)
        return [Owned(tuple(own), tuple(leaves[at] for at in of), tuple(copies[home])) for own, of, home in pieces]

    def whole(self, owned: Sequence[Owned]) -> tuple[Any, Any]:
        """Returns parameters and the optimizer's state of what stages have."""
        known = dict(zip(self._shared, owned[0].shared, strict=True))
        for one, numbers in zip(owned, self._opt_state, strict=True):
            known.update(zip(numbers, one.opt_state, strict=True))
        params = self._tree.of_pieces([one.params for one in owned])
        return params, self._structure.unflatten([known[at] for at in sorted(known)])


def _parts(
    update: Program, stages: Sequence[int], places: list[int | None], count: int, name: str
) -> tuple[list[PlacePart], list[int | None]]:
    """Divides an update; what a single stage's variables go into is of that stage."""
    loss = 2 * len(stages) + len(places)
    while True:
        try:
            parts, at = apart(update, [*stages, *places, *stages, None], count)
        except ArgumentError as error:
            raise _refused(f"what several stages have ({error})", name) from error
        if any(loss in part.inputs for part in parts):
            raise _refused("the loss", name)
        made = at[len(stages) :]
        new = [there if place is None else place for place, there in zip(places, made, strict=True)]
        strange = [(place, there) for place, there in zip(new, made, strict=True) if there not in (None, place)]
        if strange:
            raise _refused(f"what stage {strange[0][1]} has for the state of stage {strange[0][0]}", name)
        if new == places:
            return parts, places
        places = new


def _refused(what: str, name: str) -> ArgumentError:
    return ArgumentError(
        f"optimizer takes {what}, and by schedule {name!r} stages update at different moments, each with gradients of "
        f"its own: take a schedule that flushes, such as 1F1B, or an optimizer that moves each variable by itself"
    )


def _giving_up(run: Pipelined) -> list[bool]:
    """Returns of each stage whether behind each of its updates nothing needs the version before it."""
    gone = given_up(run.schedule, run.versions.used)
    updates = [one for one in run.schedule.operations() if one.kind is Kind.UPDATE]
    late = {one.stage for one in updates if one.microbatch not in gone.get(one, ())}
    return [stage not in late for stage in range(run.schedule.num_stages)]
