"""Training a batch while what the next one reads of tables is fetched."""

import weakref
from typing import Any, NamedTuple, final

import jax

from braidax.errors import ArgumentError
from braidax.program import compile_on

from .compiler_options import CompilerOptions
from .compute.feed import Pulled
from .compute.work import Work
from .state import State


class _Fetched(NamedTuple):
    """What a batch reads. **Fields:** `read`: the leaves of the state and of the batch that it was read by."""

    read: tuple[weakref.ref[jax.Array], ...]
    pulled: Pulled


@final
class RunAhead:
    """The programs of updates that are told the coming batch, and what they have fetched for it.

    That is handed out for the very arrays that it was read by, and once: a state of which a leaf was exchanged, or
    another batch, gets nothing.

    **Arguments:** `work`: has a feed. `batch_shardings`: of both batches.
    """

    def __init__(self, work: Work, batch_shardings: Any, options: CompilerOptions) -> None:
        held, pulled = work.form.shardings, work.pulled_shardings
        metrics = {name: on for name, on in work.metric_shardings.items() if name not in pulled.metrics}
        readable = (held.params, work.held(held.opt_state), held.variables, held.key, held.step)
        self._fetch = compile_on(
            work.mesh,
            work.fetch,
            in_shardings=(*readable, batch_shardings),
            out_shardings=pulled,
            compiler_options=options.apply,
        )
        moved = (held.params, held.opt_state, held.variables, held.key, held.step)
        # What was fetched gives its memory to what is fetched.
        self._gradients = compile_on(
            work.mesh,
            work.gradients_ahead,
            in_shardings=(*moved, batch_shardings, pulled._replace(metrics={}), batch_shardings),
            out_shardings=(work.gradient_shardings, held.variables, metrics, pulled),
            donate=(6,),
            compiler_options=options.gradients,
        )
        self._held, self._pulled_shardings = work.held, pulled
        self._fetched: _Fetched | None = None

    def take(self, state: State, batch: Any) -> Pulled | None:
        """Returns what was fetched, if it was for that batch and state; it is held no longer."""
        fetched, self._fetched = self._fetched, None
        leaves = _read_by(state, batch)
        if fetched is None or len(leaves) != len(fetched.read):
            return None
        alike = all(one() is leaf for one, leaf in zip(fetched.read, leaves, strict=True))
        return fetched.pulled if alike else None

    def keep(self, state: State, batch: Any, pulled: Pulled) -> None:
        """Holds what was fetched for a batch and a state."""
        self._fetched = _Fetched(tuple(map(weakref.ref, _read_by(state, batch))), pulled)

    def fetch(self, state: State, batch: Any) -> Pulled:
        """Fetches what a batch reads, of a state as it is. **Arguments:** both lie as the step wants them."""
        return self._fetch(*self._readable(state), batch)

    def gradients(self, state: State, batch: Any, pulled: Pulled, coming: Any) -> tuple[Any, Any, Any, Pulled]:
        """Computes gradients, new variables and metrics, and fetches what the coming batch reads.

        **Arguments:** `state`: that of the update before. `pulled`: for `batch`; it is given up.
        """
        given = state.params, state.opt_state, state.variables, state.key, state.step
        gradients, variables, metrics, fetched = self._gradients(*given, batch, pulled._replace(metrics={}), coming)
        return gradients, variables, {**metrics, **pulled.metrics}, fetched

    def read_specs(self, state: State, batch: Any) -> tuple[Any, ...]:
        """Returns what the gradients read, as specs with shardings. **Arguments:** such specs."""
        pulled = jax.eval_shape(self._fetch, *self._readable(state), batch)._replace(metrics={})
        shardings = self._pulled_shardings._replace(metrics={})
        given = state.params, state.opt_state, state.variables, state.key, state.step
        return *given, batch, jax.tree.map(_on, shardings, pulled), batch

    def lower(self, read: tuple[Any, ...]) -> jax.stages.Lowered:
        """Lowers the gradients. **Arguments:** `read`: of `read_specs`."""
        return self._gradients.lower(*read)

    def _readable(self, state: State) -> tuple[Any, ...]:
        return state.params, self._held(state.opt_state), state.variables, state.key, state.step


def check_coming(coming: Any, name: str = "coming") -> None:
    """Raises `ArgumentError` for host arrays: nothing tells whether they are changed before they are trained.

    **Arguments:** `coming`: a batch. `name`: of the parameter.
    """
    host = next((leaf for leaf in jax.tree.leaves(coming) if not isinstance(leaf, jax.Array)), None)
    if host is not None:
        raise ArgumentError(
            f"{name} has a leaf of type {type(host).__name__}, which could be changed before it is trained: expected "
            f"device arrays, as a DataLoader yields, or {name}=jax.device_put(batch, step.batch_shardings)"
        )


def _read_by(state: State, batch: Any) -> list[Any]:
    return jax.tree.leaves((state, batch))


def _on(sharding: Any, specs: Any) -> Any:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding), specs)
