"""`Frame`: verbs of Polars on a gang, tables that stay on its ranks, folders that all ranks write."""

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax as bx
import braidax.frame as bf
from braidax.errors import ArgumentError, CallFailed
from braidax.frame.writing import Written, check_written
from braidax.gang import LocalGang
from tests.support.frame.running import names_kept

ROWS = 1000


@pytest.fixture(scope="module")
def gang() -> Iterator[LocalGang]:
    with LocalGang(2) as gang:
        yield gang


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frame") / "table.parquet"
    table().write_parquet(path, row_group_size=90)
    return path


def table() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    return pl.DataFrame(
        {"k": rng.integers(0, 40, ROWS), "v": rng.random(ROWS), "s": [f"text {i}" for i in range(ROWS)]}
    )


def test_verbs_return_frames_and_take_them(gang: LocalGang, path: Path) -> None:
    frame = bf.scan_parquet(path, gang=gang)
    top = frame.group_by("k").agg(pl.col("v").max())
    found = frame.join(top, on=["k", "v"], how="semi").sort("k").select("k", "s")
    lazy = pl.scan_parquet(path)
    expected = lazy.join(lazy.group_by("k").agg(pl.col("v").max()), on=["k", "v"], how="semi").sort("k")
    assert isinstance(found, bf.Frame)
    assert found.collect_schema() == pl.Schema({"k": pl.Int64(), "s": pl.String()})
    assert_frame_equal(found.collect(), expected.select("k", "s").collect())
    both = bf.concat([frame.head(3), frame.tail(2)]).collect()
    assert_frame_equal(both, pl.concat([table().head(3), table().tail(2)]))


def test_a_table_that_is_persisted_stays_on_the_ranks_as_long_as_frames_begin_there(gang: LocalGang) -> None:
    before = gang.names()
    kept = bf.from_polars(table(), gang).filter(pl.col("k") < 20).persist()
    (name,) = set(gang.names()) - set(before)
    later = kept.select(pl.col("v").sum())
    expected = table().filter(pl.col("k") < 20)
    assert_frame_equal(later.collect(), expected.select(pl.col("v").sum()))
    assert sum(part.frame.height for part in gang.get(name)) == expected.height
    again = kept.head(1)
    del kept, later
    gc.collect()
    again.collect()
    assert name in gang.names()


def test_a_table_is_given_up_when_anything_else_is_computed(gang: LocalGang) -> None:
    frame = bf.from_polars(table(), gang)
    for compute in (frame.persist, frame.collect, lambda: bf.collect(table().lazy(), gang)):
        kept = bf.from_polars(table(), gang).persist()
        before = set(gang.names())
        del kept
        gc.collect()
        assert set(gang.names()) == before
        compute()
        assert len(before - set(gang.names())) == 1


def test_rows_that_lie_by_keys_are_not_moved_for_them_again(gang: LocalGang) -> None:
    frame = bf.from_polars(table(), gang)
    grouped = frame.group_by("k").agg(pl.col("s").first()).persist()
    parts = [part for name in gang.names() for part in gang.get(name) if part.frame.columns == ["k", "s"]]
    assert {part.keys for part in parts} == {("k",)}
    assert not set(parts[0].frame["k"]) & set(parts[1].frame["k"])
    joined = grouped.join(grouped, on="k").sort("k").collect()
    assert joined["k"].to_list() == sorted(set(table()["k"]))


def test_a_shuffle_is_a_permutation_and_the_same_for_any_number_of_ranks(gang: LocalGang) -> None:
    shuffled = bf.from_polars(table(), gang).shuffle(seed=3).collect()
    with LocalGang(3) as more:
        assert_frame_equal(bf.from_polars(table(), more).shuffle(seed=3).collect(), shuffled)
    assert_frame_equal(shuffled.sort("s"), table().sort("s"))
    places = shuffled["s"].str.slice(5).cast(pl.Int64).to_numpy()
    assert abs(np.corrcoef(places, np.arange(ROWS))[0, 1]) < 0.1
    assert not shuffled.equals(bf.from_polars(table(), gang).shuffle(seed=4).collect())


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_folder_is_written_by_all_ranks_and_opens_as_a_source(gang: LocalGang, kind: str, tmp_path: Path) -> None:
    frame = bf.from_polars(table(), gang).sort("v").select("v", "k")
    sink = frame.sink_arrow if kind == "arrow" else frame.sink_parquet
    assert sum(sink(tmp_path / "out")) == ROWS
    assert sorted(item.name for item in tmp_path.iterdir()) == ["out"]
    source = bx.open(tmp_path / "out")
    values = np.empty(ROWS)
    source.read(np.arange(ROWS), {"v": values, "k": np.empty(ROWS, np.int64)})
    np.testing.assert_array_equal(values, np.sort(table()["v"].to_numpy()))
    with pytest.raises(ArgumentError, match=r"out'\: is there already, and would be overwritten"):
        sink(tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"folder='/proc/self/out': cannot be made"):
        sink("/proc/self/out")


def test_a_folder_that_fails_leaves_nothing(gang: LocalGang, tmp_path: Path) -> None:
    broken = bf.from_polars(table(), gang).with_columns(pl.col("s").cast(pl.Int64))
    before = names_kept(gang)
    with pytest.raises(CallFailed, match="conversion from `str` to `i64` failed"):
        broken.sink_parquet(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert gang.names() == before


def test_a_disk_that_is_not_shared_is_told(tmp_path: Path) -> None:
    (tmp_path / "part-00000.arrow").write_bytes(b"12345")
    here = Written("part-00000.arrow", 1, 5)
    assert check_written(tmp_path, [here]) == [1]
    for elsewhere in (Written("part-00001.arrow", 1, 5), Written("part-00000.arrow", 1, 6)):
        with pytest.raises(ArgumentError, match=r"rank 1 has written . bytes, which are not to be seen from here"):
            check_written(tmp_path, [here, elsewhere])


def test_what_would_compute_here_is_refused(gang: LocalGang) -> None:
    frame = bf.from_polars(table(), gang)
    for name in ("sink_csv", "collect_async", "show", "describe"):
        with pytest.raises(AttributeError, match=f"a Frame has no '{name}'"):
            getattr(frame, name)


def test_frames_of_two_gangs_do_not_meet(gang: LocalGang) -> None:
    with LocalGang(1) as other:
        frame = bf.from_polars(table(), other)
        with pytest.raises(ArgumentError, match="a frame of another gang"):
            bf.from_polars(table(), gang).join(frame, on="k")
    with pytest.raises(ArgumentError, match="frames is empty"):
        bf.concat([])


def test_a_frame_is_what_a_loader_loads(gang: LocalGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path))
    frame = bf.from_polars(table(), gang).sort("v").select(pl.col("v").cast(pl.Float32), "k")
    expected = frame.collect()
    with bx.DataLoader(frame, batch_size=ROWS // 4, seed=None) as loader:
        batches = list(loader)
    for name in ("k", "v"):
        assert np.concatenate([np.asarray(batch[name]) for batch in batches]).tolist() == expected[name].to_list()
    assert list((tmp_path / "tables").iterdir()) == []
    assert len(bx.open(frame.head(7))) == 7
    with pytest.raises(ArgumentError, match=r"has the leaf \['s'\], whose size varies"):
        bx.DataLoader(bf.from_polars(table(), gang))
    with pytest.raises(CallFailed, match="conversion from `str` to `i64` failed"):
        bx.DataLoader(frame.select((pl.col("k").cast(pl.String) + "x").cast(pl.Int64)))
    assert list((tmp_path / "tables").iterdir()) == []
