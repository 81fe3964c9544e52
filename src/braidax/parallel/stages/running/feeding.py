"""What a stage is given of a batch: each microbatch's samples and key."""

from collections.abc import Sequence
from typing import Any, final

import jax

from braidax.errors import ArgumentError
from braidax.parallel.compute.accumulate import microbatches_of
from braidax.parallel.given.arrays import place

from .stage_programs import BATCH, KEY, VARIABLES, StagePrograms


@final
class Feeding:
    """Divides what a stage needs of a batch among microbatches, as a step on one device does; other leaves stay away.

    **Arguments:** `programs`: of the stage. `num_microbatches`: into how many.
    """

    def __init__(self, programs: StagePrograms, num_microbatches: int, numbers: Sequence[int]) -> None:
        home, leaves = programs.home, programs.given_leaves
        self._home, self._count = home, num_microbatches
        self._variables = [leaf.number for leaf in leaves if leaf.argument == VARIABLES]
        self._has_key = any(leaf.argument == KEY for leaf in leaves)
        pairs = list(zip(leaves, programs.given_shardings, programs.given_specs, strict=True))
        first = numbers[BATCH]
        self.batch = {leaf.number - first: on for leaf, on, _ in pairs if leaf.argument == BATCH}
        key = [home.whole] if self._has_key else []
        samples = tuple(self.batch.values())
        self._split = home.compile(self._microbatches, (tuple(key), samples), ((*key, *samples),) * num_microbatches)
        self.variables = [at - numbers[VARIABLES] for at in self._variables]

    def begin(self, key: Any, batch: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        """Returns the keys and samples of microbatches. **Arguments:** `key`: of the step. `batch`: leaves of all."""
        keys = self._home.bring([key], [self._home.whole]) if self._has_key else ()
        samples = place([batch[at] for at in self.batch], [*self.batch.values()])
        if not self._home.is_divided:  # what nobody has committed to a device would be compiled for anew
            samples = self._home.bring(samples, [*self.batch.values()])
        if not keys and not samples:
            return ((),) * self._count
        return self._split(tuple(keys), tuple(samples))

    def _microbatches(self, keys: Sequence[Any], samples: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        count = self._count
        if count == 1:
            return ((*keys, *samples),)
        of_keys, pieces = microbatches_of(keys[0] if keys else jax.random.key(0), tuple(samples), count)
        return tuple((*([of_keys[each]] if keys else []), *(one[each] for one in pieces)) for each in range(count))


def check_batch(specs: Sequence[Any], batch: Sequence[Any], count: int, names: Sequence[str]) -> None:
    """Checks that microbatches divide a batch. **Arguments:** `specs`: of the leaves of a microbatch."""
    for name, spec, leaf in zip(names, specs, batch, strict=True):
        expected = (spec.shape[0] * count, *spec.shape[1:]) if spec.shape else ()
        if tuple(leaf.shape) != expected:
            raise ArgumentError(
                f"{name} is {list(leaf.shape)}, expected {list(expected)}: {count} microbatches of {list(spec.shape)}"
            )
