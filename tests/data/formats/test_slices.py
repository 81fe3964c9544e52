"""Parts of records and leaves left out: what every source that can be read in part promises, and what it costs."""

import contextlib
import dataclasses
import io
import json
import math
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

import braidax.data as sources
import braidax.data.transforms.images.decoded as decoding
from braidax.data.formats.arrays.fixed_width import open_npy_files, open_token_files
from braidax.data.formats.arrays.record_layout import RecordLayout
from braidax.data.formats.tables.arrow import open_arrow
from braidax.data.source import Box, Sliced, Source, is_varying
from braidax.data.storage import Files, LocalFiles, Remote, open_files
from braidax.data.storage import mapped as memory
from braidax.data.storage.mapped import Fetched, Mapped
from braidax.data.storage.taken import take_bytes
from braidax.data.transforms.images.decoded import decoded
from braidax.data.transforms.mapped import resized
from braidax.errors import FormatError, ReadError, RecordError
from tests.support.data.formats import files
from tests.support.data.formats.array_record import written as write_array_record
from tests.support.data.formats.arrow import columns, stream, uncompressed
from tests.support.data.formats.reading import assert_equal, read, spoil
from tests.support.data.storage.faulty_server import serving
from tests.support.data.storage.remote import Remote as Unmapped


class Store(Unmapped):
    """Local files as if they were in an object store; they count what is read of them."""

    def read(self, ranges: Any) -> Any:
        self.asked.append(ranges)
        return self._files.read(ranges)

    def prepare(self, ranges: Any) -> None:
        pytest.fail("nothing here is announced")


@dataclasses.dataclass(frozen=True)
class Case:
    """A source, and for each leaf along how many dims it can be cut, and the dtype stored where its bytes count."""

    make: Callable[[Path], Source]
    cut_dims: dict[str, int]
    stored: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


def values(*shape: int, dtype: str = "f4") -> NDArray[Any]:
    return files.rng().integers(0, 100, shape).astype(dtype)


def npy(path: Path) -> Source:
    np.save(path / "a.npy", values(11, 4, 5, 3))
    return sources.open(path / "a.npy")


def npy_fortran(path: Path) -> Source:
    np.save(path / "a.npy", np.asfortranarray(values(11, 4, 5, dtype=">i8")))
    return sources.open(path / "a.npy")


def npz(path: Path) -> Source:
    leaves = {"x": values(11, 3, 2, dtype="f8"), "id": np.arange(11), "flags": values(11, 5, dtype="?")}
    np.savez(path / "a.npz", **leaves)
    return sources.open(path / "a.npz")


def npz_deflated(path: Path) -> Source:
    np.savez_compressed(path / "a.npz", x=values(11, 6, dtype="u2"), y=values(11, 3, 2, dtype="i8"))
    return sources.open(path / "a.npz")


def in_memory(path: Path) -> Source:
    return sources.open({"turned": values(5, 11, 4).transpose(1, 0, 2), "one": values(11)[::-1], "c": values(11, 4, 2)})


def half(path: Path) -> Source:
    return sources.open({"x": jax.numpy.asarray(values(11, 4, 3), jax.numpy.bfloat16)})


def tokens(path: Path) -> Source:
    values(100, dtype="u2").tofile(path / "a.bin")
    return sources.open_tokens(path / "a.bin", "uint16", sequence_length=9)


def npy_paths(path: Path) -> list[Path]:
    for number, array in enumerate(np.array_split(values(11, 3, 4, dtype="i8"), 3)):
        np.save(path / f"{number}.npy", array)
    return sorted(path.glob("*.npy"))


def token_files(path: Path, kind: type[Files]) -> Source:
    for number in range(2):
        values(50 + number, dtype="u2").tofile(path / f"{number}.bin")
    return open_token_files(kind(sorted(path.glob("*.bin"))), sequence_length=9, dtype="uint16")


