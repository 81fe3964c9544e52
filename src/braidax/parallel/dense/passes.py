"""What becomes of a traced loss whose variables lie as a plan says."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from jax.sharding import Mesh

from braidax.parallel.plan.compiling import keeps_order, ring_form
from braidax.parallel.plan.layout import Layout
from braidax.program import Path, Program, automatic

from .experts import experts
from .gathered import gathered
from .grouped import grouped
from .in_parts import InParts, in_parts
from .pieces import closed, opened
from .rotated import rotated
from .split import split
from .summed_last import summed_last


def dense_passes(
    program: Program,
    layouts: Sequence[Layout],
    mesh: Mesh,
    batch_axes: Sequence[str],
    divided: Mapping[int, Sequence[int | None] | int],
) -> Program:
    """Applies to a loss what the layouts of its variables ask for.

    **Arguments:** `layouts`: of each leaf of its first argument. `batch_axes`: over which samples are divided.
    `divided`: by number, an argument whose leaves are divided, and along which dim: of all, or of each.
    """
    whole = program
    program, used = opened(program, layouts)
    by_leaf, options = dict(enumerate(used)), (automatic(mesh), tuple(batch_axes), divided)
    platform = mesh.devices.flat[0].platform
    if splits := {leaf: layout for leaf, layout in by_leaf.items() if layout.is_split}:
        program = experts(program, splits, *options, in_turn=not ring_form(platform).in_place)
        program = split(program, splits, *options)
    rings: tuple[Path, ...] = ()
    if rotates := {leaf: layout for leaf, layout in by_leaf.items() if layout.rotated is not None}:
        program, rings = rotated(program, rotates, *options, form=ring_form(platform))
    if moved := {leaf: layout for leaf, layout in by_leaf.items() if layout.moving}:
        gathers = {leaf: _gathered_where_used(layout) for leaf, layout in moved.items()}
        in_order = keeps_order(platform)
        program = gathered(program, gathers, *options, rings=rings, in_order=in_order)
    return closed(whole, grouped(program, *options), layouts, mesh)


def _gathered_where_used(layout: Layout) -> Layout:
    """What goes around is gathered where no ring uses it."""
    return layout if layout.rotated is None else replace(layout, gathered=layout.moving, ring=None, keeps=False)


def summed_once(
    program: Program,
    layouts: Sequence[Layout],
    mesh: Mesh,
    batch_axes: Sequence[str],
    divided: Mapping[int, Sequence[int | None] | int],
    *,
    frozen: Collection[int] = (),
) -> InParts | None:
    """Returns a loss whose gradients are summed over devices behind several runs of it, of weights that are whole.

    **Arguments:** as of `dense_passes`; `frozen`: which leaves have no gradient. **Returns:** None where no gradient is
    summed over devices.
    """
    whole = _summed(layouts, mesh, batch_axes, frozen)
    return in_parts(program, whole, automatic(mesh), tuple(batch_axes), divided) if whole else None


def last_behind(
    program: Program,
    layouts: Sequence[Layout],
    mesh: Mesh,
    batch_axes: Sequence[str],
    divided: Mapping[int, Sequence[int | None] | int],
    *,
    frozen: Collection[int] = (),
) -> Program:
    """Returns a loss, to be run once, that has the gradient of its last large whole weight behind all others.

    **Arguments:** as of `summed_once`.
    """
    whole = _summed(layouts, mesh, batch_axes, frozen)
    return summed_last(program, whole, automatic(mesh), tuple(batch_axes), divided) if whole else program


def _summed(
    layouts: Sequence[Layout], mesh: Mesh, batch_axes: Sequence[str], frozen: Collection[int]
) -> dict[int, Layout]:
    """Returns the layouts of leaves whose gradients are summed over devices, and lie there whole."""
    if math.prod(mesh.shape[axis] for axis in batch_axes) == 1:
        return {}
    return {
        leaf: layout
        for leaf, layout in enumerate(layouts)
        if leaf not in frozen and not layout.moving and not layout.axes & {*batch_axes}
    }
