"""Inception v3, on images of any kind."""

from pathlib import Path

from braidax.errors import ArgumentError
from braidax.tasks.image_data import open_images
from braidax.tasks.inception_model import MIN_SIZE, InceptionV3
from braidax.tasks.task import Task, image_task

_PRESETS: dict[str, tuple[float, tuple[int, int, int], int]] = {
    "full": (1.0, (3, 4, 2), 299),
    "small": (0.25, (3, 4, 2), 139),
    "tiny": (1 / 32, (1, 1, 1), MIN_SIZE),
}


def inception_v3(path: str | Path | None = None, *, preset: str = "full", image_size: int | None = None) -> Task:
    """Returns the task to classify images by Inception v3, with an auxiliary head whose loss counts 0.4 while training.

    **Arguments:** `path`: CIFAR or MNIST as downloaded, or a folder that holds `train` and `val` with a folder of
    images per class, as ImageNet's; by default handwritten digits. `preset`: `"full"` is the published network
    (23,834,568 parameters at 1000 classes, and 3,326,696 in the auxiliary head), `"small"` has a quarter of the
    filters, `"tiny"`, for tests, 1/32 and one block of each kind. `image_size`: height and width in pixels, at least
    75; by default 299, 139 and 75.

    **Raises:** `FormatError` when the files are not usable; `ArgumentError` for a preset or a size that is none.
    """
    if preset not in _PRESETS:
        raise ArgumentError(f"preset={preset!r} is unknown; the presets are {', '.join(_PRESETS)}")
    width, num_blocks, size = _PRESETS[preset]
    if image_size is not None and image_size < MIN_SIZE:
        raise ArgumentError(f"image_size={image_size}: Inception v3 needs at least {MIN_SIZE} pixels")
    size = image_size or size
    images = open_images(path, size, folder_size=size)
    model = InceptionV3(images.num_classes, width, num_blocks)
    return image_task(model, images.train, images.test, batch_size=32, epochs=10, learning_rate=1e-3)
