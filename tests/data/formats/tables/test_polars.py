"""Arrow files as polars writes them: text, and the values of its dictionaries, as views."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import braidax as bx
from braidax.data.as_arrow import as_arrow
from braidax.data.formats.tables.arrow import ArrowSource
from tests.support.data.formats.reading import read

NUM_ROWS = 100
WORDS = [f"a word that is longer than twelve bytes: {row % 7}" for row in range(NUM_ROWS)]
LETTERS = ["abc"[row % 3] for row in range(NUM_ROWS)]
LEVELS = {"oldest": pl.CompatLevel.oldest(), "newest": pl.CompatLevel.newest()}


def frame() -> pl.DataFrame:
    mixed = [word if row % 2 else letter for row, (word, letter) in enumerate(zip(WORDS, LETTERS, strict=True))]
    return pl.DataFrame(
        {
            "x": pl.Series(range(NUM_ROWS), dtype=pl.Int32),
            "text": mixed,
            "category": pl.Series(WORDS, dtype=pl.Categorical),
            "mixed": pl.Series(mixed, dtype=pl.Categorical),
            "letter": pl.Series(LETTERS, dtype=pl.Enum(["c", "b", "a"])),
            "inner": pl.Series([{"word": word} for word in WORDS], dtype=pl.Struct({"word": pl.Categorical})),
        }
    )


def assert_holds(found: Any, rows: list[int]) -> None:
    wanted = frame().select(pl.exclude("inner"), pl.col("inner").struct.field("word").alias("inner.word"))
    assert sorted(found) == sorted(wanted.columns)
    for name in wanted.columns:
        assert found[name].tolist() == [wanted[name].to_list()[row] for row in rows], name


@pytest.mark.parametrize("level", list(LEVELS))
@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
@pytest.mark.parametrize("layout", ["file", "stream"])
def test_categories_are_read_as_their_text(tmp_path: Path, level: str, compression: Any, layout: str) -> None:
    path, level_ = tmp_path / "polars.arrow", LEVELS[level]
    if layout == "file":
        frame().write_ipc(path, compression=compression, compat_level=level_, record_batch_size=30)
    else:
        frame().write_ipc_stream(path, compression=compression, compat_level=level_)
    rows = [99, 0, 31, 30, 29, 31]
    assert_holds(read(bx.open(path), rows), rows)
    assert read(bx.open(path, columns=["letter"]), [1, 2])["letter"].tolist() == ["b", "c"]


def test_a_copy_for_random_access(tmp_path: Path) -> None:
    path = tmp_path / "polars.arrow"
    frame().select(pl.exclude("inner")).write_ipc(path, compression="zstd", record_batch_size=30)
    copy = as_arrow(path, cache=tmp_path / "cache")
    assert isinstance(copy, ArrowSource)
    found = read(copy, [64, 3])
    assert found["category"].tolist() == [WORDS[64], WORDS[3]]
    assert found["letter"].tolist() == [LETTERS[64], LETTERS[3]]


def test_a_missing_category_has_a_mask(tmp_path: Path) -> None:
    pl.DataFrame({"c": pl.Series(["a", None, "b"], dtype=pl.Categorical)}).write_ipc(tmp_path / "nulls.arrow")
    source = bx.open(tmp_path / "nulls.arrow")
    found = read(source, [2, 0, 1])
    assert found["c"].tolist() == ["b", "a", ""]
    assert found["c.is_valid"].tolist() == [True, True, False]
