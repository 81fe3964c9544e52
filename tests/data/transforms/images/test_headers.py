"""What an image's header promises, against Pillow; and what promises too much is refused before it is decoded."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

import braidax.data as sources
from braidax.data.transforms.images.headers import promised_size
from braidax.errors import ArgumentError, RecordError
from tests.support.data.formats.reading import read

FORMS: dict[str, dict[str, Any]] = {
    "jpeg": {"format": "JPEG"},
    "progressive": {"format": "JPEG", "progressive": True},
    "png": {"format": "PNG"},
    "bmp": {"format": "BMP"},
    "webp": {"format": "WEBP"},
    "lossless": {"format": "WEBP", "lossless": True},
    "extended": {"format": "WEBP", "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"},
}


def encoded(size: tuple[int, int], **options: Any) -> bytes:
    data = io.BytesIO()
    Image.effect_noise(size, 40).convert("RGB").save(data, **options)
    return data.getvalue()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("size", [(1, 1), (37, 20), (300, 17)])
def test_sizes_are_those_of_pillow(form: dict[str, Any], size: tuple[int, int]) -> None:
    data = encoded(size, **form)
    assert promised_size(memoryview(data)) == (size[1], size[0])
    for length in range(0, min(len(data), 64)):
        assert promised_size(memoryview(data)[:length]) in ((0, 0), (size[1], size[0]))


def bomb(height: int, width: int) -> bytes:
    """A PNG of a few hundred bytes that promises any number of pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


class Images(sources.Source):
    def __init__(self, *payloads: bytes) -> None:
        self.payloads = payloads

    @property
    def sample_spec(self) -> Any:
        return {"image": sources.VARYING}

    def __len__(self) -> int:
        return len(self.payloads)

    def read(self, indices: np.ndarray, out: Any) -> None:
        for place, index in enumerate(indices.tolist()):
            out["image"][place] = self.payloads[index]

    def describe(self) -> dict[str, str]:
        return {}


def test_an_image_that_promises_too_much_is_refused_by_size_and_limit() -> None:
    source = sources.decoded(Images(encoded((20, 10), format="PNG"), bomb(30_000, 30_000)), size=(8, 8))
    assert read(source, [0])["image"].shape == (1, 8, 8, 3)
    words = (
        r"record 1: the image is said to have 30000×30000 = 900,000,000 pixels, more than max_pixels=134,217,728; raise"
    )
    with pytest.raises(RecordError, match=words):
        read(source, [1])


def test_the_limit_is_an_option() -> None:
    data = encoded((20, 10), format="JPEG")
    assert read(sources.decoded(Images(data), max_pixels=200))["image"].shape == (1, 10, 20, 3)
    with pytest.raises(RecordError, match="200 pixels, more than max_pixels=199"):
        sources.decoded(Images(data), max_pixels=199)
    with pytest.raises(ArgumentError, match="max_pixels=0: expected a positive number"):
        sources.decoded(Images(data), max_pixels=0)
