"""What the rows of a table move by, besides themselves."""

from typing import Any, NamedTuple


class Now(NamedTuple):
    """What the rows of a table move by, besides themselves.

    **Fields:** `clock`: how many steps were taken, int32. `scalars`: of the state, those of a `CatchUp`, in its order.
    `context`: of a `TableUpdate`, in its order; empty where nothing is moved. `grown`: the logarithm of what all steps
    have made of a value that nothing else moves, as a float32 and what is lost of it in float32; empty where no steps'
    growth is kept (`TableUpdate.growth`).
    """

    clock: Any
    scalars: tuple[Any, ...]
    context: tuple[Any, ...] = ()
    grown: tuple[Any, ...] = ()
