"""What of the variables that servers have whole crosses the border of a worker."""

from collections.abc import Mapping
from typing import Any, final

import jax

from braidax.parallel.compute.accumulate import gradients_of
from braidax.parallel.compute.work import Work
from braidax.program import automatic, named_leaves, trace
from braidax.program.excerpts import Excerpt, excerpts_made, excerpts_read, whole


@final
class Border:
    """Lets casts and slices be done where fewer bytes cross: on the servers, what a loss in training does first with a
    variable that it reads nowhere else; and there, too, what its gradient is made by last.

    Not a bit changes: a server rounds as the loss would, and the rest of a gradient is zero. Each microbatch but the
    only one has a gradient that is summed in float32, which crosses as it is.

    **Arguments:** `work`: in training.

    **Fields:** by name `read`, of each variable, and `given`, of each gradient.

    **Source:** Parallax (Kim et al., EuroSys 2019).
    """

    def __init__(self, work: Work) -> None:
        program, params = work.program, work.form.dense(work.form.specs.params)
        self._specs = dict(named_leaves(params))
        names, laid = [*self._specs], dict(named_leaves(work.form.dense(work.form.shardings.params)))
        found = excerpts_read(program)[: len(names)]
        self.read = self._crossing(dict(zip(names, found, strict=True)), laid)
        moved = [name for name, _ in named_leaves(work.form.moved(params))]
        self.given = {name: whole(self._specs[name]) for name in moved}
        if work.plan.microbatches == 1 and self.crosses_less:

            def gradients(*given: Any) -> Any:
                return gradients_of(program, *given, frozen=work.form.still)[0]

            made = excerpts_made(trace(gradients, *program.in_specs, mesh=automatic(work.mesh)))
            self.given = self._crossing(dict(zip(moved, made, strict=True)), laid)

    def _crossing(self, found: Mapping[str, Excerpt], laid: Mapping[str, Any]) -> dict[str, Excerpt]:
        """Returns what crosses of each: of an array that is divided among devices all, in its narrower type."""
        every = {name: whole(self._specs[name]) for name in found}
        return {
            name: one if laid[name].is_fully_replicated else every[name]._replace(dtype=one.dtype)
            for name, one in found.items()
        }

    @property
    def crosses_less(self) -> bool:
        """Whether anything crosses that is less than what servers have."""
        return any(one != whole(self._specs[name]) for name, one in self.read.items())

    def laid_out(self, read: Any) -> Any:
        """Returns variables as the loss takes them. **Arguments:** `read`: what has crossed, a PyTree of these."""
        return self._mapped(self.read, lambda name, one, leaf: one.laid_out(leaf, self._specs[name]), read)

    def of(self, gradients: Any) -> Any:
        """Returns what is to cross of gradients."""
        return self._mapped(self.given, lambda _, one, leaf: one.of(leaf), gradients)

    def _mapped(self, excerpts: Mapping[str, Excerpt], fn: Any, tree: Any) -> Any:
        leaves = [fn(name, excerpts[name], leaf) for name, leaf in named_leaves(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)
