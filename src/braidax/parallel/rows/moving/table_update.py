"""What an optimizer does to one table, as terms."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from braidax.program import Term, Terms, of_no_rows


@dataclass(frozen=True)
class Scalar:
    """A number of an optimizer's state by which rows without a gradient move.

    **Fields:** `at`: which leaf of the state. `term`: it. `next`: what it is after an update, of such numbers alone.
    `kind`: a "count" grows by 1 in each update, what is "fixed" stays, what is "own" moves otherwise.
    """

    at: int
    term: Term
    next: Term
    kind: str


class Kept(NamedTuple):
    """A leaf of the state that has the rows of a table: `at` which place, its `name`, it, and what follows it."""

    at: int
    name: str
    term: Term
    next: Term


@dataclass(frozen=True)
class Fading:
    """What is kept fades by a factor in each step, and the move is a sum of multiples of it, and of the value.

    **Fields:** `factors`: of what is kept. `rates`: by what each is multiplied in the move, a scalar term, or None.
    `grown`: by which part of itself a value grows in a step if nothing else moves it, from -1 to 0: a scalar term.
    """

    factors: tuple[float, ...]
    rates: tuple[Term | None, ...]
    grown: Term


@dataclass(frozen=True)
class AdamFading:
    """Adam.

    **Fields:** `mu`, `nu`: which of what is kept. `count`: its number of steps. `rate`: a scalar term, by which its
    direction is multiplied in the move. `grown`: as of `Fading`.
    """

    mu: int
    nu: int
    b1: float
    b2: float
    eps: float
    count: Term
    rate: Term
    grown: Term


@dataclass(frozen=True)
class CatchUp:
    """How rows move without a gradient.

    **Fields:** `move`: what is added. `next`: of what is kept. `scalars`. `form`: in which missed steps can be summed
    up, if in one.
    """

    move: Term
    next: tuple[Term, ...]
    scalars: tuple[Scalar, ...]
    form: Fading | AdamFading | None = None


@dataclass(frozen=True)
class TableUpdate:
    """What an optimizer does to one table.

    **Fields:** `name`. `terms`: made all of these. `value`, `gradient`: of the table. `move`: what is added to the
    value. `kept`: what the state has of its rows. `catch_up`: None where rows without a gradient rest. `any_width`:
    whether rows may be wider or narrower than those that it was traced with.
    """

    name: str
    terms: Terms
    value: Term
    gradient: Term
    move: Term
    kept: tuple[Kept, ...]
    catch_up: CatchUp | None
    any_width: bool = False

    @functools.cached_property
    def context(self) -> tuple[Term, ...]:
        """What moves and what follows what is kept read besides what goes by rows."""
        return tuple(of_no_rows([self.move, *(one.next for one in self.kept)]))

    @property
    def replays(self) -> bool:
        """Whether the steps that rows have missed are taken one by one."""
        return self.catch_up is not None and self.catch_up.form is None

    @property
    def growth(self) -> Term | None:
        """The part by which values grow in a step without a gradient, where that differs from step to step.

        What steps have made of a value is then a product that is kept: nothing else tells it of many steps.
        """
        form = None if self.catch_up is None else self.catch_up.form
        return None if form is None or form.grown.is_literal else form.grown

    def shaped(self, leaf: jax.Array, term: Term) -> jax.Array:
        """Returns rows `[m, …]` in the shape that the program has them in."""
        return leaf if self.any_width else leaf.reshape(leaf.shape[0], *term.shape[1:])

    def sizes(self, values: jax.Array) -> tuple[Any, ...]:
        """Returns what `compute` needs to know of rows `[m, …]` of the table."""
        return values.shape if self.any_width else values.shape[:1]
