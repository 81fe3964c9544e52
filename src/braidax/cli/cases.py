"""The cases of `braidax study`: the ready-made tasks, at sizes that a small machine can run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from braidax.data.storage.derived import cache_folder
from braidax.errors import ArgumentError
from braidax.tune.study import Case, Workload

if TYPE_CHECKING:
    from braidax.tasks.task import Task

_NUM_STEPS = 10_000  # of the optimizer's schedule, which no study comes to the end of


@dataclass(frozen=True)
class _Size:
    """How large a case is. **Fields:** `batch_size`: samples. `model`: in words. `options`: of its task."""

    batch_size: int
    model: str
    options: dict[str, int | str] = field(default_factory=dict[str, int | str])


@dataclass(frozen=True)
class _Named:
    """A case. **Fields:** `data`: the real samples, in words. `made`: those that stand in for them; None where the real
    ones are at hand. `write`: these, into a folder."""

    title: str
    data: str
    made: str | None
    make: Callable[..., "Task"]
    write: Callable[[Path], Path] | None
    full: _Size
    quick: _Size
    mixes_samples: bool = True


def _digits(path: Path | None, *, stages: int) -> "Task":
    from braidax.tasks.digits import digits
    from braidax.tasks.resnet_model import WideResNet
    from braidax.tasks.task import image_task

    task = digits(cache_folder() / "digits")
    model = WideResNet(10, stage_sizes=(1,) * stages, num_filters=8, block="basic", stem="plain")
    return image_task(model, task.train, task.test, batch_size=128, epochs=16, learning_rate=1e-2)


def _resnet(path: Path | None, *, num_layers: int, preset: str, image_size: int | None = None) -> "Task":
    from braidax.tasks.resnet import resnet

    return resnet(path, preset=preset, num_layers=num_layers, image_size=image_size)


def _bert(path: Path | None, *, preset: str) -> "Task":
    from braidax.tasks.bert import bert

    return bert(path, preset=preset)


def _cifar(folder: Path) -> Path:
    from braidax.tasks.generated import write_cifar10

    return write_cifar10(folder)


def _images(folder: Path) -> Path:
    from braidax.tasks.generated import write_image_folders

    return write_image_folders(folder)


def _reviews(folder: Path) -> Path:
    from braidax.tasks.generated import write_reviews

    return write_reviews(folder)


def _small(layers: int, batch_size: int, image_size: int | None = None) -> tuple[_Size, _Size]:
    """Returns the sizes of a residual network."""
    given: dict[str, int | str] = {"num_layers": layers}
    if image_size is not None:
        given["image_size"] = image_size
    pixels = f"{image_size or 32}×{image_size or 32} pixels"
    full = _Size(batch_size, f"ResNet-{layers} with 16 filters, {pixels}", {**given, "preset": "small"})
    tiny = _Size(
        batch_size, f"ResNet-{layers} with 4 filters and a block a stage, {pixels}", {**given, "preset": "tiny"}
    )
    return full, tiny


_WRN = "wide ResNet, width factor 2, 8 filters"
_CIFAR = ("CIFAR-10", "10,000 random images in the files of CIFAR-10's binary version")
_IMAGENET = ("ImageNet", "400 made-up JPEG files of 500×375 pixels in 10 folders, as ImageNet's lie")
_IMDB = ("IMDB", "2,000 texts of made-up words in the folders of aclImdb")

_CASES: dict[str, _Named] = {
    "digits": _Named(
        "digits / WRN",
        "1,500 real 8×8 images that scikit-learn ships",
        None,
        _digits,
        None,
        _Size(64, f"{_WRN}, 3 blocks", {"stages": 3}),
        _Size(64, f"{_WRN}, 1 block", {"stages": 1}),
    ),
    "cifar-resnet18": _Named("CIFAR / ResNet-18", *_CIFAR, _resnet, _cifar, *_small(18, 32)),
    "cifar-resnet50": _Named("CIFAR / ResNet-50", *_CIFAR, _resnet, _cifar, *_small(50, 16)),
    "imagenet-resnet18": _Named("ImageNet / ResNet-18", *_IMAGENET, _resnet, _images, *_small(18, 32, 96)),
    "imagenet-resnet50": _Named("ImageNet / ResNet-50", *_IMAGENET, _resnet, _images, *_small(50, 16, 96)),
    "imdb-bert": _Named(
        "IMDB / BERT",
        *_IMDB,
        _bert,
        _reviews,
        _Size(8, "BERT of 4 layers, width 256, texts of 256 words", {"preset": "small"}),
        _Size(32, "BERT of 2 layers, width 32, texts of 32 words", {"preset": "tiny"}),
        mixes_samples=False,
    ),
}
CASES = tuple(_CASES)
"""Their names."""


def find_case(name: str, data: Path | None, *, quick: bool) -> Case:
    """Returns a case by its name, its samples being there: those of `data`, or made-up ones in the cache folder.

    **Raises:** `ArgumentError` for a name that is none, for data that is not there, and that a case does not take.
    """
    if name not in _CASES:
        raise ArgumentError(f"--case {name}: there is no such case; expected one of {', '.join(_CASES)}")
    named = _CASES[name]
    if data is not None and named.write is None:
        raise ArgumentError(f"--data {data}: the case {name} has its own samples, {named.data}; leave it out")
    if data is not None and not data.exists():
        raise ArgumentError(f"--data {data}: there is nothing; expected {named.data} as downloaded")
    size = named.quick if quick else named.full
    path = data if data is not None or named.write is None else named.write(cache_folder() / "generated")
    real = named.data if data is None else f"{named.data}, {data}"
    if data is None and named.made is not None:
        real = f"{named.made} (not the real {named.data})"
    facts = {"model": size.model, "batch": f"{size.batch_size} samples", "data": real}
    options = size.options
    make = partial(_workload, name, path, options)
    return Case(name, named.title, facts, make, size.batch_size, named.mixes_samples)


def _workload(name: str, path: Path | None, options: dict[str, int | str]) -> Workload:
    task = _CASES[name].make(path, **options)
    return Workload(task.loss, task.init, task.optimizer(_NUM_STEPS), task.train)
