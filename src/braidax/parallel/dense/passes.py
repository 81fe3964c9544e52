"""What becomes of a traced loss whose variables lie as a plan says."""

from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, AxisType, Mesh

from braidax.parallel.plan.layout import Layout
from braidax.program import Program

from .gathered import gathered


def dense_passes(
    program: Program,
    layouts: Sequence[Layout],
    mesh: Mesh,
    batch_axes: Sequence[str],
    divided: Mapping[int, Sequence[int] | int],
) -> Program:
    """Applies to a loss what the layouts of its variables ask for.

    **Arguments:** `layouts`: of each leaf of its first argument. `batch_axes`: over which samples are divided.
    `divided`: by number, an argument whose leaves are divided, and along which dim: of all, or of each.
    """
    gathers = {leaf: layout for leaf, layout in enumerate(layouts) if layout.gathered}
    if not gathers:
        return program
    automatic = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return gathered(program, gathers, automatic, tuple(batch_axes), divided)
