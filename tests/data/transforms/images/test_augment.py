"""Augmentations: which part of which image, how often, and always the same for the same cursor."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from PIL import Image

import braidax.data as sources
from braidax.data.knobs import Knobs
from braidax.data.loader import DataLoader
from braidax.data.sampling.order import Cursor
from braidax.data.source import Source, source_at
from braidax.data.transforms.images.augment import center_crop, flipped, random_crop, random_resized_crop
from braidax.data.transforms.images.decoded import decoded
from braidax.data.transforms.mapped import mapped, normalized, resized
from braidax.errors import ArgumentError, RecordError
from tests.support.data.formats.reading import read
from tests.support.data.photos import Files, encode, photo, pillow

NUM = 40
WHERE = np.stack(np.meshgrid(np.arange(48), np.arange(64), [0], indexing="ij"), axis=-1)[:, :, 0]  # its own place
IMAGES = np.broadcast_to(WHERE.astype(np.uint8), (NUM, 48, 64, 3)).copy()
IMAGES[..., 2] = np.arange(NUM)[:, None, None]


@pytest.fixture
def source() -> Source:
    return sources.open({"image": IMAGES, "id": np.arange(NUM, dtype=np.int32)})


@pytest.fixture(scope="module")
def files() -> Files:
    return Files([encode(photo(seed, 60 + seed, 90 - seed), quality=90) for seed in range(12)], leaf="picture")


AUGMENTED: dict[str, Callable[[Source], Source]] = {
    "random_resized_crop": lambda source: random_resized_crop(source, (16, 20)),
    "random_crop": lambda source: random_crop(source, (40, 40), padding=4),
    "flipped": lambda source: flipped(source),
    "chain": lambda source: flipped(random_crop(resized(flipped(source), (30, 30)), (24, 20))),
    "mapped": lambda source: mapped(source, lambda window, rng: rng.normal((3,))),
}


def leaf(window: Any) -> np.ndarray:
    return window["image"] if isinstance(window, dict) else window


@pytest.mark.parametrize("name", AUGMENTED)
def test_samples_depend_on_seed_epoch_and_index_alone(source: Source, name: str) -> None:
    augmented = AUGMENTED[name](source)
    whole = leaf(read(augmented, list(range(NUM))))
    np.testing.assert_array_equal(leaf(read(source_at(augmented, 0, 0), list(range(NUM)))), whole)
    order = [5, 39, 5, 0, 17]
    np.testing.assert_array_equal(leaf(read(augmented, order)), whole[order])
    others = [leaf(read(source_at(augmented, *cursor), list(range(NUM)))) for cursor in [(0, 1), (1, 0), (None, 0)]]
    for number, other in enumerate(others):
        assert (other != whole).any()
        assert all((other != another).any() for another in others[:number])
    np.testing.assert_array_equal(leaf(read(source_at(source_at(augmented, 1, 0), 0, 1), order)), others[0][order])
    again = cloudpickle.loads(cloudpickle.dumps(augmented))
    np.testing.assert_array_equal(leaf(read(again, order)), whole[order])


@pytest.mark.parametrize("name", AUGMENTED)
def test_threads_change_nothing(source: Source, name: str) -> None:
    augmented = AUGMENTED[name](source)
    whole, start = leaf(read(augmented, list(range(NUM)))), threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait(60)
        for order in np.random.default_rng(seed).integers(0, NUM, (8, 9)).tolist():
            np.testing.assert_array_equal(leaf(read(augmented, order)), whole[order])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_two_of_a_kind_draw_differently(source: Source) -> None:
    shared = np.arange(NUM)
    once = read(flipped(source), shared.tolist())["image"][:, 0, 0, 1] == 63
    twice = read(flipped(flipped(source)), shared.tolist())["image"][:, 0, 0, 1] == 63
    assert 0 < twice.sum() < NUM
    assert (once != twice).any()


def test_wrappers_hand_on_what_comes() -> None:
    class Announced(Files):
        """Images of one size in memory."""

        @property
        def sample_spec(self) -> Any:
            return {"image": jax.ShapeDtypeStruct((48, 64, 3), np.uint8)}

    inside = Announced([b""] * 9)
    small = center_crop(random_crop(resized(inside, (40, 40)), (30, 30)), (20, 20))
    chain: Any = normalized(flipped(random_resized_crop(small, (8, 8))), [0] * 3, [1] * 3)
    chain.prepare(np.array([3, 1]))
    assert inside.prepared == [[3, 1]]
    chain.at(4, 5)
    assert inside.seen == [(4, 5)]


# random_resized_crop


@given(st.integers(1, 700), st.integers(1, 700), st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), st.floats(0.3, 1.0))
def test_parts_lie_inside_and_have_the_area(height: int, width: int, scale: Any, ratio: float) -> None:
    scale = tuple(sorted(scale))
    crop: Any = random_resized_crop(
        sources.open({"image": np.zeros((64, 1, 1, 3), np.uint8)}), (4, 4), scale=scale, ratio=(ratio, 1 / ratio)
    )
    boxes = crop._boxes(draws_of(64), np.tile([height, width], (64, 1)))
    tops, lefts, heights, widths = boxes.T
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] >= 0).all()
    assert (tops + heights <= height).all()
    assert (lefts + widths <= width).all()
    if min(height, width) >= 100 and ratio < 0.9 and ratio <= height / width <= 1 / ratio:
        assert (heights * widths >= scale[0] * height * width * 0.9 - 9).all()
        assert (widths / heights >= ratio * 0.8).all()
        assert (widths / heights <= 1.25 / ratio).all()


def draws_of(count: int) -> Any:
    from braidax.data.sampling.draws import Draws

    return Draws(np.arange(count), seed=0, epoch=0, place="crop/0")


def test_parts_have_areas_and_corners_of_all_kinds() -> None:
    crop: Any = random_resized_crop(sources.open({"image": np.zeros((9, 8, 8, 3), np.uint8)}), (4, 4))
    boxes = crop._boxes(draws_of(4000), np.tile([375, 500], (4000, 1)))
    areas = boxes[:, 2] * boxes[:, 3] / (375 * 500)
    assert 0.079 < areas.min() < 0.1
    assert 0.9 < areas.max() <= 1
    assert 0.42 < areas.mean() < 0.52
    free = (375 - boxes[:, 2]) > 20
    assert 0.47 < (boxes[free, 0] / (375 - boxes[free, 2])).mean() < 0.53
    ratios = np.log(boxes[:, 3] / boxes[:, 2])
    assert abs(ratios.mean()) < 0.05  # an image wider than high has more room for wide parts


def test_arrays_are_cropped_and_resized(source: Source) -> None:
    crop: Any = random_resized_crop(source, (16, 20))
    indices = np.arange(NUM)
    boxes = crop._boxes(draws_of(NUM), np.tile([48, 64], (NUM, 1)))
    window = read(crop, indices.tolist())
    assert window["id"].tolist() == indices.tolist()
    for number, (top, left, height, width) in enumerate(boxes.tolist()):
        part = Image.fromarray(IMAGES[number][top : top + height, left : left + width])
        want = np.asarray(part.resize((20, 16), Image.Resampling.BILINEAR))
        assert np.abs(window["image"][number].astype(int) - want).max() <= 1
    assert crop.describe()["crop"] == "image to 16×20, a random part, resized"


def test_files_are_decoded_only_where_they_are_cropped(files: Files, tmp_path: Path) -> None:
    crop: Any = random_resized_crop(files, (36, 48), leaf="picture", scale=(0.2, 0.9))
    sizes = np.array([pillow(data).shape[:2] for data in files.payloads])
    boxes = crop._boxes(draws_of(12), sizes)
    got = read(crop, list(range(12)))["picture"]
    for number, data in enumerate(files.payloads):
        (tmp_path / f"{number:02}.jpg").write_bytes(data)
    want = np.stack([pillow(data, (36, 48), box) for data, box in zip(files.payloads, boxes, strict=True)]).astype(int)
    assert np.abs(got - want).mean() < 4
    assert np.abs(got - want).max() <= 48
    folder = random_resized_crop(sources.open(tmp_path), (36, 48), scale=(0.2, 0.9))
    np.testing.assert_array_equal(read(folder, list(range(12)))["image"], got)
    exact = random_resized_crop(sources.open(tmp_path, decode="exact"), (36, 48), scale=(0.2, 0.9))
    assert np.abs(read(exact, list(range(12)))["image"] - want).max() <= 2
    over = random_resized_crop(
        decoded(files, leaf="picture", size=(40, 40)), (36, 48), leaf="picture", scale=(0.2, 0.9)
    )
    assert (read(over, [3])["picture"] != got[3]).any()  # cut from the image of 40×40 that was asked for


def test_a_part_of_a_folder_is_cropped_as_the_whole_is(files: Files, tmp_path: Path) -> None:
    for number, data in enumerate(files.payloads):  # no two are of one size
        (tmp_path / f"{number:02}.jpg").write_bytes(data)
    source = sources.open(tmp_path)
    whole = read(center_crop(source, (24, 20), fraction=0.9), list(range(12)))["image"]
    train, test = sources.split(source, 0.75, seed=3)
    for part, places in ((train, None), (test, None), (source[::2][1:], [2, 4, 6, 8, 10])):
        inside: Any = part
        crop = center_crop(part, (24, 20), fraction=0.9)
        for each in (crop, cloudpickle.loads(cloudpickle.dumps(crop))):
            got = read(each, list(range(len(part))))["image"]
            np.testing.assert_array_equal(got, whole[places or inside.inside(np.arange(len(part)))])
    (tmp_path / "06.jpg").write_bytes(files.payloads[6][:200])
    with pytest.raises(RecordError, match=r"06.jpg, record 6: "):
        read(random_resized_crop(source[4:8], (24, 20)), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (4, 0)}, r"size=\(4, 0\): expected \(height, width\)"),
        ({"scale": (0.5, 0.1)}, r"scale=\(0.5, 0.1\): expected \(least, most\), positive"),
        ({"scale": (0.5, 1.5)}, r"scale=\(0.5, 1.5\): a part cannot be larger than the image"),
        ({"ratio": (0, 1)}, r"ratio=\(0, 1\): expected \(least, most\), positive"),
        ({"leaf": "photo"}, r"random_resized_crop needs the leaf='photo', but samples have \['id', 'image'\]"),
        ({"leaf": "id"}, r"random_resized_crop needs leaf='id' as uint8 \[height, width, channels\], got int32"),
    ],
)
def test_wrong_options_of_random_resized_crop(source: Source, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        random_resized_crop(source, **{"size": (4, 4), **options})


# center_crop


def test_center_crop(source: Source, files: Files) -> None:
    window = read(center_crop(source, (10, 21)), [0, 7])["image"]
    np.testing.assert_array_equal(window, IMAGES[[0, 7], 19:29, 21:42])
    part = read(center_crop(source, (10, 20), fraction=0.5), [3])["image"][0]
    want = Image.fromarray(IMAGES[3][16:32, 16:48]).resize((20, 10), Image.Resampling.BILINEAR)
    assert np.abs(part.astype(int) - np.asarray(want)).max() <= 1
    cut = read(center_crop(files, (30, 40), leaf="picture"), [4])["picture"][0]
    want = pillow(files.payloads[4], (30, 40), (17, 23, 30, 40))  # of 64×86
    assert np.abs(cut.astype(int) - want).mean() < 1
    assert (
        center_crop(source, (4, 4), fraction=0.875)
        .describe()["crop"]
        .endswith("the center, 0.875 of the image, resized")
    )


def test_what_has_no_such_center(source: Source, files: Files) -> None:
    with pytest.raises(ArgumentError, match=r"size=\(50, 20\) is larger than the images, 48×64; give fraction="):
        center_crop(source, (50, 20))
    with pytest.raises(ArgumentError, match=r"fraction=1\.5: expected more than 0 and at most 1"):
        center_crop(source, (5, 5), fraction=1.5)
    with pytest.raises(
        RecordError, match=r"leaf 'picture', record 0: the image is 60×90 pixels, smaller than size=\(61"
    ):
        read(center_crop(files, (61, 50), leaf="picture"), [1, 0])


# random_crop and flipped


def test_random_crop(source: Source) -> None:
    window = read(random_crop(source, (40, 60), padding=3), list(range(NUM)))["image"]
    padded = np.pad(IMAGES, ((0, 0), (3, 3), (3, 3), (0, 0)))
    corners = set()
    for number in range(NUM):
        places = [
            (top, left)
            for top in range(15)
            for left in range(11)
            if (padded[number, top : top + 40, left : left + 60] == window[number]).all()
        ]
        assert len(places) == 1
        corners.add(places[0])
    assert len(corners) > NUM * 0.6
    with pytest.raises(ArgumentError, match=r"size=\(55, 20\) is larger than the images, 48×64, with padding=3 on"):
        random_crop(source, (55, 20), padding=3)
    with pytest.raises(ArgumentError, match="padding=-1: expected 0 or more pixels"):
        random_crop(source, (5, 5), padding=-1)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flipped(source: Source, probability: float) -> None:
    window = read(flipped(source, probability=probability), list(range(NUM)))["image"]
    mirrored = window[:, 0, 0, 1] == 63
    np.testing.assert_array_equal(window[mirrored], IMAGES[mirrored][:, :, ::-1])
    np.testing.assert_array_equal(window[~mirrored], IMAGES[~mirrored])
    assert abs(mirrored.mean() - probability) < 0.2
    floats = read(flipped(normalized(source, [0] * 3, [1 / 255] * 3), probability=probability), list(range(NUM)))
    np.testing.assert_allclose(floats["image"], window, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_flipped(source: Source, files: Files) -> None:
    with pytest.raises(ArgumentError, match=r"flipped needs leaf='id' as \[height, width, channels\], got int32\[\]"):
        flipped(source, leaf="id")
    with pytest.raises(ArgumentError, match=r"got object\[\]; images that are bytes need decoded"):
        flipped(files, leaf="picture")
    with pytest.raises(ArgumentError, match="probability=2: expected 0 to 1"):
        flipped(source, probability=2)


# mapped, at random


def test_mapped_at_random(source: Source) -> None:
    def brighter(window: Any, *, rng: Any) -> Any:
        factor = rng.uniform(0.5, 1.5, (1, 1, 1))
        return {
            "image": (window["image"] * factor).astype(np.float32),
            "factor": factor[:, 0, 0, 0],
            "key": rng.keys >> 40,
        }

    bright = mapped(source, brighter)
    window = read(bright, [4, 9])
    assert window["factor"].shape == (2,)
    assert 0.5 <= window["factor"].min() < window["factor"].max() < 1.5
    np.testing.assert_allclose(window["image"], IMAGES[[4, 9]] * window["factor"][:, None, None, None], rtol=1e-5)
    assert bright.describe()["transform"].endswith("brighter, at random")


def test_a_failure_at_random_names_its_record(source: Source) -> None:
    def picky(window: Any, rng: Any) -> Any:
        if (rng.random() > 0.9).any() and 0 not in window["id"]:
            raise ValueError("too large")
        return window["id"]

    draws = mapped(source, lambda window, rng: rng.random())
    numbers = read(draws, list(range(1, NUM)))
    with pytest.raises(RecordError, match=rf"too large, on record {1 + int((numbers > 0.9).argmax())}; mend"):
        read(mapped(source, picky), list(range(1, NUM)))


# Under a loader


def test_resumed_epochs_are_augmented_the_same(source: Source) -> None:
    mesh = jax.make_mesh((8,), ("data",))

    def batches(cursor: Cursor, threads: int) -> list[np.ndarray]:
        chain = flipped(random_crop(source, (40, 40), padding=4))
        loader = DataLoader(chain, mesh, P("data"), batch_size=8, epochs=2, knobs=Knobs(threads=threads))
        loader.cursor = cursor
        return [np.asarray(batch["image"]) for batch in loader]

    whole = batches(Cursor(0, 0, 0), 1)
    assert len(whole) == 2 * NUM // 8
    for cursor, first in [(Cursor(0, 0, 16), 2), (Cursor(0, 1, 8), NUM // 8 + 1)]:
        for got, want in zip(batches(cursor, 4), whole[first:], strict=True):
            np.testing.assert_array_equal(got, want)
