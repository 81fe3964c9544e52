"""Variables that a server has whole, with what the optimizer keeps of them, and the program that moves them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jax import export
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.programs import KeptForm
from braidax.program.excerpts import Excerpt

_NUM_LOADED = 256  # programs that are kept


class DensePrograms(NamedTuple):
    """What is computed with variables that a server has whole, as JAX writes programs down.

    **Fields:** `begin`: `key data -> carry`. `update`: `(*carry, *gradients, loss, *sums, *parts) -> (*carry,
    *numbers)`. `parts`: `(*carry, *gradients, loss) -> (*parts, *squares)`: numbers that this server has and others
    need, and where the norm is wanted the sum of the squares of these gradients; empty where there are none.
    """

    begin: bytes
    update: bytes
    parts: bytes


class Excerpts(NamedTuple):
    """What crosses the border of a worker. **Fields:** `read`: of each variable, what a loss in training reads.
    `given`: of each gradient, what is not zero beyond it."""

    read: tuple[Excerpt, ...]
    given: tuple[Excerpt, ...]


@dataclass(frozen=True)
class DenseForm:
    """The variables that one server has whole, and what moves them.

    What a server has of them is a list of arrays, `carry`: the variables, what the optimizer keeps of them, and what
    all servers have alike, such as a count of steps.

    **Fields:** `names`: of the variables. `values`: which of `carry` they are. `moved`: which of them have gradients.
    `carry`: forms, which are called by their paths in a state. `numbers`: tables by name, with how many numbers their
    rows move by. `sums`: tables over whose gradients the optimizer needs sums. `programs`. `excerpts`.
    """

    names: tuple[str, ...]
    values: tuple[int, ...]
    moved: tuple[int, ...]
    carry: tuple[KeptForm, ...]
    numbers: tuple[tuple[str, int], ...]
    sums: tuple[str, ...]
    programs: DensePrograms
    excerpts: Excerpts

    def told(self) -> tuple[dict[str, Any], dict[str, NDArray[np.uint8]]]:
        """Returns it as a request has it: JSON values, and the programs."""
        plain = {one: getattr(self, one) for one in ("names", "values", "moved", "numbers", "sums", "excerpts")}
        plain["carry"] = [[one.name, one.shape, one.dtype] for one in self.carry]
        programs = {name: np.frombuffer(one, np.uint8) for name, one in self.programs._asdict().items()}
        return plain, programs

    @classmethod
    def from_told(cls, fields: Mapping[str, Any], programs: Mapping[str, NDArray[np.uint8]]) -> "DenseForm":
        """Undoes `told`."""
        plain: dict[str, Any] = {name: tuple(fields[name]) for name in fields}
        plain["carry"] = tuple(KeptForm(name, tuple(shape), dtype) for name, shape, dtype in plain["carry"])
        plain["numbers"] = tuple((name, int(count)) for name, count in plain["numbers"])
        plain["excerpts"] = Excerpts(*map(_excerpts, plain["excerpts"]))
        return cls(**plain, programs=DensePrograms(*(programs[name].tobytes() for name in DensePrograms._fields)))


@final
class DensePart:
    """The variables that this server has whole. **Arguments:** `form`. **Fields:** `carry`: as of `DenseForm`."""

    def __init__(self, form: DenseForm) -> None:
        self.form = form
        self._begin, self._update = loaded(form.programs.begin), loaded(form.programs.update)
        self._parts = loaded(form.programs.parts) if form.programs.parts else None
        self.carry: list[NDArray[Any]] = [np.zeros(one.shape, jax.numpy.dtype(one.dtype)) for one in form.carry]
        self._read: list[NDArray[Any]] | None = None

    def bear(self, key_data: NDArray[Any]) -> None:
        """Makes the first values, as the user's `init` does. **Arguments:** `key_data`: of its key."""
        self.load(self._begin(key_data))

    def load(self, carry: Sequence[Any]) -> None:
        """Puts arrays in place of those that are there. **Raises:** `ArgumentError` for others than of the form."""
        found = [np.array(one) for one in carry]
        got = [(one.dtype, one.shape) for one in found]
        expected = [(one.dtype, one.shape) for one in self.carry]
        if got != expected:
            names = [one.name for one in self.form.carry]
            raise ArgumentError(f"variables {names} were given as {_words(got)}, expected {_words(expected)}")
        self.carry, self._read = found, None

    def values(self) -> list[NDArray[Any]]:
        """Returns the variables, in the order of their names."""
        return [self.carry[at] for at in self.form.values]

    def read(self) -> list[NDArray[Any]]:
        """Returns what of the variables a loss in training reads; it is cut once for all who ask between two
        updates."""
        if self._read is None:
            pairs = zip(self.form.excerpts.read, self.values(), strict=True)
            self._read = [np.asarray(one.of(value), order="C") for one, value in pairs]
        return self._read

    def gradients(self, given: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns gradients as they move variables, of what has traveled.

        **Raises:** `ArgumentError` for others than those of the variables that have some.
        """
        got = [(one.dtype, one.shape) for one in given]
        wanted = [(np.dtype(jax.numpy.dtype(one.dtype)), one.shape) for one in self.form.excerpts.given]
        if got != wanted:
            names = [self.form.names[at] for at in self.form.moved]
            raise ArgumentError(f"gradients of {names} are {_words(got)}, expected {_words(wanted)}")
        like = [self.carry[self.form.values[at]] for at in self.form.moved]
        return [one.laid_out(box, spec) for one, box, spec in zip(self.form.excerpts.given, given, like, strict=True)]

    def parts(self, gradients: Sequence[Any], loss: Any) -> list[NDArray[Any]]:
        """Returns the numbers of an update that other servers need of this one, and squares, as of `DensePrograms`."""
        if self._parts is None:
            return []
        return [np.asarray(one) for one in self._parts(*self.carry, *gradients, loss)]

    def move(self, gradients: Sequence[Any], loss: Any, totals: Sequence[Any]) -> dict[str, list[NDArray[Any]]]:
        """Takes an update.

        **Arguments:** `totals`: sums over the gradients of all rows of the tables, and the parts of all servers.
        **Returns:** for each table the numbers by which its rows move.
        """
        found = [np.asarray(one) for one in self._update(*self.carry, *gradients, loss, *totals)]
        count = len(self.carry)
        self.carry, numbers, self._read = found[:count], iter(found[count:]), None
        return {name: [next(numbers) for _ in range(num)] for name, num in self.form.numbers}


@lru_cache(_NUM_LOADED)
def loaded(program: bytes) -> Any:
    """Returns a program that was sent as a jitted function, and for the same one the same: it is compiled once."""
    return jax.jit(export.deserialize(bytearray(program)).call)


def _excerpts(told: Any) -> tuple[Excerpt, ...]:
    return tuple(Excerpt(str(dtype), tuple(start), tuple(stop)) for dtype, start, stop in told)


def _words(forms: Sequence[tuple[Any, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in forms) or "nothing"
