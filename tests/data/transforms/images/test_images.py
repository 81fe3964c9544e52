"""Decoding: within a few steps of Pillow, for every kind of file, and an error for every damaged one."""

import io
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from braidax.data.transforms.images.decode import decode_images, image_size
from braidax.data.transforms.images.decoded import decoded
from braidax.data.transforms.images.quiet import Quiet
from braidax.errors import ArgumentError, RecordError
from tests.support.data.formats.reading import read
from tests.support.data.photos import Files, encode, photo, pillow

SIZE = (32, 40)
KINDS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "gray": {"mode": "L"},
    "restarts": {"restart_marker_blocks": 3},
    "progressive": {"progressive": True},
    "own tables": {"optimize": True},
    "poor": {"quality": 10},
    "fine": {"quality": 100},
}


def run(payloads: list[bytes], size: tuple[int, int] = SIZE, **options: Any) -> np.ndarray:
    out = np.full((len(payloads), *size, 3), 77, np.uint8)
    decode_images(payloads, out, where="record {}".format, **options)
    return out


def assert_near(got: np.ndarray, want: np.ndarray, *, most: int = 48, mean: float = 4.0) -> None:
    assert got.shape == want.shape
    difference = np.abs(got.astype(int) - want.astype(int))
    assert difference.max() <= most
    assert difference.mean() <= mean


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """What Exif says: the same as Pillow's `exif_transpose`, on pixels."""
    turned = pixels.swapaxes(0, 1) if orientation > 4 else pixels
    flip_x, flip_y = orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)
    return turned[:: -1 if flip_y else 1, :: -1 if flip_x else 1]


def smooth(height: int = 75, width: int = 100) -> np.ndarray:
    y, x = np.mgrid[:height, :width] / [[[height]], [[width]]]
    return np.stack([250 * y, 250 * x, 125 + 60 * (x - y)], axis=-1).astype(np.uint8)


