"""Pictures with the spectrum of photographs, and sources of them as encoded files."""

import io
from typing import Any

import jax
import numpy as np
from PIL import Image

from braidax.data.source import VARYING, Source, check_indices


def photo(seed: int = 0, height: int = 75, width: int = 100) -> np.ndarray:
    """Noise whose amplitude falls with its frequency, brighter than it is colorful: uint8 `[height, width, 3]`."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    spectra = rng.normal(size=(3, *frequency.shape)) + 1j * rng.normal(size=(3, *frequency.shape))
    light, warm, green = (plane / plane.std() for plane in np.fft.irfft2(spectra / frequency**1.2, (height, width)))
    pixels = 120 + 45 * light[..., None] + 12 * np.stack([warm, green, -warm - green], axis=-1)
    return pixels.clip(0, 255).astype(np.uint8)


def encode(pixels: np.ndarray, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def pillow(data: bytes, size: tuple[int, int] | None = None, box: Any = None) -> np.ndarray:
    """Decodes in full, then cuts out `(top, left, height, width)`, then resizes."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    if box is not None:
        top, left, height, width = (int(number) for number in box)
        image = image.crop((left, top, left + width, top + height))
    return np.asarray(image if size is None else image.resize(size[::-1], Image.Resampling.BILINEAR))


class Files(Source):
    """Encoded images in the leaf `leaf`, numbered in `id`."""

    def __init__(self, payloads: list[Any], leaf: str = "image") -> None:
        self.payloads, self.leaf = payloads, leaf
        self.prepared: list[list[int]] = []
        self.seen: list[tuple[int | None, int]] = []

    @property
    def sample_spec(self) -> Any:
        return {self.leaf: VARYING, "id": jax.ShapeDtypeStruct((), np.int32)}

    def __len__(self) -> int:
        return len(self.payloads)

    def read(self, indices: np.ndarray, out: Any) -> None:
        check_indices(indices, len(self), where="files")
        for row, index in enumerate(indices.tolist()):
            out[self.leaf][row] = self.payloads[index]
        out["id"][:] = indices

    def prepare(self, indices: np.ndarray) -> None:
        self.prepared.append(indices.tolist())

    def at(self, seed: int | None, epoch: int) -> "Files":
        self.seen.append((seed, epoch))
        return self

    def describe(self) -> dict[str, str]:
        return {"format": "files"}
