"""Batches that are read several at once: the same ones, each with its own error, where samples are at hand."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from jax.sharding import PartitionSpec as P

import braidax.data as data
from braidax.data.fetching import fetch, several
from braidax.data.formats.arrays.arrays import ArraySource, from_arrays
from braidax.data.knobs import Knobs
from braidax.data.loader import DataLoader
from braidax.data.sampling.order import Cursor
from braidax.data.sharding import load_plan
from braidax.data.source import Source
from braidax.errors import RecordError
from tests.support.data.numbered import Numbers, reading_threads
from tests.support.data.varying import Varying

NUM_SAMPLES = 1000


@pytest.fixture(autouse=True)
def eight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets what is read at once end often in little data."""
    monkeypatch.setattr(several, "_MOST", 8)


@pytest.fixture(params=["one leaf", "two leaves", "odd rows"])
def arrays(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    rows = np.arange(NUM_SAMPLES * 16, dtype=np.int32).reshape(NUM_SAMPLES, 16)
    if request.param == "odd rows":
        return {"x": rows.astype(np.uint8)[:, :3].copy()}
    return {"x": rows} if request.param == "one leaf" else {"x": rows, "y": np.arange(NUM_SAMPLES, dtype=np.float32)}


def batches(loader: DataLoader) -> list[dict[str, Any]]:
    return [{name: np.asarray(leaf).tolist() for name, leaf in batch.items()} for batch in loader]


def reads_of(source: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes how many samples each read asks for."""
    found: list[int] = []
    read = type(source).read

    def noted(self: Any, indices: np.ndarray, out: Any) -> None:
        found.append(len(indices))
        read(self, indices, out)

    monkeypatch.setattr(type(source), "read", noted)
    return found


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("start", [Cursor(), Cursor(3, 1, 62)])
def test_batches_are_those_that_are_read_one_by_one(
    arrays: dict[str, np.ndarray], remainder: Any, start: Cursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        DataLoader(from_arrays(arrays), batch_size=31, epochs=2, remainder=remainder, knobs=knobs)
        for knobs in (Knobs(threads=3), Knobs(threads=2, prefetch=1))
    ]
    for loader in made:
        loader.cursor = start
    found = reads_of(made[0].source, monkeypatch)
    first = batches(made[0])
    if len(arrays) == 1 and len(arrays["x"][0]) == 16:
        assert max(found) == 8 * 31
    found.clear()
    assert first == batches(made[1])
    assert max(found) == 31
    assert made[0].cursor == made[1].cursor
    assert reading_threads() == []


@pytest.mark.parametrize("place", ["one device", "split", "replicated", "host"])
def test_batches_stay_what_they_were(
    arrays: dict[str, np.ndarray], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a program makes their arrays, and those behind them have come."""
    monkeypatch.setattr(fetch, "_PROGRAM_BATCHES", 3 * 8)
    mesh = None if place in ("one device", "host") else jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    options: dict[str, Any] = {"placement": "host"} if place == "host" else {}
    specs = {"split": P("data"), "replicated": P()}.get(place)
    loader = DataLoader(from_arrays(arrays), mesh, specs, batch_size=16, epochs=2, **options)
    order = loader.peek(124)
    load_plan._split.cache_clear()
    found = list(loader)
    assert len(found) == 124
    for batch, indices in zip(found, order, strict=True):
        assert isinstance(batch["x"], np.ndarray if place == "host" else jax.Array)
        for name, values in arrays.items():
            np.testing.assert_array_equal(np.asarray(batch[name]), values[indices])
    if place == "one device":
        sharding = found[0]["x"].sharding
        assert all(leaf.sharding == sharding for batch in found for leaf in batch.values())
        assert load_plan._split.cache_info().currsize == 1
        assert load_plan._split((sharding,) * len(arrays), 8)._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]


def test_it_resumes_amid_what_was_read_at_once(arrays: dict[str, np.ndarray]) -> None:
    loader = DataLoader(from_arrays(arrays), batch_size=20, seed=5)
    whole = batches(loader)
    loader.cursor = Cursor(5, 0, 0)
    for number, batch in enumerate(loader):
        assert np.asarray(batch["x"]).tolist() == whole[number]["x"]
        if number == 12:
            break
    assert batches(loader) == whole[13:]


def test_an_error_comes_at_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_READ_SECONDS", 60.0)  # however slow the machine is, a batch is one read
    values = np.zeros((NUM_SAMPLES, 16), np.int64)
    loader = DataLoader(from_arrays({"x": values}), batch_size=20)
    coming = loader.peek(50)
    values[coming[30][7]] = 2**40
    found, got = reads_of(loader.source, monkeypatch), 0
    with pytest.raises(RecordError, match=rf"record {coming[30][7]}: leaf 'x' holds 1099511627776"):
        for _ in loader:
            got += 1
    assert got == 30
    assert loader.cursor.position == 30 * 20
    assert 160 in found
    assert found.count(20) >= 8  # the first one, and those beside the bad one
    values[:] = 1
    assert len(batches(loader)) == 20


def opened_texts(folder: Path, texts: list[Any], **columns: Any) -> Source:
    """Opens texts of several record batches, cut or padded to 40 bytes."""
    table = pa.table({"text": pa.array(texts) if isinstance(texts[0], str) else not_checked(texts), **columns})
    feather.write_feather(table, str(folder / "a.arrow"), compression="uncompressed", chunksize=300)
    return data.padded(data.open(folder / "a.arrow"), 40, leaf="text", pad=0x2A)


def not_checked(texts: list[bytes]) -> Any:
    """Returns texts that nobody has looked at."""
    return pa.StringArray.from_buffers(len(texts), *pa.array(texts).buffers()[1:])


def words(number: int) -> str:
    return f"naïve 猫 {number} " * (number % 5)


@pytest.mark.parametrize("beside", ["nothing", "nulls", "another padded leaf"])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_padded_texts_are_those_that_are_read_one_by_one(
    tmp_path: Path, beside: str, remainder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[Any] = [words(number) for number in range(NUM_SAMPLES)]
    columns: dict[str, Any] = {}
    if beside == "nulls":
        texts[7::5] = [None] * len(texts[7::5])
    if beside == "another padded leaf":
        columns["bag"] = pa.array([[*range(number % 6)] for number in range(NUM_SAMPLES)], pa.list_(pa.int64()))
    source = opened_texts(tmp_path, texts, **columns)
    if columns:
        source = data.padded(source, 4, leaf="bag")
    made = [
        DataLoader(source, batch_size=31, seed=3, epochs=2, remainder=remainder, knobs=knobs)
        for knobs in (Knobs(threads=3), Knobs(threads=2, prefetch=1))
    ]
    order = made[0].peek(33)
    found = reads_of(source, monkeypatch)
    first = batches(made[0])
    assert max(found) == 8 * 31
    found.clear()
    assert first == batches(made[1])
    assert max(found) == 31
    for batch, indices in zip(first, order, strict=False):
        for row, index in enumerate(indices.tolist()):
            held = (texts[index] or "").encode()[:40].decode(errors="ignore").encode()
            assert bytes(batch["text"][row]) == held.ljust(40, b"*")
            assert batch["num_text"][row] == len(held)
            if columns:
                assert batch["bag"][row] == [*range(index % 6), 0, 0, 0, 0][:4]
                assert batch["num_bag"][row] == min(4, index % 6)


def test_it_resumes_amid_texts_that_were_read_at_once(tmp_path: Path) -> None:
    loader = DataLoader(opened_texts(tmp_path, [words(number) for number in range(NUM_SAMPLES)]), batch_size=20, seed=5)
    whole = batches(loader)
    loader.cursor = Cursor(5, 0, 0)
    for number, batch in enumerate(loader):
        assert np.asarray(batch["text"]).tolist() == whole[number]["text"]
        if number == 12:
            break
    assert batches(loader) == whole[13:]


def test_a_text_that_is_none_is_an_error_of_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_READ_SECONDS", 60.0)  # however slow the machine is, a batch is one read
    texts = [words(number).encode() for number in range(NUM_SAMPLES)]
    coming = DataLoader(from_arrays({"x": np.zeros(NUM_SAMPLES, np.int8)}), batch_size=20).peek(50)
    bad = int(coming[30][7])
    texts[bad] = b"\xff" + texts[bad]
    loader, got = DataLoader(opened_texts(tmp_path, texts), batch_size=20), 0
    found = reads_of(loader.source, monkeypatch)
    with pytest.raises(RecordError, match=rf"a.arrow, record {bad}: column 'text' holds text that is no UTF-8"):
        for _ in loader:
            got += 1
    assert got == 30
    assert loader.cursor.position == 30 * 20
    assert 160 in found
    assert found.count(20) >= 8  # the first one, and those beside the bad one


def test_the_first_batch_is_read_before_several(arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(from_arrays(arrays), batch_size=16, knobs=Knobs(threads=1))
    found = reads_of(loader.source, monkeypatch)
    next(iter(loader))
    assert found[0] == 16


def test_who_is_read_several_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a ledger of skipped records would lie
    np.save(tmp_path / "a.npy", np.zeros((64, 256), np.float32))
    for number in range(2):
        np.save(tmp_path / f"b{number}.npy", np.zeros((64, 256), np.float32))
    quick = data.open(tmp_path / "a.npy")

    def at_once(source: Any, batch_size: int = 8, num_begun: int = 10**4, **options: Any) -> tuple[int, int]:
        loader = DataLoader(source, batch_size=batch_size, **options)
        far = several.how_far(loader.source, loader._plan, loader.knobs, loader._prefetch, num_begun=num_begun)
        assert far.room == far.at_once
        return far[:2]

    assert at_once(quick) == (8, 24)
    assert at_once(data.open(str(tmp_path / "b*.npy"))) == (8, 24)
    assert at_once(quick[5:40]) == (8, 24)
    assert at_once(quick, knobs=Knobs(max_bytes=12 * 8 * 1024)) == (4, 12)
    assert at_once(quick, knobs=Knobs(prefetch=7)) == (2, 7)
    assert at_once(quick, knobs=Knobs(prefetch=2)) == (1, 2)
    assert at_once(quick, knobs=Knobs(threads=1)) == (8, 16)
    assert at_once(quick, knobs=Knobs(threads=1, prefetch=8)) == (4, 8)
    assert at_once(quick, knobs=Knobs(threads=2, prefetch=8)) == (2, 8)
    assert at_once(quick, knobs=Knobs(prefetch=0)) == (1, 0)
    assert at_once(quick, knobs=Knobs(hedge_seconds=0)) == (1, 8)
    assert at_once(quick, on_error="skip") == (1, 8)
    assert at_once(data.mapped(quick, lambda window: window)) == (1, 8)
    assert at_once(Numbers(64)) == (1, 8)
    table = pa.table({"text": ["a"] * 64, "fixed": pa.array([[1, 2]] * 64, pa.list_(pa.int32(), 2))})
    feather.write_feather(table, str(tmp_path / "c.arrow"), compression="uncompressed")
    text = data.open(tmp_path / "c.arrow")
    assert at_once(data.padded(text, 64, leaf="text")) == (8, 24)
    assert at_once(data.padded(text, 64, leaf="text")[5:40]) == (8, 24)
    assert at_once(data.open(tmp_path / "c.arrow", columns=["fixed"])) == (8, 24)
    assert at_once(data.padded(Varying({"text": ["a"] * 64}), 64, leaf="text")) == (1, 8)
    large = np.zeros((8, 1 << 20), np.uint8)
    assert at_once(from_arrays({"x": large}), 2) == (4, 12)
    assert at_once(from_arrays({"x": large}), 5) == (1, 8)
    assert [at_once(from_arrays({"x": large}), 1, num)[0] for num in (0, 10**4)] == [8, 8]


def test_fewer_are_read_at_once_where_there_are_many_leaves_or_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # as it is by default
    loader = DataLoader(from_arrays({"x": np.zeros((64, 256), np.float32)}), batch_size=8)
    given = loader.source, loader._plan, loader.knobs, loader._prefetch
    assert several.how_far(*given, num_begun=10**4) == (32, 96, 32)
    begins = [several.how_far(*given, num_begun=num) for num in (0, 31, 32, 63, 64)]
    assert [far.at_once for far in begins] == [8, 8, 16, 16, 32]  # who asks for one batch gets it before 96 are read
    assert {far.room for far in begins} == {32}
    assert several.how_far(*given, num_begun=10**4, is_alone=False) == (8, 24, 8)
    for num_leaves, at_once in ((8, 32), (12, 16), (40, 8)):
        loader = DataLoader(
            from_arrays({str(leaf): np.zeros(64, np.float32) for leaf in range(num_leaves)}), batch_size=8
        )
        far = several.how_far(loader.source, loader._plan, loader.knobs, loader._prefetch, num_begun=10**4)
        assert far.at_once == at_once


@pytest.mark.parametrize(("form", "before"), [("arrow", 8), ("parquet", 1), ("csv", 8)])
def test_tables_are_read_several_at_once_when_all_of_them_is_there(tmp_path: Path, form: str, before: int) -> None:
    rows = np.arange(8192)
    table, path = pa.table({"x": rows.astype(np.int32), "y": (rows / 4).astype(np.float32)}), tmp_path / f"a.{form}"
    write = {
        "arrow": lambda: feather.write_feather(table, str(path), compression="uncompressed"),
        "parquet": lambda: pq.write_table(table, path, row_group_size=1000),
        "csv": lambda: csv.write_csv(table, path),
    }
    write[form]()
    loader = DataLoader(path, batch_size=100, seed=3)

    def at_once() -> int:
        return several.how_far(loader.source, loader._plan, loader.knobs, loader._prefetch, num_begun=10**4).at_once

    assert at_once() == before
    found = [{name: np.asarray(leaf) for name, leaf in batch.items()} for batch in loader]
    assert at_once() == 8
    read = np.concatenate([batch["x"] for batch in found])
    assert np.array_equal(np.unique(read), np.sort(read))
    assert len(read) == 8100
    assert np.array_equal(np.concatenate([batch["y"] for batch in found]), read / 4)
    again = [np.asarray(batch["x"]) for batch in DataLoader(loader.source, batch_size=100, seed=3)]
    assert np.array_equal(np.concatenate(again), read)


def test_a_disk_that_is_waited_for_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.arange(NUM_SAMPLES, dtype=np.int32))
    loader = DataLoader(tmp_path / "a.npy", batch_size=16)
    assert isinstance(loader.source, ArraySource)
    found = reads_of(loader.source, monkeypatch)
    monkeypatch.setattr(ArraySource, "is_at_hand", property(lambda self: sum(found) < 200))
    for _ in loader:
        pass
    assert max(found) == 8 * 16
    assert set(found[-20:]) == {16}


def test_stacks_of_microbatches_and_many_devices_are_the_same(arrays: dict[str, np.ndarray]) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    alone = Knobs(prefetch=1)
    ways: list[dict[str, Any]] = [
        {"mesh": mesh, "specs": spec, "batch_size": 24},
        {"batch_size": 24, "microbatches": 3},
    ]
    for options in ways:
        made = [DataLoader(from_arrays(arrays), **options, knobs=knobs) for knobs in (Knobs(), alone)]
        assert batches(made[0]) == batches(made[1])
