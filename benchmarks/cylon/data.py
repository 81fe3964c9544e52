"""The tables: made once, written as Parquet, several files each, the same for all systems."""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import polars as pl
import polars.selectors as cs

from benchmarks.harness import say
from benchmarks.harness.inputs import made_whole

NUM_FILES = 8
KINDS = ("90 %", "0.001 %", "Zipf", "strings")
_GROUP_ROWS = 1 << 17
_ZIPF = 1.2
_NUM_GROUPS = 100  # `K` of h2o.ai
_LIMIT_SECONDS = 600.0

Files = Mapping[str, list[str]]
"""By table the files that hold it, in order."""


def paper(folder: Path, num_rows: int, kind: str) -> Files:
    """Two tables `k, a` and `k, b`, the first one of so many rows.

    With `90 %` and `strings` both draw their keys from 0.9 times as many as they have rows, as the paper's do. With
    `0.001 %` and `Zipf` the second one has each key once, as else their join would have more rows than fit anywhere.
    """
    place = folder / f"paper-{num_rows}-{KINDS.index(kind)}"
    return _made(place, lambda unfinished: _write_paper(unfinished, num_rows, kind))


def h2o(folder: Path, num_rows: int) -> Files:
    """The tables of the questions of h2o.ai: `g` for the group-bys; `x`, `small`, `medium` and `big` for the joins."""
    return _made(folder / f"h2o-{num_rows}", lambda unfinished: _write_h2o(unfinished, num_rows))


def tpch(folder: Path, scale: float, generator: str) -> Files:
    """The eight tables of TPC-H, decimals as floats of 64 bits, which all systems compute with.

    **Arguments:** `generator`: the program `tpchgen-cli`.
    """
    return _made(folder / f"tpch-{scale:g}", lambda unfinished: _write_tpch(unfinished, scale, generator))


def warm(files: Files) -> None:
    """Reads all files once, so that they lie in the page cache."""
    for path in (Path(name) for names in files.values() for name in names):
        path.read_bytes()


def _made(place: Path, write: Callable[[Path], None]) -> Files:
    if not place.exists():
        say(f"  {place.name} is made …")
        with made_whole(place) as unfinished:
            write(unfinished)
    return {
        table.name: [str(path) for path in sorted(table.glob("*.parquet"))]
        for table in sorted(place.iterdir())
        if table.is_dir()
    }


def _write_paper(place: Path, num_rows: int, kind: str) -> None:
    rng = np.random.default_rng(0)
    num_keys = max(1, num_rows // 100_000 if kind == "0.001 %" else num_rows * 9 // 10)
    if kind == "Zipf":
        left, right = (rng.zipf(_ZIPF, num_rows) - 1) % num_keys, rng.permutation(num_keys)
    else:
        left = rng.integers(0, num_keys, num_rows)
        right = rng.permutation(num_keys) if kind == "0.001 %" else rng.integers(0, num_keys, num_rows)
    for name, column, keys in (("left", "a", left), ("right", "b", right)):
        values = rng.integers(0, 1_000_000, len(keys))
        table = pl.DataFrame({"k": keys.astype(np.int64), column: values.astype(np.int64)})
        if kind == "strings":
            table = table.with_columns(_named("k", 10))
        _write(place / name, table)


def _write_h2o(place: Path, num_rows: int) -> None:
    rng, many = np.random.default_rng(0), max(1, num_rows // _NUM_GROUPS)
    few = {name: rng.integers(1, _NUM_GROUPS + 1, num_rows) for name in ("id1", "id2", "id4", "id5")}
    lots = {name: rng.integers(1, many + 1, num_rows) for name in ("id3", "id6")}
    grouped = pl.DataFrame({**few, **lots}).with_columns(
        _named("id1", 3),
        _named("id2", 3),
        _named("id3", 10),
        v1=rng.integers(1, 6, num_rows),
        v2=rng.integers(1, 16, num_rows),
        v3=np.round(rng.uniform(0, 100, num_rows), 6),
    )
    _write(place / "g", grouped)
    sizes = {"small": max(10, num_rows // 1_000_000), "medium": max(10, num_rows // 1000), "big": num_rows}
    keys = dict(zip(sizes, ("id1", "id2", "id3"), strict=True))
    drawn = {keys[name]: rng.integers(0, size, num_rows) for name, size in sizes.items()}
    texts = pl.format("id{}", pl.col("id2")).alias("id5")
    _write(place / "x", pl.DataFrame(drawn).with_columns(texts, v1=np.round(rng.uniform(0, 100, num_rows), 6)))
    for name, size in sizes.items():  # nine of ten keys are on both sides
        held = pl.DataFrame({keys[name]: rng.permutation(size) + size // 10})
        held = held.with_columns(w=np.round(rng.uniform(0, 100, size), 6))
        _write(place / name, held.with_columns(texts) if name == "medium" else held)


def _write_tpch(place: Path, scale: float, generator: str) -> None:
    raw = place / "raw"
    parts = max(1, round(NUM_FILES * scale))
    command = [generator, "parquet", "--scale-factor", f"{scale:g}", "--parts", str(parts), "--output-dir", str(raw)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_SECONDS)
    for table in sorted(path for path in raw.iterdir() if path.is_dir()):
        (place / table.name).mkdir()
        for path in table.glob("*.parquet"):
            number = int(path.name.split(".")[1])
            scanned = pl.scan_parquet(path).with_columns(cs.decimal().cast(pl.Float64))
            scanned.sink_parquet(place / table.name / f"{number:04}.parquet", row_group_size=_GROUP_ROWS)
            path.unlink()
    shutil.rmtree(raw)


def _named(column: str, num_digits: int) -> pl.Expr:
    """`id007` of 7."""
    return pl.format("id{}", pl.col(column).cast(pl.String).str.zfill(num_digits)).alias(column)


def _write(folder: Path, table: pl.DataFrame) -> None:
    folder.mkdir(parents=True)
    step = -(-table.height // NUM_FILES) if table.height > NUM_FILES else table.height
    for number, start in enumerate(range(0, table.height, step)):
        part = table.slice(start, step)
        part.write_parquet(folder / f"{number:04}.parquet", row_group_size=_GROUP_ROWS)
