"""Folders of images: `folder/class name/image.jpg`, or all images in one folder without labels."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.source import VARYING, Box, Indices, Sliced, Source, check_indices, listed
from braidax.data.storage.local import ReadAhead, ask_ahead
from braidax.data.transforms.images.decode import Decode
from braidax.errors import FormatError, ReadError
from braidax.spans import span

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})


class ImageFolder(Source, Sliced):
    """Images decoded on demand as `{"image": uint8 [H, W, 3] RGB, "label": int32 []}`.

    Gray images become RGB, transparency is dropped, and an Exif orientation is applied, so that images stand upright.
    Labels number the sorted class names; images of a flat folder have none.

    **Arguments:** `files`: the images. `labels`: int32 `[n]`, or None. `image_size`: `(height, width)` in pixels to
    resize to; None when all images have the size of the first. `decode`: as in `braidax.data.decoded`. `facts`: what
    `describe` shows first. `classes`: the name of each label, from 0 on.

    **Raises:** `ArgumentError` for a wrong size; `RecordError` when the first image cannot be decoded.
    """

    def __init__(
        self,
        files: list[str],
        labels: NDArray[np.int32] | None,
        *,
        image_size: tuple[int, int] | None,
        decode: Decode = "fast",
        facts: Mapping[str, str],
        classes: Sequence[str] = (),
    ) -> None:
        from braidax.data.transforms.images.decoded import (
            decode_leaf,  # wraps sources: at the top this would be a cycle
        )

        inside = EncodedFolder(files, labels, facts, classes)
        self.decodes = decode_leaf(inside, "image", image_size, decode, inside.name)

    @property
    def sample_spec(self) -> Any:
        """A dict with the leaf `"image"`, and `"label"` where there are classes."""
        return self.decodes.sample_spec

    @property
    def class_names(self) -> Mapping[str, Sequence[str]]:
        """The name of each label, from 0 on, as `braidax.data.class_names` returns it; of a flat folder none."""
        return cast(EncodedFolder, self.decodes.source).class_names

    def __len__(self) -> int:
        return len(self.decodes)

    def read(self, indices: Indices, out: Any) -> None:
        """Reads, decodes and resizes images into place; the GIL is dropped meanwhile."""
        self.decodes.read(indices, out)

    @property
    def cut_dims(self) -> Sequence[int]:
        """0 for each leaf: an image that is not wanted is neither read nor decoded."""
        return cast(Sliced, self.decodes).cut_dims

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        """Reads the images, or the labels, or both."""
        cast(Sliced, self.decodes).read_slices(indices, boxes, out)

    def prepare(self, indices: Indices) -> None:
        """Asks the kernel to bring files into its page cache, where a read has waited for the disk lately."""
        self.decodes.prepare(indices)

    def describe(self) -> Mapping[str, str]:
        """Returns format, folder, samples, image size and classes."""
        return self.decodes.describe()


class EncodedFolder(Source, Sliced):
    """The files of an image folder as they are: `"image"`, bytes, and `"label"`.

    **Arguments:** `files`, `labels`, `facts`, `classes`: as those of `ImageFolder`.
    """

    def __init__(
        self,
        files: list[str],
        labels: NDArray[np.int32] | None,
        facts: Mapping[str, str],
        classes: Sequence[str] = (),
    ) -> None:
        self._files = files
        self._labels = labels
        self._facts = dict(facts)
        self._classes = list(classes)
        self._ahead = ReadAhead()

    @property
    def sample_spec(self) -> Any:
        """A dict with the leaf `"image"`, of varying size, and `"label"` where there are classes."""
        labels = {} if self._labels is None else {"label": jax.ShapeDtypeStruct((), np.int32)}
        return {"image": VARYING, **labels}

    @property
    def class_names(self) -> Mapping[str, Sequence[str]]:
        """The name of each label, from 0 on; of a flat folder none."""
        return {"label": list(self._classes)} if self._classes else {}

    def __len__(self) -> int:
        return len(self._files)

    def __reduce__(self) -> Any:
        return EncodedFolder, (self._files, self._labels, self._facts, self._classes)

    def name(self, record: int) -> str:
        """Returns how errors call a record."""
        return f"{self._files[record]}, record {record}"

    @property
    def cut_dims(self) -> Sequence[int]:
        """0 for each leaf."""
        return [0] * len(self.sample_spec)

    def read(self, indices: Indices, out: Any) -> None:
        """Reads whole files."""
        names = sorted(self.sample_spec)
        self.read_slices(indices, [()] * len(names), [out[name] for name in names])

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        """Reads whole files, or only the labels, which opens none."""
        check_indices(indices, len(self._files), where=self._facts["folder"])
        wanted = dict(zip(sorted(self.sample_spec), out, strict=True))
        images, labels = wanted["image"], wanted.get("label")
        if images is not None:
            with self._ahead.watch(len(indices)):
                if self._ahead.is_cold:
                    self.prepare(indices)
                with span("read", "image folder"):
                    for row, record in enumerate(indices.tolist()):
                        images[row] = self._bytes(record)
        if self._labels is not None and labels is not None:
            np.take(self._labels, indices, out=labels, mode="clip")

    def prepare(self, indices: Indices) -> None:
        """Asks the kernel to bring files into its page cache, where a read has waited for the disk lately."""
        if self._ahead.is_cold:
            for record in indices.tolist():
                with contextlib.suppress(OSError), Path(self._files[record]).open("rb") as file:
                    ask_ahead(file.fileno(), 0, 0)

    def describe(self) -> Mapping[str, str]:
        """Returns format, folder, samples and classes."""
        return {**self._facts, "samples": f"{len(self._files):,}"}

    def _bytes(self, record: int) -> bytes:
        path = self._files[record]
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (two thirds of the time of Path.read_bytes)
                return file.readall()
        except OSError as error:
            raise ReadError(
                f"{path}, record {record}: cannot be read ({error}); restore it or open the folder anew"
            ) from error


def has_images(path: Path) -> bool:
    """Says whether a folder holds images, or subfolders that do."""
    return bool(_images(path)) or any(_images(child) for child in _classes(path))


def open_image_folder(path: Path, *, image_size: tuple[int, int] | None = None, decode: Decode = "fast") -> ImageFolder:
    """Opens a folder with one subfolder per class, or a flat one without labels.

    **Arguments:** `image_size`: `(height, width)` in pixels to resize to; needed unless all images have one size.
    `decode`: as in `braidax.data.decoded`.

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
        return ImageFolder([f"{path}/{name}" for name in flat], None, image_size=image_size, decode=decode, facts=facts)
    if empty := [child for child, names in per_class.items() if not names]:
        raise FormatError(
            f"{empty[0]}: this class folder holds no image; expected {', '.join(sorted(IMAGE_SUFFIXES))}: remove it, "
            "or open it instead if the classes are inside"
        )
    files = [f"{child}/{name}" for child, names in per_class.items() for name in names]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(names) for names in per_class.values()])
    names = [child.name for child in classes]
    facts["classes"] = listed(names)
    return ImageFolder(files, labels, image_size=image_size, decode=decode, facts=facts, classes=names)


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
