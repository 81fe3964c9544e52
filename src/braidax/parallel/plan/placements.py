"""Placements: what happens to one variable on one mesh axis."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from braidax.errors import ArgumentError

from .layout import Axis, Layout, RingAxis

Activations = Literal["whole", "by sequence"]
Hops = Literal["ahead", "in place"]
Backward = Literal["again", "kept"]
Wire = Literal["bfloat16", "int8"]
WIRES: tuple[Wire, ...] = get_args(Wire)
_LEAST_MEMORY = 1 << 20


@runtime_checkable
class Placement(Protocol):
    """What happens to one variable on one mesh axis; a frozen dataclass whose fields are JSON values."""

    def refine(self, layout: Layout, axis: Axis) -> Layout:
        """Returns the layout of the variable on the axes seen so far, with this one added."""
        ...

    def __str__(self) -> str:
        """How a plan prints it."""
        ...


@dataclass(frozen=True)
class Replicated:
    """Every device along the axis holds the variable whole; its gradient is all-reduced."""

    def refine(self, layout: Layout, axis: Axis) -> Layout:
        """Returns `layout`: nothing is split."""
        return layout

    def __str__(self) -> str:
        """`replicated`."""
        return "replicated"


@dataclass(frozen=True)
class Rows:
    """The rows of a table are split over the axis; those that a step touches are exchanged, and their gradients.

    The table is stored as `[ceil(V / N), N, D]`, so that row `id` is on device `id mod N`.

    **Arguments:** `aggregate`: with "inner", rows of a table over several axes are aggregated along the last of them
    before they cross the others: inside a host before they leave it; "auto": where the others join processes and the
    last does not. It may be said on any axis of the table.
    """

    aggregate: Literal["auto", "inner", "none"] = "auto"

    def __post_init__(self) -> None:
        if self.aggregate not in ("auto", "inner", "none"):
            raise ArgumentError(f'aggregate={self.aggregate!r}: expected "auto", "inner" or "none"')

    def refine(self, layout: Layout, axis: Axis) -> Layout:
        """Splits dim 0 by rows."""
        return layout.split(0, axis, how="by rows")

    def __str__(self) -> str:
        """`rows`, and what is special about them."""
        return "rows, aggregated" if self.aggregate == "inner" else "rows"


@dataclass(frozen=True)
class Seen:
    """Servers have the rows of ids that updates have read, and no others: a table grows with them.

    A row that is not there is one that no gradient has moved: its first value, as `init` makes it, and what momentum or
    weight decay have made of that since. So the table itself is never made, and may have up to 2^31 - 1 rows. Rows must
    begin each by itself.

    **Arguments:** `capacity`: how many rows of a table there is room for, on all servers; each has an even part of it.
    `admit_at`: a row gets room at that update that reads its id; gradients before are dropped, and only counted, for as
    many ids as there is room for rows. `expire_after`: a row, or a count, is given up when so many updates, one after
    the other, have not read its id; it is then as if no gradient had moved it. None: never.
    """

    capacity: int
    admit_at: int = 1
    expire_after: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("capacity", 1), ("admit_at", 1), ("expire_after", 1)):
            value = getattr(self, name)
            if not (name == "expire_after" and value is None) and (type(value) is not int or value < least):
                or_none = ", or None" if name == "expire_after" else ""
                raise ArgumentError(f"{name}={value!r} of Seen: expected a whole number, {least} or more{or_none}")


@dataclass(frozen=True)
class Served:
    """Servers have the table, in their host memory, and move its rows; devices have those that a batch reads.

    Row `id` is on server `id mod S`. The axis divides the samples; a table is served as a whole, so that it is split
    along no other axis.

    **Arguments:** `staleness`: how many updates the rows that a batch reads may lack (stale synchronous parallel, Ho et
    al. 2013): pulling and pushing then take place beside so many of them. 0: training is that of one device. `copies`:
    how many servers have each row, all of which are told of each update: one less may be lost, and training goes on,
    while who owns the gang starts another one. `spares`: how many servers have nothing at first. `ServedStep.resize`
    lets them have rows, and with copies they take the place of a server that is lost: they copy what it had from
    others. `disk`: a folder on the host of each server,
    in whose file system it keeps its rows, and what the optimizer keeps of them, in files without a name that are gone
    with it. None: all are in memory. No number depends on it. `memory_bytes`: of a server, for those of its rows on
    disk that are used most; besides, each row on disk takes about nine bytes. `wire`: how rows that are pulled and
    gradients of rows that are pushed travel. "bfloat16": in half the bytes. "int8": in a quarter, with one scale a row.
    None: as they are. Servers keep rows as they are; what a gradient loses is added to the row's next one (error
    feedback: 1-bit SGD, Seide et al. 2014). `seen`: of which ids servers have rows, of each table; None: of all.
    """

    staleness: int = 0
    copies: int = 1
    spares: int = 0
    disk: str | None = None
    wire: Wire | None = None
    seen: Seen | None = None
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.wire is not None and self.wire not in WIRES:
            raise ArgumentError(f'wire={self.wire!r}: expected "bfloat16", "int8", or None for rows as they are')
        if self.disk is not None and not (isinstance(self.disk, str) and self.disk):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"disk={self.disk!r}: expected the path of a folder, a text, or None for memory")
        if self.memory_bytes < _LEAST_MEMORY:
            raise ArgumentError(
                f"memory_bytes={self.memory_bytes}: expected a number of bytes for rows on disk, {_LEAST_MEMORY:,} or "
                f"more"
            )
        if self.copies < 1:
            raise ArgumentError(f"copies={self.copies}: expected a number of servers, 1 or more")
        if self.spares < 0:
            raise ArgumentError(f"spares={self.spares}: expected a number of servers, 0 or more")
        if self.staleness < 0:
            raise ArgumentError(f"staleness={self.staleness}: expected a number of updates, 0 or more")

    @property
    def on_disk(self) -> tuple[str, int] | None:
        """The folder of rows, and the memory for some of them of one part of the tables, in bytes."""
        return None if self.disk is None else (self.disk, self.memory_bytes // self.copies)

    def refine(self, layout: Layout, axis: Axis) -> Layout:
        """Takes the variable off the devices."""
        if layout.axes or layout.pieces is not None or not layout.shape:
            split = ", ".join(sorted(layout.axes)) or "no axis"
            raise ArgumentError(
                f"a variable of shape {list(layout.shape)}, split along {split}, would be served along {axis.name}: "
                f"expected a table that no axis splits"
            )
        return replace(layout, fed="of servers")

    def __str__(self) -> str:
        """`served`, how late, whether on disk, as what rows travel, and whether it grows."""
        late = f", {self.staleness} late" if self.staleness else ""
        wire = "" if self.wire is None else f", as {self.wire}"
        seen = "" if self.seen is None else ", as seen"
        return f"served{late}{'' if self.disk is None else ', on disk'}{wire}{seen}"


@dataclass(frozen=True, repr=False)
class Gathered:
    """Each device along the axis holds a part of the variable, which is gathered where the loss uses it.

    Its gradient is summed and scattered, so that the optimizer's state is split alike (fully sharded, ZeRO 3).

    **Arguments:** `dim`: which dim is split; where the axis does not divide it, it is padded. `backward`: "again", it
    is gathered once more for the backward pass; "kept", it stays whole until then, under `jax.checkpoint` too, so that
    a third less is sent and a device needs room for it. Of a variable on several axes it is kept if all say so.
    """

    dim: int
    backward: Backward = "again"

    def __post_init__(self) -> None:
        if self.backward not in ("again", "kept"):
            raise ArgumentError(f'backward={self.backward!r}: expected "again" or "kept"')

    def refine(self, layout: Layout, axis: Axis) -> Layout:
        """Splits the dim."""
        keeps = self.backward == "kept" and (layout.keeps or not layout.gathered)
        return replace(layout.split(self.dim, axis, how="gathered"), keeps=keeps)

    def __repr__(self) -> str:
        kept = "" if self.backward == "again" else f", backward={self.backward!r}"
        return f"Gathered(dim={self.dim}{kept})"

    def __str__(self) -> str:
        """`gathered`, the dim, and whether it is kept."""
        return f"gathered, dim {self.dim}{', kept' if self.backward == 'kept' else ''}"


@dataclass(frozen=True)
class Rotated:
    """Each device along the axis holds a part of the variable; parts go around a ring while the loss uses them.

    A device computes its own samples with one part after another, and no device ever has all of it. Gradients follow
    the parts, so that they and the optimizer's state are split alike (rotated tensor parallelism, arXiv 2311.01635).

    **Arguments:** `dim`: which dim is split; where the axis does not divide it, it is padded. `pieces`: as of `Split`.
    `hops`: as of `RotatedTensorParallel`.
    """

    dim: int
    pieces: tuple[int, ...] = ()
    hops: Hops = "ahead"

    def __post_init__(self) -> None:
        check_hops(self.hops)

    def refine(self, layout: Layout, axis: Axis) -> Layout:
        """Splits the dim."""
        if self.pieces:
            layout = layout.split_in_pieces(self.dim, self.pieces, axis, how="rotated")
        else:
            layout = layout.split(self.dim, axis, how="rotated")
        return replace(layout, ring=RingAxis(axis.name, self.hops == "in place"))

    def __str__(self) -> str:
        """`rotated`, the dim, and how."""
        in_place = ", in place" if self.hops == "in place" else ""
        return f"rotated, dim {self.dim}{_in_pieces(self.pieces)}{in_place}"


@dataclass(frozen=True)
class Split:
    """Each device along the axis holds a part of the variable, and computes with it (tensor parallel).

    Its gradient and the optimizer's state are split alike. Activations that have the dim are split with it, as long as
    every operation can be done on parts; XLA brings parts together where one cannot. Over an axis that divides the
    samples, the innermost, these are gathered before such a block, and its results are scattered; of the dim of
    experts, what is for them is sent there, and back (expert parallelism).

    **Arguments:** `dim`: which dim is split; where the axis does not divide it, it is padded. `activations`: as of
    `TensorParallel`. `pieces`: sizes along the dim of what the loss takes apart, such as queries, keys and values that
    one weight makes: each is split. The variable is then stored split along another dim, whole if no other can be, and
    exchanged before it is used.
    """

    dim: int
    activations: Activations = "whole"
    pieces: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_activations(self.activations)

    def refine(self, layout: Layout, axis: Axis) -> Layout:
        """Splits the dim."""
        by_sequence = layout.by_sequence | ({axis.name} if self.activations == "by sequence" else set())
        if self.pieces:
            return replace(layout.split_in_pieces(self.dim, self.pieces, axis), by_sequence=by_sequence)
        return replace(layout.split(self.dim, axis), by_sequence=by_sequence)

    def __str__(self) -> str:
        """`split`, the dim, and what else is."""
        by_sequence = ", activations by sequence" if self.activations == "by sequence" else ""
        return f"split, dim {self.dim}{_in_pieces(self.pieces)}{by_sequence}"


@dataclass(frozen=True)
class Staged:
    """The variable lies with stages of a pipeline along the axis; its gradients are summed where it lies.

    **Arguments:** `owners`: the stages that it lies with, each with rows of its own where they are several. `copies`:
    those that read it besides, and are lent it in each step.
    """

    owners: tuple[int, ...]
    copies: tuple[int, ...] = ()

    def refine(self, layout: Layout, axis: Axis) -> Layout:
        """Returns `layout`: a stage has its devices for itself."""
        return layout

    def __str__(self) -> str:
        """`stage 0`, or `stages 0, 1`, and who is lent it."""
        lent = f", lent to {', '.join(map(str, self.copies))}" if self.copies else ""
        return f"stage{'s' if len(self.owners) > 1 else ''} {', '.join(map(str, self.owners))}{lent}"


def _in_pieces(pieces: tuple[int, ...]) -> str:
    return f" in {len(pieces)} pieces" if pieces else ""


def check_activations(activations: str) -> None:
    """Raises `ArgumentError` for another word than one of `Activations`."""
    if activations not in ("whole", "by sequence"):
        raise ArgumentError(f'activations={activations!r}: expected "whole" or "by sequence"')


def check_hops(hops: str) -> None:
    """Raises `ArgumentError` for another word than one of `Hops`."""
    if hops not in ("ahead", "in place"):
        raise ArgumentError(f'hops={hops!r}: expected "ahead" or "in place"')


PLACEMENTS: Mapping[str, type[Any]] = {
    one.__name__: one for one in (Replicated, Rows, Served, Gathered, Rotated, Split, Staged)
}
