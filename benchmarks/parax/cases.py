"""The cases: which data, which strategy on 4 processes x 2 devices."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray
from PIL import Image

import braidax as bx
from benchmarks.harness.inputs import made_whole
from benchmarks.parax.counting import Counted

NUM_PROCESSES, DEVICES_EACH = 4, 2
SIZE = 224  # pixels
SEQUENCE = 512  # tokens
PIXELS = {"photos": (1024, 768), "small photos": (SIZE, SIZE)}
"""Width and height of the JPEG files: such that decoding is the work, and such that it is little of it."""


@dataclass(frozen=True)
class Case:
    """What is loaded, and to where.

    **Fields:** `data`: `tokens`, or one of `PIXELS`. `strategy`: as in `shardings`. `folder`: of the files.
    `batch_size`: of the global batch; it divides the number of records. `threads`: that read and decode, per process.
    """

    data: str
    strategy: str
    folder: str
    batch_size: int
    threads: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.data}, {self.strategy}"

    @property
    def heavy(self) -> str:
        """The leaf that is most of the work; no two records have the same one."""
        return "input_ids" if self.data == "tokens" else "image"

    def source(self) -> Counted:
        """Opens the files."""
        if self.data == "tokens":
            return Counted(bx.open(f"{self.folder}/tokens.npz"), self.heavy, None)
        path = Path(self.folder) / self.data
        sizes = np.array([file.stat().st_size for file in sorted(path.rglob("*.jpg"))], np.int64)
        # Every pixel is decoded, as other loaders do; at a reduced scale it is a quarter less work.
        return Counted(bx.open(str(path), image_size=(SIZE, SIZE), decode="exact"), self.heavy, sizes)

    @property
    def num_batches(self) -> int:
        """Of an epoch."""
        return len(self.source()) // self.batch_size

    def arrays(self) -> dict[str, NDArray[Any]] | None:
        """Returns all samples by leaf, in memory, where the files hold arrays; None where samples are decoded."""
        if self.data != "tokens":
            return None
        with np.load(f"{self.folder}/tokens.npz") as file:
            return dict(file)

    def shardings(self) -> dict[str, NamedSharding]:
        """Returns the sharding of each leaf, on the devices of all processes."""
        return shardings(self.strategy, sorted(self.source().sample_spec))


def shardings(strategy: str, leaves: Sequence[str]) -> dict[str, NamedSharding]:
    """Returns the sharding of each leaf.

    `data`: the batch over all devices. `data_model`: over 2 groups of 4 devices, so that two processes hold each row.
    `sequence`: the same groups, each sequence cut over the 4 devices of one. `stages`: the leaf that is most of the
    work on the first two processes, the labels on the other two.
    """
    if strategy == "data":
        return dict.fromkeys(leaves, NamedSharding(_mesh((8,), ("data",)), PartitionSpec("data")))
    if strategy == "data_model":
        return dict.fromkeys(leaves, NamedSharding(_mesh((2, 4), ("data", "model")), PartitionSpec("data")))
    if strategy == "sequence":
        return dict.fromkeys(leaves, NamedSharding(_mesh((2, 4), ("data", "seq")), PartitionSpec("data", "seq")))
    first, second = (NamedSharding(_mesh((4,), ("data",), 4 * stage), PartitionSpec("data")) for stage in (0, 1))
    return {name: second if name in ("label", "labels") else first for name in leaves}


def on_one_mesh(strategy: str, leaves: Sequence[str]) -> dict[str, NamedSharding]:
    """Returns the shardings for a rule that knows one mesh only: stages are an axis that the batch does not use."""
    if strategy != "stages":
        return shardings(strategy, leaves)
    return dict.fromkeys(leaves, NamedSharding(_mesh((2, 4), ("stage", "data")), PartitionSpec("data")))


def write(folder: Path, *, num_photos: int, num_sequences: int) -> None:
    """Writes the files of all cases: photographs in ten classes, and what a masked language model is trained on."""
    tokens = folder / "tokens.npz"
    if not tokens.exists():
        with made_whole(tokens) as unfinished, unfinished.open("wb") as file:
            np.savez(file, allow_pickle=False, **_sequences(num_sequences))
    for name, pixels in PIXELS.items():
        if not (folder / name).exists():
            with made_whole(folder / name) as unfinished:
                _write_photos(unfinished, num_photos, pixels)


def _write_photos(folder: Path, num_photos: int, pixels: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    for number in range(num_photos):
        path = folder / f"class{number % 10}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        _photo(rng, pixels).save(path, "JPEG", quality=90)


def _photo(rng: np.random.Generator, pixels: tuple[int, int]) -> Image.Image:
    """Returns a picture that is as hard to decode as a photograph: large shapes, smaller ones, fine detail."""
    width, height = pixels

    def layer(rows: int, columns: int) -> Image.Image:
        noise = Image.fromarray(rng.integers(0, 256, (rows, columns, 3), dtype=np.uint8))
        return noise.resize(pixels, Image.Resampling.BICUBIC)

    shapes = Image.blend(layer(6, 8), layer(24, 32), 0.35)
    return Image.blend(shapes, layer(height // 2, width // 2), 0.2)


def _sequences(num_sequences: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    shape = (num_sequences, SEQUENCE)
    ids = rng.integers(1000, 30_522, shape, dtype=np.int32)
    masked = rng.random(shape) < 0.15
    lengths = rng.integers(SEQUENCE // 2, SEQUENCE + 1, (num_sequences, 1))
    return {
        "input_ids": np.where(masked, np.int32(103), ids),
        "attention_mask": (np.arange(SEQUENCE) < lengths).astype(np.uint8),
        "token_type_ids": (np.arange(SEQUENCE) >= lengths // 2).astype(np.uint8),
        "labels": np.where(masked, ids, np.int32(-100)),
    }


@functools.cache
def _mesh(shape: tuple[int, ...], axes: tuple[str, ...], first: int = 0) -> Mesh:
    devices = np.array(jax.devices())[first : first + int(np.prod(shape))]
    return Mesh(devices.reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))
