"""Running a single-device program on a mesh: one `jax.jit` with a global view, whatever the axis types of the mesh."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh


def compile_on(
    mesh: Mesh,
    fn: Callable[..., Any],
    *,
    in_shardings: Any,
    out_shardings: Any,
    donate: tuple[int, ...] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Makes the jitted function that runs single-device code on a mesh.

    Every axis of the mesh is automatic inside, so that XLA's partitioner distributes the work, and keeps its own type
    outside: arrays go in and come out as the user's mesh has them.

    **Arguments:** `mesh`: explicit or automatic axes. `fn`: pure, at least one output. `in_shardings`,
    `out_shardings`: a tuple with a PyTree of shardings per argument and a PyTree of shardings of the result (prefixes
    allowed). `donate`: which arguments are given up. `compiler_options`: as of `jax.jit`.

    **Returns:** what `jax.jit` returns.
    """

    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.auto_axes(fn, out_sharding=out_shardings)(*args)

    options = dict(compiler_options) if compiler_options else None
    return jax.jit(
        run,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate,
        compiler_options=options,
    )
