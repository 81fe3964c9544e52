"""Safetensors files that others have written."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import ml_dtypes
import numpy as np

from braidax.checkpoint.leaves import Leaf, named_leaves
from braidax.checkpoint.manifest import Entry, stored_as
from braidax.checkpoint.placing import converted, extended, placed
from braidax.checkpoint.reading import Content
from braidax.checkpoint.restoring import match
from braidax.errors import CheckpointError

# JAX leaves some of itself unannotated.
_jax: Any = jax
_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16 complex64 "
    "float8_e4m3fn float8_e5m2 float8_e8m0fnu"
)
_DTYPES = {stored_as(dtype).name: dtype for dtype in (np.dtype(getattr(ml_dtypes, n, n)) for n in _NAMES.split())}


def restore_safetensors(
    path: str | os.PathLike[str],
    like: Any,
    *,
    name: Callable[[str], str] = str,
    only: Sequence[str] | None = None,
) -> Any:
    """Reads tensors of safetensors files into a tree; nothing is cast, transposed, left out or made up.

    **Arguments:** `path`: a file, or a folder, of which all `*.safetensors` are read. `like`: a tree with the
    structure, shapes, dtypes and shardings to restore to; its arrays may be `jax.ShapeDtypeStruct`. A table by rows,
    padded, may be whole in the file. `name`: of the tensor for the path of a leaf; the same by default, and
    `lambda path: path.replace("/", ".")` for most files of PyTorch. `only`: patterns of the paths to restore; other
    leaves stay those of `like`.

    **Returns:** a tree like `like`. **Raises:** `CheckpointError` when a file is not valid, or the tensors do not match
    `like`.
    """
    source = Path(path).absolute()
    tensors = _tensors(source)
    values = named_leaves(like)
    chosen = {leaf: tensors[name(leaf)] for leaf in values if name(leaf) in tensors}
    used = {name(leaf) for leaf in chosen}
    others = {_label(other, values): tensor for other, tensor in tensors.items() if other not in used}
    entries = {leaf: tensor.entry(leaf) for leaf, tensor in (chosen | others).items()}
    wants = match(Content(source, (), entries), like, only)
    leaves: list[Any] = []
    for leaf, value in values.items():
        if leaf not in wants:
            leaves.append(value)
            continue
        tensor, want = chosen[leaf], wants[leaf]
        if want.how is None and want.shape == value.shape:
            leaves.append(placed(tensor.read, value))
        else:
            whole = extended(converted(tensor.read(()), want.how, want.shape), value.shape)
            leaves.append(placed(lambda index, whole=whole: whole[(*index, ...)], value))
    return _jax.tree.unflatten(_jax.tree.structure(like), leaves)


class _Tensor(NamedTuple):
    """A tensor in a file. **Fields:** `dtype`: as safetensors calls it. `content`: the file. `offset`: in it."""

    dtype: str
    shape: tuple[int, ...]
    content: np.ndarray
    offset: int

    def entry(self, path: str) -> Entry:
        """Returns what the tensor is, as a leaf of a checkpoint."""
        name = _DTYPES[self.dtype].name if self.dtype in _DTYPES else self.dtype
        return Entry(Leaf(path, "array", name, self.shape), name, self.shape)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the tensor, copied."""
        array: np.ndarray = np.ndarray(
            self.shape, _DTYPES[self.dtype], buffer=cast(Any, self.content), offset=self.offset
        )
        return np.array(array[(*index, ...)])


def _label(name: str, values: Mapping[str, Any]) -> str:
    """Returns how errors call a tensor that is for no leaf; a leaf may have its name, and be looked for elsewhere."""
    return f"tensor {name}" if name in values else name


def _tensors(source: Path) -> dict[str, _Tensor]:
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files:
        raise CheckpointError(f"{source}: has no file *.safetensors; give a folder that has, or a file")
    found: dict[str, _Tensor] = {}
    origins: dict[str, Path] = {}
    for file in files:
        for name, tensor in _tensors_of(file):
            if name in found:
                raise CheckpointError(
                    f"{file}: has a tensor {name!r}, and so has {origins[name].name}: expected every name once; give "
                    "the file that is meant"
                )
            found[name], origins[name] = tensor, file
    return found


def _tensors_of(file: Path) -> Iterator[tuple[str, _Tensor]]:
    try:
        content = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{file}: cannot be read: {error}; give a safetensors file") from error
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    try:
        header: Any = json.loads(content[8:start].tobytes()) if start <= len(content) else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{file}: does not begin with the header of a safetensors file: it was truncated, or is of another format"
        )
    tensors = cast("dict[str, Any]", header)
    tensors.pop("__metadata__", None)
    for name, about in tensors.items():
        yield name, _tensor(file, name, about, content, start)


def _tensor(file: Path, name: str, about: Any, content: np.ndarray, start: int) -> _Tensor:
    try:
        dtype, shape = str(about["dtype"]), tuple(map(int, about["shape"]))
        first, last = map(int, about["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: tensor {name!r} is described as {about!r}: expected dtype, shape and data_offsets; write the "
            "file anew"
        ) from error
    if not 0 <= first <= last <= len(content) - start:
        raise CheckpointError(
            f"{file}: ends within tensor {name!r}, which is at [{first}, {last}) of {len(content) - start} bytes: it "
            "was truncated; copy it again"
        )
    num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize if dtype in _DTYPES else last - first
    if num_bytes != last - first:
        raise CheckpointError(
            f"{file}: tensor {name!r} is {dtype}{list(shape)} in {last - first} bytes, expected {num_bytes}; write the "
            "file anew"
        )
    return _Tensor(dtype, shape, content, start + first)
