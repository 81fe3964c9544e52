"""Texts that are made up: reviews in the folders of IMDB's `aclImdb`."""

from pathlib import Path

import numpy as np

from .whole import written_whole

_NUM_WORDS = 20_000
_EXPONENT = 1.3  # of Zipf's law; words of English follow it
_LENGTHS = (60, 480)  # words of most reviews


def write_reviews(folder: str | Path, *, num_train: int = 2000, num_test: int = 200, seed: int = 0) -> Path:
    """Writes text files of made-up words, half of them positive; what is there is left as it is.

    **Returns:** the folder `aclImdb` inside of `folder`.
    """
    random = np.random.default_rng(seed)
    letters = np.array([*"abcdefghijklmnopqrstuvwxyz"])
    words = np.array(["".join(random.choice(letters, random.integers(2, 9))) for _ in range(_NUM_WORDS)])

    def write(part: Path) -> None:
        for split, count in (("train", num_train), ("test", num_test)):
            for name in ("neg", "pos"):
                place = part / split / name
                place.mkdir(parents=True)
                for number in range(count // 2):
                    ids = np.minimum(random.zipf(_EXPONENT, random.integers(*_LENGTHS)), _NUM_WORDS) - 1
                    (place / f"{number}_{8 if name == 'pos' else 2}.txt").write_text(" ".join(words[ids]))

    return written_whole(Path(folder) / "aclImdb", write)
