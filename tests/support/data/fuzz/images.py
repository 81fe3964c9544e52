"""Folders of images, of which most formats have no checksum: what is damaged may look otherwise."""

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

import braidax.data as data
from tests.support.data.fuzz.case import Case


def _photo(number: int) -> np.ndarray:
    rows, columns = np.mgrid[:24, :32]
    return np.stack([(rows * 7 + number * 20) % 256, columns * 5 % 256, (rows + columns) * 3 % 256], -1).astype(
        np.uint8
    )


def _folder(suffix: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        for number in range(6):
            place = folder / "images" / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(place / f"{number}{suffix}"), _photo(number))

    return write


def _opened(folder: Path) -> data.Source:
    return data.open(folder / "images", image_size=(12, 16))


def _opened_as_they_are(folder: Path) -> data.Source:
    return data.open(folder / "images")


CASES = [
    Case("jpeg", _folder(".jpg"), _opened, is_checked=False),
    Case("jpeg as it is", _folder(".jpg"), _opened_as_they_are, is_checked=False),
    Case("png", _folder(".png"), _opened, is_checked=False),
    Case("webp", _folder(".webp"), _opened, is_checked=False),
    Case("bmp", _folder(".bmp"), _opened, is_checked=False),
]