def at(box: Any) -> Any:
    return lambda sizes: np.tile(box, (len(sizes), 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [SIZE, (224, 10), (75, 100), (9, 300), (45, 60), (60, 70)])
def test_fast_is_near_pillow(kind: str, size: tuple[int, int]) -> None:
    files = [encode(photo(seed, *shape), **KINDS[kind]) for seed, shape in enumerate([(75, 100), (61, 83), (8, 17)])]
    got = run(files, size)
    for number, file in enumerate(files):
        assert_near(got[number], pillow(file, size))


@pytest.mark.parametrize("size", [(224, 224), (100, 333), (40, 30), (375, 500), (400, 600)])
def test_a_scale_moves_nothing(size: tuple[int, int]) -> None:
    file = encode(smooth(375, 500), quality=98)
    assert_near(run([file], size)[0], pillow(file, size), most=5, mean=0.8)
    for box in ((17, 33, 301, 402), (0, 1, 250, 250), (126, 200, 249, 300)):
        got = run([file], size, choose=at(box))[0]
        assert_near(got, pillow(file, size, box), most=5, mean=0.8)


@pytest.mark.parametrize("box", [(0, 0, 375, 500), (17, 33, 301, 402), (1, 3, 250, 250)])
def test_a_scale_moves_no_wave_by_a_quarter_of_a_pixel(box: Any) -> None:
    y, x = np.mgrid[:375, :500] * (2 * np.pi / 50)
    file = encode(np.stack([125 + 100 * np.sin(x + y)] * 3, axis=-1).astype(np.uint8), quality=98)
    assert_near(run([file], (224, 224), choose=at(box))[0], pillow(file, (224, 224), box), most=8, mean=1.5)


@pytest.mark.parametrize("shape", [(61, 83), (65, 65), (2, 80), (80, 1), (375, 500)])
def test_the_library_takes_the_scale_that_was_meant(shape: tuple[int, int]) -> None:
    file = encode(smooth(*shape))
    for eighths in range(1, 9):
        height, width = (-(-length * eighths // 8) for length in shape)
        image = simplejpeg.decode_jpeg(file, min_height=height, min_width=width, min_factor=1)
        assert image.shape == (height, width, 3)


def exif(orientation: int, order: str = ">") -> bytes:
    head = b"II*\0\x08\0\0\0" if order == "<" else b"MM\0*\0\0\0\x08"
    fields = struct.pack(order + "HHIHHHHIHH", 0x010E, 2, 2, 0, 0, 0x0112, 3, 1, orientation, 0)
    return b"Exif\0\0" + head + struct.pack(order + "H", 2) + fields + bytes(4)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("decode", ["fast", "exact"])
def test_orientations_and_crops(orientation: int, order: str, decode: Any) -> None:
    file = encode(photo(1), exif=exif(orientation, order), quality=95)
    stands = upright(pillow(file), orientation)
    box = (5, 11, stands.shape[0] // 2, stands.shape[1] // 3)
    seen: list[Any] = []

    def choose(sizes: np.ndarray) -> np.ndarray:
        seen.extend(sizes.tolist())
        return np.array([(0, 0, *stands.shape[:2]), box])

    got = run([file] * 2, choose=choose, decode=decode)
    assert seen == [list(stands.shape[:2])] * 2
    for number, part in enumerate([stands, stands[5 : 5 + box[2], 11 : 11 + box[3]]]):
        image = Image.fromarray(np.ascontiguousarray(part))
        assert_near(got[number], np.asarray(image.resize(SIZE[::-1], Image.Resampling.BILINEAR)))


@pytest.mark.parametrize("cut", range(6, 44, 3))
def test_an_exif_segment_that_is_cut_short_decides_nothing_wrong(cut: int) -> None:
    file = encode(photo(1), exif=exif(6)[:cut], quality=95)
    stands = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB)
    got = run([file], choose=lambda sizes: np.array([[0, 0, *sizes[0]]]))[0]
    assert_near(got, np.asarray(Image.fromarray(stands).resize(SIZE[::-1], Image.Resampling.BILINEAR)))


def webp(pixels: np.ndarray, exif_data: bytes, **options: Any) -> bytes:
    """A WebP file whose Exif data lie there as given: Pillow takes the mark of JPEG files off when it writes."""
    file = encode(pixels, "WEBP", mode="RGBA" if pixels.shape[-1] == 4 else "RGB", exif=exif_data, **options)
    place, parts = 12, list[bytes]()
    while place < len(file):
        kind, length = file[place : place + 4], int.from_bytes(file[place + 4 : place + 8], "little")
        data = exif_data if kind == b"EXIF" else file[place + 8 : place + 8 + length]
        parts.append(kind + len(data).to_bytes(4, "little") + data + bytes(len(data) % 2))
        place += 8 + length + length % 2
    body = b"WEBP" + b"".join(parts)
    return b"RIFF" + len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("is_lossless", [True, False])
@pytest.mark.parametrize("has_alpha", [True, False])
def test_webp_files_are_turned(orientation: int, is_marked: bool, is_lossless: bool, has_alpha: bool) -> None:
    pixels = photo(3, 21, 34)
    if has_alpha:
        pixels = np.concatenate([pixels, np.full((21, 34, 1), 200, np.uint8)], axis=-1)
    for order in "<>":
        file = webp(pixels, exif(orientation, order)[0 if is_marked else 6 :], lossless=is_lossless, quality=95)
        stands = ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB")
        assert stands.size == ((34, 21) if orientation < 5 else (21, 34))
        assert image_size(file, "it") == stands.size[::-1]
        got = run([file], stands.size[::-1], resizes=False)[0]
        assert_near(got, np.asarray(stands), most=0 if is_lossless else 8, mean=1)


@pytest.mark.parametrize("cut", [0, 1, 6, 8, 15, 20, 34])
def test_exif_data_of_webp_that_are_cut_short_turn_nothing(cut: int) -> None:
    file = webp(photo(1, 20, 30), exif(6)[:cut] or b"?", lossless=True)
    assert np.array_equal(run([file], (20, 30))[0], photo(1, 20, 30))


@given(
    st.tuples(st.integers(1, 99), st.integers(1, 99)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(*[st.floats(0, 1)] * 4),
    st.sampled_from([0, 1, 2]),
)
def test_any_crop_of_any_size(shape: Any, size: Any, place: Any, subsampling: int) -> None:
    file = encode(photo(3, 99, 99)[: shape[0], : shape[1]], subsampling=subsampling, quality=95)
    height, width = 1 + int(place[0] * (shape[0] - 1)), 1 + int(place[1] * (shape[1] - 1))
    box = (int(place[2] * (shape[0] - height)), int(place[3] * (shape[1] - width)), height, width)
    guarded = np.full((3, *size, 3), 77, np.uint8)
    decode_images([file], guarded[1:2], where=str, choose=at(box))
    assert (guarded[[0, 2]] == 77).all()  # nothing was written beside its place
    assert_near(guarded[1], pillow(file, size, box), most=80, mean=10)  # so small a part is rough itself


def test_exact_is_decoding_in_full_and_then_resizing() -> None:
    files = [encode(photo(seed), **options) for seed, options in enumerate(KINDS.values())]
    boxes = np.array([[seed, 2 * seed, 40, 50 - seed] for seed in range(len(files))])
    whole, cut = run(files, decode="exact"), run(files, decode="exact", choose=lambda sizes: boxes)
    for number, file in enumerate(files):
        assert_near(whole[number], pillow(file, SIZE), most=2, mean=0.6)
        assert_near(cut[number], pillow(file, SIZE, boxes[number]), most=2, mean=0.6)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"mode": "CMYK"}),
        ("PNG", {}),
        ("PNG", {"mode": "L"}),
        ("PNG", {"mode": "P"}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
    ],
)
def test_other_kinds_of_files(kind: str, options: Any) -> None:
    file = encode(photo(5), kind, **options)
    box = np.array([[3, 4, 50, 60]])
    limits = {"most": 12, "mean": 3.0} if "CMYK" in options.values() else {"most": 2, "mean": 0.6}
    assert_near(run([file])[0], pillow(file, SIZE), **limits)
    assert_near(run([file], choose=lambda sizes: box)[0], pillow(file, SIZE, box[0]), **limits)


def test_an_image_that_has_the_size_is_decoded_exactly() -> None:
    file = encode(photo(6))
    np.testing.assert_array_equal(run([file], (75, 100)), run([file], (75, 100), decode="exact"))
    np.testing.assert_array_equal(run([file], (75, 100), resizes=False)[0], simplejpeg.decode_jpeg(file))


def test_images_go_where_they_belong_however_it_lies() -> None:
    files = [encode(photo(seed, 32 + seed % 2, 40)) for seed in range(4)]  # every other one has the size
    whole, spread = run(files), np.zeros((8, 32, 80, 3), np.uint8)
    decode_images(files, spread[::2, :, ::2], where="record {}".format)
    np.testing.assert_array_equal(spread[::2, :, ::2], whole)
    assert not spread[1::2].any()
    assert not spread[:, :, 1::2].any()


def test_windows_may_be_cut_anywhere() -> None:
    files = [encode(photo(seed, 40 + seed, 60 - seed), **{**KINDS[kind]}) for seed, kind in enumerate(KINDS)]
    files.insert(3, encode(photo(9), "PNG"))
    whole = run(files)
    alone = np.concatenate([run([file]) for file in files])
    np.testing.assert_array_equal(whole, alone)
    np.testing.assert_array_equal(run(files[::-1])[::-1], whole)
    views = [memoryview(file) for file in files]
    np.testing.assert_array_equal(run(views), whole)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 2}, {"mode": "L"}])
