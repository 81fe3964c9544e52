"""What lies between weights whose dims belong together: a hidden layer, heads' scores, logits, and what is before."""

from typing import NamedTuple

from braidax.parallel.plan.model import Model


class Between(NamedTuple):
    """Bytes of what products make in one run of the loss, of all samples.

    **Fields:** `held`: of results that have the dim, in one turn of loops, all at once; `kept`: in all turns, of those
    that the backward pass does not compute again. `copied`: of what products spread over the dim, in one turn; `summed`
    in all turns, of what they sum over it, and of the gradients of what they spread; `again`: of what they spread, and
    a remat computes again; `stays`: of what they spread, where none does. `num_messages`: sums and gathers of these.
    """

    held: float = 0.0
    kept: float = 0.0
    copied: float = 0.0
    summed: float = 0.0
    again: float = 0.0
    stays: float = 0.0
    num_messages: int = 0


def between_of(model: Model, root: int | None) -> Between:
    """Returns what is between the weights of a group. **Arguments:** `root`: its number; None where it is none."""
    if root is None:
        return Between()
    paths, leaves = [*model.variables], {leaf for leaf, _ in model.dims.groups[root].leaves}
    multiplied = [site for leaf in leaves for site in model.sites.get(paths[leaf], ()) if site.cost.flops]
    remat = any(site.value.remat for site in multiplied)
    dots = [dot for dot in model.dims.dots if any(root in dims for dims in (*dot.operands, dot.result))]
    made = [dot for dot in dots if root in dot.result]
    spread = {(dot.origins[side] or dot.path): (dot, side) for dot in made if (side := dot.spreads(root)) is not None}
    copied = sum(dot.operand_bytes[side] for dot, side in spread.values())
    copies = sum(dot.operand_bytes[side] * dot.times for dot, side in spread.values())
    turns = sum((2 + remat) * dot.times for dot, _ in spread.values())
    turns += sum(2 * dot.times for dot in dots if dot.contracts(root))
    return Between(
        sum(dot.result_bytes for dot in made),
        0.0 if remat else sum(dot.result_bytes * dot.times for dot in made),
        copied,
        model.dims.groups[root].summed_bytes,
        copies if remat else 0.0,
        0.0 if remat else copies,
        turns,
    )
