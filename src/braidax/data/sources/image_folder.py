"""Folders of images: `folder/class name/image.jpg`, or all images in one folder without labels."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.resize import resize
from braidax.data.sources.source import Indices, Source, check_indices, listed
from braidax.errors import ArgumentError, FormatError, RecordError, import_extra
from braidax.spans import span

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})


class ImageFolder(Source):
    """Images decoded on demand as `{"image": uint8 [H, W, 3] RGB, "label": int32 []}`.

    Gray images become RGB, transparency is dropped, and an Exif orientation is applied, so that images stand upright.
    Labels number the sorted class names; images of a flat folder have none.

    **Arguments:** `files`: the images. `labels`: int32 `[n]`, or None. `image_size`: `(height, width)` in pixels to
    resize to; None when all images have the size of the first. `facts`: what `describe` shows first.

    **Raises:** `ArgumentError` for a wrong size; `RecordError` when the first image cannot be decoded.
    """

    def __init__(
        self,
        files: list[str],
        labels: NDArray[np.int32] | None,
        *,
        image_size: tuple[int, int] | None,
        facts: Mapping[str, str],
    ) -> None:
        if image_size is not None and (len(image_size) != 2 or min(image_size) < 1):
            raise ArgumentError(f"image_size={image_size!r}: expected (height, width), two positive numbers of pixels")
        self._cv2: ModuleType = import_extra("cv2", "images", purpose="decoding an image folder")
        self._files = files
        self._labels = labels
        self._resizes = image_size is not None
        self._facts = dict(facts)
        size = self._decode(0).shape[:2] if image_size is None else image_size
        self._spec: dict[str, jax.ShapeDtypeStruct] = {"image": jax.ShapeDtypeStruct((*size, 3), np.uint8)}
        if labels is not None:
            self._spec["label"] = jax.ShapeDtypeStruct((), np.int32)

    @property
    def sample_spec(self) -> Any:
        """A dict with the leaf `"image"`, and `"label"` where there are classes."""
        return dict(self._spec)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, indices: Indices, out: Any) -> None:
        """Reads, decodes and resizes images into place; the GIL is dropped meanwhile."""
        check_indices(indices, len(self._files), where=self._facts["folder"])
        images = out["image"]
        for row, record in enumerate(indices.tolist()):
            self._place(self._decode(record), images[row : row + 1], record)
        if self._labels is not None:
            np.take(self._labels, indices, out=out["label"], mode="clip")

    def describe(self) -> Mapping[str, str]:
        """Returns format, folder, samples, image size and classes."""
        height, width, _ = self._spec["image"].shape
        size = f"{height}×{width}" + (" (resized)" if self._resizes else " (of the first image)")
        return {**self._facts, "samples": f"{len(self._files):,}", "image size": size}

    def _decode(self, record: int) -> NDArray[np.uint8]:
        path = self._files[record]
        try:
            data = np.fromfile(path, np.uint8)
        except OSError as error:
            raise RecordError(
                f"{path}, record {record}: cannot be read ({error}); restore it or open the folder anew"
            ) from error
        with span("decode", num_bytes=data.size):
            image = self._cv2.imdecode(data, self._cv2.IMREAD_COLOR_RGB) if data.size else None
        if image is None:
            raise RecordError(
                f"{path}, record {record}: the image of {data.size:,} bytes is truncated or corrupt, or not of the "
                "format that its name says; expected JPEG, PNG, WebP or BMP: restore or remove it"
            )
        return image

    def _place(self, image: NDArray[np.uint8], slot: NDArray[np.uint8], record: int) -> None:
        if image.shape == slot.shape[1:]:
            slot[0] = image
        elif self._resizes:
            with span("decode", "resize", num_bytes=slot.nbytes):
                resize(image[None], slot)
        else:
            raise RecordError(
                f"{self._files[record]}, record {record}: the image is {image.shape[0]}×{image.shape[1]} pixels "
                f"(height×width), expected {slot.shape[1]}×{slot.shape[2]} as the first; give image_size=(height, "
                "width)"
            )


def has_images(path: Path) -> bool:
    """Says whether a folder holds images, or subfolders that do."""
    return bool(_images(path)) or any(_images(child) for child in _classes(path))


def open_image_folder(path: Path, *, image_size: tuple[int, int] | None = None) -> ImageFolder:
    """Opens a folder with one subfolder per class, or a flat one without labels.

    **Arguments:** `image_size`: `(height, width)` in pixels to resize to; needed unless all images have one size.

    **Raises:** `FormatError` for images both in the folder and in subfolders, or for a class without any.
    """
    classes = _classes(path)
    flat = _images(path)
    per_class = {child: _images(child) for child in classes}
    if flat and any(per_class.values()):
        raise FormatError(
            f"{path}: images lie both in it ({flat[0]} …) and in its subfolders; expected one or the other: move them"
        )
    facts = {"format": "image folder", "folder": str(path)}
    if flat:
        return ImageFolder([f"{path}/{name}" for name in flat], None, image_size=image_size, facts=facts)
    if empty := [child for child, names in per_class.items() if not names]:
        raise FormatError(
            f"{empty[0]}: this class folder holds no image; expected {', '.join(sorted(IMAGE_SUFFIXES))}: remove it, "
            "or open it instead if the classes are inside"
        )
    files = [f"{child}/{name}" for child, names in per_class.items() for name in names]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(names) for names in per_class.values()])
    facts["classes"] = listed([child.name for child in classes])
    return ImageFolder(files, labels, image_size=image_size, facts=facts)


def _classes(path: Path) -> list[Path]:
    return sorted(
        (child for child in path.iterdir() if child.is_dir() and child.name[0] != "."), key=lambda child: child.name
    )


def _images(path: Path) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name[0] != "." and os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122
        )
