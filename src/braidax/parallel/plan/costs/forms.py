"""In which forms a loss uses a variable with samples, and what lookups of its rows send where these are in parts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.model import Model
from braidax.parallel.rows.exchange.traffic import ID_BYTES
from braidax.program import Site, aval_of


class Form(NamedTuple):
    """A type and a place in which a variable is used.

    **Fields:** `num_elements` of it, `item_bytes` of one, and how many `times` a run of the loss takes it, each time
    another part. `multiplied`: whether a product or a convolution does.
    """

    num_elements: int
    item_bytes: int
    times: int
    multiplied: bool

    @property
    def num_bytes(self) -> int:
        """Of all that is taken."""
        return self.num_elements * self.item_bytes * self.times


def forms_of(model: Model, path: str) -> list[Form]:
    """Returns the forms in which samples meet a variable whole; rows that are looked up for them are none."""
    spec, found = model.variables[path], dict[tuple[object, object], Form]()
    for site in model.sites.get(path, ()):
        if site.role == "rows" or (site.path not in model.met and not site.within):
            continue
        entry, dtype = site.value.entry, _type_of(site, spec.dtype)
        before = found.get((entry, dtype))
        size, times = math.prod(spec.shape[dim] for dim in entry.dims), math.prod(entry.lengths)
        multiplied = bool(site.cost.flops) or (before is not None and before.multiplied)
        found[entry, dtype] = Form(size, dtype.itemsize, times, multiplied)
    return [*found.values()]


def lookup_bytes(model: Model, path: str, layout: Layout, sizes: Mapping[str, int], *, ways: int) -> float:
    """Returns what a device sends for lookups in a variable of which it has a part, in one run of the loss.

    It looks up its part of the rows of all ids, which are exchanged, and so are their gradients. Where it has
    consecutive rows, these are first exchanged for columns; or each says what it has, and the sum is scattered. Rows of
    ids that are the same for all samples are gathered, and so is the variable where it is shorter than what is looked
    up, or in parts along several axes.

    **Arguments:** `sizes`: of the axes that divide samples. `ways`: 1 where it has no gradient, else 2.
    """
    sent = 0.0
    num_parts, count = math.prod(sizes.values()), math.prod(sizes.get(name, 1) for name in layout.moving)
    for site in model.sites.get(path, ()):
        if site.role != "rows" or site.path not in model.met:
            continue
        rows, others = site.cost.written_bytes, (count - 1) / count
        shape = [layout.shape[dim] for dim in site.value.entry.dims]
        table = math.prod(shape) * _type_of(site, np.dtype(model.variables[path].dtype)).itemsize
        times = math.prod(site.value.entry.lengths)
        num_ids = rows / max(table / shape[0], 1) / times
        dims = [at for at, dim in enumerate(site.value.entry.dims) if {*layout.axes_of(dim)} & layout.moving]
        if not model.met[site.path] or num_ids > shape[0] * num_parts or len(layout.moving) != 1 or len(dims) != 1:
            sent += (1 + ways) * min(rows, table * times) * others
            continue
        rows, num_ids = rows / num_parts, num_ids / num_parts
        sent += num_ids * times * ID_BYTES * (count - 1)
        if dims[0]:
            sent += ways * rows * others
        elif column_dim(shape, count, num_ids) is not None:
            padded = -(-shape[0] // count) * count / shape[0]
            sent += ways * (rows + table * times * padded / count) * others
        else:
            sent += ways * rows * (count - 1)
    return sent


def column_dim(shape: Sequence[int], count: int, num_ids: float) -> int | None:
    """Returns the dim by which a table of consecutive rows is exchanged for columns before rows are looked up.

    **Arguments:** `count`: of devices that have parts of it. `num_ids`: that each of them looks up.

    **Returns:** None where they divide no dim, or it sends less to exchange the rows.
    """
    dims = [at for at, size in enumerate(shape) if at and not size % count]
    return dims[0] if dims and num_ids * (count - 1) > 2 * shape[0] / count else None


def _type_of(site: Site, dtype: Any) -> np.dtype[Any]:
    casts = site.value.casts
    return np.dtype(aval_of(casts[-1].outvars[0]).dtype if casts else dtype)
