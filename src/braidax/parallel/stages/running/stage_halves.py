"""The compiled halves of a stage's backward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax

from braidax.parallel.stages.halved import Halved
from braidax.program import batch_dims_of_results, trace
from braidax.program.halving.loop_sums import adding_in_loops
from braidax.program.putting_off.parts import left_in_parts

from .flat import Flat
from .home import Home


class Buffers(NamedTuple):
    """How a stage has what its backward pass is given: one entry a buffer or value, its shape, and where it lies.

    **Fields:** `taken`: makes of buffers of parameters, and what is given besides, what the stage takes.
    `stored`: makes of gradients of parameters leaves as they are stored. `added`: adds these to sums. `params`,
    `given`, `incoming`, `kept`, `gradients`: specs. `form`: of what is kept. `moved`: which incoming values have
    gradients and are held, `others`: have none and are. `dims`, `shardings`: of given, incoming, kept and gradients.
    `on_params`, `on_sums`: shardings. `in_parts`: which gradients are summed over devices only in the end. `products`:
    options of the compiler.
    """

    taken: Callable[[Sequence[Any], Sequence[Any]], Any]
    stored: Callable[[Any], list[Any]]
    added: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    params: Sequence[Any]
    given: Sequence[Any]
    incoming: Sequence[Any]
    kept: Sequence[Any]
    gradients: Sequence[Any]
    form: Flat
    moved: Sequence[int]
    others: Sequence[int]
    dims: Sequence[Sequence[int | None]]
    shardings: Sequence[Sequence[Any]]
    on_params: Any
    on_sums: Any
    in_parts: tuple[int, ...]
    products: Mapping[str, str]


@final
class StageHalves:
    """What a stage computes for its `I` and `W`, as jitted functions on its home, compiled at their first call.

    **Arguments:** `halved`: the halves. `sent`: where gradients lie that go back. `results`: where outputs of the loss
    do, of halves with the forward pass.
    """

    def __init__(
        self, halved: Halved, home: Home, buffers: Buffers, sent: Sequence[Any], results: Sequence[Any] = ()
    ) -> None:
        self._halved, self._home, self._own = halved, home, buffers
        left = halved.left
        self._moved = [at for at, one in enumerate(buffers.moved) if one in left.incoming]
        self._done = [at for at, one in enumerate(buffers.moved) if one not in left.incoming]
        self._others = [at for at, one in enumerate(buffers.others) if one in left.incoming]
        self._kept, self._gradients = buffers.form.holding(left.kept), left.outgoing
        on_given, on_incoming, on_kept, on_gradients = buffers.shardings
        self._handed = Flat(halved.handed, small_bytes=0)
        dims = self._dims() if home.is_divided else [None] * len(halved.handed)
        apart = [at for at, _ in self._alike(halved.handed, dims)]
        self._handed = Flat(halved.handed, dims=dims if home.is_divided else None, apart=apart)
        specs = jax.eval_shape(self._handed.pack, list(halved.handed))
        pairs = zip(specs, self._handed.dims, strict=True)
        handed: list[Any] = [home.along(spec.shape, dim) for spec, dim in pairs]
        self._spent = [at for _, at in self._alike(specs, self._handed.dims)]
        self._rest = [at for at in range(len(buffers.kept)) if at not in self._spent]
        moved, others = ([on_incoming[at] for at in places] for places in (buffers.moved, buffers.others))
        done, held = tuple(moved[at] for at in self._done), tuple(moved[at] for at in self._moved)
        given = tuple(on_given)
        spent, rest = (tuple(on_kept[at] for at in places) for places in (self._spent, self._rest))
        ins = ((done, spent), held, tuple(others), buffers.on_params, given, rest, tuple(on_gradients))
        self.handed_shardings = tuple(handed)
        outs, products = (tuple(results), tuple(sent), tuple(handed)), buffers.products
        self._to_inputs = home.compile(self._inputs, ins, outs, donate=(0,), products=products)
        places = ((others, self._others), (on_kept, self._kept), (on_gradients, self._gradients))
        picked = (tuple(one[at] for at in own) for one, own in places)
        ins = (buffers.on_sums, tuple(handed), held, *picked, buffers.on_params, given)
        self._gradients_of = self._left_in_parts() if buffers.in_parts else self._second
        weights = adding_in_loops(self._weights, mesh=home.traced_on)
        self._to_weights = home.compile(weights, ins, buffers.on_sums, donate=(0,), products=products)

    @property
    def kept_bytes(self) -> int:
        """Of what is held of a microbatch between the halves."""
        return self._halved.kept_bytes

    def inputs(
        self,
        moved: Sequence[Any],
        others: Sequence[Any],
        params: Sequence[Any],
        given: Sequence[Any],
        kept: Sequence[Any],
        gradients: Sequence[Any],
    ) -> tuple[Sequence[Any], Sequence[Any], Any]:
        """Goes back to what came in, and takes over the memory of what is not needed any more of that.

        **Returns:** outputs of the loss, of halves with the forward pass; the gradients that are sent; and what is to
        be held for `weights`.
        """
        done, held = tuple(moved[at] for at in self._done), tuple(moved[at] for at in self._moved)
        spent, rest = (tuple(kept[at] for at in places) for places in (self._spent, self._rest))
        results, sent, handed = self._to_inputs((done, spent), held, others, params, given, rest, gradients)
        places = ((others, self._others), (kept, self._kept), (gradients, self._gradients))
        return results, sent, (handed, held, *(tuple(one[at] for at in own) for one, own in places))

    def weights(self, sums: Sequence[Any], left: Any, params: Sequence[Any], given: Sequence[Any]) -> Any:
        """Returns the sums, in their memory, with what a microbatch adds. **Arguments:** `left`: by `inputs`."""
        return self._to_weights(sums, *left, params, given)

    # What is compiled

    def _inputs(
        self,
        gone: tuple[Sequence[Any], Sequence[Any]],
        held: Sequence[Any],
        others: Sequence[Any],
        params: Sequence[Any],
        given: Sequence[Any],
        rest: Sequence[Any],
        gradients: Sequence[Any],
    ) -> tuple[tuple[Any, ...], ...]:
        own, (done, spent) = self._own, gone
        kept = _placed(len(own.kept), (*self._spent, *self._rest), (*spent, *rest))
        moved = _placed(len(own.moved), (*self._done, *self._moved), (*done, *held))
        incoming = _placed(len(own.incoming), (*own.moved, *own.others), (*moved, *others))
        taken, unpacked = own.taken(params, given), own.form.unpack(kept)
        results, sent, handed = self._halved.inputs(taken, incoming, unpacked, gradients)
        return tuple(results), tuple(sent), tuple(self._handed.pack(handed))

    def _alike(self, handed: Sequence[Any], dims: Sequence[int | None]) -> list[tuple[int, int]]:
        """Returns which of what is handed on can take over the memory of which buffer of what was kept.

        **Arguments:** `handed`: specs. `dims`: of these, along samples.
        """
        own, on_kept = self._own, self._own.shardings[2]
        free = [at for at in range(len(own.kept)) if at not in self._kept]
        found: list[tuple[int, int]] = []
        for number, (spec, dim) in enumerate(zip(handed, dims, strict=True)):
            form = spec.shape, spec.dtype, self._home.along(spec.shape, dim)
            at = next((at for at in free if (own.kept[at].shape, own.kept[at].dtype, on_kept[at]) == form), None)
            if at is not None:
                free.remove(at)
                found.append((number, at))
        return found

    def _weights(self, sums: Sequence[Any], *given: Any) -> list[Any]:
        return self._own.added(sums, self._gradients_of(*given))

    def _second(
        self,
        handed: Sequence[Any],
        moved: Sequence[Any],
        others: Sequence[Any],
        kept: Sequence[Any],
        gradients: Sequence[Any],
        params: Sequence[Any],
        given: Sequence[Any],
    ) -> list[Any]:
        own = self._own
        places = [own.moved[at] for at in self._moved] + [own.others[at] for at in self._others]
        incoming = _placed(len(own.incoming), places, (*moved, *others))
        unpacked = own.form.unpack(_placed(len(own.kept), self._kept, kept))
        received = _placed(len(own.gradients), self._gradients, gradients)
        handed = self._handed.unpack(handed)
        return own.stored(self._halved.weights(own.taken(params, given), incoming, unpacked, received, handed))

    def _left_in_parts(self) -> Any:
        """Returns what gives gradients of which some are left in parts, as those of the whole backward pass are."""
        own, home = self._own, self._home
        on_given, on_incoming, on_kept, on_gradients = own.dims
        moved, others = [own.moved[at] for at in self._moved], [own.others[at] for at in self._others]
        handed = tuple(jax.eval_shape(self._handed.pack, list(self._halved.handed)))
        values = [(own.incoming, on_incoming, moved), (own.incoming, on_incoming, others)]
        values += [(own.kept, on_kept, self._kept), (own.gradients, on_gradients, self._gradients)]
        specs = [tuple(specs[at] for at in places) for specs, _, places in values]
        dims = [[dims[at] for at in places] for _, dims, places in values]
        program = trace(self._second, handed, *specs, list(own.params), tuple(own.given), mesh=home.traced_on)
        divided = {0: self._handed.dims, **dict(enumerate(dims, 1)), 6: on_given}
        return left_in_parts(program, own.in_parts, divided, home.traced_on, home.batch_axes, every=True).program

    def _dims(self) -> list[int | None]:
        """Returns which dim of what is handed on goes along samples."""
        own = self._own

        def handed(params: Any, given: Any, incoming: Any, kept: Any, gradients: Any) -> Any:
            taken = own.taken(params, given)
            return self._halved.inputs(taken, incoming, own.form.unpack(kept), gradients)[-1]

        given = (tuple(one) for one in (own.params, own.given, own.incoming, own.kept, own.gradients))
        traced = trace(handed, *given, mesh=self._home.traced_on)
        return batch_dims_of_results(traced, dict(enumerate(own.dims, 1)), islands=True)


def _placed(count: int, places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Returns so many values, these at their places and None elsewhere."""
    found: list[Any] = [None] * count
    for at, one in zip(places, values, strict=True):
        found[at] = one
    return found