ARROW = ["x", "flags", "tokens", "fixed", "nested", "ragged", "text", "digest", "struct.p", "many_flags"]
ARROW_CUTS = dict.fromkeys(ARROW, 0) | {"tokens": 1, "fixed": 1, "nested": 2, "digest": 1}
ARROW_STORED = {"x": "f8", "tokens": "i4", "fixed": "f4", "nested": "u1", "digest": "u1", "struct.p": "i8"}


def arrow_path(path: Path) -> Path:
    return stream(path / "a.arrow", pa.table(columns()))


def arrow(path: Path) -> Source:
    return open_arrow(arrow_path(path), columns=ARROW)


def arrow_fetched(path: Path) -> Source:
    return open_arrow(Store([arrow_path(path)]), columns=ARROW)


def arrow_files(path: Path) -> Source:
    for part in range(2):
        uncompressed(path / f"{part}.arrow", pa.table(columns()).slice(25 * part, 25))
    return open_arrow(path, columns=ARROW)


def hugging_face(path: Path) -> Source:
    table = pa.table({"ids": [[row, row + 1, 7] for row in range(30)], "text": [f"t{row}" for row in range(30)]})
    stream(path / "data.arrow", table)
    stream(path / "indices.arrow", pa.table({"indices": np.arange(29, 5, -1).astype(np.uint64)}))
    state = {"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (path / "state.json").write_text(json.dumps(state))
    return sources.open(path)


def cifar(path: Path) -> Source:
    return sources.open(files.write_folder(path / "cifar-100-python", files.cifar100_python()))


def mnist(path: Path) -> Source:
    return sources.open(files.mnist(path / "mnist"))


def mnist_gzipped(path: Path) -> Source:
    return sources.open(files.mnist(path / "mnist", gzipped=True))


def png(seed: int) -> bytes:
    written = io.BytesIO()
    Image.fromarray(files.rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)).save(written, "PNG")
    return written.getvalue()


def image_folder(path: Path) -> Source:
    for number in range(11):
        folder = path / "images" / ("cat" if number % 2 else "ant")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.png").write_bytes(png(number))
    return sources.open(path / "images")


def flat_folder(path: Path) -> Source:
    for number in range(4):
        (path / f"{number}.png").write_bytes(png(number))
    return sources.open(path, image_size=(3, 4))


def images_in_arrow(path: Path) -> Source:
    table = pa.table({"jpg": [png(row) for row in range(9)], "label": range(9), "a": [[row, 1] for row in range(9)]})
    return decoded(open_arrow(stream(path / "a.arrow", table)), leaf="jpg")


CASES = {
    "npy": Case(npy, {"data": 3}, {"data": "f4"}),
    "npy_fortran": Case(npy_fortran, {"data": 2}),
    "npz": Case(npz, {"x": 2, "id": 0, "flags": 1}, {"x": "f8", "id": "i8", "flags": "?"}),
    "npz_deflated": Case(npz_deflated, {"x": 1, "y": 2}),
    "in_memory": Case(in_memory, {"turned": 2, "one": 0, "c": 2}),
    "half": Case(half, {"x": 2}),
    "tokens": Case(tokens, {"tokens": 1}, {"tokens": "u2"}),
    "npy_files": Case(lambda path: open_npy_files(LocalFiles(npy_paths(path))), {"data": 2}, {"data": "i8"}),
    "npy_fetched": Case(lambda path: open_npy_files(Store(npy_paths(path))), {"data": 1}, {"data": "i8"}),
    "token_files": Case(lambda path: token_files(path, LocalFiles), {"tokens": 1}, {"tokens": "u2"}),
    "token_fetched": Case(lambda path: token_files(path, Store), {"tokens": 1}, {"tokens": "u2"}),
    "arrow": Case(arrow, ARROW_CUTS, ARROW_STORED),
    "arrow_files": Case(arrow_files, ARROW_CUTS, ARROW_STORED),
    "arrow_fetched": Case(arrow_fetched, ARROW_CUTS | {"nested": 1}, ARROW_STORED),
    "hugging_face": Case(hugging_face, {"ids": 1, "text": 0}, {"ids": "i8"}),
    "cifar": Case(cifar, {"image": 3, "label": 0, "coarse_label": 0}),
    "mnist": Case(mnist, {"image": 3, "label": 0}),
    "mnist_gzipped": Case(mnist_gzipped, {"image": 3, "label": 0}),
    "image_folder": Case(image_folder, {"image": 0, "label": 0}),
    "flat_folder": Case(flat_folder, {"image": 0}),
    "images_in_arrow": Case(images_in_arrow, {"jpg": 0, "label": 0, "a": 1}, {"label": "i8", "a": "i8"}),
}


