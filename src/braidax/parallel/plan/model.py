"""What strategies are told of a traced loss, found out when they ask."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from braidax.program import Cut, Dims, LeafUses, Path, Site

from .layout import Axis


def _nothing(path: str) -> str:
    return ""


class RowWork(NamedTuple):
    """What exchanging the rows of a variable takes besides sending them.

    **Fields:** `num_shared`: how many of the ids by which one run of the loss reads it are the same for all samples,
    such as positions. `num_replayed`: how many arrays of its rows the optimizer moves where it takes the steps that
    they have missed one by one; 0 where it need not.
    """

    num_shared: int = 0
    num_replayed: int = 0


class RingUses(NamedTuple):
    """What one ring uses. **Fields:** `paths`: of variables; `stacks`: whether its parts give parts of a result."""

    paths: frozenset[str]
    stacks: bool


class ExpertUses(NamedTuple):
    """What experts do, each for itself.

    **Fields:** `dims`: by path, along which dim of a variable experts lie. `num_bytes`: of what one run of the loss
    sends to them and back on all samples, where they stay, with the backward pass. `num_experts`.
    """

    dims: Mapping[str, int]
    num_bytes: int
    num_experts: int


class RotatedUses(NamedTuple):
    """How variables are used whose parts go around a ring.

    **Fields:** `left`: by path, why some use of it is none of a part. `rotated`: of those of which parts are, the bytes
    of what goes around with it at once: a part of several variables, or a slice of one. `units`: which of these are on
    one ring.
    """

    left: Mapping[str, str]
    rotated: Mapping[str, int]
    units: Sequence[RingUses] = ()


def _none(path: str) -> RowWork:
    return RowWork()


@dataclass(frozen=True)
class Model:
    """The variables of a traced loss.

    **Fields:** `variables`: by path, shape and dtype. `num_parts`: among how many devices, along all axes, a batch is
    divided; `batch_axes`: along which, the outermost first. `microbatches`: of how many runs of the loss an update
    consists. `find_uses`, `find_sites`, `find_dims`:
    how the loss uses each variable, and which of their dims belong together, where that is known. `find_met`: which of
    its uses samples meet, as of `find_meetings`. `find_rotated`: of
    variables of which a dim, perhaps in pieces, goes around an axis, which are used elsewhere than on rings, and why;
    and which on rings. `find_experts`: what experts do.
    `no_rows`: why the rows of a variable cannot be exchanged though it is used by rows only; "" if they can.
    `row_work`: what exchanging them takes besides. `find_state_bytes`: what the optimizer keeps of each variable in its
    shape; at "" all else that it keeps, whole on each device. `frozen`: the paths of those that are not trained.
    `no_padding`: why no variable can be stored longer than it is, so that an axis that does not divide a dim cannot
    split it; "" if it can.
    """

    variables: Mapping[str, jax.ShapeDtypeStruct]
    num_parts: int
    microbatches: int = 1
    batch_axes: Sequence[str] = ()
    find_uses: Callable[[], Mapping[str, LeafUses]] = field(default=dict[str, LeafUses])
    find_sites: Callable[[], Mapping[str, Sequence[Site]]] = field(default=dict[str, Sequence[Site]])
    find_met: Callable[[], Mapping[Path, bool]] = field(default=dict[Path, bool])
    find_dims: Callable[[], Dims] = lambda: Dims({}, ())
    find_rotated: Callable[[Mapping[str, Cut], Axis], RotatedUses] = lambda cuts, axis: RotatedUses({}, {})
    find_experts: Callable[[], Sequence[ExpertUses]] = field(default=list[ExpertUses])
    no_rows: Callable[[str], str] = _nothing
    row_work: Callable[[str], RowWork] = _none
    find_state_bytes: Callable[[], Mapping[str, int]] = field(default=dict[str, int])
    frozen: Collection[str] = ()
    no_padding: str = ""

    @functools.cached_property
    def uses(self) -> Mapping[str, LeafUses]:
        """By path, how the loss uses variables; those whose gradient nobody takes are not there."""
        return self.find_uses()

    @functools.cached_property
    def sites(self) -> Mapping[str, Sequence[Site]]:
        """By path, where the loss uses variables."""
        return self.find_sites()

    @functools.cached_property
    def met(self) -> Mapping[Path, bool]:
        """By path of an equation that uses a variable: whether samples meet that there, or what is made of it."""
        return self.find_met()

    @functools.cached_property
    def state_bytes(self) -> Mapping[str, int]:
        """By path, the bytes that the optimizer keeps of variables; at "" those of what lies like none of them."""
        return self.find_state_bytes()

    @functools.cached_property
    def dims(self) -> Dims:
        """Which dims belong together; leaves are numbered as `variables` are."""
        return self.find_dims()

    @functools.cached_property
    def experts(self) -> Sequence[ExpertUses]:
        """What experts do, each for itself."""
        return self.find_experts()
