import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import braidax.data as sources
from braidax.errors import ArgumentError, FormatError, ReadError, RecordError
from braidax.spans import Trace
from tests.support.data.formats import files
from tests.support.data.formats.reading import read


def picture(seed: int = 0, size: tuple[int, int] = (6, 5)) -> np.ndarray:
    return files.rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def folder(path: Path, count: int = 4, suffix: str = "png") -> Path:
    for number in range(count):
        (path / "bcd"[number % 3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number)).save(path / "bcd"[number % 3] / f"{number}.{suffix}")
    return path


def test_values_and_classes(tmp_path: Path) -> None:
    source = sources.open(folder(tmp_path / "images"))
    window = read(source)
    assert window["label"].tolist() == [0, 0, 1, 2]
    np.testing.assert_array_equal(window["image"], [picture(0), picture(3), picture(1), picture(2)])
    assert source.describe()["classes"] == "3: b, c, d"
    assert source.describe()["image size"] == "6×5 (of the first image)"


def test_labels_have_names(tmp_path: Path) -> None:
    source = sources.open(folder(tmp_path / "images", count=6))
    names = sources.class_names(source)
    assert names == ["b", "c", "d"]
    for number, path in enumerate(sorted((tmp_path / "images").rglob("*.png"))):
        assert names[source[number]["label"]] == path.parent.name
    kept = sources.filter(source, lambda sample: sample["label"] > 0)
    cut, again = sources.random_crop(kept, (2, 2)), pickle.loads(pickle.dumps(source))
    joined = sources.concat([source[1:], source[:1]])
    for other in (source[2:], kept, cut, again, joined, sources.select(source, "label"), sources.open(source)):
        assert sources.class_names(other) == names
        assert names[other[0]["label"]] == names[int(sources.to_numpy(other[:1])["label"][0])]


def test_labels_without_names_are_told(tmp_path: Path) -> None:
    source = sources.open(folder(tmp_path / "images"))
    message = r"leaf='label': samples have the leaves .*, and none with names; expected one of an image folder"
    for other in (
        sources.map(source, lambda sample: {"label": 2 - sample["label"]}),
        sources.open({"label": np.arange(3)}),
        sources.open(tmp_path / "images" / "b"),
    ):
        with pytest.raises(ArgumentError, match=message):
            sources.class_names(other)
    with pytest.raises(ArgumentError, match=r"leaf='image': .*and \['label'\] with names"):
        sources.class_names(source, "image")


def test_a_flat_folder(tmp_path: Path) -> None:
    for number in range(3):
        Image.fromarray(picture(number)).save(tmp_path / f"{number}.bmp")
    (tmp_path / "notes.txt").write_text("x")
    source = sources.open(tmp_path)
    assert set(source.sample_spec) == {"image"}
    np.testing.assert_array_equal(read(source, [2, 0])["image"], [picture(2), picture(0)])


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "webp"])
def test_lossy_formats_decode_as_pillow_does(tmp_path: Path, suffix: str) -> None:
    smooth = np.linspace(0, 255, 32 * 48 * 3).reshape(32, 48, 3).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / f"a.{suffix}", quality=95)
    decoded = read(sources.open(tmp_path))["image"][0]
    reference = np.asarray(Image.open(tmp_path / f"a.{suffix}").convert("RGB"))
    assert np.abs(decoded.astype(int) - reference).max() <= 2


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "I;16"])
def test_other_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(picture()).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    image.save(tmp_path / "a.png")
    expected = Image.fromarray(picture()).convert("L") if mode in ("L", "I;16") else image.convert("RGB")
    np.testing.assert_array_equal(read(sources.open(tmp_path))["image"][0], np.asarray(expected.convert("RGB")))


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    smooth = np.linspace(0, 255, 16 * 8 * 3).reshape(16, 8, 3).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / "a.jpg", quality=100, exif=exif)
    decoded = read(sources.open(tmp_path))["image"][0]
    assert decoded.shape == (8, 16, 3)
    assert np.abs(decoded.astype(int) - np.rot90(smooth, -1)).max() <= 12


