"""Segments: what stands between two neighboring borders of a chain, and what it costs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from braidax.parallel.compute.accumulate import wide, wide_zeros
from braidax.program import Cost, Stage, bytes_of, cost_behind, cost_of
from braidax.program.halving.loop_sums import adding_in_loops

from .halved import Halved
from .passes import Passes, is_float
from .products import LEAST_MICROBATCHES, packs


class Seconds(NamedTuple):
    """How long the passes of a stage take on one microbatch: forward, and what goes back to inputs and to weights."""

    forward: float
    inputs: float
    weights: float

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True)
class Segment:
    """What one microbatch costs between two borders.

    **Fields:** `seconds`. `kept_bytes`: held from the forward to the backward pass. `incoming_bytes`: of what comes in,
    `float_bytes` of them with gradients that go back. `leaves`: bytes of the parameters that are read, by name and
    rows.
    """

    seconds: Seconds
    kept_bytes: int
    incoming_bytes: int
    float_bytes: int
    leaves: Mapping[Any, int]


Backward = Literal["whole", "halves"]
"""How a backward pass is run."""

Clock = Callable[[Stage, int], Seconds]
"""Of a stage, and the number of the argument that is trained, how long its passes take."""


def segments_of(stages: Sequence[Stage], clock: Clock, *, params: int = 0) -> tuple[Segment, ...]:
    """Returns what stages cost; those that compute the same, such as the iterations of a loop, are timed as one.

    All are timed, and then all once more, and the shorter time counts: what else a machine does lasts for a while.

    **Arguments:** `clock`: `measured` or `counted`. `params`: the number of the argument that is trained.
    """
    keys = [stage.told() for stage in stages]
    alike = dict(zip(keys, stages, strict=True))
    rounds = [{key: clock(stage, params) for key, stage in alike.items()} for _ in range(2)]
    kept = {key: Passes(stage, params=params).kept_bytes for key, stage in alike.items()}
    found: list[Segment] = []
    for key, stage in zip(keys, stages, strict=True):
        seconds = shortest([one[key] for one in rounds])
        leaves = {(leaf.name, leaf.rows): leaf.num_bytes for leaf in stage.leaves if leaf.argument == params}
        incoming = [(bytes_of(one), is_float(one)) for one in stage.incoming]
        floats = sum(size for size, moved in incoming if moved)
        found.append(Segment(seconds, kept[key], sum(size for size, _ in incoming), floats, leaves))
    return tuple(found)


def shortest(looks: Sequence[Seconds]) -> Seconds:
    """Returns the shortest time of each pass."""
    return Seconds(*map(min, zip(*looks, strict=True)))


def counted(*, flops_per_second: float = 1e9, bytes_per_second: float = 1e9) -> Clock:
    """Returns a clock that runs nothing: by operations and bytes of each equation, whichever takes longer.

    The same on all machines; what fusion saves is not seen.
    """

    def seconds(cost: Cost) -> float:
        moved = (cost.read_bytes + cost.written_bytes) / bytes_per_second
        return max((cost.flops + cost.transcendentals) / flops_per_second, moved)

    def clock(stage: Stage, params: int) -> Seconds:
        jaxpr = stage.program.closed.jaxpr
        trained = [leaf.argument == params and not leaf.frozen for leaf in stage.leaves]
        once = seconds(cost_of(jaxpr))
        if any(map(is_float, stage.incoming)):
            return Seconds(once, once, once * any(trained))
        own = [one for one, moved in zip(jaxpr.invars, trained, strict=False) if moved]
        return Seconds(once, 0.0, once * any(trained) + seconds(cost_behind(jaxpr, own)))

    return clock


def measured(*, num_runs: int = 5, backward: Backward = "whole") -> Clock:
    """Returns a clock that compiles the passes of a stage and runs them on the first device.

    They are those that a pipeline runs: forward, and the backward pass, which adds to sums. Values are drawn at random.
    Of all runs the shortest counts, since what else a machine does only adds.

    **Arguments:** `backward`: whether the whole pass is timed, and divided among inputs and weights by the operations
    that each takes; or its halves, as schedules run them that put off the second one, and which may take longer.
    """

    timers = dict[tuple[str, int], _Timer]()

    def clock(stage: Stage, params: int) -> Seconds:
        key = stage.told(), params
        if key not in timers:
            timers[key] = _Timer(stage, params, backward)
        return timers[key].seconds(num_runs)

    return clock


@final
class _Timer:
    """The passes of a stage, compiled once."""

    def __init__(self, stage: Stage, params: int, backward: Backward) -> None:
        self._stage, self._params, self._backward = stage, params, backward
        self._passes = passes = passes_here(stage, params=params)
        self._halved = halved = Halved(passes)
        self._trained = passes.trained
        self._sends_back = any(map(is_float, stage.incoming))

        def whole(sums: Sequence[Any], *given: Any) -> tuple[list[Any], list[Any]]:
            _, sent, own = halved.backward(*given)
            return added(sums, own), sent

        def weights(sums: Sequence[Any], *given: Any) -> tuple[list[Any], list[Any]]:
            return added(sums, halved.weights(*given)), []

        made = adding_in_loops(whole if backward == "whole" else weights, mesh=AbstractMesh((), ()))
        options = dict(passes.products)
        self._forward, self._inputs = (
            jax.jit(one, compiler_options=options) for one in (passes.forward, halved.inputs)
        )
        self._adding = jax.jit(made, donate_argnums=0, compiler_options=options)

    def seconds(self, num_runs: int) -> Seconds:
        """Runs the passes, once more than it times them; values are given up behind that."""
        *given, incoming = drawn(self._stage.program.in_specs)
        taken = [*given, self._passes.turn(given)]
        made = self._forward(taken, incoming)
        back = [taken, incoming, made.kept, [jnp.ones_like(one) for one in made.outgoing if is_float(one)]]
        own = jax.tree.leaves(taken[self._params])
        sums = [wide_zeros(own[at]) for at in self._trained]
        is_whole = self._backward == "whole"
        given = back if is_whole else self._left(back)
        forward, inputs, adding = list[float](), list[float](), list[float]()
        for _ in range(num_runs + 1):
            forward.append(_timed(self._forward, taken, incoming)[0])
            inputs.append(_timed(self._inputs, *back)[0] if self._sends_back and not is_whole else 0.0)
            seconds, (sums, _) = _timed(self._adding, sums, *given) if sums or is_whole else (0.0, (sums, None))
            adding.append(seconds)
        found = Seconds(*(min(each[1:]) for each in (forward, inputs, adding)))
        return self._divided(found) if is_whole else found

    def _left(self, back: Sequence[Any]) -> list[Any]:
        """Returns what the second half is given. **Arguments:** `back`: what the whole pass is."""
        handed = self._inputs(*back)[-1]
        held = [
            [one if at in own else None for at, one in enumerate(part)]
            for own, part in zip(self._halved.left, back[1:], strict=True)
        ]
        return [back[0], *held, handed]

    def _divided(self, found: Seconds) -> Seconds:
        """Returns seconds of which those of a whole backward pass are divided."""
        if not self._sends_back:
            return found
        share = self._halved.weights_share if self._trained else 0.0
        return Seconds(found.forward, (1 - share) * found.weights, share * found.weights)


def passes_here(stage: Stage, *, params: int = 0) -> Passes:
    """Returns the passes of a stage as a pipeline runs them that has it on the first device, of many microbatches."""
    is_cpu = jax.devices()[0].platform == "cpu"
    turn = is_cpu and packs(LEAST_MICROBATCHES, is_flushed=True)
    return Passes(stage, params=params, turn_weights=turn, hold_values=is_cpu)


def added(sums: Sequence[Any], gradients: Any) -> list[Any]:
    """Returns sums with the leaves of gradients added to them."""
    return [total + wide(one) for total, one in zip(sums, jax.tree.leaves(gradients), strict=True)]


def _timed(run: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = jax.block_until_ready(run(*args))
    return time.perf_counter() - begun, result


def drawn(specs: Any) -> Any:
    """Returns values drawn at random for specs; of what is no float zeros."""
    random = np.random.default_rng(0)

    def draw(spec: Any) -> jax.Array:
        if is_float(spec):
            return jnp.asarray(random.normal(size=spec.shape) * 0.1, spec.dtype)
        return jnp.zeros(spec.shape, spec.dtype)

    return jax.tree.map(draw, specs)