@dataclasses.dataclass(frozen=True)
class Opened:
    case: Case
    source: Any
    again: Any
    everything: dict[str, NDArray[Any]]


@pytest.fixture(scope="module", params=CASES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    case = CASES[request.param]
    source = case.make(tmp_path_factory.mktemp(request.param))
    return Opened(case, source, cloudpickle.loads(cloudpickle.dumps(source)), read(source))


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """Counts the bytes that any memory is asked for, in a list of one number for each time."""
    found: list[int] = []
    reading, slices = Mapped.reading_found, Fetched.slices

    def mapped(self: Mapped, num_ranges: int, find: Any) -> Any:
        ranges = list(find())
        assert num_ranges == sum(len(places) for places, _ in ranges)
        found.append(sum(int(np.broadcast_to(lengths, places.shape).sum()) for places, lengths in ranges))
        return reading(self, num_ranges, find)

    def fetched(self: Fetched, places: Any, lengths: Any) -> Any:
        found.append(int(lengths.sum()))
        return slices(self, places, lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mapped, "reading_found", mapped)
        patch.setattr(Fetched, "slices", fetched)
        yield found


def drawn_box(data: st.DataObject, shape: tuple[int, ...], depth: int) -> Box:
    edges = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape[:depth]]
    return (*((start, stop) for start, stop in edges), *((0, size) for size in shape[depth:]))


def part_of(leaf: NDArray[Any], box: Box) -> NDArray[Any]:
    return leaf[(slice(None), *(slice(start, stop) for start, stop in box))]


def slices(source: Any, indices: Sequence[int], boxes: dict[str, Box]) -> dict[str, NDArray[Any]]:
    """Reads parts of samples of a source whose samples are a dict, into memory that held something else before."""
    spec = source.sample_spec
    out: dict[str, Any] = {}
    for name in sorted(spec):
        out[name] = None
        if name in boxes:
            sizes = [stop - start for start, stop in boxes[name]]
            out[name] = np.empty((len(indices), *sizes), spec[name].dtype)
            spoil(out[name])
    source.read_slices(np.array(indices, np.int64), [boxes.get(name) for name in sorted(spec)], list(out.values()))
    return {name: leaf for name, leaf in out.items() if leaf is not None}


@settings(max_examples=12)
@given(data=st.data())
def test_slices_are_what_is_read_and_then_cut(opened: Opened, data: st.DataObject) -> None:
    source, case = opened.source, opened.case
    wanted = data.draw(st.sets(st.sampled_from(sorted(case.cut_dims))))
    indices = data.draw(st.lists(st.integers(0, len(source) - 1), max_size=20))
    boxes = {name: drawn_box(data, source.sample_spec[name].shape, case.cut_dims[name]) for name in sorted(wanted)}
    expected = {name: part_of(opened.everything[name][indices], box) for name, box in boxes.items()}
    with counting() as counts:
        assert_equal(slices(source, indices, boxes), expected)
    assert_equal(slices(opened.again, indices, boxes), expected)
    if case.stored and wanted <= case.stored.keys():
        num_values = {name: math.prod(expected[name].shape) for name in wanted}
        assert sum(counts) == sum(num * np.dtype(case.stored[name]).itemsize for name, num in num_values.items())