def test_images_are_resized(tmp_path: Path) -> None:
    for number, size in enumerate([(12, 10), (20, 8), (4, 7)]):
        Image.fromarray(picture(number, size)).save(tmp_path / f"{number}.png")
    source = sources.open(tmp_path, image_size=(4, 7))
    window = read(source)["image"]
    for number, size in enumerate([(12, 10), (20, 8), (4, 7)]):
        reference = Image.fromarray(picture(number, size)).resize((7, 4), Image.Resampling.BILINEAR)
        assert np.abs(window[number].astype(int) - np.asarray(reference)).max() <= 1
    assert source.describe()["image size"] == "4×7 (resized)"


def test_an_image_of_another_size(tmp_path: Path) -> None:
    path = folder(tmp_path / "images")
    Image.fromarray(picture(9, (7, 5))).save(path / "d" / "2.png")
    source = sources.open(path)
    read(source, [0, 1, 2])
    message = (
        f"{path}/d/2.png, record 3: the image is 7×5 pixels (height×width), expected 6×5 as the first; give image_size="
    )
    with pytest.raises(RecordError, match=re.escape(message)):
        read(source, [0, 3])


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_corrupt_image(tmp_path: Path, suffix: str, damage: str) -> None:
    path = folder(tmp_path / "images", suffix=suffix)
    file = path / "c" / f"1.{suffix}"
    data = file.read_bytes()
    file.write_bytes({"truncated": data[: len(data) * 2 // 3], "garbage": b"x" * 99, "empty": b""}[damage])
    source = sources.open(path)
    read(source, [0, 1, 3])
    size = file.stat().st_size
    message = f"{file}, record 2: the image of {size} bytes is truncated or corrupt, or of no known format"
    with pytest.raises(RecordError, match=re.escape(message)):
        read(source, [2])


def test_the_first_image_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(RecordError, match=r"a\.png, record 0: the image of 1 bytes"):
        sources.open(tmp_path)


def test_an_image_that_went_away(tmp_path: Path) -> None:
    path = folder(tmp_path / "images")
    source = sources.open(path)
    (path / "c" / "1.png").unlink()
    with pytest.raises(ReadError, match=r"c/1\.png, record 2: cannot be read"):
        read(source, [2])


def test_a_class_without_images(tmp_path: Path) -> None:
    path = folder(tmp_path / "images")
    (path / "e").mkdir()
    with pytest.raises(FormatError, match=rf"{path}/e: this class folder holds no image; expected \.bmp, \.jpeg"):
        sources.open(path)


def test_images_on_two_levels(tmp_path: Path) -> None:
    path = folder(tmp_path / "images")
    Image.fromarray(picture()).save(path / "stray.png")
    with pytest.raises(FormatError, match=rf"{path}: images lie both in it \(stray\.png …\) and in its subfolders"):
        sources.open(path)


@pytest.mark.parametrize("size", [(0, 4), (4, -1)])
def test_a_wrong_size(tmp_path: Path, size: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=rf"image_size={re.escape(repr(size))}: expected \(height, width\)"):
        sources.open(folder(tmp_path / "images"), image_size=size)


def test_decoding_is_a_span(tmp_path: Path) -> None:
    path = folder(tmp_path / "images")
    source = sources.open(path)
    trace = Trace()
    with trace.active():
        read(source, [0, 1])
    files = [path / "b" / name for name in ("0.png", "3.png")]
    assert trace.totals()["decode"].num_spans == 1
    assert trace.totals()["read"].num_spans == 1
    assert trace.totals()["decode"].num_bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("part", [0.5, 0.9, 0.999])
def test_a_truncated_jpeg_whose_rest_a_decoder_would_make_up(tmp_path: Path, progressive: bool, part: float) -> None:
    for name in ("a.jpg", "b.jpg"):
        Image.fromarray(picture(0, (64, 64))).save(tmp_path / name, progressive=progressive)
    data = (tmp_path / "b.jpg").read_bytes()
    (tmp_path / "b.jpg").write_bytes(data[: int(len(data) * part)])
    with pytest.raises(RecordError, match=r"b\.jpg, record 1: the image of .* is truncated or corrupt"):
        read(sources.open(tmp_path))
