"""A program of values that lie with several stages, run where they lie."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import NamedSharding, Sharding

from braidax.program import JOINT, PlacePart, Program, divided

from .home import Home


@final
class PlacedProgram:
    """Runs a program whose inputs and outputs lie with stages; what joins all goes over the first one by scalars.

    **Arguments:** `places`: of each input, the stage; None: a scalar of the first one's. `kept`: numbers of inputs that
    become outputs, by these numbers, and give their memory to these. `lies`: how inputs lie that are not whole, by
    number; outputs that they become lie alike.

    **Raises:** `ArgumentError` for a program that joins large arrays of several stages.
    """

    def __init__(
        self,
        program: Program,
        places: Sequence[int | None],
        homes: Sequence[Home],
        *,
        kept: Collection[tuple[int, int]] = (),
        lies: Mapping[int, NamedSharding] | None = None,
    ) -> None:
        self._homes, self._structure = homes, jax.tree.structure(program.out_specs)
        self._places = list(places)
        parts, at = divided(program, places)
        self.places = [0 if place == JOINT else place for place in at]
        """Of each output, the stage with which it lies."""
        given_up = {output: one for one, output in kept}
        self._lies = lies or {}
        self._outputs_lie = {output: self._lies[one] for one, output in kept if one in self._lies}
        self._parts: list[tuple[PlacePart, list[int], Any]] = []
        for part in parts:
            own = {given_up.get(output) for output in part.outputs} if part.place != JOINT else set[int | None]()
            donated = [at for at, one in enumerate(part.inputs) if one in own and places[one] == part.place]
            self._parts.append((part, donated, self._compiled(part, donated)))

    def _compiled(self, part: PlacePart, donated: Sequence[int]) -> Any:
        home = self._home(part)

        def run(given_up: Sequence[Any], others: Sequence[Any], taken: Sequence[Any]) -> list[Any]:
            one, other = iter(given_up), iter(others)
            inputs = [next(one if at in donated else other) for at in range(len(part.inputs))]
            return part(inputs, taken)

        ins: tuple[list[Sharding], list[Sharding]] = ([], [])
        for at, one in enumerate(part.inputs):
            ins[at not in donated].append(self._lie(part, one))
        outs = [self._outputs_lie.get(one, home.whole) for one in part.outputs]
        return home.compile(run, (*ins, home.whole), [*[home.whole] * len(part.sent), *outs], donate=(0,))

    def _lie(self, part: PlacePart, at: int) -> Sharding:
        """Returns how an input lies where a part reads it: as where it comes from."""
        home, on = self._home(part), self._lies.get(at)
        return home.whole if on is None else NamedSharding(home.mesh, on.spec)

    def _home(self, part: PlacePart) -> Home:
        return self._homes[0 if part.place == JOINT else part.place]

    def __call__(self, *args: Any) -> Any:
        """Computes it, of arrays that lie where they are said to."""
        flat, sent = jax.tree.leaves(args), dict[int, tuple[Home, Any]]()
        given = [[self._brought(part, flat, sent_at) for sent_at in part.inputs] for part, _, _ in self._parts]
        outputs: list[Any] = [None] * len(self.places)
        for inputs, (part, donated, run) in zip(given, self._parts, strict=True):
            home = self._home(part)
            taken = [home.bring([one], at, [home.whole])[0] for at, one in map(sent.get, part.taken)]  # pyright: ignore
            others = [one for at, one in enumerate(inputs) if at not in donated]
            found = run([inputs[at] for at in donated], others, taken)
            sent.update((number, (home, value)) for number, value in zip(part.sent, found, strict=False))
            outputs_of = found[len(part.sent) :]
            for number, value in zip(part.outputs, outputs_of, strict=True):
                outputs[number] = value
        return jax.tree.unflatten(self._structure, outputs)

    def _brought(self, part: PlacePart, flat: Sequence[Any], at: int) -> Any:
        """Returns an input where a part reads it."""
        home, origin = self._home(part), self._homes[self._places[at] or 0]
        return home.bring([flat[at]], origin, [self._lie(part, at)])[0]
