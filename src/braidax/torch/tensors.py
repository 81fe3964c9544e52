"""Data sets that hold their columns as tensors, or read them as a source of Braidax does; and parts of these."""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from braidax.cores import usable_cores
from braidax.data.source import Source, read_samples
from braidax.torch.gathering import Table
from braidax.torch.hugging_face import table_of
from braidax.torch.library import torch_library


def columns_of(dataset: Any) -> Table | None:
    """Returns the columns of a data set whose samples are rows of them by its very class, else None.

    These are a `TensorDataset`, a Hugging Face `Dataset`, a `braidax.data.Source`, and a `Subset` of one of them.
    """
    data = torch_library().utils.data
    kind = cast("type[Any]", type(dataset))
    if kind is data.TensorDataset:
        return _Tensors(dataset.tensors) if all(map(_is_plain, dataset.tensors)) else None
    if kind is data.Subset:
        inside = columns_of(dataset.dataset)
        return None if inside is None else _chosen(inside, dataset.indices)
    if Source in kind.__mro__:
        own = (kind.__getitem__, kind.__getitems__) != (Source.__getitem__, Source.__getitems__)
        return None if own or not _is_fixed(dataset.sample_spec) else _Samples(dataset)
    return table_of(dataset)


def first_threads(dataset: Any) -> int:
    """Returns by how many threads to begin: for a `braidax.data.Source`, which computes without the GIL, by as many as
    there are cores."""
    return usable_cores() if Source in type(dataset).__mro__ else 1


class _Tensors:
    """The tensors of a `TensorDataset`."""

    def __init__(self, tensors: tuple[Any, ...]) -> None:
        self._tensors = tensors
        self.signature = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]

    def __len__(self) -> int:
        return len(self._tensors[0])

    def fill(self, rows: NDArray[np.int64], out: Any) -> bool:
        """As of `Table`."""
        torch = torch_library()
        if not isinstance(out, list) or [(leaf.shape[1:], leaf.dtype) for leaf in cast(Any, out)] != self.signature:
            return False
        for tensor, leaf in zip(self._tensors, cast("list[Any]", out), strict=True):
            if tensor.is_contiguous() and tensor.numel():
                np.take(_bytes(tensor), rows, axis=0, out=_bytes(leaf), mode="clip")  # else it copies `out` first
            else:
                torch.index_select(tensor, 0, torch.from_numpy(rows), out=leaf)
        return True


class _Samples:
    """The samples of a source, as it reads them into place."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.signature = (id(source), repr(source.sample_spec))

    def __len__(self) -> int:
        return len(self._source)

    def fill(self, rows: NDArray[np.int64], out: Any) -> bool:
        """As of `Table`. **Raises:** as `Source.read`."""
        spec = self._source.sample_spec
        leaves = cast("dict[str, Any]", out if isinstance(out, dict) else {"": out})
        specs = cast("dict[str, Any]", spec if isinstance(out, dict) else {"": spec})
        if isinstance(out, list) or isinstance(spec, dict) != isinstance(out, dict) or specs.keys() != leaves.keys():
            return False
        if any(leaf.shape[1:] != specs[name].shape for name, leaf in leaves.items()):
            return False
        arrays = {name: leaf.numpy() for name, leaf in leaves.items()}
        read = {
            name: array if array.dtype == specs[name].dtype else np.empty(array.shape, specs[name].dtype)
            for name, array in arrays.items()
        }
        read_samples(self._source, rows, read if isinstance(out, dict) else read[""])
        for name, array in arrays.items():
            if read[name] is not array:
                array[...] = read[name]
        return True


class _Chosen:
    """Some rows of a table: a `Subset`."""

    def __init__(self, table: Table, places: NDArray[np.int64]) -> None:
        self._table = table
        self._places = places
        self.signature = table.signature

    def __len__(self) -> int:
        return len(self._places)

    def fill(self, rows: NDArray[np.int64], out: Any) -> bool:
        """As of `Table`."""
        return self._table.fill(self._places[rows], out)


def _chosen(table: Table, indices: Any) -> Table | None:
    """Returns rows of a table, or None where their indices are not what all data sets take for the same."""
    places = np.asarray(indices)
    if places.dtype != np.int64 or places.ndim != 1 or not len(places):
        return None
    return _Chosen(table, places) if places.min() >= 0 and places.max() < len(table) else None


def _bytes(tensor: Any) -> NDArray[np.uint8]:
    """Returns a contiguous tensor as uint8 `[rows, bytes of a row]`, for NumPy does not know all dtypes of torch."""
    return tensor.view(len(tensor), -1).view(torch_library().uint8).numpy()


def _is_plain(tensor: Any) -> bool:
    torch = torch_library()
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


def _is_fixed(spec: Any) -> bool:
    """Says whether samples are an array of numbers, or a flat dict of such."""
    leaves = list(cast("dict[str, Any]", spec).values()) if type(spec) is dict else [spec]
    return bool(leaves) and all(hasattr(leaf, "dtype") and leaf.dtype.kind in "biufc" for leaf in leaves)