def test_how_deep_leaves_can_be_cut(opened: Opened) -> None:
    assert isinstance(opened.source, Sliced)
    assert dict(zip(sorted(opened.case.cut_dims), opened.source.cut_dims, strict=True)) == opened.case.cut_dims


def test_there_are_no_other_records(opened: Opened) -> None:
    beyond = len(opened.source)
    with pytest.raises(RecordError, match=rf"there is no record {beyond}; "):
        slices(opened.source, [0, beyond], {})


def test_leaves_that_are_not_wanted_cost_nothing(opened: Opened) -> None:
    with counting() as counts:
        assert slices(opened.source, [2, 0], {}) == {}
    assert counts == []


@given(data=st.data())
def test_the_bytes_of_a_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "<i2", "f8"])))
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    box = drawn_box(data, shape, len(shape))
    runs = RecordLayout(shape, dtype).runs(box)
    whole = array.tobytes()
    found = b"".join(whole[offset : offset + runs.num_bytes] for offset in runs.offsets.tolist())
    assert found == part_of(array[None], box).tobytes()
    assert found == b"" or (np.diff(runs.offsets) > runs.num_bytes).all()  # what touches is one run


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), 0),
        ((9,), 1),
        ((4096, 2), 1),
        ((224, 224, 3), 1),
        ((3, 224, 224), 2),
        ((2, 30_000), 1),
        ((1, 9), 2),
        ((2, 2, 1 << 16), 3),
    ],
)
def test_where_ranges_are_fetched_only_long_gaps_are_left_out(shape: tuple[int, ...], expected: int) -> None:
    layout = RecordLayout(shape, np.dtype(np.uint8))
    assert layout.cut_dims(gap_bytes=20_000) == expected
    assert layout.cut_dims(gap_bytes=0) == len(shape)


@pytest.mark.parametrize("width", [1, 63, 64, 100])
@pytest.mark.parametrize("shift", [0, 1])
def test_bytes_on_one_grid_and_off_it(tmp_path: Path, width: int, shift: int) -> None:
    data = files.rng().integers(0, 256, 5000, dtype=np.uint8)
    for number in range(2):
        (tmp_path / f"{number}").write_bytes(data[2500 * number :][:2500].tobytes())
    mapped = Mapped([tmp_path / "0", tmp_path / "1"])
    offsets = np.array([7 + 9 * width, 7, 7 + 3 * width, 7 + 3 * width, 2500 - width, 0][: 4 + 2 * shift])
    expected = np.stack([data[offset : offset + width] for offset in offsets])
    held, local = np.empty_like(expected), np.empty_like(expected)
    take_bytes(data, offsets, held)
    mapped.gather(mapped.origins[0] + offsets, local)
    np.testing.assert_array_equal(held, expected)
    np.testing.assert_array_equal(local, expected)
    mapped.gather(mapped.origins[1] + offsets, local)
    np.testing.assert_array_equal(local, [data[2500 + offset :][:width] for offset in offsets])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["i4", "i8"])
