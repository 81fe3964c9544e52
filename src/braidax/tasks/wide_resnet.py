"""A wide residual network on CIFAR-100 and MNIST, read from the archives as they are downloaded."""

from pathlib import Path

from braidax.data import open as open_source
from braidax.errors import ArgumentError
from braidax.tasks.image_data import count_classes
from braidax.tasks.resnet_model import WideResNet
from braidax.tasks.task import Task, image_task

_SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "full": ((3, 4, 6, 3), 256),
    "small": ((1, 1, 1, 1), 32),
    "tiny": ((1, 1, 1, 1), 4),
}
_GRAY_SIZE, _COLOR_SIZE = 30, 224


def wide_resnet(path: str | Path, *, preset: str = "full", image_size: int | None = None) -> Task:
    """Returns the task to classify images by a wide residual network with bottleneck blocks of width factor 2.

    **Arguments:** `path`: CIFAR-10 or CIFAR-100 (an archive or a folder, python or binary version) or a folder with
    MNIST's files. `preset`: `"full"` has 50 layers in 4 stages and 256 filters in the first (1.07 billion parameters at
    100 classes); `"small"` has 14 layers and 32 filters; `"tiny"` has 14 layers and 4, for tests. `image_size`: height
    and width in pixels to resize to; by default 224 for color images and 30 for gray ones.

    **Raises:** `FormatError` when the files are not usable; `ArgumentError` for a preset or a size that is none.
    """
    if preset not in _SHAPES:
        raise ArgumentError(f"preset={preset!r} is unknown; the presets are {', '.join(_SHAPES)}")
    if image_size is not None and image_size < 1:
        raise ArgumentError(f"image_size={image_size} must be a positive number of pixels, such as 224")
    original = open_source(path, split="train")
    num_classes = count_classes(original, path)
    gray = original.sample_spec["image"].shape[-1] == 1
    size = image_size or (_GRAY_SIZE if gray else _COLOR_SIZE)
    train, test = (open_source(path, split=split, image_size=(size, size)) for split in ("train", "test"))
    stage_sizes, num_filters = _SHAPES[preset]
    model = WideResNet(num_classes, stage_sizes=stage_sizes, num_filters=num_filters)
    return image_task(model, train, test, batch_size=64, epochs=10, learning_rate=1e-3)
