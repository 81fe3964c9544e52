"""What every source promises, over all of them."""

import dataclasses
import gzip
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import h5py
import jax
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zarr
from numpy.typing import NDArray
from PIL import Image

import braidax.data as sources
from braidax.data.source import Source, allocate, stamp_of
from braidax.errors import ArgumentError, RecordError
from tests.support.data.formats import files
from tests.support.data.formats.array_record import written as write_array_record
from tests.support.data.formats.example import example
from tests.support.data.formats.mds import write_mds
from tests.support.data.formats.megatron import write as write_megatron
from tests.support.data.formats.reading import assert_equal, read, spoil
from tests.support.data.formats.tfrecord import write as write_tfrecord
from tests.support.data.formats.webdataset import numbered, shard


@dataclasses.dataclass(frozen=True)
class Case:
    """A source and what it must look like: number of samples and leaves as `dtype[shape]`."""

    make: Callable[[Path], Source]
    num_samples: int
    leaves: dict[str, tuple[tuple[int, ...], str]]


def npy(path: Path) -> Source:
    np.save(path / "a.npy", files.rng().normal(size=(11, 3)).astype(np.float32))
    return sources.open(path / "a.npy")


def npy_wide(path: Path) -> Source:
    np.save(path / "a.npy", np.asfortranarray(np.arange(22, dtype=">i8").reshape(11, 2)))
    return sources.open(path / "a.npy")


def npz(path: Path) -> Source:
    np.savez(path / "a.npz", x=files.rng().normal(size=(11, 3)), y=np.arange(11), z=np.arange(11) % 2 == 0)
    return sources.open(path / "a.npz")


def npz_deflated(path: Path) -> Source:
    np.savez_compressed(
        path / "a.npz", x=files.rng().normal(size=(11, 3)).astype(np.float32), y=np.arange(11, dtype="i4")
    )
    return sources.open(path / "a.npz")


def tokens(path: Path) -> Source:
    files.rng().integers(0, 50257, 100, dtype=np.uint16).tofile(path / "a.bin")
    return sources.open_tokens(path / "a.bin", "uint16", sequence_length=9)


def megatron(path: Path) -> Source:
    sequences = [list(range(10 * number, 10 * number + number % 4)) for number in range(11)]
    return sources.open(write_megatron(path / "a", sequences))


def megatron_rows(path: Path) -> Source:
    return sources.open(write_megatron(path / "a", [list(range(40)), list(range(60))]), sequence_length=9)


def cifar10_archive(path: Path) -> Source:
    return sources.open(files.write_tar(path / "a.tar.gz", "cifar-10-batches-py", files.cifar10_python()))


def cifar10_binary(path: Path) -> Source:
    return sources.open(files.write_folder(path / "cifar-10-batches-bin", files.cifar10_binary()))


def cifar100_python(path: Path) -> Source:
    files.write_folder(path / "cifar-100-python", files.cifar100_python())
    return sources.open(path)


def cifar100_binary(path: Path) -> Source:
    return sources.open(files.write_tar(path / "a.tar", "cifar-100-binary", files.cifar100_binary(), "w"), split="test")


def mnist(path: Path) -> Source:
    return sources.open(files.mnist(path / "mnist"))


def mnist_gzipped(path: Path) -> Source:
    return sources.open(files.mnist(path / "mnist", gzipped=True), split="test")


def idx(path: Path) -> Source:
    (path / "a.idx").write_bytes(files.idx_bytes(files.rng().normal(size=(11, 2, 3))))
    return sources.open(path / "a.idx")


