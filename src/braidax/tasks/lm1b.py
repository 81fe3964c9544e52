"""A language model on the One Billion Word benchmark, or on the sources of Python's standard library."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from braidax.data import Source
from braidax.data import open as open_source
from braidax.data.storage.derived import Derived
from braidax.data.storage.locks import NotKept
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room
from braidax.data.transforms.text.measuring import Show, counting
from braidax.errors import ArgumentError, FormatError
from braidax.tasks.lm1b_model import (
    Sizes,
    estimated_softmax,
    init_language_model,
    read_words,
    sample_classes,
    sampled_softmax,
)
from braidax.tasks.task import Task, masked_mean, tell_perplexity
from braidax.tasks.words import SplitWords, Vocabulary, library_files, pieces, read_text

_STEPS = 20
_LARGEST_NORM = 10.0  # of the gradients of the LSTM, summed over the steps
_END, _NUM_RESERVED = 0, 2  # the end of a sentence; then the unknown word
_TRAIN, _TEST = "training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled"
_INSIDE = "1-billion-word-language-modeling-benchmark-r13output"  # what the archive holds
_HELD_OUT = 10  # one of so many files of the standard library is to test
_MORE_TO_TEST = 4  # times as many classes stand for all others


@dataclass(frozen=True)
class _Preset:
    sizes: Sizes
    num_sampled: int
    batch_size: int
    epochs: int
    library_bytes: int | None = None


_PRESETS = {
    "full": _Preset(Sizes(793_470, 512, 2048, 512, dropout=0.1), num_sampled=8192, batch_size=128, epochs=5),
    "small": _Preset(Sizes(50_000, 128, 256, 128, dropout=0.1), num_sampled=1024, batch_size=128, epochs=5),
    "tiny": _Preset(Sizes(2000, 16, 32, 16, dropout=0.0), 64, batch_size=32, epochs=1, library_bytes=300_000),
}


def lm1b(path: str | Path | None = None, *, preset: str = "full") -> Task:
    """Returns the task to predict the next word, by an LSTM with projection and a sampled softmax.

    A sample is `{"tokens": int32 [21]}`: 20 words of the running text and the word behind each. The state of the LSTM
    is zero at the first word of a sample. While training, the loss is that of a sampled softmax: against classes that
    are drawn anew in each step, the same for the whole batch. It is less than the cross-entropy over all classes. To
    test, that cross-entropy is estimated: four times as many classes stand for all, always the same ones, or really all
    of them where that would be more than half. An estimate is a little too small, so say how many classes were drawn
    where a perplexity is published.

    **Arguments:** `path`: the benchmark's folder as its archive is unpacked; by default the Python files of the
    standard library, one of ten to test. Words are counted and encoded once, and kept in the cache folder
    (`$BRAIDAX_CACHE`, or else `~/.cache/braidax`); of the benchmark that takes minutes and 3.3 GB. `preset`: `"full"`
    is the model of the benchmark (a vocabulary of 793,470, tables of width 512, LSTM of 2048, 8192 sampled classes;
    9,445,376 parameters besides 813,306,750 in the tables), `"small"` has a vocabulary of 50,000, `"tiny"` is for tests
    and reads 300 kB of the library. Of a text with fewer different words, the last rows are only ever sampled.

    **Raises:** `ArgumentError` for a preset that is none; `FormatError` for a folder without the benchmark.
    """
    if preset not in _PRESETS:
        raise ArgumentError(f"preset={preset!r} is unknown; the presets are {', '.join(_PRESETS)}")
    chosen = _PRESETS[preset]
    train, test = _sources(path, chosen)
    return Task(
        train,
        test,
        functools.partial(init_language_model, sizes=chosen.sizes),
        _make_loss(chosen.sizes, chosen.num_sampled),
        _optimizer,
        chosen.batch_size,
        chosen.epochs,
        tell_perplexity,
    )


def _optimizer(num_steps: int) -> optax.GradientTransformation:
    # As published, where accumulators begin at 1, the norm of the LSTM's gradients is 10 at most, and the loss is the
    # sum over the steps of a sample, not their mean.
    clipped = optax.masked(optax.clip_by_global_norm(_LARGEST_NORM / _STEPS), _is_of_lstm)
    return optax.chain(clipped, optax.adagrad(0.2, initial_accumulator_value=1 / _STEPS**2))


def _is_of_lstm(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: jax.tree.map(lambda _, name=name: name == "lstm", part) for name, part in params.items()}


def _make_loss(sizes: Sizes, num_sampled: int) -> Any:
    num_classes, num_tested = sizes.vocabulary, num_sampled * _MORE_TO_TEST
    if 2 * num_tested > num_classes:
        num_tested = num_classes

    def loss(params: Any, batch: Any, key: Any, train: bool) -> Any:
        words, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        if train:
            dropout_key, sample_key = jax.random.split(key)
            outputs = read_words(params, words, key=dropout_key, dropout=sizes.dropout)
            candidates = sample_classes(sample_key, num_classes, num_sampled)
            losses = sampled_softmax(params["softmax"], outputs, targets, candidates)
        else:
            outputs = read_words(params, words, key=None, dropout=0.0)
            candidates = sample_classes(jax.random.key(0), num_classes, num_tested)
            losses = estimated_softmax(params["softmax"], outputs, targets, candidates)
        return masked_mean(jnp.mean(losses, axis=1), batch), {}

    return loss


def _sources(path: str | Path | None, preset: _Preset) -> tuple[Source, Source]:
    if path is None:
        files = library_files(max_bytes=preset.library_bytes)
        held_out = files[_HELD_OUT - 1 :: _HELD_OUT]
        parts, split, min_count = ([file for file in files if file not in held_out], held_out), pieces, 1
    else:
        parts, split, min_count = _benchmark_files(Path(path)), str.split, 3
    tokens = _kept_tokens(parts, split, min_count, preset.sizes.vocabulary)
    train, test = (
        open_source({"tokens": part[: len(part) // (_STEPS + 1) * (_STEPS + 1)].reshape(-1, _STEPS + 1)})
        for part in tokens
    )
    return train, test


def _benchmark_files(folder: Path) -> tuple[list[Path], list[Path]]:
    for root in (folder, folder / _INSIDE):
        train = sorted((root / _TRAIN).glob("news.en-*-of-*"))
        test = sorted((root / _TEST).glob("news.en.heldout-*-of-*"))
        if train and test:
            return train, test[:1]  # what is published is measured on the first file
    raise FormatError(
        f"{folder}: holds no One Billion Word benchmark; expected the folders {_TRAIN} and {_TEST} with their files, "
        "as they lie in the archive: unpack it there"
    )


def _kept_tokens(
    parts: tuple[Sequence[Path], Sequence[Path]], split: SplitWords, min_count: int, vocabulary_size: int
) -> tuple[Any, Any]:
    """Returns the ids of both parts, int32 `[words]`, encoded now or before; the vocabulary is that of the first."""
    states = [[[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in part] for part in parts]
    about = {"kind": "words", "files": states, "min_count": min_count, "vocabulary": vocabulary_size}
    room = Room("lm1b")
    place = Derived.named(room.folder, about)
    room.claim([place.path])
    try:
        with Progress("words of", "", 2 * len(parts[0]) + len(parts[1]), unit="files") as work:
            show = counting(work)

            def write(file: IO[bytes]) -> Mapping[str, Any]:
                vocabulary = _count(parts[0], split, min_count, vocabulary_size, show)
                return {"num_words": [_encode(part, split, vocabulary, file, show) for part in parts]}

            kept = place.numbers(write, work)
    except NotKept as error:
        raise FormatError(
            f"{room.folder}: the words as ids cannot be kept there ({error}); set the environment variable "
            "BRAIDAX_CACHE to a folder that can be written"
        ) from error
    kept.check()
    room.made(kept.data.nbytes)
    num_words = kept.facts["num_words"]
    for part, number in zip(parts, num_words, strict=True):
        if number <= _STEPS:
            raise FormatError(
                f"{part[0] if part else place.path}: {len(part)} file(s) of the text hold {number} words, expected "
                f"more than the {_STEPS} of a sample"
            )
    tokens = kept.data.view(np.int32)
    return tokens[: num_words[0]], tokens[num_words[0] :]


def _count(files: Sequence[Path], split: SplitWords, min_count: int, size: int, show: Show) -> Vocabulary:
    counts: Counter[str] = Counter()
    for file in files:
        for words in _sentences(file, split):
            counts.update(words)
        show(1)
    return Vocabulary.of(counts, size, num_reserved=_NUM_RESERVED, min_count=min_count)


def _encode(files: Sequence[Path], split: SplitWords, vocabulary: Vocabulary, out: IO[bytes], show: Show) -> int:
    """Writes the ids of the sentences of some files, an end behind each; returns how many ids that are."""
    end, total = np.array([_END], np.int32), 0
    for file in files:
        ids = [part for words in _sentences(file, split) for part in (vocabulary.encode(words), end)]
        written = np.concatenate([np.empty(0, np.int32), *ids])
        out.write(written.data)
        total += len(written)
        show(1)
    return total


def _sentences(file: Path, split: SplitWords) -> Iterator[list[str]]:
    """Yields the words of each line that has some."""
    for line in read_text(file).splitlines():
        if words := split(line):
            yield words
