"""One damaged data set, opened and read: what came of it, in a word."""

import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from braidax.data.source import Source, allocate
from braidax.errors import BraidaxError
from tests.support.data.formats.reading import spoil
from tests.support.data.fuzz.case import Case, Samples, files_of
from tests.support.data.fuzz.mutations import mutated

FINE = ("right", "refused")  # what may come of a trial; all else is a defect

_WINDOW = 5
_MOST_SAMPLES = 64


def damaged(case: Case, number: int, whole: Path, folder: Path) -> str:
    """Copies the folder of a case and damages one of its files; returns which, and how."""
    shutil.copytree(whole, folder)
    random = np.random.default_rng([zlib.crc32(case.name.encode()), number])
    chosen = [path for path in files_of(folder) if path.stat().st_size]
    path = chosen[int(random.integers(len(chosen)))]
    data, kind = mutated(path.read_bytes(), random)
    path.write_bytes(data)
    return f"{path.name}: {kind}"


def tried(case: Case, folder: Path, written: Samples) -> str:
    """Opens and reads what lies in a folder.

    **Returns:** `"right"`: the samples as they were written, or as another library reads them now; `"refused"`: an
    error of ours that names the file; or what went wrong.
    """
    outcome = "right"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # numbers that came out wrong
            source = case.opened(folder)
            windows = _read(source)
            while True:
                try:
                    indices, window = next(windows)
                except StopIteration:
                    return outcome
                except BraidaxError as error:
                    outcome = _judged(error, folder)
                    if outcome != "refused":
                        return outcome
                    continue
                if not case.is_checked and _alike(window, len(source), written):
                    continue
                if not _equal(window, indices, len(source), written):
                    wrong = _compared(case, folder, window, indices, len(source))
                    if wrong:
                        return wrong
    except BraidaxError as error:
        return _judged(error, folder)
    except Exception as error:  # noqa: BLE001 (whatever else comes out is what is looked for)
        return f"bare {type(error).__name__}: {error}"


def samples(source: Source) -> Samples:
    """Reads all of a source."""
    out = allocate(source.sample_spec, len(source))
    spoil(out)
    source.read(np.arange(len(source)), out)
    return dict(_leaves(out))


def cleared(folder: Path) -> Path:
    """Removes a folder, and returns it."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


class _Windows:
    """Windows of a source in a shuffled order; a window that fails does not end it, as a generator would be ended."""

    def __init__(self, source: Source) -> None:
        self._source = source
        chosen = np.random.default_rng(0).permutation(min(len(source), _MOST_SAMPLES))
        if len(source) > _MOST_SAMPLES:
            chosen[:_WINDOW] = len(source) - 1 - np.arange(_WINDOW)
        self._windows = iter(np.split(chosen, range(_WINDOW, len(chosen), _WINDOW)))

    def __iter__(self) -> "_Windows":
        return self

    def __next__(self) -> tuple[np.ndarray, Any]:
        indices = next(self._windows)
        out = allocate(self._source.sample_spec, len(indices))
        spoil(out)
        self._source.read(indices, out)
        return indices, out


def _read(source: Source) -> Iterator[tuple[np.ndarray, Any]]:
    return _Windows(source)


def _judged(error: BraidaxError, folder: Path) -> str:
    names = [str(folder), *(path.name for path in files_of(folder))]
    if any(name in str(error) for name in names):
        return "refused"
    return f"{type(error).__name__} that does not name the file: {error}"


def _compared(case: Case, folder: Path, window: Any, indices: np.ndarray, length: int) -> str:
    """Says how a window differs from what another library reads; nothing if it does not."""
    if case.read is None:
        return "other samples than were written"
    try:
        others = case.read(folder)
    except Exception as error:  # noqa: BLE001 (of another library, which raises what it likes)
        return f"other samples, where another library raises {type(error).__name__}: {error}"
    return "" if _equal(window, indices, length, others) else "other samples than another library reads"


def _alike(window: Any, length: int, expected: Samples) -> bool:
    """Says whether the leaves of a window, and their shapes and dtypes, are those of a source as long."""
    leaves = dict(_leaves(window))
    return set(leaves) == set(expected) and all(
        (len(expected[name]), expected[name][0].shape, expected[name][0].dtype) == (length, leaf.shape[1:], leaf.dtype)
        for name, leaf in leaves.items()
    )


def _equal(window: Any, indices: np.ndarray, length: int, expected: Samples) -> bool:
    leaves = dict(_leaves(window))
    if set(leaves) - set(expected) or any(len(expected[name]) != length for name in leaves):
        return False
    return all(
        _same(found, [expected[name][index] for index in indices.tolist()], is_last=found.dtype != object)
        for name, found in leaves.items()
    )


def _same(found: Any, expected: list[Any], *, is_last: bool) -> bool:
    if not is_last:
        pairs = zip(found, expected, strict=True)
        return all(
            _same(one, other, is_last=True) if isinstance(one, np.ndarray) else one == other for one, other in pairs
        )
    stored = np.asarray(expected)
    if stored.dtype == object:  # a null among them
        return False
    if stored.shape != found.shape:
        return found.size == stored.size == 0
    with np.errstate(all="ignore"):
        return stored.astype(found.dtype).tobytes() == found.tobytes()


def _leaves(window: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(window)[0]:
        yield ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf
