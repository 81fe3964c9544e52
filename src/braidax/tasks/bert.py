"""BERT as a classifier: of film reviews, or of pieces of Python's standard library by the package they are from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from braidax.data import Source
from braidax.data import open as open_source
from braidax.errors import ArgumentError, FormatError
from braidax.tasks.bert_model import Bert, Sizes
from braidax.tasks.task import Task, classification, rising_and_falling
from braidax.tasks.words import Vocabulary, library_files, library_root, pieces, read_text

_FILLING, _BEGIN, _NUM_RESERVED = 0, 1, 3  # then the unknown word
_HELD_OUT = 5  # one of so many texts is to test, where none are set apart
_PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
_PIECE_LINES = 24


@dataclass(frozen=True)
class _Preset:
    sizes: Sizes
    batch_size: int = 32
    learning_rate: float = 1e-4
    epochs: int = 3


_PRESETS = {
    "full": _Preset(Sizes()),
    "small": _Preset(Sizes(positions=256, width=256, num_layers=4, num_heads=4)),
    "tiny": _Preset(Sizes(1000, 32, width=32, num_layers=2, num_heads=2, dropout=0.0), learning_rate=1e-2, epochs=1),
}


@dataclass(frozen=True)
class _Texts:
    """Texts as words, and the number of each one's class."""

    words: list[list[str]]
    labels: list[int]


def bert(
    path: str | Path | None = None, *, preset: str = "full", remat: Literal["layers", "nothing"] = "nothing"
) -> Task:
    """Returns the task to classify texts by BERT's encoder, which starts untrained.

    A sample is `{"words": int32 [length], "num_words": int32 [], "label": int32 []}`: the id that begins a text, then
    its words in small letters, cut behind the head or filled up with 0. The vocabulary is that of the most frequent
    words of the texts to train with, not BERT's own pieces of words.

    **Arguments:** `path`: IMDB's folder `aclImdb`, or one that holds `pos` and `neg` with text files, of which every
    fifth is to test. By default the classes are eight packages of Python's standard library, and the texts pieces of 24
    lines of them. `preset`: `"full"` is BERT-base (12 layers of width 768, 12 heads, 30,522 ids, texts of 512 words;
    109,482,240 parameters besides those of the classifier), `"small"` has 4 layers of width 256 and texts of 256 words,
    `"tiny"` is for tests. `remat`: whether the inside of the layers is computed again for the gradients.

    **Raises:** `ArgumentError` for a preset that is none; `FormatError` for a folder without such texts.
    """
    if preset not in _PRESETS:
        raise ArgumentError(f"preset={preset!r} is unknown; the presets are {', '.join(_PRESETS)}")
    chosen = _PRESETS[preset]
    sizes = chosen.sizes
    texts, num_classes = (_library_pieces(), len(_PACKAGES)) if path is None else (_reviews(Path(path)), 2)
    counts = Counter(word for words in texts[0].words for word in words)
    vocabulary = Vocabulary.of(counts, sizes.vocabulary, num_reserved=_NUM_RESERVED)
    train, test = (_encoded(part, vocabulary, sizes.positions) for part in texts)
    model = Bert(num_classes, sizes, remat)

    def init(key: jax.Array) -> Any:
        words = jnp.zeros((1, sizes.positions), jnp.int32)
        return model.init(key, words, jnp.ones(1, jnp.int32), train=False)["params"]

    def loss(params: Any, batch: Any, key: Any, train: bool) -> Any:
        rngs = {"dropout": key} if train else {}
        logits: Any = model.apply({"params": params}, batch["words"], batch["num_words"], train=train, rngs=rngs)
        return classification(logits, batch)

    optimizer = rising_and_falling(chosen.learning_rate)
    return Task(train, test, init, loss, optimizer, chosen.batch_size, chosen.epochs)


def _encoded(texts: _Texts, vocabulary: Vocabulary, length: int) -> Source:
    words: NDArray[np.int32] = np.full((len(texts.words), length), _FILLING, np.int32)
    words[:, 0] = _BEGIN
    num_words = np.ones(len(texts.words), np.int32)
    for row, text in enumerate(texts.words):
        ids = vocabulary.encode(text[: length - 1])
        words[row, 1 : 1 + len(ids)] = ids
        num_words[row] += len(ids)
    return open_source({"words": words, "num_words": num_words, "label": np.array(texts.labels, np.int32)})


def _reviews(folder: Path) -> tuple[_Texts, _Texts]:
    for root in (folder, folder / "aclImdb"):
        if (root / "train" / "pos").is_dir():
            train, test = (_of_classes(root / split, ("neg", "pos")) for split in ("train", "test"))
            return train, test
    return _split(_of_classes(folder, ("neg", "pos")))


def _of_classes(folder: Path, classes: Sequence[str]) -> _Texts:
    """Reads the text files of some folders, each of which is a class."""
    texts = _Texts([], [])
    for label, name in enumerate(classes):
        files = sorted((folder / name).glob("*.txt"))
        if not files:
            raise FormatError(
                f"{folder / name}: holds no .txt file; expected reviews as they lie in aclImdb, or a folder that holds "
                "pos and neg with text files"
            )
        texts.words.extend(pieces(read_text(file)) for file in files)
        texts.labels.extend([label] * len(files))
    return texts


def _library_pieces() -> tuple[_Texts, _Texts]:
    texts = _Texts([], [])
    for file in library_files():
        package = file.relative_to(library_root()).parts[0]
        if package in _PACKAGES:
            lines = read_text(file).splitlines()
            found = [pieces("\n".join(lines[at : at + _PIECE_LINES])) for at in range(0, len(lines), _PIECE_LINES)]
            texts.words.extend(found)
            texts.labels.extend([_PACKAGES.index(package)] * len(found))
    return _split(texts)


def _split(texts: _Texts) -> tuple[_Texts, _Texts]:
    """Sets every fifth text apart, to test."""
    held_out = slice(_HELD_OUT - 1, None, _HELD_OUT)
    test = _Texts(texts.words[held_out], texts.labels[held_out])
    kept = [number for number in range(len(texts.words)) if number % _HELD_OUT != _HELD_OUT - 1]
    train = _Texts([texts.words[number] for number in kept], [texts.labels[number] for number in kept])
    if not test.words:
        raise FormatError(
            f"path holds {len(train.words)} texts, expected at least {_HELD_OUT}, of which one is to test"
        )
    return train, test
