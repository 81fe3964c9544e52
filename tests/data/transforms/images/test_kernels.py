"""Resizing: within one step of Pillow's bilinear filter, for any sizes, from any thread."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from braidax.data.transforms.images.kernels import resize
from braidax.errors import ArgumentError


def images(num: int, height: int, width: int, channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num, height, width, channels), dtype=np.uint8)


def ours(source: np.ndarray, height: int, width: int, indices: np.ndarray | None = None) -> np.ndarray:
    count = len(source) if indices is None else len(indices)
    out = np.full((count, height, width, source.shape[3]), 77, np.uint8)
    resize(source, out, indices)
    return out


def pillow(source: np.ndarray, height: int, width: int) -> np.ndarray:
    """Every channel on its own, as Pillow knows no image of 2 or 5 channels."""
    planes = source.transpose(0, 3, 1, 2).reshape(-1, *source.shape[1:3])
    done = [np.asarray(Image.fromarray(p).resize((width, height), Image.Resampling.BILINEAR)) for p in planes]
    return np.stack(done).reshape(len(source), source.shape[3], height, width).transpose(0, 2, 3, 1)


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1


PAIRS = [
    ((32, 32), (224, 224)),
    ((28, 28), (30, 30)),
    ((224, 224), (32, 32)),
    ((100, 60), (60, 100)),
    ((7, 5), (13, 3)),
    ((64, 64), (63, 65)),
    ((33, 47), (1, 1)),
    ((1, 1), (9, 4)),
    ((1, 50), (20, 7)),
    ((50, 1), (7, 20)),
    ((2, 2), (5, 5)),
    ((300, 200), (299, 10)),
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_pillow_agrees(old: tuple[int, int], new: tuple[int, int], channels: int) -> None:
    source = images(3, *old, channels)
    assert_close(ours(source, *new), pillow(source, *new))


SIZES = st.integers(1, 70)


@given(
    old=st.tuples(SIZES, SIZES),
    new=st.tuples(SIZES, SIZES),
    channels=st.integers(1, 4),
    seed=st.integers(0, 99),
    extreme=st.booleans(),
)
@example(old=(70, 70), new=(35, 35), channels=1, seed=0, extreme=True)
@example(old=(35, 35), new=(70, 70), channels=1, seed=0, extreme=True)
def test_pillow_agrees_for_any_sizes(
    old: tuple[int, int], new: tuple[int, int], channels: int, seed: int, extreme: bool
) -> None:
    source = images(2, *old, channels, seed)
    if extreme:  # black and white: the largest steps there are
        source = np.where(source > 127, 255, 0).astype(np.uint8)
    assert_close(ours(source, *new), pillow(source, *new))


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (32, 32), (17, 40)])
def test_the_same_size_is_the_same_image(size: tuple[int, int]) -> None:
    source = images(4, *size, 3)
    np.testing.assert_array_equal(ours(source, *size), source)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 254, 255])
@pytest.mark.parametrize(("old", "new"), PAIRS[:6])
def test_an_even_image_stays_even(old: tuple[int, int], new: tuple[int, int], value: int) -> None:
    assert (ours(np.full((1, *old, 3), value, np.uint8), *new) == value).all()


def test_channels_do_not_mix() -> None:
    source = np.zeros((1, 9, 9, 3), np.uint8)
    source[..., 1] = images(1, 9, 9, 1)[..., 0]
    out = ours(source, 20, 4)
    assert not out[..., [0, 2]].any()
    np.testing.assert_array_equal(out[..., 1:2], ours(np.ascontiguousarray(source[..., 1:2]), 20, 4))


def test_indices_say_which_image_goes_where() -> None:
    source = images(6, 20, 12, 3)
    indices = np.array([5, 0, 0, 3, 5, 2, 1, 4])
    np.testing.assert_array_equal(ours(source, 31, 9, indices), ours(source, 31, 9)[indices])


def test_images_need_not_lie_in_one_piece() -> None:
    source = images(8, 20, 24, 3)
    np.testing.assert_array_equal(ours(source[::2, :, ::2], 9, 9), ours(source[::2, :, ::2].copy(), 9, 9))


def test_nothing_beyond_the_target_is_written() -> None:
    whole = np.full((3, 11, 13, 3), 77, np.uint8)
    resize(images(1, 20, 20, 3), whole[1:2])
    assert (whole[[0, 2]] == 77).all()


def test_no_image_at_all() -> None:
    assert ours(images(0, 8, 8, 3), 4, 4).shape == (0, 4, 4, 3)


def test_many_threads_get_what_one_gets() -> None:
    source = images(32, 40, 40, 3)
    want = ours(source, 64, 64)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: ours(source, 64, 64), range(16)):
            np.testing.assert_array_equal(got, want)


def test_other_threads_run_meanwhile() -> None:
    """No thread is made to give the GIL up here, so the other one runs inside `resize` or not at all before its end."""
    source, out = images(32, 200, 200, 3), np.empty((32, 400, 400, 3), np.uint8)
    resize(source[:1], out[:1])  # compiled

    def ran_inside() -> bool:
        go, ran = threading.Event(), list[int]()
        thread = threading.Thread(target=lambda: go.wait(60) and ran.append(1))
        thread.start()
        go.set()
        resize(source, out)
        inside = bool(ran)
        thread.join()
        return inside

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        assert any(ran_inside() for _ in range(10))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("source", "out", "facts"),
    [
        (np.zeros((1, 4, 4, 3), np.float32), np.zeros((1, 2, 2, 3), np.uint8), ["images=float32", "out=uint8"]),
        (np.zeros((1, 4, 4, 3), np.uint8), np.zeros((1, 2, 2, 3), np.int32), ["out=int32"]),
        (np.zeros((1, 4, 4, 3), np.uint8), np.zeros((1, 2, 2, 1), np.uint8), ["(1, 4, 4, 3)", "(1, 2, 2, 1)"]),
        (
            np.zeros((4, 4, 3), np.uint8),
            np.zeros((1, 2, 2, 3), np.uint8),
            ["(4, 4, 3)", "[n, height, width, channels]"],
        ),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros((3, 2, 2, 3), np.uint8), ["2 indices for 3 places"]),
        (np.zeros((1, 0, 4, 3), np.uint8), np.zeros((1, 2, 2, 3), np.uint8), ["(1, 0, 4, 3)"]),
        (np.zeros((1, 4, 4, 3), np.uint8), np.zeros((1, 2, 0, 3), np.uint8), ["(1, 2, 0, 3)"]),
        (np.zeros((1, 4, 4, 3), np.uint8), np.zeros((1, 2, 4, 3), np.uint8)[:, :, ::2], ["C-contiguous"]),
    ],
)
def test_what_cannot_be_resized(unchecked: None, source: np.ndarray, out: np.ndarray, facts: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        resize(source, out)
    for fact in facts:
        assert fact in str(caught.value)


@pytest.mark.parametrize("wrong", [-1, 3, 2**40])
def test_indices_out_of_range_are_refused(wrong: int) -> None:
    with pytest.raises(ArgumentError, match=rf"index {wrong}.* 3 images"):
        ours(images(3, 4, 4, 1), 8, 8, np.array([0, wrong, 2]))