def test_nothing_but_the_box_is_copied(tmp_path: Path, order: Any, dtype: str) -> None:
    shape = (1 << 12, 1 << 12)
    with (tmp_path / "a.npy").open("wb") as file:
        header = {"descr": np.dtype(dtype).str, "fortran_order": order == "F", "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + math.prod(shape) * np.dtype(dtype).itemsize)
    on_disk = sources.open(tmp_path / "a.npy")
    in_memory = sources.open({"data": np.memmap(tmp_path / "a.npy", dtype, "r", 128, shape, order)})
    for source in (on_disk, in_memory):
        tracemalloc.start()
        try:
            found = slices(source, [7, 4000, 7], {"data": ((100, 2100),)})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found["data"].shape == (3, 2000)
        assert not found["data"].any()
        assert peak < 1 << 20  # the array has 64 MiB or more


@pytest.mark.parametrize("kind", [LocalFiles, Store])
def test_the_places_of_half_a_record(tmp_path: Path, kind: Any) -> None:
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", np.arange(3 * 8, dtype="<i2").reshape(3, 4, 2) + 100 * number)
    paths = sorted(tmp_path.glob("*.npy"))
    stored = kind(paths)
    source = open_npy_files(stored)
    found = slices(source, [5, 0], {"data": ((1, 3), (0, 2))})
    assert found["data"].tolist() == [[[118, 119], [120, 121]], [[2, 3], [4, 5]]]
    assert slices(source, [4], {"data": ((0, 2), (1, 2))})["data"].tolist() == [[[109], [111]]]
    if kind is Store:
        first, second = ([field.tolist() for field in ranges] for ranges in stored.asked[1:])
        assert first == [[1, 0], [128 + 2 * 16 + 4, 128 + 4], [8, 8]]
        assert second == [[1, 1], [128 + 16 + 2, 128 + 16 + 6], [2, 2]]


def test_a_server_is_asked_for_the_box_only() -> None:
    array = files.rng().integers(0, 1000, (6, 3, 20_000), np.int16)  # 40 kB each third: too far apart to be one request
    written = io.BytesIO()
    np.save(written, array)
    with serving({"a.npy": written.getvalue()}) as server:
        remote = Remote(cache_bytes=0, timeout_seconds=20.0, hedge_seconds=math.inf)
        source = open_npy_files(open_files([f"{server.url}/a.npy"], remote=remote))
        before = len(server.requests)
        found = slices(source, [4, 1], {"data": ((1, 2), (0, 20_000))})
        asked = sorted((request.start, request.stop) for request in server.requests[before:])
    np.testing.assert_array_equal(found["data"], array[[4, 1], 1:2])
    starts = [128 + (3 * record + 1) * 40_000 for record in (1, 4)]
    assert asked == [(start, start + 40_000) for start in starts]


def too_wide(path: Path, kind: str) -> Source:
    wide = np.zeros((4, 3, 2), np.int64)
    wide[2, 1, 1] = 1 << 40
    if kind == "arrow":
        lists = pa.list_(pa.list_(pa.int64(), 2), 3)
        return open_arrow(stream(path / "a.arrow", pa.table({"data": pa.array(wide.tolist(), lists)})))
    np.save(path / "a.npy", np.asfortranarray(wide) if kind == "fortran" else wide)
    if kind in ("local", "fetched"):
        return open_npy_files((LocalFiles if kind == "local" else Store)([path / "a.npy"]))
    return sources.open({"data": wide}) if kind == "memory" else sources.open(path / "a.npy")


@pytest.mark.parametrize("kind", ["mapped", "fortran", "memory", "local", "fetched", "arrow"])
def test_a_value_that_does_not_fit_is_named_where_it_is_wanted(tmp_path: Path, kind: str) -> None:
    source = too_wide(tmp_path, kind)
    message = r", record 2: leaf 'data' holds 1099511627776 \(int64\), which does not fit in int32; store smaller"
    with pytest.raises(RecordError, match=message):
        slices(source, [0, 2], {"data": ((1, 2), (0, 2))})
    assert not slices(source, [0, 2], {"data": ((2, 3), (0, 2))})["data"].any()
    assert not slices(source, [0, 1, 3], {"data": ((0, 3), (0, 2))})["data"].any()


def test_a_value_that_does_not_fit_is_named_by_its_file(tmp_path: Path) -> None:
    for part in range(2):
        ids = pa.array([[row, (part << 40) * (row == 3), 0] for row in range(5)], pa.list_(pa.int64(), 3))
        stream(tmp_path / f"{part}.arrow", pa.table({"ids": ids}))
    with pytest.raises(RecordError, match=r"1\.arrow, record 3: leaf 'ids' holds 1099511627776"):
        slices(open_arrow(tmp_path), [0, 3, 8], {"ids": ((1, 2),)})


def test_a_null_is_masked_in_any_part(tmp_path: Path) -> None:
    pairs = pa.array([[row, None if row == 3 else 2] for row in range(9)], pa.list_(pa.int32(), 2))
    source = open_arrow(stream(tmp_path / "a.arrow", pa.table({"id": range(9), "pair": pairs})))
    assert slices(source, [3], {"id": ()})["id"].tolist() == [3]
    assert slices(source, [2, 3], {"pair": ((0, 1),)})["pair"].tolist() == [[2], [0]]
    assert slices(source, [3, 2], {"pair.is_valid": ()})["pair.is_valid"].tolist() == [False, True]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_file_that_changes_is_noticed(tmp_path: Path, order: Any) -> None:
    np.save(tmp_path / "a.npy", np.array(values(2000, 8), order=order))
    source: Any = sources.open(tmp_path / "a.npy")
    slices(source, [5], {"data": ((1, 2),)})
    with (tmp_path / "a.npy").open("r+b") as file:
        file.truncate(40_000)
    source._mapped._next_check = 0.0
    with pytest.raises(FormatError, match=r"a\.npy: changed while it was open: 40,000 bytes"):
        slices(source, [5], {"data": ((1, 2),)})


def test_of_cold_files_the_box_is_asked_for_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_FITTING", 0.0)
    np.save(tmp_path / "a.npy", np.arange(50 * 32768, dtype=np.uint8).reshape(50, 32768))
    source: Any = sources.open(tmp_path / "a.npy")
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "ask_ahead", lambda descriptor, offset, length: asked.append((offset, length)))
    source._mapped._ahead.saw(1, 1)
    slices(source, [40, 3], {"data": ((8192, 20_000),)})
    assert asked == [(128 + record * 32768 + 8192, 20_000 - 8192) for record in (3, 40)]


