"""What a stage does behind its last microbatch: means of gradients, and metrics."""

from collections.abc import Sequence
from typing import Any, final

import jax.numpy as jnp

from braidax.parallel.compute.accumulate import averaged, wide
from braidax.parallel.compute.metrics import in_order_of_samples

from .owning.ownership import Ownership, spec_of_rows
from .stage_programs import StagePrograms


@final
class Flush:
    """Makes of sums of gradients the means of what a stage owns, with what borrowers have for it.

    **Arguments:** `stage`: its number. `programs`: of all stages. `specs`: of its own pieces as they are stored, None
    for those that are frozen, and how they lie, `on`. `num_microbatches`: of an update.
    """

    def __init__(
        self,
        stage: int,
        programs: Sequence[StagePrograms],
        ownership: Ownership,
        specs: Any,
        on: Sequence[Any],
        num_microbatches: int,
    ) -> None:
        own = programs[stage]
        self._count, self._specs, self._own = num_microbatches, specs, own
        places = {piece: at for at, piece in enumerate(ownership.pieces[stage])}
        self._places = [
            [(at, places[one.piece], one.rows) for at, one in enumerate(own.trained_reads) if one.owner == stage]
        ]
        self.borrowers: list[tuple[int, list[int]]] = []
        """Stages that read something of this one, with the numbers of their gradients that are its."""
        for other, each in enumerate(programs):
            lent = [at for at, one in enumerate(each.trained_reads) if one.owner == stage and other != stage]
            if lent:
                self.borrowers.append((other, lent))
                self._places.append(
                    [
                        (at, places[each.trained_reads[of].piece], each.trained_reads[of].rows)
                        for at, of in enumerate(lent)
                    ]
                )
        home = own.home
        # Memory of sums is given up where a gradient has the form of one.
        self._given_up = [at for at, leaf in own.sums.alone_places if self._has_form_of_gradient(leaf)]
        others = [one for at, one in enumerate(own.sums_on) if at not in self._given_up]
        ins = ([own.sums_on[at] for at in self._given_up], others, home.whole)
        outs = tuple(one for one, spec in zip(on, specs, strict=True) if spec is not None)
        self._means = home.compile(self._averaged, ins, outs, donate=(0,))
        self._part = {
            owner: home.compile(self._lent(owner), (own.sums_on,), home.whole)
            for owner in {one.owner for one in own.trained_reads if one.owner != stage}
        }

    def lend(self, owner: int, sums: Sequence[Any]) -> Sequence[Any]:
        """Returns this stage's sums for what another one owns."""
        return self._part[owner](sums)

    def means(self, sums: Sequence[Any], lent: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """Returns gradients of own pieces, None for those that are frozen.

        **Arguments:** `sums`: given up. `lent`: of each borrower, brought here.
        """
        given_up = [sums[at] for at in self._given_up]
        found = iter(self._means(given_up, [one for at, one in enumerate(sums) if at not in self._given_up], lent))
        return tuple(None if spec is None else next(found) for spec in self._specs)

    def _has_form_of_gradient(self, leaf: int) -> bool:
        if leaf in self._own.sums.turned:
            return False
        pieces = {at: piece for at, piece, rows in self._places[0] if rows is None}
        sums, own = self._own.sums.specs[leaf], self._specs[pieces[leaf]] if leaf in pieces else None
        return own is not None and (own.shape, own.dtype) == (sums.shape, sums.dtype)

    def _lent(self, owner: int) -> Any:
        mine = [at for at, one in enumerate(self._own.trained_reads) if one.owner == owner]
        return lambda sums: tuple(self._own.totals(sums)[at] for at in mine)

    def _averaged(self, given_up: Sequence[Any], others: Sequence[Any], lent: Sequence[Any]) -> tuple[Any, ...]:
        one, other = iter(given_up), iter(others)
        count = len(given_up) + len(others)
        return self.averaged([next(one if at in self._given_up else other) for at in range(count)], lent)

    def averaged(self, sums: Sequence[Any], lent: Sequence[Sequence[Any]] = ()) -> tuple[Any, ...]:
        """Returns what `means` does; traced."""
        found: list[Any] = [None] * len(self._specs)
        for values, places in zip([self._own.totals(sums), *lent], self._places, strict=True):
            for at, piece, rows in places:
                value = values[at]
                if rows is not None:
                    whole = jnp.zeros(self._specs[piece].shape, value.dtype)
                    value = whole.at[slice(*rows)].set(value)
                found[piece] = value if found[piece] is None else found[piece] + value
        pairs = zip(found, self._specs, strict=True)
        return tuple(
            jnp.zeros(spec.shape, spec.dtype) if total is None else averaged(total, spec, self._count)
            for total, spec in pairs
            if spec is not None
        )


@final
class StageResults:
    """Makes of the results of microbatches those of an update: means, and what goes along samples in their order.

    **Arguments:** `dims`: of the loss and its metrics, which dim goes along the samples. `num_samples`: of a
    microbatch. `count`: of microbatches.
    """

    def __init__(self, programs: StagePrograms, dims: Sequence[int | None], num_samples: int, count: int) -> None:
        own = [at for at, number in enumerate(programs.stage.results) if number < len(dims)]
        self.numbers = [programs.stage.results[at] for at in own]
        self._own, self._count, self._num_samples = own, count, num_samples
        specs = [programs.stage.program.out_specs[1][at] for at in own]
        self._specs = specs
        self._dims = [dims[number] for number in self.numbers]
        home = programs.home
        outs = [home.along(_whole_shape(one, dim, count), dim) for one, dim in zip(specs, self._dims, strict=True)]
        ins = tuple(programs.ran_shardings.results[at] for at in own)
        self._joined = home.compile(self._in_one, ((ins,) * count,), outs)

    def join(self, results: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Returns them. **Arguments:** `results`: of each microbatch, all of the stage."""
        if not self._own or self._count == 1:
            return [results[0][at] for at in self._own]
        return self._joined(tuple(tuple(one[at] for at in self._own) for one in results))

    def _in_one(self, pieces: Sequence[Sequence[Any]]) -> list[Any]:
        found: list[Any] = []
        for values, spec, dim in zip(zip(*pieces, strict=True), self._specs, self._dims, strict=True):
            if dim is not None:
                found.append(in_order_of_samples(jnp.stack(values), dim, self._num_samples))
                continue
            first, *rest = map(wide, values)
            found.append(averaged(sum(rest, first), spec, self._count))
        return found


def _whole_shape(spec: Any, dim: int | None, count: int) -> tuple[int, ...]:
    return tuple(size * count if at == dim else size for at, size in enumerate(spec.shape))


def piece_specs(ownership: Ownership, specs: Sequence[Any]) -> dict[Any, Any]:
    """Returns the specs of all pieces, by owner and piece."""
    return {
        (stage, one): spec_of_rows(specs[one.leaf], one.rows)
        for stage, own in enumerate(ownership.pieces)
        for one in own
    }
