"""After training: the parameters of a run, as host arrays or as one file, from its checkpoints alone."""

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import jax
import numpy as np

from braidax.checkpoint.format import folders
from braidax.checkpoint.format.loading import Mismatch
from braidax.checkpoint.format.manifest import OtherFormat, manifest_file, safetensors_header, stored_as
from braidax.checkpoint.format.parameters import LateRows, Parameter, parameters_in
from braidax.checkpoint.format.reading import Content, Reader, read_content
from braidax.checkpoint.format.writing import bytes_of
from braidax.checkpoint.places.restoring import is_out_of_reach, listed_in
from braidax.checkpoint.snapshot.boxes import blocks, whole
from braidax.checkpoint.snapshot.leaves import named_leaves
from braidax.errors import ArgumentError, CheckpointError

# JAX leaves some of itself unannotated.
_jax: Any = jax
_BLOCK_BYTES = 16 * 2**20  # of a parameter that are in memory at a time
_ATTEMPTS = 4  # to find a checkpoint that is not removed while it is read
_INSIDE = "checkpoints"  # where `braidax train` has them in the folder of a run
_MAX_NAMED = 20
_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def load_params(
    run: str | os.PathLike[str],
    *,
    step: int | None = None,
    at: str | None = None,
    like: Any = None,
    late_rows: LateRows = "refuse",
) -> Any:
    """Reads the parameters of a run into host memory, in the form that the loss has, without mesh, step or optimizer.

    Nothing is locked, and the run may be saving meanwhile. Tables by rows and on servers are `[V, ...]`.

    **Arguments:** `run`: its folder, as a `Checkpointer` or `braidax train` had it, or that of one checkpoint. `step`:
    of the checkpoint; by default the newest that verifies. `at`: the path of the node that has the parameters, such as
    `0/params`, which is found by default; others do as well, such as `0/variables`. `like`: a PyTree of their
    structure, such as `jax.eval_shape(init_fn, key)`; without it there are nested dicts by the parts of the paths, also
    where the run had lists. `late_rows`: whether tables are refused that have rows which the optimizer has yet to move.

    **Returns:** NumPy arrays, of PRNG keys their data, and Python numbers, in a tree.

    **Raises:** `CheckpointError` when there is no checkpoint, none is valid, or the parameters are not those of `like`;
    `ArgumentError` where `run` is no path of a folder.
    """

    def read(content: Content, reader: Reader) -> Any:
        parameters = parameters_in(content, reader, at, late_rows)
        if like is not None:
            _check_like(content, parameters, named_leaves(like))
        values = {one.name: one.value(reader) for one in parameters}
        if like is None:
            return _nested(content, values)
        return _jax.tree.unflatten(_jax.tree.structure(like), [_of(values, name) for name in named_leaves(like)])

    return _newest(run, step, read)


def export_safetensors(
    run: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    step: int | None = None,
    at: str | None = None,
    name: Callable[[str], str] = str,
    late_rows: LateRows = "refuse",
    existing: Literal["refuse", "replace"] = "refuse",
) -> int:
    """Writes the parameters of a run as one safetensors file, which is whole or not there.

    They are those of `load_params`, in their dtypes; host memory holds a few blocks of 16 MiB of them. The metadata of
    the file say `step`, and the version of `braidax` that trained.

    **Arguments:** `run`, `step`, `at`, `late_rows`: as of `load_params`. `file`: to write; its folder is made. `name`:
    of the tensor for the path of a parameter; the same by default, and `lambda path: path.replace("/", ".")` as PyTorch
    has them. `existing`: whether a file that is there may be replaced.

    **Returns:** how many updates the parameters have seen. **Raises:** as `load_params`; `ArgumentError` where `file`
    exists or cannot be written, or two parameters have one name.
    """
    target = Path(file).absolute()
    if target.is_dir() or (existing == "refuse" and target.exists()):
        raise _taken(target)

    def write(content: Content, reader: Reader) -> int:
        named = _named(content, parameters_in(content, reader, at, late_rows), name)
        about = {"step": str(content.step), "braidax": content.manifests[0].about.version}
        _write(target, existing, named, reader, about)
        return content.step

    return _newest(run, step, write)


