"""`RotatedTensorParallel`: weights go around a ring, and nothing of them is ever whole."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction

from braidax.program import Cut

from .costs.by_cost import ByCost, by_cost, placed
from .costs.machine import Machine
from .costs.prices import Prices, ring_work
from .costs.work import work_of
from .experts import choose_experts, dims_of_experts
from .layout import Axis, Layout
from .model import Model, RotatedUses
from .placements import Hops, Placement, Replicated, Rotated, Split, check_hops
from .strategies import FullySharded
from .strategy import Choice, bytes_where_used, check_min_bytes, check_room, chosen, in_words, num_bytes, shown

_NAME = "rotated tensor parallel"
_MOST_PADDED = Fraction(3, 2)  # of the size, as 17 heads on 8 devices: what is behind the end is multiplied, too


@dataclass(frozen=True, repr=False)
class RotatedTensorParallel:
    """Divides the samples like `DataParallel`; weights go around a ring, and a device ever has 1/N of them.

    Each device computes its samples with one part of the weights after another, while the next part is on its way. The
    columns of an MLP's first weight and the rows of its second go around together, so that what is between them is
    never whole, nor are the heads of an attention, or the logits of a cross entropy. It sends what `FullySharded` sends
    (rotated tensor parallelism, arXiv 2311.01635), and needs less memory.

    Experts go around, or stay while tokens are sent to them, whichever sends less; the plan tells both figures.

    What no rule can compute part by part is gathered where it is used, as by `FullySharded`; the plan says why.

    **Arguments:** `overrides`: as of `Hybrid`; `Rotated(dim)` pads a dim that the axis does not divide. `min_bytes`:
    what has fewer where it is used, with all that its dims belong to, stays whole, and so does what has fewer by itself
    and is no side of a product, such as a bias. `machine`: of `measure_machine`, or with published figures: each
    variable then goes around, stays split while samples are brought for its products, is gathered (for either pass, or
    once and kept), or lies whole, whatever of these takes the fewest seconds of a step; None: what can go around does.
    `memory_bytes`: what variables may take of a device's memory by that choice, with gradients, optimizer's state, what
    is made of them for a moment, and what is between those that belong together (hidden layers, scores, logits); other
    activations come on top. None: all that the machine has, if that is known. `hops`: "ahead", the next part comes
    while this one is used, and there is room for two (out of place); "in place", a part is handed on when it has been
    used, there is one at a time, and products wait for hops.

    **Raises:** `ArgumentError` for sizes below zero, and for `memory_bytes` without a `machine`.
    """

    overrides: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    min_bytes: int = 64 << 10
    _: KW_ONLY
    machine: Machine | None = None
    memory_bytes: int | None = None
    hops: Hops = "ahead"

    def __post_init__(self) -> None:
        check_min_bytes(self.min_bytes)
        check_hops(self.hops)
        check_room(self.memory_bytes, self.machine)

    def __repr__(self) -> str:
        return shown(self)

    @property
    def splits_batch(self) -> bool:
        """True."""
        return True

    def place(self, model: Model, axis: Axis, taken: Mapping[str, Layout]) -> dict[str, Choice]:
        """Chooses `Rotated` for dims that belong together, and for what a single product uses, `Split` for experts that
        send less when they stay, else what `FullySharded` chooses.

        **Raises:** as `Hybrid.place`.
        """
        sharded = FullySharded(min_bytes=self.min_bytes).place(model, axis, taken)
        no_ring = "another axis is a ring already" if any(one.rotated is not None for one in taken.values()) else ""
        if told := "the axis has one device" if axis.size == 1 else no_ring:
            dims, groups, reasons = dict[str, Cut](), dict[str, int](), dict.fromkeys(model.variables, told)
        else:
            dims, groups, reasons = self._dims(model, axis, taken, sharded)
        uses = model.find_rotated(dims, axis) if dims else RotatedUses({}, {})
        experts = choose_experts(model, axis, uses, taken, _NAME)
        left, used = uses.left, {*uses.rotated} - {*experts.exchanged}
        cuts = {path: dims[path] for path in used}
        if self.machine is None:
            prices, by = None, ByCost({}, {}, {})
        else:
            prices = Prices(model, axis, taken, self.machine, self.hops)
            room = self.memory_bytes or self.machine.memory_bytes
            ruled = {**self.overrides, **{path: one.placement for path, one in experts.exchanged.items()}}
            splits = _splits(model, axis, cuts, groups)
            by = by_cost(model, prices, sharded, cuts, groups, ruled, room, splits=splits)
            if kept := {path: cut for path, cut in cuts.items() if by.kinds.get(path) == "rotated"}:
                used = {*model.find_rotated(kept, axis).rotated}
            used &= {*kept}

        def choose(path: str) -> Choice:
            words = f"; {by.words[path]}" if by.words.get(path) else ""
            if path in experts.exchanged:
                return experts.exchanged[path]
            if path in used:
                also = experts.told.get(path, "") + (f"; {left[path]}" if path in left else "")
                cost = self._cost(uses.rotated[path])
                why = f"{_NAME}: goes around a ring, with its gradient, {cost}{also}{words}"
                return Choice(Rotated(cuts[path].dim, cuts[path].sizes, self.hops), why)
            kind, told = by.kinds.get(path), "" if path in cuts else left.get(path) or reasons.get(path, "")
            if words and kind == "split":
                how = "stays split, and samples of all devices along the axis are brought for its products"
                return Choice(Split(cuts[path].dim, pieces=cuts[path].sizes), f"{_NAME}: {how}{words}")
            if words and kind in ("replicated", "kept"):
                placement, how = placed(sharded[path], kind)
                return Choice(placement, f"{_NAME}: {how}{words}")
            return _otherwise(sharded[path], told, words)

        def priced(path: str) -> Choice:
            choice = choose(path)
            if prices is None:
                ring = ring_work(work_of(model, path, taken[path]), axis.size) if path in cuts else None
                return replace(choice, ring=ring)
            ring = prices.ring_work(path, cuts[path]) if path in cuts else None
            return replace(choice, ring=ring, exposed_seconds=by.seconds.get(path))

        return chosen(self.overrides, _NAME, model, priced)

    def _cost(self, part_bytes: int) -> str:
        part = in_words(part_bytes)
        if self.hops == "in place":
            return f"one part of {part} at a time and products waiting for hops"
        return f"two parts of {part} at a time and hops under products"

    def _stays_whole(self, model: Model, path: str) -> bool:
        """Whether a variable is short, and is no side of a product, such as a bias: a message of its own costs more."""
        works = any(site.role in ("product", "kernel", "rows") for site in model.sites.get(path, ()))
        return not works and bytes_where_used(model, path) < self.min_bytes

    def _dims(
        self, model: Model, axis: Axis, taken: Mapping[str, Layout], sharded: Mapping[str, Choice]
    ) -> tuple[dict[str, Cut], dict[str, int], dict[str, str]]:
        """Returns along which dims variables may go around, of which groups these are, and why others may not."""
        paths, dims, groups = [*model.variables], dict[str, Cut](), dict[str, int]()
        reasons, cuts = dict[str, str](), model.dims.cuts
        free = {
            (path, dim) for path, layout in taken.items() for dim in range(len(layout.shape)) if _is_free(layout, dim)
        }
        apart, own = dims_of_experts(model, axis, free)
        dims |= {path: Cut(dim, ()) for path, dim in apart.items()}
        groups |= own
        picked = {*own.values()}
        sizes = {
            root: sum(num_bytes(model.variables[paths[leaf]]) for leaf in {leaf for leaf, _ in group.leaves})
            for root, group in model.dims.groups.items()
        }
        whole = {path for path in paths if self._stays_whole(model, path)}
        for root in sorted(sizes, key=lambda root: model.dims.groups[root].summed_bytes / (sizes[root] or 1)):
            group = model.dims.groups[root]
            parts = [(paths[leaf], dim) for leaf, dim in group.leaves if paths[leaf] not in {*dims, *whole}]
            lengths = {model.variables[path].shape[dim] for path, dim in parts}
            is_padded = group.divisor % axis.size != 0
            if is_padded and (model.no_padding or not _can_be_padded(lengths, group.divisor, axis)):
                continue
            if is_padded and not _ends_at_weights(model, root):  # longer for nothing
                continue
            if group.blocked or group.conflicts & picked or sizes[root] < self.min_bytes or not parts:
                continue
            pieces = {
                paths[leaf]: cuts[leaf].sizes for leaf, dim in group.leaves if leaf in cuts and cuts[leaf].dim == dim
            }
            if any(size % axis.size for several in pieces.values() for size in several):
                continue
            if not all(_is_free(taken[path], dim) for path, dim in parts):
                continue
            picked.add(root)
            dims |= {path: Cut(dim, pieces.get(path, ())) for path, dim in parts}
            groups |= {path: root for path, _ in parts}
        for path, choice in sharded.items():
            if path not in dims and not isinstance(choice.placement, Replicated):
                layout = taken[path]
                if layout.is_split or layout.is_fed:
                    reasons[path] = "split along another axis"
                else:
                    dims[path] = Cut(choice.placement.dim, ())  # pyright: ignore[reportAttributeAccessIssue]
        return dims, groups, reasons


def _splits(model: Model, axis: Axis, cuts: Mapping[str, Cut], groups: Mapping[str, int]) -> set[int]:
    """Returns the groups of which each device can do its part for the samples of all along the axis.

    Rows of theirs are not looked up, as all devices would bring together what each has of them.
    """
    found = {root for path, root in groups.items() if path in cuts and root in model.dims.groups}
    for path, root in groups.items():
        sizes = cuts[path].sizes or (model.variables[path].shape[cuts[path].dim],) if path in cuts else (1,)
        is_read = any(site.role == "rows" and site.path in model.met for site in model.sites.get(path, ()))
        if is_read or any(size % axis.size for size in sizes):
            found.discard(root)
    blocked = {root for root in found if model.dims.groups[root].blocked}
    even = {root for root in found if model.dims.groups[root].divisor % axis.size == 0}
    return (found & even) - blocked if [*model.batch_axes][-1:] == [axis.name] else set()


def _can_be_padded(lengths: set[int], divisor: int, axis: Axis) -> bool:
    """Whether dims that belong together are of one size, of which padding is a small part."""
    return lengths == {divisor} and -(-divisor // axis.size) * axis.size <= _MOST_PADDED * divisor


def _ends_at_weights(model: Model, root: int) -> bool:
    """Whether products that sum over dims that belong together are by weights, all of whose dims are some leaf's."""
    ends = (dot for dot in model.dims.dots if dot.contracts(root))
    return all(any(model.dims.groups.keys() >= {*dims} for dims in dot.operands) for dot in ends)


def _is_free(layout: Layout, dim: int) -> bool:
    return not layout.is_split and not layout.is_fed and not layout.dim_axes[dim]


def _otherwise(choice: Choice, why: str, words: str) -> Choice:
    told = f"{choice.why.removeprefix('fully sharded: ')}{words}"
    return Choice(choice.placement, f"{_NAME}: {why}: {told}" if why else f"{_NAME}: {told}")