def parquet(path: Path) -> Source:
    (path / "table").mkdir()
    values = files.rng()
    for number, num_rows in enumerate((7, 5)):
        columns = {
            "x": pa.array(values.normal(size=num_rows)),
            "id": pa.array(np.arange(num_rows)),
            "flag": pa.array([row % 3 == 0 for row in range(num_rows)]),
            "fixed": pa.array(list(values.normal(size=(num_rows, 2))), pa.list_(pa.float32(), 2)),
            "list": pa.array([[row, row + 1, row + 2] for row in range(num_rows)], pa.list_(pa.int16())),
            "nested": pa.array([[[row, 1]] * 3 for row in range(num_rows)], pa.large_list(pa.list_(pa.uint8()))),
        }
        pq.write_table(pa.table(columns), path / "table" / f"{number}.parquet", row_group_size=3)
    return sources.open(path / "table")


def image_folder(path: Path) -> Source:
    for number in range(11):
        folder = path / "images" / ("cat" if number % 2 else "ant")
        folder.mkdir(parents=True, exist_ok=True)
        image = files.rng(number).integers(0, 256, (6, 5, 3), dtype=np.uint8)
        Image.fromarray(image).save(folder / f"{number:02}.png")
    return sources.open(path / "images")


def image_folder_resized(path: Path) -> Source:
    (path / "images").mkdir()
    for number, suffix in enumerate(("jpg", "png", "webp", "bmp", "jpeg")):
        image = files.rng(number).integers(0, 256, (8 + number, 9, 3), dtype=np.uint8)
        Image.fromarray(image).save(path / "images" / f"{number}.{suffix}")
    return sources.open(path / "images", image_size=(4, 7))