def _newest(run: str | os.PathLike[str], step: int | None, use: Callable[[Content, Reader], _Result]) -> _Result:
    """Returns what is made of the newest checkpoint, or of that of a step, that verifies.

    **Raises:** `CheckpointError` when there is none or none verifies, or as `use` does.
    """
    root, listed = _checkpoints(run)
    for attempt in range(_ATTEMPTS):
        root, listed = _checkpoints(run) if attempt else (root, listed)
        reasons: list[str] = []
        for found in _of_step(root, listed, step):
            try:
                content = read_content(found.path)
                if found.path != root and (words := folders.misnamed(found.path, content.step)):
                    raise CheckpointError(words)
                with Reader(content) as reader:
                    return use(content, reader)
            except (OtherFormat, Mismatch):
                raise
            except CheckpointError as error:
                if not found.path.exists():
                    break  # removed while it was read, so there are newer ones
                if found.path == root or is_out_of_reach(error.__cause__):
                    raise
                reasons.append(str(error))
                _logger.warning("skipped the checkpoint %s: %s", found.path, error)
        else:
            which = "none of its checkpoints" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(
                f"{root}: {which} is valid: {'; '.join(reasons)}; put a whole one back from a copy, or give the `step` "
                f"of another; `braidax inspect {root}` shows what is whole"
            )
    raise CheckpointError(
        f"{root}: {_ATTEMPTS} checkpoints were removed while they were read: its run replaces them faster than they "
        "can be read; let it keep more of them, or wait for its end"
    )


def _of_step(root: Path, listed: Sequence[folders.Found], step: int | None) -> list[folders.Found]:
    found = [each for each in listed if step is None or each.step == step]
    if not found:
        steps = sorted({each.step for each in listed})
        shown = f"{'…, ' if len(steps) > _MAX_NAMED else ''}{', '.join(map(str, steps[-_MAX_NAMED:]))}"
        raise CheckpointError(
            f"{root}: step={step}: there is no such checkpoint: expected one of {shown}; give one of these, or none "
            "for the newest"
        )
    return found


def _checkpoints(run: str | os.PathLike[str]) -> tuple[Path, list[folders.Found]]:
    """Returns the folder of a run's checkpoints, and these, newest first; or that of the one that is given, and it."""
    if "://" in os.fspath(run):
        raise ArgumentError(
            f"run={os.fspath(run)!r}: expected a folder on a disk; copy a checkpoint from the store, or restore it by "
            "a Checkpointer with a Folder before the Bucket, and give the folder"
        )
    root = Path(run).absolute()
    if (root / manifest_file(0)).is_file():
        return root, [folders.found_at(root) or folders.Found(read_content(root).step, 0, root)]
    if not root.is_dir():
        told = "is no folder" if root.exists() else "is not there"
        raise CheckpointError(f"{root}: {told}: expected the folder of a run; correct the path")
    places = [folder for folder in (root, root / _INSIDE) if folder.is_dir() and listed_in(folder)]
    if places:
        return places[0], listed_in(places[0])
    inside = sorted(child for child in root.iterdir() if child.is_dir())
    runs = [child for child in inside if any(each.is_dir() and listed_in(each) for each in (child, child / _INSIDE))]
    hint = f"give one of the runs in it, such as {runs[0]}" if runs else "give the folder of a run that has saved one"
    raise CheckpointError(f"{root}: has no checkpoint; {hint}")


def _check_like(content: Content, parameters: Sequence[Parameter], likes: Mapping[str, Any]) -> None:
    """Checks that the parameters are those of a tree. **Raises:** `Mismatch` naming all that are not."""
    found = {one.name or ".": one for one in parameters}
    troubles = [f"{name!r} is in `like`, but not in the checkpoint" for name in likes if name not in found]
    for name, one in found.items():
        told = f"{name!r} is {one.dtype}{list(one.shape)} in the checkpoint, but"
        if name not in likes:
            troubles.append(f"{told} not in `like`")
        elif one.entry.leaf.dtype and not one.entry.key_impl:
            shape, dtype = np.shape(likes[name]), getattr(likes[name], "dtype", None)
            if (shape, dtype) != (one.shape, one.dtype):
                troubles.append(f"{told} {dtype or type(likes[name]).__name__}{list(shape)} in `like`")
    if troubles:
        more = f"\n  and {len(troubles) - _MAX_NAMED} more" if len(troubles) > _MAX_NAMED else ""
        raise Mismatch(
            f"{content.folder}: has other parameters than `like`:\n  "
            + "\n  ".join(troubles[:_MAX_NAMED])
            + more
            + "\n"
            "give a tree like that of the run, or none and convert afterwards"
        )


