"""Units of a program that can be computed part by part, as the parts of their weights come by.

The columns of one weight and the rows of the next belong together: a part of the first gives a part of what is
between, which the same part of the second sums into the result. Such equations become one call. So do the heads of an
attention, and a vocabulary with its cross entropy, of which the maximum is found on the way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import Jaxpr, Var

from braidax.program.bodies import Path, aval_of, bodies, equation_at
from braidax.program.inline import inlined
from braidax.program.lines import line_of
from braidax.program.outline import Unit, outline, unit_path
from braidax.program.sites import Site, dims_of_value, find_sites
from braidax.program.trace import Program

from .checked import checked, in_slices
from .division import Undivided
from .labels import BATCH, Labeled, labeled
from .reads import with_reads_first
from .region import Region
from .unit import Length, RotatedUnit, RotatedWeight, Taken


@dataclass(frozen=True)
class Rotatable:
    """A program and its units. **Fields:** `program`: with a call for each unit; `units`: by the path of that. `left`:
    leaves that are used elsewhere, too, and why; `rotated`: those that a unit uses."""

    program: Program
    units: Mapping[Path, RotatedUnit]
    left: Mapping[int, str]
    rotated: frozenset[int]


def rotatable(
    program: Program,
    dims: Mapping[int, int],
    num_parts: int,
    divided: Mapping[int, Sequence[int | None] | int],
    num_batch_parts: int,
) -> Rotatable:
    """Finds units that can be computed while the parts of weights come by.

    **Arguments:** `dims`: of leaves of the program's first argument, the dim that is in `num_parts` parts. `divided`:
    as of `find_batch_dims`. `num_batch_parts`: among how many devices samples are.
    """
    program = with_reads_first(inlined(program))
    found = _Finder(program, find_sites(program), labeled(program, dims, divided), num_parts, num_batch_parts)
    found.search()
    outlined = outline(program, [one for one, _ in found.units])
    units = {unit_path(outlined, one.name): made for one, made in found.units}
    left: dict[int, str] = {}
    for site in find_sites(outlined):
        inside = any(site.path[: len(path)] == path for path in units)
        if site.value.entry.leaf in dims and not inside:
            left.setdefault(site.value.entry.leaf, found.why(site))
    used = frozenset(weight.leaf for unit in units.values() for weight in unit.weights.values())
    return Rotatable(outlined, units, left, used)


class _Finder:
    """Looks for units, body by body."""

    def __init__(
        self,
        program: Program,
        sites: Sequence[Site],
        labels: Labeled,
        num_parts: int,
        num_batch_parts: int,
    ) -> None:
        self._jaxpr, self._labels = program.closed.jaxpr, labels
        self._num_parts, self._num_batch_parts = num_parts, num_batch_parts
        self._sites: dict[Path, list[Site]] = {}
        own = [site for site in sites if site.value.entry.leaf in labels.leaves]
        self._forms = {id(one) for site in own for one in (*site.value.casts, *site.value.view)}
        for site in sites:
            self._sites.setdefault(site.path, []).append(site)
        self.units: list[tuple[Unit, RotatedUnit]] = []
        self._whys: dict[int, str] = {}
        self._taken: set[Path] = set()

    def why(self, site: Site) -> str:
        """Says why a site is in no unit."""
        if site.role == "rows":
            return "its rows are looked up"
        if site.source is None:
            return "it is a result as it stands"
        where = line_of(site.source).replace("\\", "/").rpartition("/")[2]
        other = (
            f", but {equation_at(self._jaxpr, site.path).primitive.name}" if site.role == "other" and site.path else ""
        )
        return self._whys.get(site.value.entry.leaf, "") or f"no product uses it at {where}{other}"

    def search(self) -> None:
        for site in (site for sites in self._sites.values() for site in sites):
            is_own = site.value.entry.leaf in self._labels.leaves and not site.value.in_loop
            if is_own and site.role in ("product", "kernel") and site.path not in self._taken:
                self._grow(site)

    def _grow(self, seed: Site) -> None:
        """Makes a unit of what a product leads to, else of the product alone."""
        root = self._labels.leaves[seed.value.entry.leaf]
        if root == BATCH:
            self._whys.setdefault(seed.value.entry.leaf, "its dim goes along the samples")
            return
        body = self._body(seed.path[:-1])
        region = Region(body, seed.path[:-1], self._labels, self._sites, self._forms, root)
        region.take([path[-1] for path in self._taken if path[:-1] == region.path])
        while members := region.joined(seed.path[-1]):
            error = self._added(region, members, root)
            if error is None:
                return
            self._whys.setdefault(seed.value.entry.leaf, str(error))
            if error.equation is None or not region.leave(region.index(error.equation)):
                break
        if error := self._added(region, {seed.path[-1]}, root):
            self._whys.setdefault(seed.value.entry.leaf, str(error))

    def _added(self, region: Region, members: set[int], root: int) -> Undivided | None:
        """Adds a unit, or returns why it cannot be one."""
        try:
            self._add(region, members, root)
        except Undivided as error:
            return error
        return None

    def _body(self, path: Path) -> Jaxpr:
        if not path:
            return self._jaxpr
        return bodies(equation_at(self._jaxpr, path[:-1]))[path[-1]].jaxpr

    def _add(self, region: Region, members: set[int], root: int) -> None:
        members = region.convex(members)
        region.check_samples(members)
        name = f"rotated_{len(self.units)}"
        jaxpr = region.outlined(members)
        weights: dict[int, RotatedWeight] = {}
        for at, var in enumerate(jaxpr.invars):
            if (site := region.weights.get(var)) is not None:
                weights[at] = self._weight(site, region.divided(var, root))
        if not weights:
            raise Undivided("no weight of it is in parts")
        sizes = {aval_of(jaxpr.invars[at]).shape[one.divided] for at, one in weights.items()}
        size = None
        if any(one % self._num_parts for one in sizes):
            if len(sizes) > 1:
                raise Undivided(f"{self._num_parts} does not divide {min(sizes)}")
            (size,) = sizes
        nothing = Taken(None, None)
        taken = [
            nothing if at in weights else self._how(region, var, root, size) for at, var in enumerate(jaxpr.invars)
        ]
        unit = RotatedUnit(name, jaxpr, weights, tuple(taken), Length(size), region.maxima(jaxpr))
        counts = self._num_parts, self._num_batch_parts
        unit = in_slices(checked(unit, *counts), *counts)
        self.units.append((Unit(name, region.path, tuple(sorted(members))), unit))
        self._taken |= {(*region.path, at) for at in members}

    def _how(self, region: Region, var: Var, root: int, size: int | None) -> Taken:
        """How an input is taken that is no weight; what has no length that can be cut is cut where it meets a part."""
        dim = region.divided(var, root)
        length = 0 if dim is None else aval_of(var).shape[dim]
        fits = length % self._num_parts == 0 if size is None else length == size
        return Taken(region.divided(var, BATCH), dim if fits else None)

    def _weight(self, site: Site, divided: int | None) -> RotatedWeight:
        dims = dims_of_value(site.value)
        leaf = site.value.entry.leaf
        if divided is None:
            raise Undivided("a change of its shape hides the dim that is in parts")
        return RotatedWeight(leaf, dims, divided)
