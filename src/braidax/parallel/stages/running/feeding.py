"""What a stage is given of a batch: each microbatch's samples and key."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax
from jax.sharding import Sharding

from braidax.errors import ArgumentError
from braidax.parallel.compute.accumulate import microbatches_of

from .home import Home
from .stage_programs import BATCH, KEY, VARIABLES, StagePrograms


class Given(NamedTuple):
    """A leaf of a batch. **Fields:** `home`: of the stage that it came for, None: all processes have it alike."""

    array: Any
    home: Home | None


@final
class Feeding:
    """Divides what a stage needs of a batch among microbatches, as a step on one device does; other leaves stay away.

    **Arguments:** `programs`: of the stage. `num_microbatches`: into how many. `numbers`: of the first leaf of each
    argument of the loss.
    """

    def __init__(self, programs: StagePrograms, num_microbatches: int, numbers: Sequence[int]) -> None:
        home, leaves = programs.home, programs.given_leaves
        self._home, self._count = home, num_microbatches
        pairs = list(zip(leaves, programs.given_shardings, programs.given_specs, strict=True))
        keys = [spec for leaf, _, spec in pairs if leaf.argument == KEY]
        self._key_impl: Any = impl_of(keys[0]) if keys else None
        first = numbers[BATCH]
        self.batch = {leaf.number - first: on for leaf, on, _ in pairs if leaf.argument == BATCH}
        key, samples = [home.whole] * len(keys), tuple(self.batch.values())
        self._split = home.compile(self._microbatches, (tuple(key), samples), ((*key, *samples),) * num_microbatches)
        self.variables = [leaf.number - numbers[VARIABLES] for leaf in leaves if leaf.argument == VARIABLES]

    def begin(self, key: Any, key_home: Home, batch: Sequence[Given]) -> Sequence[tuple[Any, ...]]:
        """Returns the keys and samples of microbatches.

        **Arguments:** `key`: data of the step's, which lies at `key_home`. `batch`: leaves of all.
        """
        home = self._home
        keys = home.bring([key], key_home, [home.whole]) if self._key_impl is not None else ()
        samples = [self._brought(batch[at], on) for at, on in self.batch.items()]
        if not keys and not samples:
            return ((),) * self._count
        return self._split(tuple(keys), tuple(samples))

    def _brought(self, given: Given, on: Sharding) -> Any:
        if given.home is None or given.home is self._home:
            return self._home.place([given.array], [on])[0]
        return self._home.bring([given.array], given.home, [on])[0]

    def _microbatches(self, keys: Sequence[Any], samples: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        count = self._count
        typed = [jax.random.wrap_key_data(one, impl=self._key_impl) for one in keys]
        if count == 1:
            return ((*typed, *samples),)
        of_keys, pieces = microbatches_of(typed[0] if typed else jax.random.key(0), tuple(samples), count)
        return tuple((*([of_keys[each]] if typed else []), *(one[each] for one in pieces)) for each in range(count))


def impl_of(key: Any) -> Any:
    """Returns the implementation of a key, of which only the form is known."""
    found: list[Any] = []
    jax.eval_shape(lambda one: found.append(jax.random.key_impl(one)), key)
    return found[0]


def check_batch(specs: Sequence[Any], batch: Sequence[Any], count: int, names: Sequence[str]) -> None:
    """Checks that microbatches divide a batch. **Arguments:** `specs`: of the leaves of a microbatch."""
    for name, spec, leaf in zip(names, specs, batch, strict=True):
        expected = (spec.shape[0] * count, *spec.shape[1:]) if spec.shape else ()
        if tuple(leaf.shape) != expected:
            raise ArgumentError(
                f"{name} is {list(leaf.shape)}, expected {list(expected)}: {count} microbatches of {list(spec.shape)}"
            )
