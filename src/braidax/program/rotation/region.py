"""The equations of one jaxpr that have to do with one label, and which of them belong together."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, primitives

from braidax.program.bodies import Path
from braidax.program.dim_rules import num_bytes
from braidax.program.sites import Site

from .division import Undivided
from .labels import BATCH, Labeled


class Region:
    """The equations of one jaxpr that have to do with one label."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        path: Path,
        labels: Labeled,
        sites: Mapping[Path, Sequence[Site]],
        forms: Collection[int],
        root: int,
    ) -> None:
        self.jaxpr, self.path, self._labels, self._root, self._forms = jaxpr, path, labels, root, forms
        self.weights: dict[Var, Site] = {}
        self._dims: dict[Var, tuple[int | None, ...]] = {}
        others: set[int] = set()
        for at, equation in enumerate(jaxpr.eqns):
            told = labels.at.get((*path, at))
            if told is not None:
                for atom, dims in zip((*equation.invars, *equation.outvars), (*told[0], *told[1]), strict=True):
                    if not isinstance(atom, Literal):
                        self._dims[atom] = dims
            for site in sites.get((*path, at), ()):
                atom = equation.invars[site.operand] if site.operand >= 0 else None
                own = labels.leaves.get(site.value.entry.leaf)
                if isinstance(atom, Var) and own == root:
                    self.weights[atom] = site
                # What else is multiplied by a weight is computed where that is gathered.
                if (
                    site.role == "rows"
                    or own not in (None, root)
                    or (own is None and site.role in ("product", "kernel"))
                ):
                    others.add(at)
        self._members = {
            at for at, equation in enumerate(jaxpr.eqns) if at not in others and self._belongs(at, equation)
        }
        self._maker = {var: at for at, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
        self._left = set[int]()
        self._users: dict[Var, list[int]] = {}
        for at, equation in enumerate(jaxpr.eqns):
            for atom in equation.invars:
                if not isinstance(atom, Literal):
                    self._users.setdefault(atom, []).append(at)

    def divided(self, var: Any, root: int) -> int | None:
        """Returns the dim of a value that has a label; None where there is none. **Raises:** `Undivided` for two."""
        dims = [dim for dim, label in enumerate(self._dims.get(var, ())) if label == root]
        if len(dims) > 1:
            raise Undivided("two dims of one value belong together")
        return dims[0] if dims else None

    def _has(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and self._root in self._dims.get(atom, ())

    def _belongs(self, at: int, equation: JaxprEqn) -> bool:
        """Whether an equation takes the label, does not only give a weight another form, and works on parts."""
        path = (*self.path, at)
        if path not in self._labels.at or self._root in self._labels.blocked.get(path, ()):
            return False
        return id(equation) not in self._forms and any(map(self._has, equation.invars))

    def _next(self, at: int) -> set[int]:
        """Members that use a result that has the label."""
        results = [var for var in self.jaxpr.eqns[at].outvars if self._has(var)]
        return {one for var in results for one in self._users.get(var, ())} & self._members

    def _before(self, at: int) -> set[int]:
        """Members that make an operand that has the label."""
        operands = [atom for atom in self.jaxpr.eqns[at].invars if self._has(atom) and atom not in self.weights]
        return {self._maker[atom] for atom in operands if atom in self._maker} & self._members

    def _sums(self, at: int) -> bool:
        return self._ends(self.jaxpr.eqns[at])

    def _is_maximum(self, equation: JaxprEqn) -> bool:
        return equation.primitive is primitives.reduce_max_p and self._ends(equation)

    def maxima(self, jaxpr: Jaxpr) -> tuple[Var, ...]:
        """Returns the maxima over all parts that some of the equations take."""
        return tuple(equation.outvars[0] for equation in jaxpr.eqns if self._is_maximum(equation))

    def _ends(self, equation: JaxprEqn) -> bool:
        """Whether the label ends here: the dim is summed over, or alike."""
        return any(map(self._has, equation.invars)) and not any(map(self._has, equation.outvars))

    def joined(self, seed: int) -> set[int]:
        """Returns the members that are joined with a product, and lead to a sum; nothing where none does.

        What no weight leads to is among them where nothing else uses it and it is made of less, as masks of experts
        are: then it is made in parts, too.
        """
        while members := self._reached(seed):
            made = members & _closed({at for at in members if self._takes_weight(at)}, self._next)
            before = members - made
            outside = [at for at in before if self._is_used_outside(at, members)]
            if not outside and not self._is_made_of_less(before, made):
                outside = [*before]
            if sum(map(self.leave, outside)) == 0:
                break
        return members

    def _reached(self, seed: int) -> set[int]:
        reached = _closed({seed}, self._next)
        sums = {at for at in reached if self._sums(at)}
        members = _closed(sums, self._before)
        while True:  # other products come in, and what they lead to
            more = _closed({at for at in members if self._takes_weight(at)}, self._next)
            ends = {at for at in more if self._sums(at)}
            grown = _closed(ends, self._before) | members
            if grown == members:
                break
            members = grown
        return members if seed in members and sums else set()

    def _takes_weight(self, at: int) -> bool:
        atoms = self.jaxpr.eqns[at].invars
        return any(not isinstance(atom, Literal) and atom in self.weights and self._has(atom) for atom in atoms)

    def _is_used_outside(self, at: int, members: set[int]) -> bool:
        results = {*self.jaxpr.eqns[at].outvars}
        users = {one for var in results for one in self._users.get(var, ())}
        return not users <= members or any(atom in results for atom in self.jaxpr.outvars if isinstance(atom, Var))

    def _is_made_of_less(self, before: Collection[int], behind: Collection[int]) -> bool:
        """Whether what some equations take has fewer bytes than what they give to others."""
        made = {var for at in before for var in self.jaxpr.eqns[at].outvars}

        def read(indices: Collection[int]) -> set[Var]:
            return {atom for at in indices for atom in self.jaxpr.eqns[at].invars if isinstance(atom, Var)}

        return sum(map(num_bytes, read(before) - made)) < sum(map(num_bytes, read(behind) & made))

    def apart(self) -> list[set[int]]:
        """Returns the equations that do with each element of the dim what weights of its own say, those in one set that
        belong together: from products of it alone to the last weight behind them."""
        first = {at for at in self._members if self._takes_weight(at) and self._is_one_by_one(at)}
        made = _closed(first, lambda at: {one for one in self._next(at) if not self._sums(one)})
        left = made & _closed(first | {at for at in made if self._takes_weight(at)}, self._before)
        found: list[set[int]] = []
        while todo := left.difference(*found):
            found.append(_closed({min(todo)}, lambda at: (self._next(at) | self._before(at)) & left))
        blocked = self._labels.blocked
        return [
            members
            for members in found
            if not self._between(members) and not any(BATCH in blocked.get((*self.path, at), ()) for at in members)
        ]

    def _is_one_by_one(self, at: int) -> bool:
        equation = self.jaxpr.eqns[at]
        return equation.primitive is primitives.dot_general_p and all(
            map(self._has, (*equation.invars, *equation.outvars))
        )

    def leave(self, at: int) -> bool:
        """Leaves an equation out of what is joined, with all that leads to it: it is computed before.

        **Returns:** whether that can be: no weight leads to it, and it was not left out.
        """
        before = _closed({at}, self._makers)
        if at in self._left or any(self._takes_weight(one) for one in before & self._members):
            return False
        self._left |= before
        self._members -= before
        return True

    def check_samples(self, members: Collection[int]) -> None:
        """Raises `Undivided` where a weight multiplies what is made of samples and the same on all devices."""
        for at in members:
            equation = self.jaxpr.eqns[at]
            if equation.primitive is primitives.dot_general_p and self._takes_weight(at):
                made = self._labels.of_samples.get((*self.path, at), ())
                if any(made) and not any(BATCH in self._dims.get(atom, ()) for atom in equation.outvars):
                    raise Undivided("it multiplies what all samples have made, which no device has a part of", equation)

    def index(self, equation: JaxprEqn) -> int:
        """Returns which equation of the jaxpr one is."""
        return next(at for at, one in enumerate(self.jaxpr.eqns) if one is equation)

    def take(self, indices: Collection[int]) -> None:
        """Takes some equations away: they are in another unit."""
        self._members -= {*indices}

    def _makers(self, at: int) -> set[int]:
        atoms = [atom for atom in self.jaxpr.eqns[at].invars if not isinstance(atom, Literal)]
        return {self._maker[atom] for atom in atoms if atom in self._maker}

    def convex(self, members: set[int]) -> set[int]:
        """Returns the members with what lies between a maximum and them, and with what only makes their inputs longer.

        **Raises:** `Undivided` where something else lies between them.
        """
        members = self._with_broadcasts(members)
        while between := self._between(members):
            if not all(self._follows_maximum(at, members) for at in between):
                equation = self.jaxpr.eqns[min(between)]
                raise Undivided(f"{equation.primitive.name} stands between what would be one", equation)
            members |= between
        return members

    def _with_broadcasts(self, members: set[int]) -> set[int]:
        outputs = {atom for atom in self.jaxpr.outvars if not isinstance(atom, Literal)}

        def broadcast(at: int) -> set[int]:
            atoms = [atom for atom in self.jaxpr.eqns[at].invars if not isinstance(atom, Literal)]
            makers = {
                self._maker[atom] for atom in atoms if atom in self._maker and atom not in outputs | {*self.weights}
            }
            return {one for one in makers if self.jaxpr.eqns[one].primitive is primitives.broadcast_in_dim_p}

        grown = {*members}
        while more := {
            one
            for at in grown
            for one in broadcast(at) - grown
            if one not in self._left and {*self._users[self.jaxpr.eqns[one].outvars[0]]} <= grown
        }:
            grown |= more
        return grown

    def _between(self, members: set[int]) -> set[int]:
        low, high = min(members), max(members)
        behind, outside = set[Var](), dict[Var, int]()
        found: set[int] = set()
        ways: dict[int, set[int]] = {}
        for at in range(low, high + 1):
            equation = self.jaxpr.eqns[at]
            reads = [atom for atom in equation.invars if not isinstance(atom, Literal)]
            through = {outside[atom] for atom in reads if atom in outside}
            if at in members:
                for one in through:
                    found |= ways[one] | {one}
                behind.update(equation.outvars)
            elif through or any(atom in behind for atom in reads):
                ways[at] = {*through}.union(*(ways[one] for one in through)) if through else set()
                for var in equation.outvars:
                    outside[var] = at
        return found

    def _follows_maximum(self, at: int, members: set[int]) -> bool:
        """Whether all that comes into an equation out of the members comes from maxima."""
        todo, seen = [at], set[int]()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            for atom in self.jaxpr.eqns[one].invars:
                maker = None if isinstance(atom, Literal) else self._maker.get(atom)
                if maker is None:
                    continue
                if maker in members and self._has_or_sums(maker):
                    if not self._is_maximum(self.jaxpr.eqns[maker]):
                        return False
                elif maker >= min(members):
                    todo.append(maker)
        return True

    def _has_or_sums(self, at: int) -> bool:
        equation = self.jaxpr.eqns[at]
        return any(map(self._has, (*equation.invars, *equation.outvars)))

    def outlined(self, members: Collection[int]) -> Jaxpr:
        """Returns the members as a jaxpr, whose inputs and outputs come in the order that `outline` gives them."""
        chosen = [self.jaxpr.eqns[at] for at in sorted(members)]
        made = {var for equation in chosen for var in equation.outvars}
        others = [equation for at, equation in enumerate(self.jaxpr.eqns) if at not in members]
        atoms = [*self.jaxpr.outvars, *(atom for equation in others for atom in equation.invars)]
        wanted = {atom for atom in atoms if not isinstance(atom, Literal)}
        reads = [atom for equation in chosen for atom in equation.invars if not isinstance(atom, Literal)]
        inputs = list(dict.fromkeys(atom for atom in reads if atom not in made))
        outputs = [var for equation in chosen for var in equation.outvars if var in wanted]
        return Jaxpr([], inputs, outputs, chosen, debug_info=self.jaxpr.debug_info.with_unknown_names())


def _closed(start: set[int], step: Callable[[int], set[int]]) -> set[int]:
    found, todo = {*start}, [*start]
    while todo:
        new = step(todo.pop()) - found
        found |= new
        todo += new
    return found
