"""The optimizer of one stage, which moves what that owns while other stages are elsewhere."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from jax.sharding import Sharding

from braidax.parallel.stages.running.flush import Flush
from braidax.parallel.stages.running.stage_programs import StagePrograms
from braidax.program import PlacePart


class Owned(NamedTuple):
    """What a stage has from update to update.

    **Fields:** `params`: its pieces. `opt_state`: leaves of the optimizer's that belong to these. `shared`: others, of
    which every stage makes the same, such as the number of updates.
    """

    params: tuple[Any, ...]
    opt_state: tuple[Any, ...]
    shared: tuple[Any, ...]


class Updated(NamedTuple):
    """What an update makes. **Fields:** `buffers`: of parameters, for the stage's programs. `sums`: of nothing."""

    owned: Owned
    buffers: list[Any]
    sums: list[Any]


@final
class StageUpdate:
    """Makes of sums of gradients the next version of what a stage owns, in one program.

    **Arguments:** `part`: of the optimizer's update. `inputs`: of these the numbers of parameters, optimizer's state,
    what is shared, and gradients; its outputs have the numbers of the first three. `on`: how those lie. `read`: which
    of the pieces the stage's programs read, in their order. `flush`: makes means of sums. `gives_up`: whether nothing
    needs a version of parameters any more once the next one is made.
    """

    def __init__(
        self,
        part: PlacePart,
        inputs: Owned,
        gradients: Sequence[int],
        on: Owned,
        read: Sequence[int],
        programs: StagePrograms,
        flush: Flush,
        *,
        gives_up: bool,
    ) -> None:
        self._part, self._inputs, self._gradients = part, inputs, tuple(gradients)
        self._read, self._programs, self._flush = tuple(read), programs, flush
        home, sums_on = programs.home, programs.sums_on
        joined: Sharding = home.whole
        self._run = home.compile(
            self._moved,
            (sums_on, on.opt_state, on.params, on.shared),
            (on, joined, sums_on),
            donate=(0, 1, 2) if gives_up else (0, 1),
        )

    def __call__(self, sums: Sequence[Any], owned: Owned) -> Updated:
        """Takes over the memory of sums and of the optimizer's state."""
        made, joined, no_sums = self._run(sums, owned.opt_state, owned.params, owned.shared)
        return Updated(made, [*joined, *self._programs.flat.alone([made.params[at] for at in self._read])], no_sums)

    def _moved(
        self, sums: Sequence[Any], opt_state: Sequence[Any], params: Sequence[Any], shared: Sequence[Any]
    ) -> tuple[Owned, list[Any], list[Any]]:
        given = (params, opt_state, shared, self._flush.averaged(sums))
        numbers = (*self._inputs, self._gradients)
        values = {at: one for of, each in zip(numbers, given, strict=True) for at, one in zip(of, each, strict=True)}
        found = dict(zip(self._part.outputs, self._part([values[at] for at in self._part.inputs], ()), strict=True))
        made = Owned(*(tuple(found[at] for at in own) for own in self._inputs))
        flat = self._programs.flat
        return made, flat.joined(flat.small([made.params[at] for at in self._read])), self._programs.no_sums()