def _of(values: Mapping[str, Any], name: str) -> Any:
    return values["" if name == "." and "" in values else name]


def _nested(content: Content, values: Mapping[str, Any]) -> Any:
    """Returns dicts by the parts of the paths, or the one value that has none."""
    if "" in values:
        return values[""]
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split("/")
        node: Any = tree
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            raise Mismatch(
                f"{content.folder}: parameter {path!r}: another one has the path of a node above it, which nested "
                "dicts cannot hold; give a tree of them in like="
            )
        node[last] = value
    return tree


def _named(
    content: Content, parameters: Sequence[Parameter], name: Callable[[str], str]
) -> list[tuple[str, Parameter, np.ndarray]]:
    """Returns the parameters with their names and abstract values, in an order in which each begins at a multiple of
    what its dtype asks for.

    **Raises:** `ArgumentError` where two have one name; `Mismatch` for numbers that no tensor can hold.
    """
    owners: dict[str, str] = {}
    found: list[tuple[str, Parameter, np.ndarray]] = []
    for one in parameters:
        path = one.name or "params"
        called = name(path)
        if called in owners or called == "__metadata__":
            other = f"parameter {owners[called]!r}" if called in owners else "the format itself"
            raise ArgumentError(
                f"name gives {called!r} for parameter {path!r}, and that is the name of {other}: expected one of its "
                "own for each; correct it"
            )
        owners[called] = path
        number = one.entry.number
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            raise Mismatch(
                f"{content.folder}: parameter {path!r} is {number}, which has more than 64 bits and so is no tensor; "
                "give another node in at=, or use load_params"
            )
        found.append((called, one, np.broadcast_to(np.zeros((), one.dtype), one.shape)))
    return sorted(found, key=lambda each: -stored_as(each[1].dtype).alignment)


def _write(
    target: Path,
    existing: Literal["refuse", "replace"],
    named: Sequence[tuple[str, Parameter, np.ndarray]],
    reader: Reader,
    about: Mapping[str, str],
) -> None:
    header = safetensors_header([(called, spec) for called, _, spec in named], about)
    with _unfinished(target, existing) as file:
        file.write(header)
        for _, one, spec in named:
            if not spec.size:
                continue
            for box in blocks(whole(one.shape), max(1, _BLOCK_BYTES // spec.itemsize)):
                file.write(bytes_of(np.ascontiguousarray(one.read(reader, box))))


@contextlib.contextmanager
def _unfinished(target: Path, existing: Literal["refuse", "replace"]) -> Generator[IO[bytes]]:
    """Gives a file to write, which becomes the target, durably, if nothing raises.

    **Raises:** `ArgumentError` when it cannot be written, or has come to be there meanwhile.
    """
    path = target.with_name(f".{target.name}.{secrets.token_hex(8)}.unfinished")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if existing == "replace":
            path.replace(target)
        else:
            _name(path, target)
        folders.sync(target.parent)
    except OSError as error:
        raise ArgumentError(
            f"file={str(target)!r}: cannot be written: {error}; give another path, make room, or change its permissions"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _name(path: Path, target: Path) -> None:
    """Gives a file its name. **Raises:** `ArgumentError` where another has it; `OSError`."""
    try:
        os.link(path, target)
    except FileExistsError as error:
        raise _taken(target) from error
    except OSError as error:  # of a file system without links
        if target.exists():
            raise _taken(target) from error
        path.rename(target)


def _taken(target: Path) -> ArgumentError:
    if target.is_dir():
        return ArgumentError(f"file={str(target)!r}: is a folder: expected a file to write; give a name in it")
    return ArgumentError(
        f"file={str(target)!r}: is there: expected a file that is to be made; give another path, or replace it by "
        'existing="replace", which is --replace on the command line'
    )
