"""Kernels: loops over whole windows of samples, compiled by Numba, that run without the GIL.

Imported by the files that hold kernels, which in turn are imported when a kernel is needed first. Numba makes vector
instructions of long loops only; those eight numbers wide are spelled out here.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

from braidax.errors import import_extra

_numba = import_extra("numba", "images", purpose="decoding and resizing images")
_ir = import_extra("llvmlite.ir", "images", purpose="decoding and resizing images")


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function compiled for the types it is called with; machine code is kept on disk between runs."""
    return _numba.njit(nogil=True, cache=True, error_model="numpy")(_plain(function))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return inspect.unwrap(function)  # while tests run, annotated functions are wrapped by what checks them


def _eight_bytes(typing: Any, values: Any, start: Any) -> Any:
    """Returns the number that `values[start:start + 8]` are, flat uint8, the first byte on top."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), _ir.IntType(64).as_pointer())
        return builder.bswap(builder.load(place, align=1))

    types = _numba.core.types
    return types.uint64(values, types.uint64), generate


def _add_eight(typing: Any, into: Any, at: Any, weight: Any, values: Any, start: Any) -> Any:
    """`into[at:at + 8] += weight * values[start:start + 8]`, on flat float32 arrays."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = _eight(context, builder, signature.args[0], arguments[0], arguments[1])
        source = _eight(context, builder, signature.args[3], arguments[3], arguments[4])
        undefined = _ir.Constant(_vector(), _ir.Undefined)
        first = builder.insert_element(undefined, arguments[2], _ir.Constant(_ir.IntType(32), 0))
        factor = builder.shuffle_vector(first, undefined, _mask([0] * 8))
        total = builder.fadd(builder.load(target, align=4), builder.fmul(factor, builder.load(source, align=4)))
        builder.store(total, target, align=4)
        return context.get_dummy_value()

    types = _numba.core.types
    return types.void(into, types.intp, types.float32, values, types.intp), generate


def _turn_eight(typing: Any, values: Any, start: Any, into: Any, at: Any) -> Any:
    """Transposes `values[start:start + 64]`, 8 rows of 8, into `into[at:at + 64]`, flat float32 arrays."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def row(array: int, number: int) -> Any:
            place = builder.add(arguments[array + 1], _ir.Constant(arguments[array + 1].type, 8 * number))
            return _eight(context, builder, signature.args[array], arguments[array], place)

        rows = [builder.load(row(0, number), align=4) for number in range(8)]
        for side in (1, 2, 4):  # squares of this side swap places across the diagonal
            for upper in (number for number in range(8) if not number & side):
                a, b = rows[upper], rows[upper | side]
                kept = _mask([lane if not lane & side else 8 + lane - side for lane in range(8)])
                moved = _mask([lane + side if not lane & side else 8 + lane for lane in range(8)])
                rows[upper], rows[upper | side] = (
                    builder.shuffle_vector(a, b, kept),
                    builder.shuffle_vector(a, b, moved),
                )
        for number, value in enumerate(rows):
            builder.store(value, row(2, number), align=4)
        return context.get_dummy_value()

    types = _numba.core.types
    return types.void(values, types.intp, into, types.intp), generate


def _start_eight(typing: Any, values: Any, at: Any, steps: Any, into: Any, place: Any) -> Any:
    """`into[place:place + 64]` becomes the transforms of `values[at:at + 64]`, int16, each times its own of `steps`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def row(array: int, number: int, start: Any, kind: Any) -> Any:
            index = builder.add(start, _ir.Constant(start.type, 8 * number))
            return _eight(context, builder, signature.args[array], arguments[array], index, kind)

        rows: list[Any] = []
        zero = _ir.Constant(arguments[1].type, 0)
        for k in range(8):
            whole = builder.load(row(0, k, arguments[1], _ir.IntType(16)), align=2)
            step = builder.load(row(2, k, zero, _ir.FloatType()), align=4)
            rows.append(builder.fmul(builder.sitofp(whole, _vector()), step))
        for k, value in enumerate(_transformed(builder, rows)):
            builder.store(value, row(3, k, arguments[4], _ir.FloatType()), align=4)
        return context.get_dummy_value()

    types = _numba.core.types
    return types.void(values, types.intp, steps, into, types.intp), generate


