"""Safetensors files that others have written."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import jax
import ml_dtypes
import numpy as np

from braidax.checkpoint.format.loading import match, matching
from braidax.checkpoint.format.manifest import Entry, stored_as
from braidax.checkpoint.format.placing import Read, placed
from braidax.checkpoint.format.reading import Content
from braidax.checkpoint.snapshot.boxes import Box, extents
from braidax.checkpoint.snapshot.leaves import Leaf, leaves_of, parts_of, saved_leaves
from braidax.errors import CheckpointError

# JAX leaves some of itself unannotated.
_jax: Any = jax
_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16 complex64 "
    "float8_e4m3fn float8_e5m2 float8_e8m0fnu"
)
_DTYPES = {stored_as(dtype).name: dtype for dtype in (np.dtype(getattr(ml_dtypes, n, n)) for n in _NAMES.split())}

View = Callable[[str, np.ndarray], np.ndarray]
"""Makes of a tensor what the leaf at a path has of it."""


def restore_safetensors(
    path: str | os.PathLike[str],
    like: Any,
    *,
    name: Callable[[str], str | Sequence[str]] = str,
    view: View | None = None,
    only: Sequence[str] | None = None,
) -> Any:
    """Reads tensors of safetensors files into a tree; nothing is cast, transposed, left out or made up unasked.

    The host holds one leaf at a time, each process what its devices need of it, and one tensor besides.

    **Arguments:** `path`: a file, or a folder, of which all `*.safetensors` are read. `like`: a tree with the
    structure, shapes, dtypes and shardings to restore to, such as `step.state_specs`; its arrays may be
    `jax.ShapeDtypeStruct`. A table by rows, padded, may be whole in the file. `name`: of the tensor for the path of a
    leaf; the same by default, and `lambda path: path.replace("/", ".")` for most files of PyTorch. Several names are
    those of tensors that are stacked, such as layers that a scan goes over. `view`: makes of a tensor, or of each in a
    stack, what the leaf at a path has, such as `lambda path, tensor: tensor.T`; it is called with arrays that lie in
    the file, and by a transposition or a reshape nothing is read. `only`: patterns of the paths to restore; other
    leaves stay those of `like`.

    **Returns:** a tree like `like`. **Raises:** `CheckpointError` when a file is not valid, or the tensors do not match
    `like`.
    """
    source = Path(path).absolute()
    with contextlib.ExitStack() as files:
        tensors = _tensors(source, files)
        values = saved_leaves(like)
        found = {
            leaf: _made_of(source, leaf, name(leaf), tensors, view) for leaf in matching(values, only, "in `like`")
        }
        made = {leaf: one for leaf, one in found.items() if one is not None}
        used = {tensor for one in made.values() for tensor in one.names}
        others = {_label(other, values): tensor for other, tensor in tensors.items() if other not in used}
        entries = {leaf: one.entry for leaf, one in made.items()}
        entries |= {label: tensor.entry(label) for label, tensor in others.items()}
        wants = match(Content(source, (), entries), like, only)
        leaves: list[Any] = []
        for leaf, value in values.items():
            want = wants.get(leaf)
            if want is None:
                leaves += leaves_of(value)
                continue
            read = made[leaf].reader()
            leaves += [placed(read, part, want.how) for part in parts_of(value, want.shape)]
    return _jax.tree.unflatten(_jax.tree.structure(like), leaves)


class _Tensor(NamedTuple):
    """A tensor in a file. **Fields:** `dtype`: as safetensors calls it. `offset`: in the file."""

    dtype: str
    shape: tuple[int, ...]
    file: IO[bytes]
    offset: int

    def entry(self, path: str) -> Entry:
        """Returns what the tensor is, as a leaf of a checkpoint."""
        return _entry(path, _DTYPES[self.dtype].name if self.dtype in _DTYPES else self.dtype, self.shape)

    def mapped(self) -> np.ndarray:
        """Returns the tensor as it lies in the file. What was read of it counts as memory while the array is there."""
        if not math.prod(self.shape):
            return np.empty(self.shape, _DTYPES[self.dtype])
        return np.memmap(self.file, _DTYPES[self.dtype], "r", self.offset, self.shape)


class _Made(NamedTuple):
    """A leaf that is made of a tensor, or of several in a stack.

    **Fields:** `names`: of the tensors. `view`: as `restore_safetensors` takes it.
    """

    entry: Entry
    names: tuple[str, ...]
    tensors: tuple[_Tensor, ...]
    is_stack: bool
    view: View | None

    def reader(self) -> Read:
        """Returns what reads parts of the leaf; it holds one tensor."""
        last: dict[int, np.ndarray] = {}

        def viewed(number: int) -> np.ndarray:
            if self.view is None:
                return self.tensors[number].mapped()
            if number not in last:  # boxes of one tensor come one after another
                last.clear()
                last[number] = self.view(self.entry.leaf.path, self.tensors[number].mapped())
            return last[number]

        def read(box: Box) -> np.ndarray:
            if not self.is_stack:
                return np.array(viewed(0)[_index(box)])
            found = np.empty(extents(box), np.dtype(self.entry.dtype))
            for number in range(*box[0]):
                found[number - box[0][0]] = viewed(number)[_index(box[1:])]
            return found

        return read


def _made_of(
    source: Path, path: str, names: str | Sequence[str], tensors: Mapping[str, _Tensor], view: View | None
) -> _Made | None:
    """Returns how a leaf is made of tensors, None where there are none of these.

    **Raises:** `CheckpointError` where only some are there, they are not alike, or `view` fails.
    """
    listed = (names,) if isinstance(names, str) else tuple(names)
    missing = [one for one in listed if one not in tensors]
    if missing == [*listed]:
        return None
    if missing:
        raise CheckpointError(
            f"{source}: has no tensor {missing[0]!r}, but others of the {len(listed)} that `name` gives for leaf "
            f"{path!r}: expected all of them; correct `name`"
        )
    entries = [_viewed_entry(source, path, one, tensors[one], view) for one in listed]
    for one, entry in zip(listed, entries, strict=True):
        if entry != entries[0]:
            raise CheckpointError(
                f"{source}: tensor {one!r} gives {entry.leaf}, and {listed[0]!r} {entries[0].leaf}: expected tensors "
                f"of one kind in the stack for leaf {path!r}; correct `name` or `view`"
            )
    entry, found = entries[0], tuple(tensors[one] for one in listed)
    if isinstance(names, str):
        return _Made(entry, listed, found, False, view)
    return _Made(_entry(path, entry.dtype, (len(listed), *entry.shape)), listed, found, True, view)


def _viewed_entry(source: Path, path: str, name: str, tensor: _Tensor, view: View | None) -> Entry:
    if view is None or tensor.dtype not in _DTYPES:
        return tensor.entry(path)
    try:
        found = view(path, np.broadcast_to(np.zeros((), _DTYPES[tensor.dtype]), tensor.shape))
        return _entry(path, found.dtype.name, found.shape)
    except Exception as error:
        raise CheckpointError(
            f"{source}: view fails for leaf {path!r} and tensor {name!r}, {tensor.entry(name).leaf}: "
            f"{type(error).__name__}: {error}; expected a function of path and tensor that returns a NumPy array"
        ) from error


def _entry(path: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    return Entry(Leaf(path, "array", dtype, shape), dtype, shape)


def _index(box: Box) -> tuple[Any, ...]:
    return (*(slice(start, stop) for start, stop in box), ...)


def _label(name: str, values: Mapping[str, Any]) -> str:
    """Returns how errors call a tensor that is for no leaf; a leaf may have its name, and be looked for elsewhere."""
    return f"tensor {name}" if name in values else name


def _tensors(source: Path, files: contextlib.ExitStack) -> dict[str, _Tensor]:
    paths = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not paths:
        raise CheckpointError(f"{source}: has no file *.safetensors; give a folder that has, or a file")
    found: dict[str, _Tensor] = {}
    origins: dict[str, Path] = {}
    for file in paths:
        for name, tensor in _tensors_of(file, files):
            if name in found:
                raise CheckpointError(
                    f"{file}: has a tensor {name!r}, and so has {origins[name].name}: expected every name once; give "
                    "the file that is meant"
                )
            found[name], origins[name] = tensor, file
    return found


def _tensors_of(file: Path, files: contextlib.ExitStack) -> Iterator[tuple[str, _Tensor]]:
    try:
        opened = files.enter_context(file.open("rb", buffering=0))
        content = np.memmap(opened, np.uint8, "r")
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
        yield name, _tensor(file, name, about, opened, len(content), start)


def _tensor(file: Path, name: str, about: Any, opened: IO[bytes], length: int, start: int) -> _Tensor:
    try:
        dtype, shape = str(about["dtype"]), tuple(map(int, about["shape"]))
        first, last = map(int, about["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: tensor {name!r} is described as {about!r}: expected dtype, shape and data_offsets; write the "
            "file anew"
        ) from error
    if not 0 <= first <= last <= length - start:
        raise CheckpointError(
            f"{file}: ends within tensor {name!r}, which is at [{first}, {last}) of {length - start} bytes: it "
            "was truncated; copy it again"
        )
    num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize if dtype in _DTYPES else last - first
    if num_bytes != last - first:
        raise CheckpointError(
            f"{file}: tensor {name!r} is {dtype}{list(shape)} in {last - first} bytes, expected {num_bytes}; write the "
            "file anew"
        )
    return _Tensor(dtype, shape, opened, start + first)