class Torchvision:
    """A data set as torchvision's are: a PIL image and an int, one at a time."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return Image.fromarray(files.rng(index).integers(0, 256, (4, 5), dtype=np.uint8)), index % 3


def torchvision(path: Path) -> Source:
    return sources.open(Torchvision())


def hugging_face(path: Path) -> Source:
    rows = {"x": [float(row) for row in range(11)], "ids": [[row, 2, 3] for row in range(11)], "label": list(range(11))}
    return sources.open(datasets.Dataset.from_dict(rows))


def dict_of_arrays(path: Path) -> Source:
    return sources.open({"x": files.rng().normal(size=(11, 3)), "y": np.arange(11)})


def text_lines(path: Path) -> Source:
    for number in range(2):
        (path / f"{number}.txt").write_text("".join(f"line {row}\n" for row in range(6 - number)))
    return sources.open(path)


def jsonl(path: Path) -> Source:
    lines = [
        json.dumps({"id": row, "text": "x" * row, "pair": [row, 0.5], "ids": list(range(row))}) for row in range(11)
    ]
    (path / "a.jsonl").write_text("\n".join(lines))
    return sources.open(path / "a.jsonl")


def jsonl_zstd(path: Path) -> Source:
    jsonl(path)
    (path / "a.jsonl.zst").write_bytes(pa.compress((path / "a.jsonl").read_bytes(), "zstd", asbytes=True))
    return sources.open(path / "a.jsonl.zst", columns=["id", "text"])


def jsonl_gzipped(path: Path) -> Source:
    jsonl(path)
    (path / "a.jsonl.gz").write_bytes(gzip.compress((path / "a.jsonl").read_bytes()))
    return sources.open(path / "a.jsonl.gz", columns=["id", "text"])


def table_csv(path: Path) -> Source:
    (path / "a.csv").write_text("id,x,text\n" + "".join(f'{row},{row / 2},"a ""{row}""\n"\n' for row in range(11)))
    return sources.open(path / "a.csv")


def csv_at_once(path: Path) -> Source:
    """Windows of so many records are parsed at once, and others are not."""
    (path / "a.csv").write_text("id,x,text\n" + "".join(f'{row},{row / 7},"a ""{row}""\n"\n' for row in range(256)))
    return sources.open(path / "a.csv")


def tfrecord(path: Path) -> Source:
    records = [{"label": [row], "x": [0.5 * row, 1.0], "image": [bytes(row)]} for row in range(11)]
    write_tfrecord(path / "a.tfrecord-00000-of-00001", [example(record) for record in records])
    return sources.open(path / "a.tfrecord-00000-of-00001")


def npy_files(path: Path) -> Source:
    for number, array in enumerate(np.array_split(files.rng().normal(size=(11, 3)), 3)):
        np.save(path / f"{number}.npy", array)
    return sources.open(path)


def token_files(path: Path) -> Source:
    for number in range(2):
        files.rng(number).integers(0, 50257, 50 + number, dtype=np.uint16).tofile(path / f"{number}.bin")
    return sources.open(str(path / "*.bin"), sequence_length=9, dtype="uint16")


def webdataset(path: Path) -> Source:
    for number in range(2):
        shard(path / f"{number}.tar", numbered(range(6 * number, 11 - 5 * (1 - number))))
    return sources.open(path, columns=["cls", "jpg", "json", "npy"])


def mds(path: Path) -> Source:
    rows = [{"n": np.int64(row).tobytes(), "text": f"row {row}".encode()} for row in range(11)]
    write_mds(path / "mds", {"n": "int", "text": "str"}, rows)
    return sources.open(path / "mds")


def array_record(path: Path) -> Source:
    write_array_record(path / "a.array_record", [b"%d" % row for row in range(11)])
    return sources.open(path)


def arrow(path: Path) -> Source:
    rows = list(range(11))
    table = pa.table({"id": rows, "text": [f"row {row}" for row in rows], "ids": [list(range(row)) for row in rows]})
    feather.write_feather(table, path / "a.feather", compression="uncompressed")
    return sources.open(path / "a.feather")


def nulls() -> pa.Table:
    rows = range(11)
    return pa.table(
        {
            "id": [row if row % 3 else None for row in rows],
            "x": [row / 2 if row % 4 else None for row in rows],
            "text": [f"row {row}" if row % 5 else None for row in rows],
            "ids": [list(range(row)) if row % 6 else None for row in rows],
            "pair": pa.array([[row, 1] if row % 2 else [None, 1] for row in rows], pa.list_(pa.int8(), 2)),
        }
    )


def arrow_nulls(path: Path) -> Source:
    feather.write_feather(nulls().drop_columns(["ids"]), path / "a.feather", compression="uncompressed")
    return sources.open(path / "a.feather")


def hdf5(path: Path) -> Source:
    with h5py.File(path / "a.h5", "w") as file:
        file["x"], file["group/id"] = files.rng().normal(size=(11, 3)), np.arange(11)
    return sources.open(path / "a.h5")


def hdf5_chunks(path: Path) -> Source:
    for number, rows in enumerate((5, 6)):
        with h5py.File(path / f"{number}.h5", "w") as file:
            values = files.rng(number).normal(size=(rows, 3)).astype(np.float32)
            file.create_dataset("x", data=values, chunks=(2, 2), compression="gzip", shuffle=True)
            file.create_dataset("flag", data=np.arange(rows) % 3 == 0, chunks=(4,), compression="lzf")
            file["text"] = [f"row {row}" for row in range(rows)]
    return sources.open(path)


def zarr_group(path: Path) -> Source:
    group = zarr.open_group(path / "a.zarr", mode="w", zarr_format=2)
    group.create_array("x", data=files.rng().normal(size=(11, 3)), chunks=(4, 2))
    group.create_array("text", shape=(11,), dtype=str, chunks=(3,))[:] = np.array([f"row {row}" for row in range(11)])
    return sources.open(path / "a.zarr")


def zarr_shards(path: Path) -> Source:
    zarr.create_array(path / "a", data=files.rng().normal(size=(11, 3)).astype("f4"), chunks=(2, 3), shards=(6, 3))
    return sources.open(path / "a")


def parquet_nulls(path: Path) -> Source:
    pq.write_table(nulls(), path / "a.parquet", row_group_size=3)
    return sources.open(path / "a.parquet")


def hugging_face_folder(path: Path) -> Source:
    rows = {"x": [float(row) for row in range(11)], "text": [f"row {row}" if row % 5 else None for row in range(11)]}
    datasets.Dataset.from_dict(rows).save_to_disk(path / "saved")
    return sources.open(path / "saved")


IMAGE = ((32, 32, 3), "uint8")
TEXT = ((), "object")
NULLS = {
    name: leaf
    for column, kind in {
        "id": ((), "int32"),
        "x": ((), "float32"),
        "text": TEXT,
        "ids": TEXT,
        "pair": ((2,), "int8"),
    }.items()
    for name, leaf in {column: kind, f"{column}.is_valid": ((), "bool")}.items()
}
CASES = {
    "npy": Case(npy, 11, {"data": ((3,), "float32")}),
    "npy_wide": Case(npy_wide, 11, {"data": ((2,), "int32")}),
    "npz": Case(npz, 11, {"x": ((3,), "float32"), "y": ((), "int32"), "z": ((), "bool")}),
    "npz_deflated": Case(npz_deflated, 11, {"x": ((3,), "float32"), "y": ((), "int32")}),
    "tokens": Case(tokens, 11, {"tokens": ((9,), "uint16")}),
    "megatron": Case(megatron, 11, {"tokens": TEXT}),
    "megatron_rows": Case(megatron_rows, 11, {"tokens": ((9,), "uint16")}),
    "cifar10_archive": Case(cifar10_archive, 20, {"image": IMAGE, "label": ((), "int32")}),
    "cifar10_binary": Case(cifar10_binary, 20, {"image": IMAGE, "label": ((), "int32")}),
    "cifar100_python": Case(
        cifar100_python, 12, {"image": IMAGE, "label": ((), "int32"), "coarse_label": ((), "int32")}
    ),
    "cifar100_binary": Case(
        cifar100_binary, 5, {"image": IMAGE, "label": ((), "int32"), "coarse_label": ((), "int32")}
    ),
    "mnist": Case(mnist, 12, {"image": ((28, 28, 1), "uint8"), "label": ((), "int32")}),
    "mnist_gzipped": Case(mnist_gzipped, 5, {"image": ((28, 28, 1), "uint8"), "label": ((), "int32")}),
    "idx": Case(idx, 11, {"data": ((2, 3), "float32")}),
    "parquet": Case(
        parquet,
        12,
        {
            "x": ((), "float32"),
            "id": ((), "int32"),
            "flag": ((), "bool"),
            "fixed": ((2,), "float32"),
            "list": ((3,), "int16"),
            "nested": ((3, 2), "uint8"),
        },
    ),
    "image_folder": Case(image_folder, 11, {"image": ((6, 5, 3), "uint8"), "label": ((), "int32")}),
    "image_folder_resized": Case(image_folder_resized, 5, {"image": ((4, 7, 3), "uint8")}),
    "torchvision": Case(torchvision, 11, {"0": ((4, 5, 1), "uint8"), "1": ((), "int32")}),
    "hugging_face": Case(hugging_face, 11, {"x": ((), "float32"), "ids": ((3,), "int32"), "label": ((), "int32")}),
    "text_lines": Case(text_lines, 11, {"text": TEXT}),
    "jsonl": Case(jsonl, 11, {"id": ((), "int32"), "text": TEXT, "pair": ((2,), "float32"), "ids": TEXT}),
    "jsonl_gzipped": Case(jsonl_gzipped, 11, {"id": ((), "int32"), "text": TEXT}),
    "jsonl_zstd": Case(jsonl_zstd, 11, {"id": ((), "int32"), "text": TEXT}),
    "csv": Case(table_csv, 11, {"id": ((), "int32"), "x": ((), "float32"), "text": TEXT}),
    "csv_at_once": Case(csv_at_once, 256, {"id": ((), "int32"), "x": ((), "float32"), "text": TEXT}),
    "tfrecord": Case(tfrecord, 11, {"label": ((), "int32"), "x": ((2,), "float32"), "image": TEXT}),
    "npy_files": Case(npy_files, 11, {"data": ((3,), "float32")}),
    "token_files": Case(token_files, 10, {"tokens": ((9,), "uint16")}),
    "webdataset": Case(webdataset, 11, {"cls": ((), "int32"), "jpg": TEXT, "json": TEXT, "npy": ((2, 3), "int32")}),
    "mds": Case(mds, 11, {"n": ((), "int32"), "text": TEXT}),
    "array_record": Case(array_record, 11, {"record": TEXT}),
    "arrow": Case(arrow, 11, {"id": ((), "int32"), "text": TEXT, "ids": TEXT}),
    "hdf5": Case(hdf5, 11, {"x": ((3,), "float32"), "group/id": ((), "int32")}),
    "hdf5_chunks": Case(hdf5_chunks, 11, {"x": ((3,), "float32"), "flag": ((), "bool"), "text": TEXT}),
    "zarr_group": Case(zarr_group, 11, {"x": ((3,), "float32"), "text": TEXT}),
    "zarr_shards": Case(zarr_shards, 11, {"data": ((3,), "float32")}),
    "arrow_nulls": Case(arrow_nulls, 11, {name: leaf for name, leaf in NULLS.items() if "ids" not in name}),
    "parquet_nulls": Case(parquet_nulls, 11, NULLS),
    "hugging_face_folder": Case(
        hugging_face_folder, 11, {"x": ((), "float32"), "text": TEXT, "text.is_valid": ((), "bool")}
    ),
    "dict_of_arrays": Case(dict_of_arrays, 11, {"x": ((3,), "float32"), "y": ((), "int32")}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def source(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """Returns a source that all tests of its case read."""
    folder = tmp_path_factory.mktemp("source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRAIDAX_CACHE", str(folder / "cache"))
        yield case.make(folder)


def test_length_and_spec(case: Case, source: Source) -> None:
    assert isinstance(source, Source)
    assert len(source) == case.num_samples
    spec = source.sample_spec
    leaves = spec if isinstance(spec, dict) else {str(number): leaf for number, leaf in enumerate(spec)}
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in leaves.items()} == case.leaves
    batch = jax.tree.leaves(source.batch_spec(4))
    assert [leaf.shape for leaf in batch] == [(4, *leaf.shape) for leaf in jax.tree.leaves(spec)]


def test_every_leaf_is_written(source: Source) -> None:
    out = allocate(source.sample_spec, len(source))
    first = read(source, list(range(len(source))))
    spoil(out, 0xA5)
    source.read(np.arange(len(source)), out)
    assert_equal(first, out)


def test_any_order_and_repeats(source: Source) -> None:
    serial = read(source, list(range(len(source))))
    order = [len(source) - 1, 0, 2, 2, 1, 0, len(source) - 1]
    assert_equal(read(source, order), jax.tree.map(lambda leaf: leaf[order], serial))
    assert_equal(read(source, [3]), jax.tree.map(lambda leaf: leaf[[3]], serial))


def test_samples_differ(source: Source) -> None:
    window = read(source, [0, 1])
    assert any(not np.array_equal(leaf[0], leaf[1]) for leaf in jax.tree.leaves(window))


def test_many_threads_read_what_one_reads(source: Source) -> None:
    serial = read(source, list(range(len(source))))
    orders = [files.rng(seed).integers(0, len(source), 16).tolist() for seed in range(32)]
    with ThreadPoolExecutor(8, thread_name_prefix="reader") as pool:
        for order, window in zip(orders, pool.map(lambda order: read(source, order), orders), strict=True):
            assert_equal(window, jax.tree.map(lambda leaf, order=order: leaf[order], serial))


def test_an_empty_window_is_read(source: Source) -> None:
    assert all(len(leaf) == 0 for leaf in jax.tree.leaves(read(source, [])))


@pytest.mark.parametrize("beyond", [-1, 0])
def test_index_out_of_range(source: Source, beyond: int) -> None:
    wrong = -1 if beyond else len(source)
    with pytest.raises(RecordError, match=rf"no record {wrong}; it holds {len(source)} samples: use indices 0 to"):
        read(source, [0, wrong])


def test_describe(source: Source) -> None:
    facts = source.describe()
    assert next(iter(facts)) == "format"
    assert facts["samples"] == str(len(source))
    assert all(isinstance(value, str) for value in facts.values())


def test_one_sample_many_and_all(source: Source) -> None:
    serial = read(source)
    assert_same_sample(source[2], serial, 2)
    assert_same_sample(source[-1], serial, len(source) - 1)
    with pytest.raises(IndexError, match=f"there is no sample {len(source)}"):
        source[len(source)]
    samples = list(source)
    assert len(samples) == len(source)
    for number, sample in enumerate(source.__getitems__([3, 0, 3])):
        assert_same_sample(sample, serial, (3, 0, 3)[number])
    for number, sample in enumerate(samples):
        assert_same_sample(sample, serial, number)


def test_rows_are_cut(source: Source) -> None:
    serial, total = read(source), len(source)
    train, test = sources.split(source, 0.6, seed=2)
    assert len(train) == round(0.6 * total)
    places = sources.split(sources.open({"place": np.arange(total)}), 0.6, seed=2)
    for part, of in zip((train, test), places, strict=True):
        assert_equal(read(part), jax.tree.map(lambda leaf, of=of: leaf[read(of)["place"]], serial))
    assert_equal(read(source[1:5][::-2]), jax.tree.map(lambda leaf: leaf[1:5][::-2], serial))
    assert_equal(read(sources.take(source, 3)), jax.tree.map(lambda leaf: leaf[:3], serial))
    twice = sources.concat([source[2:], source])
    order = np.array([total - 2, 0, total - 3, len(twice) - 1])
    whole = jax.tree.map(lambda leaf: np.concatenate([leaf[2:], leaf]), serial)
    assert_equal(read(twice, order.tolist()), jax.tree.map(lambda leaf: leaf[order], whole))
    for cut in (test, twice):
        assert cut.describe()["samples"] == str(len(cut))
        assert (stamp_of(cut) is None) == (stamp_of(source) is None)
    with pytest.raises(RecordError, match=f"there is no record {len(twice)}"):
        read(twice, [len(twice)])


def test_samples_are_kept_and_mapped(source: Source) -> None:
    serial = read(source)
    seen: list[Any] = []
    answers = iter([True, False] * len(source))

    def keep(window: Any) -> NDArray[np.bool_]:
        seen.append(window)
        return np.array([next(answers) for _ in jax.tree.leaves(window)[0]])

    kept = sources.filter(source, keep, by="window")
    assert_equal(seen[0], serial)
    assert_equal(read(kept), jax.tree.map(lambda leaf: leaf[::2], serial))
    mapped = sources.map(kept, lambda sample: sample)
    if all(leaf.dtype != object for leaf in jax.tree.leaves(source.sample_spec)):
        assert mapped.sample_spec == source.sample_spec
    assert_equal(read(mapped), read(kept))


def test_leaves_are_selected(case: Case, source: Source) -> None:
    if not isinstance(source.sample_spec, dict):
        with pytest.raises(ArgumentError, match="samples are no mappings"):
            sources.select(source, "0")
        return
    serial = read(source)
    for name in case.leaves:
        part = sources.select(source[1:], name)
        assert_equal(read(part, [2, 0]), {name: serial[name][[3, 1]]})


def assert_same_sample(sample: Any, serial: Any, number: int) -> None:
    assert jax.tree.structure(sample) == jax.tree.structure(serial)
    for leaf, column in zip(jax.tree.leaves(sample), jax.tree.leaves(serial), strict=True):
        assert type(leaf) is type(column[number])
        np.testing.assert_array_equal(leaf, column[number])