@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.7, 0.95, 0.999])
def test_a_truncated_image_is_an_error(options: Any, part: float) -> None:
    file = encode(photo(2), **options)
    broken = file[: int(len(file) * part)]
    for decode in ("fast", "exact"):
        with pytest.raises(RecordError, match=rf"record 1: the image of {len(broken):,} bytes is truncated or corrupt"):
            run([file, broken], decode=decode)
    with pytest.raises(RecordError, match="record 1: the image of"):
        run([file, broken], choose=lambda sizes: np.tile([0, 0, 8, 8], (2, 1)))


def test_opencv_says_nothing_of_what_the_error_names(capfd: pytest.CaptureFixture[str]) -> None:
    file = encode(photo(2), "PNG")
    before = cv2.utils.logging.getLogLevel()
    with pytest.raises(RecordError, match="record 0: the image of"):
        run([file[: len(file) // 2]])
    assert capfd.readouterr().err == ""
    assert cv2.utils.logging.getLogLevel() == before > 0


def test_opencv_is_quiet_until_the_last_thread_is_done() -> None:
    levels = [3]

    def set_level(level: int) -> int:
        levels.append(level)
        return levels[-2]

    logger = ModuleType("logger")
    logger.__dict__["setLogLevel"] = set_level
    silent = Quiet(logger)
    with silent:
        with silent:
            assert levels == [3, 0]
        assert levels == [3, 0]
    assert levels == [3, 0, 3]


@settings(max_examples=30)
@given(
    st.integers(0, 2),
    st.lists(st.tuples(st.floats(0, 0.9999), st.integers(0, 255)), min_size=1, max_size=6),
    st.sampled_from([SIZE, (33, 47)]),
)
def test_damage_writes_nothing_beside_its_place(number: int, changes: list[tuple[float, int]], size: Any) -> None:
    options = [{"subsampling": 2}, {"restart_marker_blocks": 2}, {"mode": "L", "optimize": True}][number]
    file = bytearray(encode(photo(4, 33, 47), **options))
    for place, value in changes:
        file[int(place * len(file))] = value
    guarded = np.full((3, *size, 3), 77, np.uint8)
    try:
        decode_images([bytes(file)], guarded[1:2], where="record {}".format)
    except RecordError as error:
        assert "record 0" in str(error)  # noqa: PT017 (it may as well decode)
    assert (guarded[[0, 2]] == 77).all()


@pytest.mark.parametrize("decode", ["fast", "exact"])
@pytest.mark.parametrize("size", [SIZE, (200, 200)])
def test_bytes_missing_inside_are_an_error(decode: Any, size: tuple[int, int]) -> None:
    file = encode(photo(2, 200, 200), quality=90)
    middle = len(file) // 2
    broken = file[:middle] + file[middle + 400 :]
    with pytest.raises(RecordError, match=r"record 0: the image .* of no known format \(Corrupt JPEG data: premature"):
        run([broken], size, decode=decode)


def test_a_header_that_promises_too_many_pixels_is_an_error() -> None:
    file = bytearray(encode(photo(2)))
    frame = file.index(b"\xff\xc0\x00\x11")
    file[frame + 5 : frame + 9] = struct.pack(">HH", 65_000, 65_000)
    with pytest.raises(RecordError, match="record 0: the image is said to have 65000×65000"):
        run([bytes(file)])


# decoded


@pytest.fixture
def source() -> Files:
    kinds: list[Callable[[int], bytes]] = [
        lambda seed: encode(photo(seed)),
        lambda seed: encode(photo(seed, 50, 90), "PNG"),
        lambda seed: encode(photo(seed, 64, 64), "WEBP", lossless=True),
    ]
    return Files([kinds[seed % 3](seed) for seed in range(12)], leaf="picture")


def test_decoded(source: Files) -> None:
    ready = decoded(source, leaf="picture", size=SIZE)
    assert ready.sample_spec["picture"].shape == (*SIZE, 3)
    assert ready.sample_spec["id"].dtype == np.int32
    assert len(ready) == 12
    window = read(ready, [7, 0, 11, 7])
    assert window["id"].tolist() == [7, 0, 11, 7]
    for row, index in enumerate([7, 0, 11, 7]):
        assert_near(window["picture"][row], pillow(source.payloads[index], SIZE))
    assert ready.describe() == {"format": "files", "image size": "32×40 (resized)"}
    assert decoded(source, leaf="picture", size=SIZE, decode="exact").describe()["image size"].endswith("d, exact)")


def test_decoded_hands_on_epochs_and_what_comes(source: Files) -> None:
    ready: Any = decoded(source, leaf="picture", size=SIZE)
    assert len(ready.at(3, 4)) == 12
    ready.prepare(np.array([1, 2]))
    assert (source.seen, source.prepared) == ([(3, 4)], [[1, 2]])


def test_images_of_one_size_need_none() -> None:
    same = decoded(Files([encode(photo(seed), "PNG") for seed in range(3)] + [encode(photo(3, 20, 30))]))
    np.testing.assert_array_equal(read(same, [1])["image"][0], photo(1))
    with pytest.raises(RecordError, match=r"leaf 'image', record 3: the image is 20×30 pixels .* expected 75×100"):
        read(same, [0, 3])


def test_many_threads_decode_what_one_does(source: Files) -> None:
    ready = decoded(source, leaf="picture", size=SIZE)
    whole = read(ready, list(range(12)))["picture"]
    orders = [np.random.default_rng(seed).integers(0, 12, 7).tolist() for seed in range(24)]
    with ThreadPoolExecutor(6) as pool:
        for order, window in zip(orders, pool.map(lambda order: read(ready, order), orders), strict=True):
            np.testing.assert_array_equal(window["picture"], whole[order])


def test_what_cannot_be_decoded(source: Files, unchecked: None) -> None:
    with pytest.raises(ArgumentError, match=r"decoded needs the leaf='image', but samples have \['id', 'picture'\]"):
        decoded(source)
    with pytest.raises(ArgumentError, match=r"decoded needs leaf='id' as bytes of varying size, got int32\[\]"):
        decoded(source, leaf="id")
    with pytest.raises(ArgumentError, match='decode=\'quick\': expected "fast" or "exact"'):
        decoded(source, leaf="picture", decode="quick")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match=r"size=\(0, 4\): expected \(height, width\)"):
        decoded(source, leaf="picture", size=(0, 4))
    with pytest.raises(RecordError, match="leaf 'image', record 1: holds a str, expected the bytes of an encoded"):
        read(decoded(Files([encode(photo()), "text"]), size=SIZE), [0, 1])
