"""Residual networks of 18 and 50 layers, on images of any kind."""

from pathlib import Path
from typing import Literal

from braidax.errors import ArgumentError
from braidax.tasks.image_data import open_images
from braidax.tasks.resnet_model import WideResNet
from braidax.tasks.task import Task, image_task

_STAGES: dict[int, tuple[tuple[int, ...], Literal["basic", "bottleneck"]]] = {
    18: ((2, 2, 2, 2), "basic"),
    50: ((3, 4, 6, 3), "bottleneck"),
}
_PRESETS = {"full": (64, 1e-3), "small": (16, 3e-3), "tiny": (4, 1e-2)}  # filters, and the highest learning rate
_LARGE_SIZE, _MAX_SMALL_SIZE = 224, 64


def resnet(
    path: str | Path | None = None, *, preset: str = "full", num_layers: int = 50, image_size: int | None = None
) -> Task:
    """Returns the task to classify images by a residual network.

    Images of more than 64 pixels go through a 7×7 convolution and a maximum that quarter height and width; smaller ones
    through a 3×3 convolution.

    **Arguments:** `path`: CIFAR or MNIST as downloaded, or a folder that holds `train` and `val` with a folder of
    images per class, as ImageNet's; by default handwritten digits. `preset`: `"full"` has 64 filters in the first stage
    (25,557,032 parameters in 50 layers at 1000 classes, 11,689,512 in 18), `"small"` 16; `"tiny"`, for tests, has 4 and
    one block in each stage. `num_layers`: 18 or 50. `image_size`: height and width in pixels; by default those of the
    images, and 224 for those of a folder.

    **Raises:** `FormatError` when the files are not usable; `ArgumentError` for a preset, a number or a size that is
    none.
    """
    if preset not in _PRESETS:
        raise ArgumentError(f"preset={preset!r} is unknown; the presets are {', '.join(_PRESETS)}")
    if num_layers not in _STAGES:
        raise ArgumentError(f"num_layers={num_layers}: expected one of {', '.join(map(str, _STAGES))}")
    images = open_images(path, image_size, folder_size=_LARGE_SIZE)
    stage_sizes, block = _STAGES[num_layers]
    num_filters, learning_rate = _PRESETS[preset]
    model = WideResNet(
        images.num_classes,
        stage_sizes=(1,) * len(stage_sizes) if preset == "tiny" else stage_sizes,
        num_filters=num_filters,
        width_factor=1,
        block=block,
        stem="strided" if max(images.train.sample_spec["image"].shape[:2]) > _MAX_SMALL_SIZE else "plain",
    )
    return image_task(model, images.train, images.test, batch_size=128, epochs=10, learning_rate=learning_rate)
