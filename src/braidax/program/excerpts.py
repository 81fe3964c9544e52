"""What a program reads of an array, and what it makes of one: a box, in a narrower type where it casts at once."""

from collections.abc import Iterator
from typing import Any, NamedTuple, final

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from .inline import inlined
from .trace import Program

_MOVING = (
    p.broadcast_in_dim_p,
    p.copy_p,
    p.dynamic_slice_p,
    p.gather_p,
    p.name_p,
    p.rev_p,
    p.reshape_p,
    p.sharding_constraint_p,
    p.slice_p,
    p.squeeze_p,
    p.transpose_p,
)
"""Elements of the first operand elsewhere: they may be rounded before as well as behind that."""


class Excerpt(NamedTuple):
    """The part of an array that is needed. **Fields:** `dtype`: in which. `start`, `stop`: of the box."""

    dtype: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(last - first for first, last in zip(self.start, self.stop, strict=True))

    def of(self, array: Any) -> Any:
        """Returns the box, in its type. **Arguments:** `array`: of NumPy or of JAX."""
        box = array[tuple(slice(*ends) for ends in zip(self.start, self.stop, strict=True))]
        return box if box.dtype == jnp.dtype(self.dtype) else box.astype(jnp.dtype(self.dtype))

    def laid_out(self, box: Any, like: Any) -> Any:
        """Undoes `of`, with zeros beyond the box. **Arguments:** `box`: of NumPy or of JAX. `like`: what it is of."""
        dtype, shape = jnp.dtype(like.dtype), tuple(like.shape)
        wide = box if box.dtype == dtype else box.astype(dtype)
        if tuple(box.shape) == shape:
            return wide
        beyond = [(first, size - last) for first, last, size in zip(self.start, self.stop, shape, strict=True)]
        if isinstance(box, np.ndarray):
            return np.pad(wide, beyond)
        return lax.pad(wide, jnp.zeros((), dtype), [(*ends, 0) for ends in beyond])


def whole(spec: Any) -> Excerpt:
    """Returns all of an array, as it is."""
    return Excerpt(str(spec.dtype), (0,) * len(spec.shape), tuple(spec.shape))


def excerpts_read(program: Program) -> list[Excerpt]:
    """Returns what a program reads of each of its inputs, which are flat.

    It reads a box where it takes static slices of an input and nothing else: the least that has all of them. It reads
    another type where it casts all that it reads to that, in which a number takes fewer bytes, before it computes.

    **Source:** operations at the border of a worker go to the side where fewer bytes cross (Parallax, Kim et al.,
    EuroSys 2019).
    """
    flow = _Flow(inlined(program).closed.jaxpr)
    return [_with_type(_box_read(flow, var), var, {*_types_read(flow, var)}) for var in flow.jaxpr.invars]


def excerpts_made(program: Program) -> list[Excerpt]:
    """Returns what of each of its outputs, which are flat, a program does not make by padding with zeros and widening.

    From the excerpt, `Excerpt.laid_out` makes the output, bit for bit.
    """
    flow = _Flow(inlined(program).closed.jaxpr)
    return [_with_type(_box_made(flow, one), one, {_type_made(flow, one)}) for one in flow.jaxpr.outvars]


def _with_type(box: tuple[tuple[int, ...], tuple[int, ...]] | None, var: Any, types: set[Any]) -> Excerpt:
    """Returns an excerpt. **Arguments:** `box`: None for all. `types`: in which elements are needed."""
    found = whole(var.aval)
    dtype = next(iter(types)) if len(types) == 1 else None
    return Excerpt(found.dtype if dtype is None else str(dtype), *((found.start, found.stop) if box is None else box))


@final
class _Flow:
    """Who takes and who makes the values of a jaxpr. **Fields:** by `id` of a value, `uses`: the equations that take
    it, and as which operand, None for an output; `made`: the one that makes it, and as which result."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.uses: dict[int, list[tuple[JaxprEqn | None, int]]] = {}
        self.made: dict[int, tuple[JaxprEqn, int]] = {}
        self._bodies: dict[int, _Flow] = {}
        for equation in jaxpr.eqns:
            for at, one in enumerate(equation.invars):
                self.uses.setdefault(id(one), []).append((equation, at))
            self.made |= {id(one): (equation, at) for at, one in enumerate(equation.outvars)}
        for at, one in enumerate(jaxpr.outvars):
            self.uses.setdefault(id(one), []).append((None, at))

    def body(self, scan: JaxprEqn) -> "_Flow":
        """Returns that of a scan's body."""
        if id(scan) not in self._bodies:
            self._bodies[id(scan)] = _Flow(scan.params["jaxpr"].jaxpr)
        return self._bodies[id(scan)]


