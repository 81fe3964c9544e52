"""Text for the tasks: the sources of Python's standard library, which are on every machine, and words as ids."""

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError, FormatError

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_PIECES = re.compile(r"\w+|[^\w\s]")

SplitWords = Callable[[str], list[str]]
"""Makes words of a text."""


def library_root() -> Path:
    """Returns the folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def library_files(*, max_bytes: int | None = None) -> list[Path]:
    """Returns the Python files of the standard library, without its tests, sorted by their path.

    **Arguments:** `max_bytes`: of all files together; those that would exceed it are left out. None takes all.

    **Raises:** `FormatError` where Python came without sources.
    """
    root = library_root()
    found: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _NOT_THE_LIBRARY]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    chosen: list[Path] = []
    total = 0
    for file in sorted(found, key=lambda file: file.relative_to(root).parts):
        total += file.stat().st_size
        if max_bytes is not None and total > max_bytes:
            break
        chosen.append(file)
    if not chosen:
        raise FormatError(
            f"{root}: holds no sources of Python's standard library within {max_bytes} bytes; give a path= with data"
        )
    return chosen


def read_text(file: Path) -> str:
    """Returns the text of a UTF-8 file; what is none becomes U+FFFD."""
    return file.read_text("utf-8", errors="replace")


def pieces(text: str) -> list[str]:
    """Returns the words and signs of a text, in small letters: `"x.y = Z"` gives `["x", ".", "y", "=", "z"]`."""
    return _PIECES.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Words by number, the more frequent ones first.

    **Fields:** `ids`: of the words. `unknown`: the id of all other words.
    """

    ids: dict[str, int]
    unknown: int

    @classmethod
    def of(cls, counts: Counter[str], size: int, *, num_reserved: int, min_count: int = 1) -> "Vocabulary":
        """Numbers words by how often they occur; those that occur equally often are in the order of the alphabet.

        **Arguments:** `counts`: of each word. `size`: ids in all; rarer words are unknown. `num_reserved`: the first
        ids, which are no words; the last of them is that of unknown words. `min_count`: of a word that gets an id.

        **Raises:** `ArgumentError` for a size without room for a word.
        """
        if not 1 <= num_reserved < size:
            raise ArgumentError(f"num_reserved={num_reserved}: expected at least 1 and fewer than size={size}")
        ranked = sorted((word for word in counts if counts[word] >= min_count), key=lambda word: (-counts[word], word))
        kept = ranked[: size - num_reserved]
        return cls({word: number for number, word in enumerate(kept, num_reserved)}, num_reserved - 1)

    def encode(self, words: Iterable[str]) -> NDArray[np.int32]:
        """Returns the ids of words, int32 `[number of words]`."""
        ids, unknown = self.ids, self.unknown
        return np.array([ids.get(word, unknown) for word in words], np.int32)
