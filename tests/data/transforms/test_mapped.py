"""Transforms: resized, normalized and mapped sources, alone, one upon another, and under a loader."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import braidax.data as sources
from braidax.data.loader import DataLoader
from braidax.data.source import Source, allocate
from braidax.data.transforms.images.kernels import resize
from braidax.data.transforms.mapped import mapped, normalized, resized
from braidax.errors import ArgumentError, FormatError, RecordError

IMAGES = np.random.default_rng(0).integers(0, 256, (24, 12, 10, 3), dtype=np.uint8)


@pytest.fixture
def source() -> Source:
    return sources.open({"image": IMAGES, "label": np.arange(24, dtype=np.int32)})


def read(source: Source, *indices: int) -> Any:
    out = allocate(source.sample_spec, len(indices))
    jax.tree.map(lambda leaf: leaf.view(np.uint8).fill(0xA5) if leaf.size else None, out)
    source.read(np.array(indices, np.int64), out)
    return out


def shapes(source: Source) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), source.sample_spec)


def resized_images(height: int, width: int) -> np.ndarray:
    out = np.empty((len(IMAGES), height, width, 3), np.uint8)
    resize(IMAGES, out)
    return out


# resized


@pytest.mark.parametrize("size", [(24, 20), (5, 4), (30, 3), (1, 1)])
def test_resized(source: Source, size: tuple[int, int]) -> None:
    small = resized(source, size)
    assert len(small) == 24
    assert shapes(small) == {"image": ((*size, 3), "uint8"), "label": ((), "int32")}
    got = read(small, 7, 0, 23, 7)
    np.testing.assert_array_equal(got["image"], resized_images(*size)[[7, 0, 23, 7]])
    np.testing.assert_array_equal(got["label"], [7, 0, 23, 7])
    assert small.describe()["resized"] == f"image to {size[0]} x {size[1]}, bilinear, antialiased"
    assert dict(source.describe()).items() <= dict(small.describe()).items()


def test_resized_to_its_own_size_is_the_source(source: Source) -> None:
    assert resized(source, (12, 10)) is source


def test_resized_windows_of_many_lengths(source: Source) -> None:
    small, want = resized(source, (7, 9)), resized_images(7, 9)
    for indices in ([3], list(range(24)), [5, 4], list(range(20, 3, -1)), []):
        np.testing.assert_array_equal(read(small, *indices)["image"], want[indices])


@pytest.mark.parametrize("size", [(0, 5), (5, -1), (4,), (4, 4, 3)])
def test_a_size_that_is_none(unchecked: None, source: Source, size: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        resized(source, size)
    assert f"size={size!r}: expected (height, width), two positive integers" in str(caught.value)


@pytest.mark.parametrize("make", [lambda s: resized(s, (4, 4)), lambda s: normalized(s, [0.5], [0.5])])
def test_what_is_no_image(make: Callable[[Source], Source]) -> None:
    name = "resized" if "resized" in make.__code__.co_names else "normalized"
    cases: list[tuple[Any, str]] = [
        ({"label": np.arange(4, dtype=np.int32)}, f"{name} needs the leaf='image', but samples have ['label']"),
        ({"image": np.zeros((4, 8, 8), np.uint8)}, "uint8 [height, width, channels], got uint8[8, 8]"),
        ({"image": np.zeros((4, 8, 8, 1), np.float32)}, "uint8 [height, width, channels], got float32[8, 8, 1]"),
        ([np.arange(3)] * 4, f"{name} needs the leaf='image', but samples have ShapeDtypeStruct"),
    ]
    for data, fact in cases:
        with pytest.raises(ArgumentError) as caught:
            make(sources.open(data))
        assert fact in str(caught.value)


def test_another_leaf(source: Source) -> None:
    other = sources.open({"left": IMAGES, "right": IMAGES[::-1].copy()})
    got = read(normalized(resized(other, (6, 6), leaf="right"), [0.5] * 3, [0.25] * 3, leaf="left"), 2)
    assert (got["left"].shape, got["left"].dtype) == ((1, 12, 10, 3), np.float32)
    np.testing.assert_array_equal(got["right"][0], resized_images(6, 6)[21])


# normalized


@given(
    mean=st.tuples(*[st.floats(0, 1)] * 3),
    std=st.tuples(*[st.floats(0.05, 1)] * 3),
    indices=st.lists(st.integers(0, 23), min_size=1, max_size=8),
)
def test_normalized_is_the_formula(mean: Any, std: Any, indices: list[int]) -> None:
    ready = normalized(sources.open({"image": IMAGES}), mean, std)
    assert shapes(ready) == {"image": ((12, 10, 3), "float32")}
    got = read(ready, *indices)["image"]
    want = (IMAGES[indices] / 255.0 - np.array(mean)) / np.array(std)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


def test_normalized_between_zero_and_one(source: Source) -> None:
    got = read(normalized(source, [0, 0, 0], [1, 1, 1]), *range(24))
    np.testing.assert_allclose(got["image"], IMAGES / 255, rtol=1e-6)
    np.testing.assert_array_equal(got["label"], np.arange(24))


def test_numbers_that_do_not_fit_the_channels(source: Source) -> None:
    with pytest.raises(ArgumentError, match=r"mean=\[0.5\] has 1 numbers, but 'image' has 3 channels"):
        normalized(source, [0.5], [0.5, 0.5, 0.5])
    with pytest.raises(ArgumentError, match=r"std=\(1.0, 2.0\) has 2 numbers, but 'image' has 3 channels"):
        normalized(source, (0.5, 0.5, 0.5), (1.0, 2.0))
    with pytest.raises(ArgumentError, match=r"std=\[1.0, 0.0, 1.0\] must be positive"):
        normalized(source, [0.5, 0.5, 0.5], [1.0, 0.0, 1.0])


# mapped


def flip(window: Any) -> Any:
    return {"pixels": window["image"][:, :, ::-1].astype(np.float16), "pair": (window["label"], window["label"] * 2)}


def test_mapped(source: Source) -> None:
    flipped = mapped(source, flip)
    assert shapes(flipped) == {"pixels": ((12, 10, 3), "float16"), "pair": (((), "int32"), ((), "int32"))}
    got = read(flipped, 4, 0, 19)
    np.testing.assert_array_equal(got["pixels"], IMAGES[[4, 0, 19], :, ::-1].astype(np.float16))
    np.testing.assert_array_equal(got["pair"][0], [4, 0, 19])
    np.testing.assert_array_equal(got["pair"][1], [8, 0, 38])
    assert flipped.describe()["transform"] == "flip"
    assert len(flipped) == 24


def test_the_wide_numbers_of_numpy_become_narrow(source: Source) -> None:
    def widen(window: Any) -> Any:
        return {"f": window["label"] / 3, "i": window["label"].astype(np.int64), "b": window["label"] > 3}

    wide = mapped(source, widen)
    assert shapes(wide) == {"f": ((), "float32"), "i": ((), "int32"), "b": ((), "bool")}
    got = read(wide, 1, 8)
    np.testing.assert_array_equal(got["f"], np.array([1 / 3, 8 / 3], np.float32))
    np.testing.assert_array_equal(got["i"], [1, 8])
    np.testing.assert_array_equal(got["b"], [False, True])


def test_a_number_that_does_not_fit_names_its_record(source: Source) -> None:
    large = mapped(source, lambda window: np.where(window["label"] == 13, 2**40, 0))
    assert read(large, 1, 2).tolist() == [0, 0]
    with pytest.raises(RecordError) as caught:
        read(large, 3, 13, 5)
    assert "record 13" in str(caught.value)
    assert str(2**40) in str(caught.value)


def refuse(*labels: int) -> Callable[[Any], Any]:
    def refusing(window: Any) -> Any:
        if set(window["label"].tolist()) & set(labels):
            raise ZeroDivisionError("not this one")
        return window

    return refusing


def test_the_record_that_a_transform_fails_on_is_named(source: Source) -> None:
    careful = mapped(source, refuse(17, 11))
    np.testing.assert_array_equal(read(careful, 3, 4)["label"], [3, 4])
    with pytest.raises(RecordError) as caught:
        read(careful, *range(5, 21))
    message = str(caught.value)
    assert message.endswith(
        "refusing raised ZeroDivisionError: not this one, on record 11; mend the transform or the record"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_records_that_fail_only_together_are_named_together(source: Source) -> None:
    def no_long_window(window: Any) -> Any:
        if len(window["label"]) > 3:
            raise ValueError("too long")
        return window

    with pytest.raises(RecordError, match=r"on records \[5, 6, 7\]… \(6 of them\) taken together"):
        read(mapped(source, no_long_window), *range(5, 11))
    with pytest.raises(RecordError, match=r"on records \[5, 6, 7, 8\] taken together"):
        read(mapped(source, no_long_window), *range(5, 9))


def test_a_transform_that_fails_on_the_first_sample_fails_at_once(source: Source) -> None:
    with pytest.raises(RecordError, match="refusing raised ZeroDivisionError: not this one, on record 0"):
        mapped(source, refuse(0))


@pytest.mark.parametrize(
    ("result", "fact"),
    [
        (lambda window: window["image"][:, :5], "uint8[2, 5, 10, 3]"),
        (lambda window: window["image"].astype(np.float32), "float32[2, 12, 10, 3]"),
        (lambda window: window["image"][:1], "uint8[1, 12, 10, 3]"),
        (lambda window: window["image"][0, 0, 0, 0], "uint8[]"),
    ],
)
def test_another_shape_or_dtype_later_is_refused(source: Source, result: Callable[[Any], Any], fact: str) -> None:
    def changing(window: Any) -> Any:
        return result(window) if 9 in window["label"] else window["image"]

    changed = mapped(source, changing)
    assert read(changed, 1, 2).shape == (2, 12, 10, 3)
    with pytest.raises(RecordError) as caught:
        read(changed, 8, 9)
    message = str(caught.value)
    assert f"returned {fact} in leaf (the only one) for records [8, 9]" in message
    assert "expected uint8[2, 12, 10, 3], as record 0 gave" in message


def test_another_structure_later_is_refused(source: Source) -> None:
    changed = mapped(source, lambda window: {"a": window["label"]} if 9 not in window["label"] else (window["label"],))
    with pytest.raises(RecordError, match=r"returned the structure .* for records \[9\], but .* for record 0"):
        read(changed, 9)


@pytest.mark.parametrize("result", [lambda w: w["label"].sum(), lambda w: w["image"][0], lambda w: np.zeros((2, 3))])
def test_a_result_that_is_not_per_sample_is_refused(source: Source, result: Callable[[Any], Any]) -> None:
    with pytest.raises(RecordError, match=r"in leaf \(the only one\) for a window of 1 sample"):
        mapped(source, result)


def test_a_result_that_is_no_number_is_refused(source: Source) -> None:
    with pytest.raises(FormatError, match=r"leaf .*'t'.* no JAX dtype"):
        mapped(source, lambda window: {"t": np.array(["text"])})


def test_a_source_without_samples_cannot_be_mapped() -> None:
    class Empty(Source):
        @property
        def sample_spec(self) -> Any:
            return jax.ShapeDtypeStruct((), np.int32)

        def __len__(self) -> int:
            return 0

        def read(self, indices: np.ndarray, out: Any) -> None:
            raise AssertionError

        def describe(self) -> dict[str, str]:
            return {}

    with pytest.raises(ArgumentError, match="source has no samples"):
        mapped(Empty(), flip)


# Together


def test_one_upon_another(source: Source) -> None:
    chain = mapped(
        normalized(resized(source, (6, 5)), [0.5] * 3, [0.25] * 3), lambda w: {**w, "mean": w["image"].mean((1, 2, 3))}
    )
    want = (resized_images(6, 5) / 255 - 0.5) / 0.25
    got = read(chain, 9, 3)
    np.testing.assert_allclose(got["image"], want[[9, 3]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["mean"], want[[9, 3]].mean((1, 2, 3)), rtol=1e-4, atol=1e-5)
    assert list(chain.describe())[-3:] == ["resized", "normalized", "transform"]


def test_twice_the_same_transform(source: Source) -> None:
    twice = resized(resized(source, (30, 30)), (8, 8))
    once, out = resized_images(30, 30), np.empty((24, 8, 8, 3), np.uint8)
    resize(once, out)
    np.testing.assert_array_equal(read(twice, *range(24))["image"], out)


def test_many_threads_read_at_once(source: Source) -> None:
    chain = mapped(normalized(resized(source, (40, 40)), [0.5] * 3, [0.25] * 3), lambda window: window["image"] * 2)
    whole, start = read(chain, *range(24)), threading.Barrier(6)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait(60)
        for _ in range(12):
            indices = rng.integers(0, 24, rng.integers(1, 20))
            np.testing.assert_array_equal(read(chain, *indices), whole[indices])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_under_a_loader(source: Source) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    chain = normalized(resized(source, (6, 4)), [0.0] * 3, [1.0] * 3)
    want = resized_images(6, 4) / 255
    loader = DataLoader(chain, mesh, {"image": P("data", "model"), "label": P()}, batch_size=8)
    batches = list(loader)
    for batch in batches:
        np.testing.assert_allclose(np.asarray(batch["image"]), want[np.asarray(batch["label"])], rtol=1e-5)
    assert len(batches) == 3
    totals = loader.trace.totals()
    assert totals["decode"].num_bytes == 24 * 6 * 4 * 3 * (1 + 4)


def test_a_failing_transform_under_a_loader_raises_at_its_batch(source: Source) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    loader = DataLoader(mapped(source, refuse(17)), mesh, P("data"), batch_size=8, seed=None)
    got: list[list[int]] = []
    with pytest.raises(RecordError, match="on record 17"):
        for batch in loader:
            got.append(np.asarray(batch["label"]).tolist())
    assert got == [list(range(8)), list(range(8, 16))]
