"""`TensorParallel`: dims that belong together are split over an axis, and with them the work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from braidax.program import Group

from .layout import Axis, Layout
from .model import Model
from .placements import Activations, Placement, Replicated, Split, check_activations
from .strategy import Choice, check_min_bytes, chosen, in_words, num_bytes, shown


@dataclass(frozen=True, repr=False)
class TensorParallel:
    """Splits weights over the axis, and the work with them; every device along it sees the same samples.

    The hidden dim of an MLP is split in the columns of its first weight, its bias and the rows of its second, an
    attention by heads, an embedding with its output layer and cross entropy by the vocabulary, whatever library wrote
    them: such dims are found in the traced loss. Activations are summed over the axis behind each such block, and their
    gradients before it (Megatron-LM, arXiv 1909.08053, section 3).

    **Arguments:** `overrides`: as of `Hybrid`; `Split(dim)` splits a dim whatever uses it. `min_bytes`: dims whose
    weights have fewer bytes together stay whole. `activations`: how they lie between such blocks: whole on each device,
    or "by sequence", split along the first dim that is neither the batch's nor multiplied by weights. What layers keep
    for the backward pass is then 1/N, for about the same bytes on the wire (arXiv 2205.05198, section 4.2).
    """

    overrides: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    min_bytes: int = 64 << 10
    activations: Activations = "whole"

    def __post_init__(self) -> None:
        check_min_bytes(self.min_bytes)
        check_activations(self.activations)

    def __repr__(self) -> str:
        return shown(self)

    @property
    def splits_batch(self) -> bool:
        """False."""
        return False

    def place(self, model: Model, axis: Axis, taken: Mapping[str, Layout]) -> dict[str, Choice]:
        """Chooses `Split` for dims that belong together and can be divided, else `Replicated`.

        Groups that sum the fewest bytes for the bytes that they split come first; those that share a value with one
        that is split already stay whole. **Raises:** as `Hybrid.place`.
        """
        paths = [*model.variables]
        whole: dict[str, tuple[int, str]] = {}
        split = {path: by for path in paths if (by := self._by_columns(model, path, axis, taken[path]))}
        picked: set[int] = set()
        sizes = {root: _split_bytes(group, model) for root, group in model.dims.groups.items()}
        ranked = sorted(model.dims.groups, key=lambda root: model.dims.groups[root].summed_bytes / (sizes[root] or 1))
        for root in ranked:
            group = model.dims.groups[root]
            parts = [
                (paths[leaf], dim, taken[paths[leaf]], _pieces(model, leaf, dim))
                for leaf, dim in group.leaves
                if paths[leaf] not in split
            ]
            why = self._why_whole(group, sizes[root], axis, [part[1:] for part in parts])
            if why or group.conflicts & picked:
                told = why or "its dims share a value with what is split"
                for path, dim, layout, _ in parts:
                    whole[path] = max(whole.get(path, (0, "")), (layout.shape[dim], told))
                continue
            picked.add(root)
            told = f"a device sends {in_words(_sent(group.summed_bytes, model, axis))} a step for {len(parts)} of them"
            for path, dim, _, pieces in parts:
                how = f"dim {dim} split" + (f" in pieces {_shown(pieces)}, which are exchanged" if pieces else "")
                split[path] = Choice(Split(dim, self.activations, pieces), f"tensor parallel: {how}; {told}")

        def choose(path: str) -> Choice:
            _, why = whole.get(path, (0, "a scalar"))
            return split.get(path) or Choice(Replicated(), f"tensor parallel: whole: {why}")

        return chosen(self.overrides, "tensor parallel", model, choose)

    def _by_columns(self, model: Model, path: str, axis: Axis, taken: Layout) -> Choice | None:
        """A table that is read by rows only is split by its columns, which are brought together behind that."""
        spec, sites = model.variables[path], model.sites.get(path, ())
        if not sites or len(spec.shape) < 2 or any(site.role != "rows" for site in sites) or axis.size == 1:
            return None
        dim = len(spec.shape) - 1
        even = spec.shape[dim] % (taken.num_parts(dim) * axis.size) == 0
        if not even or num_bytes(spec) < self.min_bytes:
            return None
        return Choice(
            Split(dim, self.activations), "tensor parallel: by columns, brought together behind what reads its rows"
        )

    def _why_whole(self, group: Group, size: int, axis: Axis, parts: Sequence[tuple[int, Layout, Any]]) -> str:
        """Says why the dims of a group are not split, or ""."""
        if axis.size == 1:
            return "the axis has one device"
        if group.blocked:
            return group.blocked
        if any(pieces and (layout.pieces or layout.dim_axes[dim]) for dim, layout, pieces in parts):
            return "pieces of it would be split along two axes"
        uneven = any(layout.shape[dim] % (layout.num_parts(dim) * axis.size) for dim, layout, _ in parts)
        if uneven or group.divisor % axis.size:
            return f"{axis.size} devices do not divide {group.divisor}"
        return f"{in_words(size)} together" if size < self.min_bytes or not parts else ""


def _sent(summed_bytes: int, model: Model, axis: Axis) -> int:
    """What a device sends for activations of one run on the whole batch, of which it has a part."""
    return round(summed_bytes * model.microbatches / model.num_parts * 2 * (axis.size - 1) / axis.size)


def _pieces(model: Model, leaf: int, dim: int) -> tuple[int, ...]:
    """Returns the sizes of the pieces in which a dim is used; none where it is used whole."""
    cut = model.dims.cuts.get(leaf)
    return cut.sizes if cut is not None and cut.dim == dim else ()


def _shown(pieces: Sequence[int]) -> str:
    same = len({*pieces}) == 1
    return f"{len(pieces)}×{pieces[0]}" if same else "+".join(map(str, pieces))


def _split_bytes(group: Group, model: Model) -> int:
    specs = [*model.variables.values()]
    return sum(num_bytes(specs[leaf]) for leaf in {leaf for leaf, _ in group.leaves})
