"""What a loss does with a variable in one run, on one device: the bytes that it needs of it, and its products by it."""

import math
from typing import NamedTuple

import numpy as np

from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.model import Model
from braidax.parallel.plan.strategy import num_bytes
from braidax.program import aval_of


class Work(NamedTuple):
    """What one run of a loss does with a variable.

    **Fields:** `own_bytes`: of the variable itself. `used_bytes`: of the forms in which products take it, in all turns
    of loops, or all else but lookups where none does: a penalty on weights, say, meets no samples, and is computed on
    the parts. `num_used`: how many such takings there are; `most_bytes`: of the largest.
    `elements`: of those that products take. `flops`: of the products by it, forward. `looked_up_bytes`: of the rows
    that are looked up in it.
    """

    own_bytes: float
    used_bytes: float
    num_used: int
    most_bytes: float
    elements: float
    flops: float
    looked_up_bytes: float

    @property
    def tokens(self) -> float:
        """How many rows are multiplied with it."""
        return self.flops / (2 * self.elements) if self.elements else 0.0


def work_of(model: Model, path: str, taken: Layout) -> Work:
    """Returns what one run of the loss does with a variable on one device. **Arguments:** `taken`: how it lies."""
    spec, sites = model.variables[path], model.sites.get(path, ())
    others = math.prod(axis.size for axes in taken.dim_axes for axis in axes)
    forms: dict[tuple[object, object], tuple[int, int, int]] = {}
    multiplied: set[tuple[object, object]] = set()
    for site in sites:
        entry, casts = site.value.entry, site.value.casts
        dtype = np.dtype(aval_of(casts[-1].outvars[0]).dtype if casts else spec.dtype)
        if site.role != "rows":
            size, times = math.prod(spec.shape[dim] for dim in entry.dims), math.prod(entry.lengths)
            forms[entry, dtype] = size, dtype.itemsize, times
        if site.cost.flops:
            multiplied.add((entry, dtype))
    forms = {form: forms[form] for form in multiplied} if multiplied else forms
    return Work(
        num_bytes(spec) / others,
        sum(size * width * times for size, width, times in forms.values()) / others,
        sum(times for _, _, times in forms.values()),
        max((size * width for size, width, _ in forms.values()), default=0) / others,
        sum(size * times for size, _, times in forms.values()) / others if multiplied else 0.0,
        sum(site.cost.flops for site in sites) / others / model.num_parts,
        sum(site.cost.written_bytes for site in sites if site.role == "rows") / others / model.num_parts,
    )