def _is_narrower(dtype: Any, than: Any) -> bool:
    both_float = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(than, jnp.floating)
    return both_float and jnp.dtype(dtype).itemsize < jnp.dtype(than).itemsize


def _types_read(flow: _Flow, var: Any) -> Iterator[Any]:
    """Yields the narrower types to which a value is cast before anything is computed; None for its own."""
    for equation, at in flow.uses.get(id(var), [(None, 0)]):  # nobody needs less of what nobody takes
        if equation is None:
            yield None
        elif equation.primitive is p.convert_element_type_p:
            dtype = equation.params["new_dtype"]
            yield dtype if _is_narrower(dtype, var.aval.dtype) else None
        elif _moves(equation, at):
            yield from _types_read(flow, equation.outvars[0])
        elif equation.primitive is p.scan_p and not _is_carry(equation, at):
            body = flow.body(equation)
            yield from _types_read(body, body.jaxpr.invars[at])
        else:
            yield None


def _moves(equation: JaxprEqn, at: int) -> bool:
    """Whether an operand's elements are those of the result, somewhere, or not there."""
    if equation.primitive in (p.select_n_p, p.concatenate_p):
        return at > 0 or equation.primitive is p.concatenate_p
    return equation.primitive in _MOVING and at == 0


def _is_carry(scan: JaxprEqn, at: int) -> bool:
    first = scan.params["num_consts"]
    return first <= at < first + scan.params["num_carry"]


def _box_read(flow: _Flow, var: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the box that has all that is read of a value; None where that is not known to be less than all."""
    boxes: list[tuple[Any, Any]] = []
    for equation, _ in flow.uses.get(id(var), []):
        if equation is not None and equation.primitive is p.slice_p and not equation.params["strides"]:
            boxes.append((equation.params["start_indices"], equation.params["limit_indices"]))
        elif equation is not None and equation.primitive is p.convert_element_type_p:
            box = _box_read(flow, equation.outvars[0])
            if box is None:
                return None
            boxes.append(box)
        else:
            return None
    return _hull(boxes)


def _hull(boxes: list[tuple[Any, Any]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the least box that has all of some."""
    if not boxes:
        return None
    starts, stops = zip(*boxes, strict=True)
    return tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*stops, strict=True)))


def _type_made(flow: _Flow, var: Any) -> Any:
    """Returns the narrower type from which a value was cast, and only moved since; None where it was not."""
    if id(var) not in flow.made:
        return None
    equation, at = flow.made[id(var)]
    first: Any = equation.invars[0] if equation.invars else None
    if equation.primitive is p.convert_element_type_p:
        dtype = first.aval.dtype
        return dtype if _is_narrower(dtype, var.aval.dtype) else None
    moves = equation.primitive in _MOVING or (equation.primitive is p.pad_p and _is_zero(equation.invars[1]))
    if moves and equation.primitive is not p.gather_p:  # which may fill
        return _type_made(flow, first)
    if equation.primitive is p.scan_p and at >= equation.params["num_carry"]:
        body = flow.body(equation)
        return _type_made(body, body.jaxpr.outvars[at])
    return None


def _is_zero(atom: Any) -> bool:
    """Whether a value is 0, and not -0.0."""
    return isinstance(atom, Literal) and not np.asarray(atom.val).tobytes().strip(b"\0")


def _box_made(flow: _Flow, var: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the box beyond which a value is zero by the way it is made; None where that is not known."""
    if id(var) not in flow.made:
        return None
    equation, _ = flow.made[id(var)]
    if equation.primitive is p.pad_p and _is_zero(equation.invars[1]):
        ends = equation.params["padding_config"]
        if any(before < 0 or behind < 0 or inside for before, behind, inside in ends):
            return None
        pairs = zip(ends, var.aval.shape, strict=True)
        return tuple(int(one[0]) for one in ends), tuple(int(size - one[1]) for one, size in pairs)
    if equation.primitive is p.convert_element_type_p:
        return _box_made(flow, equation.invars[0])
    if equation.primitive in (p.add_jaxvals_p, p.add_p):
        boxes = [_box_made(flow, one) for one in equation.invars]
        return None if None in boxes else _hull([one for one in boxes if one is not None])
    return None