def test_a_label_alone_opens_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = image_folder(tmp_path)
    images = read(source)["image"]
    monkeypatch.setattr(decoding, "decode_images", lambda *_, **__: pytest.fail("decoded"))
    for path in (tmp_path / "images").rglob("*.png"):
        path.unlink()
    assert slices(source, [10, 0, 7], {"label": ()})["label"].tolist() == [1, 0, 1]
    whole: Box = tuple((0, size) for size in images.shape[1:])
    with pytest.raises(ReadError, match=r"images/ant/02\.png, record 1: cannot be read"):
        slices(source, [1], {"image": whole})


def test_a_label_alone_reads_no_bytes_of_an_image(tmp_path: Path) -> None:
    source = images_in_arrow(tmp_path)
    with counting() as counts:
        assert slices(source, [8, 2, 2], {"label": (), "a": ((1, 2),)})["label"].tolist() == [8, 2, 2]
    assert counts == [3 * 8, 3 * 8]


def test_what_cannot_be_read_in_part_does_not_say_so(tmp_path: Path) -> None:
    write_array_record(tmp_path / "a.array_record", [png(row) for row in range(3)])
    whole = sources.open(tmp_path / "a.array_record")
    (tmp_path / "folder").mkdir()
    folder = image_folder(tmp_path / "folder")
    assert isinstance(folder, Sliced)
    for source in (whole, decoded(whole, leaf="record", size=(4, 4)), resized(folder, (3, 3))):
        assert not isinstance(source, Sliced)


def test_leaves_of_varying_size_are_whole_or_left_out(tmp_path: Path) -> None:
    source = open_arrow(arrow_path(tmp_path), columns=["ragged", "text", "id"])
    assert [name for name, leaf in sorted(source.sample_spec.items()) if is_varying(leaf)] == ["ragged", "text"]
    found = slices(source, [3, 7], {"ragged": ()})
    assert [leaf.tolist() for leaf in found["ragged"]] == [[0, 1, 2], [0, 1, 2]]
