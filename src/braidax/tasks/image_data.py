"""Images for the tasks that classify them: the archives of CIFAR and MNIST, image folders, or handwritten digits."""

from dataclasses import dataclass
from pathlib import Path

from braidax.data import Source, center_crop, flipped, random_resized_crop, resized
from braidax.data import open as open_source
from braidax.data.storage.derived import cache_folder
from braidax.errors import ArgumentError
from braidax.tasks.digits import digits

_SHOWN = 0.875  # of the shorter side of an image to test


@dataclass(frozen=True)
class Images:
    """Samples `{"image": uint8 [size, size, channels], "label": int32 []}` to train and to test, and their classes."""

    train: Source
    test: Source
    num_classes: int


def open_images(path: str | Path | None, image_size: int | None, *, folder_size: int) -> Images:
    """Opens images in one size.

    **Arguments:** `path`: CIFAR or MNIST as downloaded; or a folder that holds `train` and `val` (or `test`), each with
    a folder of images per class, of which random parts, half of them mirrored, are to train and the centers to test;
    None: handwritten digits, written to the cache folder. `image_size`: height and width in pixels; None leaves images
    as large as they are, which those of a folder are not: they get `folder_size`.

    **Raises:** `FormatError` when the files are not usable; `ArgumentError` for a size that is none, or other samples.
    """
    if image_size is not None and image_size < 1:
        raise ArgumentError(f"image_size={image_size} must be a positive number of pixels, such as 224")
    if path is None:
        task = digits(cache_folder() / "digits")
        return Images(_sized(task.train, image_size), _sized(task.test, image_size), 10)
    folders = [Path(path) / name for name in ("train", "val", "test")]
    if folders[0].is_dir() and any(folder.is_dir() for folder in folders[1:]):
        train, test = (open_source(folder) for folder in (folders[0], next(f for f in folders[1:] if f.is_dir())))
        size = image_size or folder_size, image_size or folder_size
        num_classes = count_classes(train, folders[0])
        if count_classes(test, folders[0]) != num_classes:
            raise ArgumentError(f"path={str(path)!r} has other classes to test than the {num_classes} to train")
        return Images(flipped(random_resized_crop(train, size)), center_crop(test, size, fraction=_SHOWN), num_classes)
    train, test = (open_source(path, split=split) for split in ("train", "test"))
    num_classes = count_classes(train, path)
    return Images(_sized(train, image_size), _sized(test, image_size), num_classes)


def count_classes(source: Source, path: str | Path) -> int:
    """Returns how many classes images have. **Raises:** `ArgumentError` for samples that are no images with classes."""
    number = source.describe().get("classes", "").partition(":")[0]  # "10", or "3: cat, dog, owl"
    if not number.isdecimal() or "image" not in source.sample_spec:
        raise ArgumentError(
            f"path={str(path)!r} holds {source.sample_spec}; expected images with classes: CIFAR or MNIST as "
            "downloaded, or a folder that holds train and val with a folder of images per class"
        )
    return int(number)


def _sized(source: Source, image_size: int | None) -> Source:
    return source if image_size is None else resized(source, (image_size, image_size))
