"""What a loss does with a variable in one run, on one device: the bytes that it needs of it, and its products by it."""

import math
from typing import NamedTuple

from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.model import Model
from braidax.parallel.plan.strategy import num_bytes

from .forms import forms_of


class Work(NamedTuple):
    """What one run of a loss does with a variable.

    **Fields:** `own_bytes`: of the variable itself. `used_bytes`: of the forms in which samples meet it, in all turns
    of loops; a penalty on weights, say, meets none, and is computed on the parts. `num_used`: how many such takings
    there are; `most_bytes`: of the largest.
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
    forms = forms_of(model, path)
    return Work(
        num_bytes(spec) / others,
        sum(form.num_bytes for form in forms) / others,
        sum(form.times for form in forms),
        max((form.num_elements * form.item_bytes for form in forms), default=0) / others,
        sum(form.num_elements * form.times for form in forms if form.multiplied) / others,
        sum(site.cost.flops for site in sites) / others / model.num_parts,
        sum(site.cost.written_bytes for site in sites if site.role == "rows") / others / model.num_parts,
    )
