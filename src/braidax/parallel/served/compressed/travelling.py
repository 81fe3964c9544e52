"""Rows as the arrays of a message: as they are, or in fewer bits, and back."""

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.plan.placements import WIRES, Wire
from braidax.parallel.served.batches.batch_rows import Reads
from braidax.parallel.served.programs import ReadAs

_MOST = 127  # the largest code; -128 is never sent, so that x and -x travel alike
_LEAST_SCALE = np.finfo(np.float32).tiny  # of a row of zeros, and of what is as small
_CACHED_BYTES = 1 << 20  # of the rows that are taken at a time
_SCALES = "scales"


Travels = Wire | ReadAs
"""In what rows travel, in place of what they are."""


class Travelling(NamedTuple):
    """How rows travel.

    **Fields:** `wire`: both ways, as of `Served`. `read_as`: by table, to who trains, the type to which the loss casts
    all rows that it reads, where that is narrower.
    """

    wire: Wire | None = None
    read_as: Mapping[str, ReadAs] = {}

    def to_reader(self, table: str, reads: Reads) -> Travels | None:
        """Returns in what rows of a table travel to who reads them; None is as they are."""
        return self.wire if self.wire is not None or reads == "all" else self.read_as.get(table)

    @classmethod
    def from_told(cls, wire: Any, read_as: Any) -> "Travelling":
        """Returns it as a message has its fields. **Raises:** `ArgumentError` for what no rows travel in."""
        types: Mapping[str, Any] = read_as if isinstance(read_as, dict) else {"": read_as}
        for one, known in ((wire, (None, *WIRES)), *((one, get_args(ReadAs)) for one in types.values())):
            if one not in known:
                raise ArgumentError(f"rows would travel as {one!r}: expected one of {[*known]}")
        return cls(wire, types)


def packed_rows(rows: NDArray[Any], name: str, wire: Travels | None) -> dict[str, NDArray[Any]]:
    """Returns rows as the arrays of a message, each with a dim of rows in front.

    Each row is packed by itself: what becomes of it does not depend on the others. As int8 it is `rint(x / s)` and a
    scale `s = max |x| / 127`. Of a row with NaN or an infinity the scale is NaN, so that all of it arrives as NaN.

    **Arguments:** `rows`: `[m, D]`, float32 where `wire` is given. `name`: of their array. `wire`: as of `Served`.
    """
    if wire is None:
        return {name: rows}
    if wire != "int8":
        with np.errstate(over="ignore"):  # what is above all of its numbers is infinite, as IEEE 754 rounds
            return {name: rows.astype(jnp.dtype(wire))}
    codes, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    num = max(1, _CACHED_BYTES // max(1, rows.itemsize * rows.shape[1]))
    for start in range(0, len(rows), num):
        part = slice(start, start + num)
        codes[part], scales[part] = _in_int8(rows[part])
    return {name: codes, f"{name}/{_SCALES}": scales}


def _in_int8(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Returns codes, whole numbers `[m, D]` that int8 has, and scales `[m]`."""
    with np.errstate(invalid="ignore"):  # of NaN, and infinity divided by itself
        room = np.abs(rows)
        scales = np.maximum(room.max(1, initial=0) / np.float32(_MOST), _LEAST_SCALE)
        codes = np.rint(np.divide(rows, scales[:, None], out=room), out=room)
    if not (is_finite := np.isfinite(scales)).all():
        codes[~is_finite], scales[~is_finite] = 0, np.nan
    return codes, scales


def unpacked_rows(
    arrays: Mapping[str, NDArray[Any]],
    name: str,
    wire: Travels | None,
    expected: NDArray[Any] | jax.ShapeDtypeStruct,
    told: str,
) -> NDArray[Any]:
    """Undoes `packed_rows`, as far as that can be.

    **Arguments:** `arrays`: of a message. `expected`: of the shape and dtype that the rows have. `told`: what
    errors call them.

    **Raises:** `ArgumentError` for other arrays than `packed_rows` makes of such rows.
    """
    dtype, count = np.dtype(expected.dtype), expected.shape[:1]
    rows = _checked(arrays, name, jnp.dtype(dtype if wire is None else wire), expected.shape, told)
    if wire != "int8":
        return rows if wire is None else rows.astype(dtype)
    scales = _checked(arrays, f"{name}/{_SCALES}", np.dtype(np.float32), count, f"scales of {told}")
    if not (is_scale := ((scales > 0) & (scales < np.inf)) | np.isnan(scales)).all():
        raise ArgumentError(f"scales of {told} have {scales[~is_scale][0]}: expected finite numbers above 0, or NaN")
    with np.errstate(over="ignore"):
        return np.multiply(rows, scales[:, None], dtype=np.float32)


def _checked(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: Any, shape: tuple[int, ...], told: str
) -> NDArray[Any]:
    found = arrays.get(name)
    if found is None or found.shape != shape or found.dtype != dtype:
        got = "missing" if found is None else f"{found.dtype}{list(found.shape)}"
        raise ArgumentError(f"{told} are {got}, expected {dtype}{list(shape)}")
    return found
