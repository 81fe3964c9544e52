"""`plan`: which mesh and strategies a loss trains fastest with."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from braidax.errors import ArgumentError

if TYPE_CHECKING:
    import optax

    from .search.cluster import Cluster
    from .search.finding import Found


def plan(
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    *,
    init: Callable[..., Any],
    batch: Any,
    cluster: "Cluster | None" = None,
    target: str | None = None,
    memory_bytes: int | None = None,
    measure: int = 3,
    devices: Sequence[Any] | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> "Found":
    """Searches for the mesh and the strategies with which a loss trains fastest.

    All meshes × strategies × microbatches are priced by a model, with rows of tables and stages where the loss has a
    use for them. Where the devices are here, the best are compiled, which says their memory exactly, and those that fit
    are run, in turns.

    **Arguments:** `loss_fn`, `optimizer`, `init`, `batch`: as of `parallelize`. `cluster`: devices that need not be
    here, of which nothing is run; None: those that are, which are measured. `target`: what the compiler of the cluster
    calls that, as `Step.compile_for` takes it: the best are compiled by it, which says their memory, but for those with
    stages, and meshes that its grid of devices has not; None: nothing is compiled for a cluster. `memory_bytes`: of a
    device, at most. `measure`: how many candidates are compiled, and here also run, 1 or more. `devices`: of JAX, some
    of those here; None: all. `tell`: is told what is being done, since compiling takes its time.

    **Returns:** the winner and all others; `print` shows them. **Raises:** `ArgumentError` when a limit cannot be met,
    and for a target that is none, or has another number of devices than the cluster; `MissingExtra`.
    """
    if measure < 1:
        raise ArgumentError(f"measure={measure}: expected how many candidates are compiled and run, 1 or more")
    if memory_bytes is not None and memory_bytes < 1:
        raise ArgumentError(f"memory_bytes={memory_bytes}: expected a size in bytes, such as 16 << 30")
    from braidax.program import specs_of

    from .search.finding import Where, search  # who reads plans only needs none of what a search imports

    given = {"init": init, "batch": specs_of(batch)}
    return search(
        loss_fn,
        optimizer,
        given,
        Where(cluster, devices, target),
        memory_bytes=memory_bytes,
        measure=measure,
        tell=tell,
    )