def _transform_eight(typing: Any, values: Any, start: Any) -> Any:
    """Eight inverse cosine transforms of `values[start + 8 * k + i]` along k, in place, one for each i."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        starts = [builder.add(arguments[1], _ir.Constant(arguments[1].type, 8 * k)) for k in range(8)]
        places = [_eight(context, builder, signature.args[0], arguments[0], start) for start in starts]
        rows = [builder.load(place, align=4) for place in places]
        for place, value in zip(places, _transformed(builder, rows), strict=True):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    types = _numba.core.types
    return types.void(values, types.intp), generate


def _transformed(builder: Any, a: list[Any]) -> list[Any]:
    """Source: Arai, Agui, Nakajima, "A fast DCT-SQ scheme for images" (Trans. IEICE E71, 1988)."""
    add, less = builder.fadd, builder.fsub
    cos1, cos3 = math.cos(math.pi / 8), math.cos(3 * math.pi / 8)

    def times(value: Any, factor: float) -> Any:
        return builder.fmul(value, _ir.Constant(_vector(), [_ir.Constant(_ir.FloatType(), factor)] * 8))

    even0, even1, even3 = add(a[0], a[4]), less(a[0], a[4]), add(a[2], a[6])
    even2 = less(times(less(a[2], a[6]), math.sqrt(2)), even3)
    p0, p3, p1, p2 = add(even0, even3), less(even0, even3), add(even1, even2), less(even1, even2)
    z13, z10, z11, z12 = add(a[5], a[3]), less(a[5], a[3]), add(a[1], a[7]), less(a[1], a[7])
    q7 = add(z11, z13)
    z5 = times(add(z10, z12), 2 * cos1)
    q6 = less(less(z5, times(z10, 2 * (cos1 + cos3))), q7)
    q5 = less(times(less(z11, z13), math.sqrt(2)), q6)
    q4 = less(less(z5, times(z12, 2 * (cos1 - cos3))), q5)
    pairs = [(p0, q7), (p1, q6), (p2, q5), (p3, q4)]
    return [add(*pair) for pair in pairs] + [less(*pair) for pair in reversed(pairs)]


def _put_bytes(typing: Any, values: Any, start: Any, number: Any) -> Any:
    """Does the reverse of `eight_bytes`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), _ir.IntType(64).as_pointer())
        builder.store(builder.bswap(arguments[2]), place, align=1)
        return context.get_dummy_value()

    types = _numba.core.types
    return types.void(values, types.uint64, types.uint64), generate


def _eight(context: Any, builder: Any, kind: Any, array: Any, place: Any, number: Any = None) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [place]), _ir.VectorType(number or _ir.FloatType(), 8).as_pointer())


def _vector() -> Any:
    return _ir.VectorType(_ir.FloatType(), 8)


def _mask(lanes: list[int]) -> Any:
    return _ir.Constant(_ir.VectorType(_ir.IntType(32), len(lanes)), lanes)


eight_bytes: Callable[..., Any] = _numba.extending.intrinsic(_plain(_eight_bytes))
add_eight: Callable[..., None] = _numba.extending.intrinsic(_plain(_add_eight))
turn_eight: Callable[..., None] = _numba.extending.intrinsic(_plain(_turn_eight))
transform_eight: Callable[..., None] = _numba.extending.intrinsic(_plain(_transform_eight))
start_eight: Callable[..., None] = _numba.extending.intrinsic(_plain(_start_eight))
put_bytes: Callable[..., None] = _numba.extending.intrinsic(_plain(_put_bytes))
