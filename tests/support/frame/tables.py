"""Random tables that queries are asked of, in memory and in files, and what hypothesis draws of them."""

import datetime as dt
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
from hypothesis import strategies

from tests.support.frame.values import ALL, COLORS, NESTED, SCALARS, values

START = dt.datetime(2024, 3, 1)
NULLS = 0.12


@dataclass(frozen=True)
class Shape:
    """What tables are like. **Fields:** `heavy`: which part of the rows has one and the same key."""

    name: str
    num_rows: int
    heavy: float = 0.0
    chunks: int = 1
    nulls: float = NULLS


SHAPES = {
    shape.name: shape
    for shape in [
        Shape("usual", 61),
        Shape("empty", 0),
        Shape("one row", 1, nulls=0.0),
        Shape("tiny", 3, nulls=0.3),
        Shape("one giant key", 90, heavy=0.8, chunks=5),
        Shape("nulls", 40, nulls=0.9, chunks=3),
    ]
}


def table(columns: Mapping[str, pl.DataType], num_rows: int, draw: random.Random, **options: Any) -> pl.DataFrame:
    """Returns random columns. **Arguments:** `options`: see `values`."""
    options = {"nulls": NULLS, "distinct": None, **options}
    return pl.DataFrame(
        [pl.Series(name, values(dtype, num_rows, draw, **options), dtype) for name, dtype in columns.items()]
    )


