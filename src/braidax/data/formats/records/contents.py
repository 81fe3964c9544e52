"""Leaves made of the contents of fields, one string of bytes a sample: bytes, text, integers, and arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Indices, loader_dtype, narrow
from braidax.data.storage.files import Bytes
from braidax.errors import RecordError

Where = Callable[[int], str]
"""Names the file and the record of the content with a number, for errors."""

Place = Callable[[Sequence[Bytes], Indices, NDArray[Any], Where], None]
"""Makes one leaf: of the contents of its field, with the numbers of the samples, int64 `[n]`, in place."""


def place_bytes(contents: Sequence[Bytes], indices: Indices, out: NDArray[Any], where: Where) -> None:
    """Makes a leaf of bytes of varying size, as `Place`."""
    for i, content in enumerate(contents):
        out[i] = bytes(content)


def place_text(contents: Sequence[Bytes], indices: Indices, out: NDArray[Any], where: Where) -> None:
    """Makes a leaf of text of varying size, as `Place`. **Raises:** `RecordError` for text that is not UTF-8."""
    for i, content in enumerate(contents):
        try:
            out[i] = str(content, "utf-8")
        except UnicodeDecodeError as error:
            raise RecordError(f"{where(i)}: the text is not UTF-8 ({error}); store it in UTF-8") from error


def place_integers(contents: Sequence[Bytes], indices: Indices, out: NDArray[Any], where: Where) -> None:
    """Makes a leaf of integers, of their digits, as `Place`.

    **Raises:** `RecordError` for what is no integer, or does not fit in the dtype of `out`.
    """
    limits = np.iinfo(out.dtype)
    for i, content in enumerate(contents):
        try:
            value = int(bytes(content))
        except ValueError as error:
            raise RecordError(
                f"{where(i)}: {bytes(content[:40])!r} is no integer; expected digits, such as b'17'"
            ) from error
        if not limits.min <= value <= limits.max:
            raise RecordError(
                f"{where(i)}: {value} does not fit in {out.dtype}; store smaller integers, or keep 64 bits with "
                "jax.config.update('jax_enable_x64', True)"
            )
        out[i] = value


def place_arrays(dtype: np.dtype[Any], *, name: str, leaf: str) -> Place:
    """Returns what makes a leaf of arrays of one shape, whose bytes the contents are, as `Place`.

    **Arguments:** `dtype`: of the contents. `name`, `leaf`: of the file and the leaf, for errors.

    **Raises:** when it is called, `RecordError` for a content of another length, or a value that does not fit.
    """

    from braidax.data.storage.taken import stack_rows

    def place(contents: Sequence[Bytes], indices: Indices, out: NDArray[Any], where: Where) -> None:
        same = out.dtype == dtype and out.flags.c_contiguous
        values = out if same else np.empty(out.shape, dtype)
        width = values[:1].nbytes
        wrong = stack_rows(contents, values)
        if wrong is not None:
            raise RecordError(
                f"{where(wrong)}: has {len(contents[wrong]):,} bytes; expected {width:,}, as {leaf!r} was declared to "
                f"hold {dtype}{list(out.shape[1:])}: declare what the records hold, or write it again"
            )
        if dtype == np.bool_:  # bytes may be others than 0 and 1
            np.not_equal(values.view(np.uint8), 0, out=values)
        if not same:
            narrow(values, out, indices, where=name, leaf=leaf)

    return place


def loaded_array(value: NDArray[Any], index: int, *, where: str, leaf: str) -> NDArray[Any]:
    """Returns an array of its own, in the dtype in which it is loaded.

    **Arguments:** `index`: the number of the sample. `where`, `leaf`: for errors.

    **Raises:** `RecordError` for a value that does not fit.
    """
    loaded = np.empty(value.shape, loader_dtype(value.dtype, where=where, leaf=leaf))
    narrow(value[None], loaded[None], np.array([index]), where=where, leaf=leaf)
    return loaded
