"""Integers of 64 bits: functions see them as they are stored, and nothing is cut on its way to a device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zarr

import braidax as bx
import braidax.data as sources
from braidax.errors import RecordError

IDS = np.array([2**62 + 5, 7, -(2**40), 2**31, 3, 2**31 - 1], np.int64)
HASHES = np.array([2**64 - 1, 7, 2**63, 2**32, 3, 2**32 - 1], np.uint64)
BAGS = [[2**40, 1], [], [3], [2**40], [5], [6, 7]]


def _table() -> Any:
    return pa.table({"id": IDS, "hash": HASHES, "bag": BAGS, "label": np.arange(6, dtype=np.int8)})


def _parquet(path: Path) -> Any:
    pq.write_table(_table(), path / "a.parquet", row_group_size=2)
    return bx.open(path / "a.parquet")


def _arrow(path: Path) -> Any:
    feather.write_feather(_table(), str(path / "a.arrow"), compression="uncompressed", chunksize=4)
    return bx.open(path / "a.arrow")


def _feather(path: Path) -> Any:
    feather.write_feather(_table(), str(path / "a.feather"), compression="lz4")
    return bx.open(path / "a.feather")


def _partitioned(path: Path) -> Any:
    (path / "table" / "day=1").mkdir(parents=True)
    pq.write_table(_table(), path / "table" / "day=1" / "a.parquet")
    return sources.select(bx.open(path / "table"), ["id", "hash", "bag", "label"])


def _csv(path: Path) -> Any:
    rows = [f"{one},{other},{label}\n" for label, (one, other) in enumerate(zip(IDS, HASHES, strict=True))]
    (path / "a.csv").write_text("id,hash,label\n" + "".join(rows))
    return bx.open(path / "a.csv")


def _jsonl(path: Path) -> Any:
    rows = zip(IDS.tolist(), HASHES.tolist(), BAGS, strict=True)
    lines = [{"id": one, "hash": other, "bag": bag, "label": label} for label, (one, other, bag) in enumerate(rows)]
    (path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return bx.open(path / "a.jsonl")


def _arrays(path: Path) -> Any:
    return bx.open({"id": IDS, "hash": HASHES, "label": np.arange(6, dtype=np.int8)})


def _npz(path: Path) -> Any:
    np.savez(path / "a.npz", id=IDS.astype(">i8"), hash=HASHES, label=np.arange(6, dtype=np.int8))
    return bx.open(path / "a.npz")


def _hdf5(path: Path) -> Any:
    with h5py.File(path / "a.h5", "w") as file:
        file.create_dataset("id", data=IDS, chunks=(2,), compression="gzip")
        file.create_dataset("hash", data=HASHES, chunks=(2,))
        file["label"] = np.arange(6, dtype=np.int8)
    return bx.open(path / "a.h5")


def _zarr(path: Path) -> Any:
    group: Any = zarr.open_group(str(path / "a.zarr"), mode="w")
    for name, array in {"id": IDS, "hash": HASHES, "label": np.arange(6, dtype=np.int8)}.items():
        group.create_array(name, data=array, chunks=(2,))
    return bx.open(path / "a.zarr")


OPENED: dict[str, Callable[[Path], Any]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "feather": _feather,
    "partitioned": _partitioned,
    "csv": _csv,
    "jsonl": _jsonl,
    "arrays": _arrays,
    "npz": _npz,
    "hdf5": _hdf5,
    "zarr": _zarr,
}


def modulo(window: Any) -> Any:
    assert window["id"].dtype == np.int64
    assert window["hash"].dtype == np.uint64
    return {"id": window["id"] % 1000, "hash": window["hash"] % np.uint64(1000), "label": window["label"]}


QUICK = {"parquet", "arrow", "csv", "jsonl", "arrays"}


@pytest.fixture(params=[pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in OPENED])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return OPENED[request.param](tmp_path)


def test_a_transform_sees_them_as_they_are_stored(source: Any, tmp_path: Path) -> None:
    narrow = {"id": "int32", "hash": "uint32", "label": source.sample_spec["label"].dtype.name}
    for made in (
        sources.mapped(source, modulo),
        cloudpickle.loads(cloudpickle.dumps(sources.mapped(source, modulo))),
        sources.mapped(sources.concat([source[:3], source[3:]]), modulo),
        sources.mapped(
            sources.skipping(sources.select(source, ["id", "hash", "label"]), ledger=tmp_path / "bad.jsonl"), modulo
        ),
    ):
        assert {name: leaf.dtype.name for name, leaf in made.sample_spec.items()} == narrow
        found = sources.to_numpy(made)
        assert found["id"].tolist() == (IDS % 1000).tolist()
        assert found["hash"].tolist() == [int(value) % 1000 for value in HASHES]
        assert found["label"].tolist() == list(range(6))
    (batch,) = bx.DataLoader(sources.mapped(source, modulo), batch_size=6, seed=None)
    assert batch["id"].dtype == jnp.int32
    assert batch["id"].tolist() == (IDS % 1000).tolist()


def test_functions_of_samples_and_predicates_see_them(source: Any) -> None:
    each = sources.map(source, lambda sample: {"low": sample["id"] & 0xFF, "high": sample["id"] >> 32})
    found = sources.to_numpy(each)
    assert found["low"].tolist() == (IDS & 0xFF).tolist()
    assert found["high"].tolist() == (IDS >> 32).tolist()
    large = sources.filter(source, lambda sample: abs(int(sample["id"])) > 2**31)
    assert [sample["label"] for sample in sources.map(large, lambda sample: {"label": sample["label"]})] == [0, 2]
    small = sources.filter(source, lambda window: np.abs(window["id"]) < 2**31, by="window", columns="id")
    kept = sources.mapped(small, lambda window: {"id": window["id"].astype(np.float32)})
    assert sources.to_numpy(kept)["id"].tolist() == [7, 3, 2**31]


def test_what_does_not_fit_is_refused_on_its_way_to_a_device(source: Any) -> None:
    assert source.sample_spec["id"].dtype == np.int32
    message = r"'(id|hash)' holds \d+.* does not fit in u?int32; store smaller values, take them modulo a number in tra"
    with pytest.raises(RecordError, match=message):
        next(iter(bx.DataLoader(sources.select(source, ["id", "hash"]), batch_size=6)))
    with pytest.raises(RecordError, match=r"jax_enable_x64"):
        sources.to_numpy(source)
    whole = sources.mapped(source, lambda window: {"user": window["id"]})
    with pytest.raises(RecordError, match=r"transform=.*, record 0: leaf .*'user'.* holds 4611686018427387909"):
        next(iter(bx.DataLoader(whole, batch_size=6, seed=None)))


@pytest.mark.parametrize("name", ["parquet", "arrow", "feather", "jsonl"])
def test_lists_of_any_length(name: str, tmp_path: Path) -> None:
    OPENED[name](tmp_path)
    source = bx.open(next(tmp_path.glob(f"a.{name}")), columns=["bag"])
    with pytest.raises(RecordError, match=r"'bag' holds 1099511627776.* does not fit in int32"):
        sources.to_numpy(source)
    made = sources.mapped(source, lambda window: {"sum": np.array([bag.sum() % 1000 for bag in window["bag"]])})
    assert sources.to_numpy(made)["sum"].tolist() == [sum(bag) % 1000 for bag in BAGS]
    unchanged = sources.mapped(source, lambda window: {"bag": window["bag"]})
    with pytest.raises(RecordError, match=r"leaf 'bag' holds 1099511627776 \(int64\), which does not fit in int32"):
        sources.to_numpy(sources.padded(unchanged, leaf="bag", length=2))


def test_sources_around_sources_hand_them_on(tmp_path: Path) -> None:
    ids = IDS[[1, 3, 2]]
    np.save(tmp_path / "a.npy", ids)
    np.save(tmp_path / "b.npy", ids + 1)
    files = bx.open([str(tmp_path / "a.npy"), str(tmp_path / "b.npy")])
    for source in (files, bx.mix([(files[:3], 1), (files[3:], 1)])):
        made = sources.mapped(source, lambda window: {"low": window["data"] & 0xFF, "high": window["data"] >> 32})
        again = cloudpickle.loads(cloudpickle.dumps(made))
        for one in (made, again):
            found = sources.to_numpy(one)
            both = sorted(found["low"].astype(np.int64) + (found["high"].astype(np.int64) << 32))
            assert both == sorted(np.concatenate([ids, ids + 1]) & ~np.int64(0xFFFFFF00))
    images = {"image": np.zeros((3, 4, 4, 3), np.uint8), "id": ids}
    small = sources.mapped(sources.resized(bx.open(images), (2, 2)), lambda window: {"id": window["id"] % 1000})
    assert sources.to_numpy(small)["id"].tolist() == (ids % 1000).tolist()


WITH_JAX: dict[str, Callable[[Any], Any]] = {
    "returned": lambda ids: jnp.asarray(ids) % 1000,
    "made NumPy's": lambda ids: np.asarray(jnp.asarray(ids) % 1000),
    "an operation": lambda ids: np.asarray(jnp.sin(ids)),
    "compiled": lambda ids: np.asarray(jax.jit(lambda given: given + 1)(ids)),
    "a constant": lambda ids: jax.jit(lambda: jnp.asarray(ids) + 1)(),
}


@pytest.mark.parametrize("way", WITH_JAX)
def test_functions_of_jax_do_not_cut_them(way: str, tmp_path: Path) -> None:
    _parquet(tmp_path)
    message = r"raised ValueError: leaf .*'id'.* holds int64 that does not fit in int32.*use NumPy alone.*record 2"
    given, fine = WITH_JAX[way], bx.open(tmp_path / "a.parquet", columns=["id"])[[1, 4, 3]]
    with pytest.raises(RecordError, match=message):
        sources.to_numpy(sources.mapped(fine, lambda window: {"id": given(window["id"])}))
    if way != "a constant":
        with pytest.raises(RecordError, match=message):
            sources.to_numpy(sources.map(fine, lambda sample: {"id": given(sample["id"])}))
    with pytest.raises(RecordError, match=message):
        sources.filter(fine, lambda sample: given(sample["id"]) > 0)
    with pytest.raises(RecordError, match=r"raised ValueError: leaf .* does not fit in int32"):
        sources.filter(fine, lambda window: given(window["id"]) > 0, by="window")
    small = sources.mapped(fine[:2], lambda window: {"id": given(window["id"])})
    assert sources.to_numpy(small)["id"].tolist() == np.asarray(given(np.array([7, 3]))).tolist()


def test_functions_of_jax_do_not_cut_lists_of_them(tmp_path: Path) -> None:
    _parquet(tmp_path)
    source = bx.open(tmp_path / "a.parquet", columns=["bag"])
    fine = sources.mapped(source[[4, 5]], lambda window: {"n": np.array([jnp.sum(bag) for bag in window["bag"]])})
    assert sources.to_numpy(fine)["n"].tolist() == [5, 13]
    for number, rows in ((1, [4, 0]), (2, [4, 2, 3])):
        wrong = sources.mapped(source[rows], lambda window: {"n": np.array([jnp.sum(bag) for bag in window["bag"]])})
        with pytest.raises(RecordError, match=rf"leaf .*'bag'.* int64 that does not fit in int32.*record {number}"):
            sources.to_numpy(wrong)


def test_with_64_bits_nothing_is_refused(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        found = sources.to_numpy(_parquet(tmp_path)[:])
        cut = sources.to_numpy(sources.mapped(_arrays(tmp_path), lambda window: {"id": jnp.asarray(window["id"])}))
    assert found["id"].dtype == np.int64
    assert found["id"].tolist() == IDS.tolist()
    assert found["hash"].tolist() == HASHES.tolist()
    assert cut["id"].tolist() == IDS.tolist()
