"""Any object with `__len__` and `__getitem__`: a Hugging Face `Dataset`, a torchvision data set, a list of samples."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Indices, Source, check_indices, loader_dtype, narrow
from braidax.errors import BraidaxError, FormatError, RecordError
from braidax.spans import span


class IndexableSource(Source):
    """Samples that an object gives one by one, or many at a time through `__getitems__`.

    Dicts and tuples give the structure; NumPy, JAX and torch arrays, PIL images, numbers and lists of numbers are the
    leaves. Python numbers become int32 (int64 if the first sample's does not fit) and float32.

    **Arguments:** `items`: the object; it is asked for samples from many threads at once.

    **Raises:** `FormatError` when the first sample is no PyTree of numbers, or there is none.
    """

    def __init__(self, items: Any) -> None:
        self._items = items
        self._where = f"object of type {type(items).__name__!r}"
        self._num_samples = len(items)
        if self._num_samples == 0:
            raise FormatError(f"{self._where}: it holds 0 samples; expected at least one")
        leaves, self._treedef = _flatten(self._fetch([0])[0])
        if not leaves:
            raise FormatError(f"{self._where}, record 0: has no leaf at all; expected arrays or numbers")
        self._names = [name for name, _ in leaves]
        stored = [self._leaf(value, name, record=0) for name, value in leaves]
        self._stored = [(array.shape, array.dtype) for array in stored]
        specs = [
            jax.ShapeDtypeStruct(array.shape, self._loaded(array, name, value))
            for array, (name, value) in zip(stored, leaves, strict=True)
        ]
        self._spec: Any = self._treedef.unflatten(specs)

    @property
    def sample_spec(self) -> Any:
        """A PyTree of `jax.ShapeDtypeStruct` with the structure of the object's first sample."""
        return self._spec

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: Indices, out: Any) -> None:
        """Asks the object for the samples and copies them into place."""
        check_indices(indices, self._num_samples, where=self._where)
        with span("read", type(self._items).__name__):
            samples = self._fetch(indices.tolist())
        with span("decode"):
            columns = [self._checked(sample, record) for sample, record in zip(samples, indices.tolist(), strict=True)]
            slots = cast("list[NDArray[Any]]", self._treedef.flatten_up_to(out))
            for leaf, (slot, (_, dtype)) in enumerate(zip(slots, self._stored, strict=True)):
                if slot.dtype != dtype and columns:
                    values = np.stack([arrays[leaf] for arrays in columns])
                    narrow(values, slot, indices, where=self._where, leaf=self._names[leaf])
                    continue
                for row, arrays in enumerate(columns):
                    slot[row] = arrays[leaf]

    def describe(self) -> Mapping[str, str]:
        """Returns the object's type and its number of samples."""
        kind = cast("type[Any]", type(self._items))
        return {
            "format": f"indexable object {kind.__module__}.{kind.__qualname__}",
            "samples": f"{self._num_samples:,}",
        }

    def _fetch(self, records: list[int]) -> Sequence[Any]:
        many = getattr(self._items, "__getitems__", None)
        try:
            if many is None:
                return [self._get(record) for record in records]
            samples = many(records)
        except BraidaxError:
            raise
        except Exception as error:
            for record in records:
                self._get(record)  # raises for the record that is to blame, if one alone is
            raise RecordError(
                f"{self._where}, one of the records {records[:8]}{'…' if len(records) > 8 else ''}: its __getitems__ "
                f"raised {type(error).__name__}: {error}; index the object there to see why"
            ) from error
        if len(samples) != len(records):
            raise RecordError(
                f"{self._where}: __getitems__ returned {len(samples)} samples for {len(records)} indices; expected as "
                "many"
            )
        return samples

    def _get(self, record: int) -> Any:
        try:
            return self._items[record]
        except Exception as error:
            raise RecordError(
                f"{self._where}, record {record}: its __getitem__ raised {type(error).__name__}: {error}; "
                f"index the object with {record} to see why"
            ) from error

    def _checked(self, sample: Any, record: int) -> list[NDArray[Any]]:
        """Returns a sample's leaves as arrays of the shapes and dtypes of the first sample's."""
        tree: Any = jax.tree
        leaves, treedef = tree.flatten(sample, is_leaf=_is_leaf)
        if treedef != self._treedef:
            raise RecordError(
                f"{self._where}, record {record}: its structure is {treedef}, expected that of record 0, "
                f"{self._treedef}; give every sample the same leaves"
            )
        arrays: list[NDArray[Any]] = []
        for value, name, (shape, dtype) in zip(leaves, self._names, self._stored, strict=True):
            array = self._leaf(value, name, record=record)
            if array.shape != shape or array.dtype != dtype:
                raise RecordError(
                    f"{self._where}, record {record}: leaf {name!r} is {array.dtype} {list(array.shape)}, expected "
                    f"{dtype} {list(shape)} as in record 0; pad, crop or convert the samples to one shape and dtype"
                )
            arrays.append(array)
        return arrays

    def _leaf(self, value: Any, name: str, *, record: int) -> NDArray[Any]:
        if value is None or isinstance(value, str | bytes):
            raise FormatError(
                f"{self._where}, record {record}: field {name!r} is {_shown(value)}; expected numbers: remove the "
                "field, or turn it into numbers first (with a Hugging Face Dataset: remove_columns, map or "
                "with_format)"
            )
        try:
            array = np.asarray(_eight_bit(value))
        except (ValueError, TypeError, OverflowError) as error:
            raise RecordError(
                f"{self._where}, record {record}: field {name!r} ({type(value).__name__}) is no rectangular array of "
                f"numbers ({error}); pad its lists to one length, or remove the field"
            ) from error
        if array.dtype.kind in "OSUT":
            raise FormatError(
                f"{self._where}, record {record}: field {name!r} is {_shown(value)} (dtype {array.dtype}); expected "
                "numbers: remove the field, or turn it into numbers first"
            )
        return array

    def _loaded(self, array: NDArray[Any], name: str, value: Any) -> np.dtype[Any]:
        """Returns the dtype of a leaf: 32 bits for Python's own numbers, which have no width, where the first fits."""
        if isinstance(value, int | float | list) and not isinstance(value, np.generic):
            if array.dtype == np.float64:
                return np.dtype(np.float32)
            if array.dtype == np.int64 and bool((np.abs(array) < 2**31).all()):
                return np.dtype(np.int32)
        return loader_dtype(array.dtype, where=self._where, leaf=name)


def _flatten(sample: Any) -> tuple[list[tuple[str, Any]], Any]:
    tree_util: Any = jax.tree_util
    paths, treedef = tree_util.tree_flatten_with_path(sample, is_leaf=_is_leaf)
    return [(tree_util.keystr(path, simple=True, separator=".") or "sample", value) for path, value in paths], treedef


def _is_leaf(value: Any) -> bool:
    return value is None or isinstance(value, list)


def _eight_bit(value: Any) -> Any:
    """Turns a PIL image, known by its looks, into an array [H, W, C]; bilevel and palette images are expanded."""
    if not (hasattr(value, "getbands") and hasattr(value, "mode")):
        return value
    wider = {"1": "L", "P": "RGB"}.get(value.mode)
    array = np.asarray(value if wider is None else value.convert(wider))
    return array[..., None] if array.ndim == 2 else array


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '…'}"
