"""`State`: everything that an update changes."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import jax

from .plan.replanning import changes, tables_in

Way = tuple[Any, Callable[[Any], Any], str] | str | None
"""From the form in which a state was saved, as of `State.saved_as`."""


@final
class Origin:
    """What made a state, as long as that is there. Any two are equal: a state is none the less like another.

    **Arguments:** `way_to`: a method of it that answers `State.saved_as`; only weakly referenced. None: nobody knows.
    """

    def __init__(self, way_to: Callable[[Mapping[str, int | None]], Way] | None = None) -> None:
        self._way_to = None if way_to is None else weakref.WeakMethod(way_to)

    @property
    def is_known(self) -> bool:
        """Whether what made the state is there."""
        return self._way_to is not None and self._way_to() is not None

    def way_to(self, saved: Mapping[str, int | None]) -> Way:
        """As of `State.saved_as`; None where nobody knows."""
        way_to = None if self._way_to is None else self._way_to()
        return None if way_to is None else way_to(saved)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> tuple[type["Origin"], tuple[()]]:
        return Origin, ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that an update changes; a PyTree.

    `step`: int32 scalar, updates done. `params`, `opt_state`: PyTrees. `variables`: what the loss changes besides
    (BatchNorm statistics), `{}` when it asks for none. `key`: the PRNG key that the keys of all steps come from.
    `padded`: of the leaves that are stored by rows, `[ceil(V / N), N, ...]`, the path and V. `shapes`: of the others
    that are stored padded, or as a tuple of rows, one a stage, the path and the shape that the loss has. `origin`: the
    step.
    """

    step: Any
    params: Any
    opt_state: Any
    variables: Any
    key: Any
    padded: tuple[tuple[str, int], ...] = field(default=(), metadata={"static": True})
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), metadata={"static": True})
    origin: Origin = field(default=Origin(), repr=False, metadata={"static": True})

    @property
    def padded_rows(self) -> Mapping[str, int]:
        """`padded` as a checkpoint asks for them, so that they can be restored to another N."""
        return dict(self.padded)

    @property
    def true_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """`shapes` as a checkpoint asks for them, which holds the leaves as the loss has them."""
        return dict(self.shapes)

    def saved_as(self, saved: Mapping[str, int | None], notes: Mapping[str, str]) -> Way:
        """Returns the form in which a state was saved, as a checkpoint asks for it that was planned otherwise.

        **Arguments:** `saved`: the paths of the leaves that were saved, each with its V if it has padded rows. `notes`:
        that were kept with them; the paths say enough.

        **Returns:** a state in that form, with abstract arrays, what makes one of this form from it, and in words what
        has changed, if anything has. Words alone where there is no way, None where there is nothing to do.
        """
        if self.origin.is_known:
            return self.origin.way_to(saved)
        said = changes(tables_in(saved), [path for path, _ in self.padded if path.startswith("params")])
        return f"{said}; restore into what `init` of the step gives, which knows the way from there" if said else None