def in_chunks(frame: pl.DataFrame, num_chunks: int) -> pl.DataFrame:
    """Returns the same rows in several pieces of memory, of different lengths, one of them empty."""
    if num_chunks == 1:
        return frame
    borders = [frame.height * piece**2 // num_chunks**2 for piece in range(num_chunks + 1)]
    pieces = [frame.slice(begin, end - begin) for begin, end in pairwise(borders)]
    return pl.concat([pieces[0], frame.clear(), *pieces[1:]], rechunk=False)


def dealt(frame: pl.DataFrame, seed: int) -> pl.DataFrame:
    """Returns the same rows in another order."""
    return frame[random.Random(seed).sample(range(frame.height), frame.height)]


def split(frame: pl.DataFrame, num_parts: int) -> list[pl.DataFrame]:
    """Returns consecutive parts of different lengths; the second is empty."""
    borders = [0, *(frame.height * (part + 1 - part % 2) // num_parts for part in range(num_parts - 1)), frame.height]
    return [frame.slice(begin, end - begin) for begin, end in pairwise(borders)]


def write_parts(frame: pl.DataFrame, folder: Path, name: str, num_parts: int = 4) -> dict[str, Path]:
    """Writes the parts of a table to files. **Returns:** by format the pattern that finds its files, in order."""
    found = {
        "parquet": lambda part, path: part.write_parquet(path, row_group_size=7, statistics=True),
        "ipc": lambda part, path: part.write_ipc(path, record_batch_size=6),
        "csv": lambda part, path: part.write_csv(path),
        "ndjson": lambda part, path: part.write_ndjson(path),
    }
    for number, part in enumerate(split(frame, num_parts)):
        for suffix, write in found.items():
            write(part, folder / f"{name}-{number}.{suffix}")
    return {suffix: folder / f"{name}-*.{suffix}" for suffix in found}


class Tables:
    """The tables of one shape. What a query gets of them is lazy, and the same for the same seed.

    `table` has a column of each usual kind beside `id`, which counts its rows; `wide` has all dtypes; `left` and
    `right` are joined; `events` and `quotes` are sorted by `at`.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        seed: int = 0,
        folder: Path | None = None,
        change: Callable[[pl.DataFrame], Any] | None = None,
    ) -> None:
        self.shape = shape
        self._seed = seed
        self._folder = folder
        self._change = change

    @cached_property
    def table(self) -> pl.LazyFrame:
        return self._lazy(self._table)

    @cached_property
    def wide(self) -> pl.LazyFrame:
        columns = {f"c{number}": dtype for number, dtype in enumerate(ALL)}
        return self._lazy(self._numbered(table(columns, self._rows(0.5), self._draw("wide"), nulls=self.shape.nulls)))

    @cached_property
    def nested(self) -> pl.LazyFrame:
        columns = {f"n{number}": dtype for number, dtype in enumerate(NESTED)}
        frame = table(columns, self._rows(0.7), self._draw("nested"), nulls=self.shape.nulls, distinct=9)
        return self._lazy(self._numbered(frame).with_columns(g=pl.col("id") % 4))

    @cached_property
    def left(self) -> pl.LazyFrame:
        return self._lazy(self._keyed("left", "x", self._rows(1.0)))

    @cached_property
    def right(self) -> pl.LazyFrame:
        return self._lazy(self._keyed("right", "y", self._rows(0.4)))

    @cached_property
    def events(self) -> pl.LazyFrame:
        return self._lazy(self._timed("events", self._rows(1.0)))

    @cached_property
    def quotes(self) -> pl.LazyFrame:
        return self._lazy(self._timed("quotes", self._rows(0.6)).rename({"id": "quote", "v": "bid"}))

    @cached_property
    def files(self) -> dict[str, Path]:
        """The rows of `table`, without what CSV and JSON cannot tell."""
        assert self._folder is not None
        frame = self._table.drop("took", "price", "raw").with_columns(pl.col("f", "n").fill_nan(None).clip(-1e6, 1e6))
        return write_parts(frame.drop("n"), self._folder, "table")

    @cached_property
    def wide_files(self) -> dict[str, Path]:
        """All dtypes that Parquet and Arrow files hold, and the same in both."""
        assert self._folder is not None
        kept = [dtype for dtype in ALL if dtype not in (pl.Null(), pl.Int128(), pl.UInt128(), pl.Float16())]
        columns = {f"c{number}": dtype for number, dtype in enumerate(kept)}
        frame = table(columns, self._rows(0.5), self._draw("files"), nulls=self.shape.nulls)
        found: dict[str, Path] = {}
        for number, part in enumerate(split(self._numbered(frame), 3)):
            part.write_parquet(self._folder / f"wide-{number}.parquet", row_group_size=5)
            part.write_ipc(self._folder / f"wide-{number}.ipc", record_batch_size=5)
        for suffix in ("parquet", "ipc"):
            found[suffix] = self._folder / f"wide-*.{suffix}"
        return found

    @cached_property
    def _table(self) -> pl.DataFrame:
        draw, rows, nulls = self._draw("table"), self._rows(1.0), self.shape.nulls
        keys = {"g": pl.String(), "h": pl.Int32(), "cat": pl.Categorical(), "en": COLORS, "day": pl.Date()}
        measured = {"i": pl.Int64(), "s": pl.Int16(), "u": pl.UInt32(), "n": pl.Float64(), "f32": pl.Float32()}
        other = {
            "b": pl.Boolean(),
            "name": pl.String(),
            "raw": pl.Binary(),
            "at": pl.Datetime("us"),
            "zoned": pl.Datetime("ms", "Europe/Zurich"),
            "took": pl.Duration("us"),
            "price": pl.Decimal(12, 2),
        }
        frame = pl.concat(
            [
                table(keys, rows, draw, nulls=nulls, distinct=5),
                table({**measured, **other}, rows, draw, nulls=nulls),
            ],
            how="horizontal",
        )
        frame = frame.with_columns(
            pl.Series("f", [None if draw.random() < nulls else draw.uniform(-10, 10) for _ in range(rows)], pl.Float64),
            pl.col("i", "s").clip(-1000, 1000),
            pl.col("u").clip(0, 1000),
            f32=pl.col("f32").fill_nan(None).clip(-50, 50),
        )
        return self._numbered(self._with_heavy(frame, ["g", "h", "cat", "en", "day"]))

    def _keyed(self, name: str, number: str, rows: int) -> pl.DataFrame:
        """Keys of which both sides have some; `number` is this side's own, and tells its rows."""
        draw, nulls = self._draw(name), self.shape.nulls
        words = ["", "a", "b", "ä", "a longer word than a view holds"]
        drawn: dict[str, tuple[pl.DataType, Sequence[Any]]] = {
            "k": (pl.Int64(), range(8)),
            "w": (pl.String(), words),
            "kf": (pl.Float64(), [0.0, -0.0, float("nan"), float("inf"), 1.5, -2.0]),
            "kc": (pl.Categorical(), words),
            "kd": (pl.Date(), [dt.date(2024, 1, day) for day in range(1, 5)]),
            "ks": (pl.Struct({"p": pl.Int8(), "q": pl.String()}), [{"p": 1, "q": "a"}, {"p": None, "q": "b"}]),
            "v": (pl.Float64(), [draw.uniform(-10, 10) for _ in range(50)]),
        }
        columns = [
            pl.Series(
                name, [None if draw.random() < nulls else draw.choice(choices) for _ in range(rows)], dtype, strict=True
            )
            for name, (dtype, choices) in drawn.items()
        ]
        return self._numbered(self._with_heavy(pl.DataFrame(columns), ["k", "w"]), number)

    def _timed(self, name: str, rows: int) -> pl.DataFrame:
        """Rows in the order of time, some at the same; `tick` is an integer with the same order."""
        draw, tick, found = self._draw(name), 0, []
        for _ in range(rows):
            tick += draw.choice([0, 1, 1, 2, 7, 40])
            found.append(tick)
        frame = pl.DataFrame(
            {
                "tick": pl.Series(found, dtype=pl.Int64),
                "g": pl.Series([draw.choice("abc") for _ in range(rows)], dtype=pl.String),
                "v": pl.Series(
                    [None if draw.random() < self.shape.nulls else draw.uniform(0, 9) for _ in found], dtype=pl.Float64
                ),
            }
        )
        frame = frame.with_columns(at=pl.lit(START) + pl.duration(minutes=pl.col("tick") * 13))
        return self._numbered(self._with_heavy(frame, ["g"]))

    def _with_heavy(self, frame: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
        if not self.shape.heavy:
            return frame
        draw = self._draw("heavy")
        is_heavy = pl.Series([draw.random() < self.shape.heavy for _ in range(frame.height)], dtype=pl.Boolean)
        return frame.with_columns(
            pl.when(is_heavy).then(pl.col(key).drop_nulls().first()).otherwise(pl.col(key)).alias(key) for key in keys
        )

    def _numbered(self, frame: pl.DataFrame, name: str = "id") -> pl.DataFrame:
        return frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(name)).select(name, pl.exclude(name))

    def _rows(self, part: float) -> int:
        return round(self.shape.num_rows * part) if self.shape.num_rows > 3 else self.shape.num_rows

    def _draw(self, name: str) -> random.Random:
        return random.Random(f"{self.shape.name} {self._seed} {name}")

    def _lazy(self, frame: pl.DataFrame) -> pl.LazyFrame:
        frame = in_chunks(frame, self.shape.chunks)
        return (frame if self._change is None else self._change(frame)).lazy()


@dataclass(frozen=True)
class Drawn:
    """A table of `id`, of keys with few values each, and of others; made when it is asked for, not while it is drawn.

    **Fields:** `distinct`: values of a key. `cut`: a number that a query may use, from -9 to 9.
    """

    key_dtypes: list[pl.DataType]
    dtypes: list[pl.DataType]
    num_rows: int
    nulls: float
    distinct: int
    chunks: int
    cut: int
    seed: int

    @property
    def keys(self) -> list[str]:
        return [f"k{number}" for number in range(len(self.key_dtypes))]

    @property
    def shape(self) -> Shape:
        return Shape(repr(self), self.num_rows)

    @cached_property
    def frame(self) -> pl.LazyFrame:
        draw = random.Random(self.seed)
        keyed = dict(zip(self.keys, self.key_dtypes, strict=True))
        other = {f"v{number}": dtype for number, dtype in enumerate(self.dtypes)}
        frame = pl.concat(
            [
                pl.DataFrame({"id": pl.Series(range(self.num_rows), dtype=pl.Int64)}),
                table(keyed, self.num_rows, draw, nulls=self.nulls, distinct=self.distinct),
                table(other, self.num_rows, draw, nulls=self.nulls),
            ],
            how="horizontal",
        )
        return in_chunks(frame, self.chunks).lazy()


drawn_tables = strategies.builds(
    Drawn,
    key_dtypes=strategies.lists(strategies.sampled_from(SCALARS), min_size=1, max_size=3),
    dtypes=strategies.lists(strategies.sampled_from(ALL), min_size=1, max_size=3),
    num_rows=strategies.integers(0, 40),
    nulls=strategies.sampled_from([0.0, 0.1, 0.9]),
    distinct=strategies.integers(1, 6),
    chunks=strategies.integers(1, 3),
    cut=strategies.integers(-9, 9),
    seed=strategies.integers(0, 2**32),
)
