"""Images that are made up: CIFAR-10's binary version, and folders of JPEG files as ImageNet's are."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.errors import import_extra

from .whole import written_whole

_PIXELS = 3 * 32 * 32
_NUM_FILES, _NUM_CLASSES = 5, 10
_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_QUALITY = 92
_BLOCK = 8  # pixels that look alike: JPEG files of noise would be larger than those of photographs


def write_cifar10(folder: str | Path, *, num_train: int = 10_000, num_test: int = 500, seed: int = 0) -> Path:
    """Writes files like those of CIFAR-10's binary version; those that are there are left as they are.

    **Arguments:** `num_train`: images, a multiple of 5, the number of files.

    **Returns:** the folder `cifar-10-batches-bin` inside of `folder`.
    """
    random = np.random.default_rng(seed)

    def write(part: Path) -> None:
        (part / "batches.meta.txt").write_text("".join(f"{name}\n" for name in _NAMES))
        names = [(f"data_batch_{number}.bin", num_train // _NUM_FILES) for number in range(1, _NUM_FILES + 1)]
        for name, count in [*names, ("test_batch.bin", num_test)]:
            records = random.integers(0, 256, (count, 1 + _PIXELS), np.uint8)
            records[:, 0] %= _NUM_CLASSES
            (part / name).write_bytes(records.tobytes())

    return written_whole(Path(folder) / "cifar-10-batches-bin", write)


def write_image_folders(
    folder: str | Path,
    *,
    num_classes: int = 10,
    num_each: int = 40,
    size: tuple[int, int] = (375, 500),
    seed: int = 0,
) -> Path:
    """Writes `train` and `val` with a folder of JPEG files for each class; what is there is left as it is.

    **Arguments:** `num_each`: images of a class to train; a fifth of it to test. `size`: height and width, by default
    what most of ImageNet's have.

    **Returns:** the folder that holds both.
    """
    cv2: Any = import_extra("cv2", "images", purpose="writing JPEG files")
    random = np.random.default_rng(seed)

    def write(part: Path) -> None:
        for split, count in (("train", num_each), ("val", max(1, num_each // 5))):
            for number in range(num_classes):
                place = part / split / f"n{number:08d}"
                place.mkdir(parents=True)
                for image in range(count):
                    encoded = cv2.imencode(".jpg", _picture(random, size), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1]
                    (place / f"{image:05d}.jpg").write_bytes(encoded.tobytes())

    return written_whole(Path(folder) / f"images-{num_classes}x{num_each}-{size[0]}x{size[1]}", write)


def _picture(random: np.random.Generator, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Returns blocks of color with some noise, which take about as many bytes as a photograph does."""
    rows, columns = (-(-pixels // _BLOCK) for pixels in size)
    blocks = random.integers(0, 256, (rows, columns, 3), np.uint8).repeat(_BLOCK, 0).repeat(_BLOCK, 1)
    noise = random.integers(0, 24, (*size, 3), np.uint8)
    return (blocks[: size[0], : size[1]] // 2 + noise).astype(np.uint8)
