"""What the benchmark reads, made by rule: token records, texts and photographs, each in the formats of all systems."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.harness import absent
from benchmarks.harness.inputs import made_whole

TOKENS = 512  # in a record
PHOTO = (375, 500)  # height and width
_WORDS = (
    "loss",
    "shuffle",
    "gather",
    "the",
    "of",
    "a",
    "window",
    "batch",
    "token",
    "record",
    "and",
    "to",
    "is",
    "read",
)


def token_array(num_records: int) -> NDArray[np.uint16]:
    """Returns tokens: uint16 `[num_records, 512]`."""
    return np.random.default_rng(0).integers(0, 50_000, (num_records, TOKENS), dtype=np.uint16)


def write_tokens(folder: Path, num_records: int) -> Path:
    """Writes the records as a NumPy file."""
    path = folder / f"tokens_{num_records}.npy"
    if not path.exists():
        with made_whole(path) as unfinished, unfinished.open("wb") as file:
            np.save(file, token_array(num_records))
    return path


def write_tokens_for_hugging_face(npy: Path) -> Path:
    """Writes the same records as a Hugging Face folder with a column of fixed length, if its library is there."""
    folder = npy.with_name(f"{npy.stem}_hf")
    if folder.exists() or absent("datasets"):
        return folder
    import datasets
    import pyarrow

    datasets.disable_progress_bars()
    column: Any = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.load(npy).ravel()), TOKENS)
    dataset = datasets.Dataset(pyarrow.table({"tokens": column}))
    with made_whole(folder) as unfinished:
        dataset.save_to_disk(str(unfinished))
    return folder


def texts(num_records: int) -> list[str]:
    """Returns texts of 20 to 400 words."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(20, 400, num_records)
    words = np.array(_WORDS)[rng.integers(0, len(_WORDS), lengths.sum())]
    borders = np.cumsum(lengths)[:-1]
    return [" ".join(part) for part in np.split(words, borders)]


def write_texts(folder: Path, num_records: int) -> Path:
    """Writes texts, a line each."""
    path = folder / f"texts_{num_records}.txt"
    if not path.exists():
        with made_whole(path) as unfinished:
            unfinished.write_text("\n".join(texts(num_records)))
    return path


def write_texts_for_hugging_face(lines: Path) -> Path:
    """Writes the same texts as a Hugging Face folder, if its library is there."""
    folder = lines.with_name(f"{lines.stem}_hf")
    if folder.exists() or absent("datasets"):
        return folder
    import datasets

    datasets.disable_progress_bars()
    with made_whole(folder) as unfinished:
        datasets.Dataset.from_dict({"text": lines.read_text().splitlines()}).save_to_disk(str(unfinished))
    return folder


def write_photos(folder: Path, num_images: int) -> Path:
    """Writes JPEG files of 500 x 375 pixels, quality 90, in ten class folders; detail as photographs have it."""
    path = folder / f"photos_{num_images}"
    if not path.exists():
        with made_whole(path) as unfinished:
            _write_photos(unfinished, num_images)
    return path


def _write_photos(folder: Path, num_images: int) -> None:
    rng, (height, width) = np.random.default_rng(2), PHOTO
    for number in range(num_images):
        target = folder / f"class{number % 10}" / f"{number:06}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        layers = [
            np.asarray(
                Image.fromarray(rng.integers(0, 256, (size[0], size[1], 3), dtype=np.uint8)).resize(
                    (width, height), Image.Resampling.BICUBIC
                ),
                np.float32,
            )
            for size in ((6, 8), (24, 32), (94, 125))
        ]
        pixels = 0.5 * layers[0] + 0.3 * layers[1] + 0.2 * layers[2]
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(target, "JPEG", quality=90)


def jpeg_bytes(path: Path) -> int:
    """Returns the mean size of the JPEG files in a folder."""
    sizes = [file.stat().st_size for file in path.rglob("*.jpg")]
    return sum(sizes) // max(len(sizes), 1)


def decoded(path: str | Path | bytes, size: int) -> NDArray[np.uint8]:
    """Returns a JPEG as uint8 `[size, size, 3]`, decoded and resized by Pillow as a torchvision user would."""
    opened: Any = io.BytesIO(path) if isinstance(path, bytes) else path
    with Image.open(opened) as image:
        return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))


def bring_to_page_cache(path: Path) -> None:
    """Reads a file, or the files of a folder, through."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def drop_from_page_cache(path: Path) -> None:
    """Takes a file, or the files of a folder, out of the kernel's page cache, in a process of its own.

    A page that is mapped anywhere stays: nothing here maps these files when it is called.
    """
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    drop = (
        "import os, sys\n"
        "for name in sys.argv[1:]:\n"
        "    descriptor = os.open(name, os.O_RDONLY)\n"
        "    os.fsync(descriptor)\n"
        "    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "    os.close(descriptor)\n"
    )
    subprocess.run([sys.executable, "-c", drop, *map(str, files)], check=True, timeout=120)
