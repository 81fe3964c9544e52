"""DLRM on Criteo's display advertising data, or on samples that are made up."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from braidax.data import Source
from braidax.data import open as open_source
from braidax.data.formats.records.index import RecordIndex
from braidax.data.formats.records.lines import scan_filled_lines
from braidax.data.formats.records.records import Decoder, RecordSource
from braidax.data.source import Indices, check_indices, prepare, source_at
from braidax.data.storage import open_files
from braidax.data.storage.files import Bytes
from braidax.data.transforms.wrapping import Wrapping
from braidax.errors import ArgumentError, FormatError, RecordError
from braidax.tasks.dlrm_model import Sizes, init_dlrm, predict_clicks
from braidax.tasks.task import Task, masked_mean

_NUM_DENSE = 13
# Different values of each categorical column in the Kaggle data set, as published with DLRM.
# fmt: off
_CARDINALITIES = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992, 5_461_306,
    10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)
# fmt: on
_NUM_FIELDS = 1 + _NUM_DENSE + len(_CARDINALITIES)
_DAYS = 7  # in the file; the last one is to test
_SEED = 0


@dataclass(frozen=True)
class _Preset:
    sizes: Sizes
    num_made_up: int
    batch_size: int = 2048


def _sizes(max_rows: int | None, bottom: tuple[int, ...], top: tuple[int, ...]) -> Sizes:
    rows = tuple(rows if max_rows is None else min(rows, max_rows) for rows in _CARDINALITIES)
    return Sizes(rows, _NUM_DENSE, bottom, top)


_PRESETS = {
    "full": _Preset(_sizes(None, (512, 256, 64, 16), (512, 256)), 1 << 18),
    "small": _Preset(_sizes(100_000, (512, 256, 64, 16), (512, 256)), 1 << 17),
    "tiny": _Preset(_sizes(200, (16, 4), (16,)), 1 << 12, batch_size=128),
}


def dlrm(path: str | Path | None = None, *, preset: str = "full") -> Task:
    """Returns the task to predict clicks from 13 numbers and 26 categories.

    A sample is `{"dense": int32 [13], "ids": int32 [26], "label": int32 []}`; the loss takes `log(1 + max(x, 0))` of
    the numbers. The metric besides the loss is the accuracy at a probability of 1/2.

    **Arguments:** `path`: Criteo's `train.txt` (tabs, no header), or its folder. A missing number or category is 0;
    the id of a category, which is hexadecimal, is its value modulo the rows of its table, so that some share a row. The
    last seventh of the lines is to test. By default samples are made up: ids by a power law, and clicks that depend on
    the numbers and on some of the ids. `preset`: `"full"` has tables of as many rows as Criteo's Kaggle data has
    values, width 16, and layers of 512, 256, 64, 16 and 512, 256, 1 (540,201,232 parameters in the tables, 475,985
    besides); `"small"` has 100,000 rows at most in a table, `"tiny"` 200, and smaller layers, for tests.

    **Raises:** `ArgumentError` for a preset that is none; `FormatError` for a file that is missing or empty; while
    reading, `RecordError` for a line that is not one of Criteo's.
    """
    if preset not in _PRESETS:
        raise ArgumentError(f"preset={preset!r} is unknown; the presets are {', '.join(_PRESETS)}")
    chosen = _PRESETS[preset]
    if path is None:
        samples = make_clicks(chosen.sizes.cardinalities, chosen.num_made_up)
        held_out = chosen.num_made_up // 8
        train = open_source({name: leaf[held_out:] for name, leaf in samples.items()})
        test = open_source({name: leaf[:held_out] for name, leaf in samples.items()})
    else:
        train, test = _open_criteo(Path(path), chosen.sizes.cardinalities)
    init = functools.partial(init_dlrm, sizes=chosen.sizes)
    return Task(train, test, init, _loss, _optimizer, chosen.batch_size, epochs=1)


def _optimizer(num_steps: int) -> optax.GradientTransformation:
    # From 0 on, so that a row that is seldom read learns as much when it is as one of every batch did at first.
    return optax.adagrad(0.02, initial_accumulator_value=0.0, eps=1e-8)


def make_clicks(cardinalities: Sequence[int], num_samples: int) -> dict[str, NDArray[np.int32]]:
    """Returns samples that are made up, always the same ones: `dense` `[n, 13]`, `ids` `[n, 26]`, `label` `[n]`, int32.

    An id is `floor((rows + 1)**u) - 1` for a uniform `u`, so that id `i` is about as frequent as `1 / (i + 1)`. About a
    third of the samples are clicks, and the ids of the first eight columns say most about which.
    """
    rng = np.random.default_rng(_SEED)
    rows = np.array(cardinalities)
    ids = np.minimum((rows + 1.0) ** rng.random((num_samples, len(rows))) - 1, rows - 1).astype(np.int32)
    dense = rng.exponential(2.0, (num_samples, _NUM_DENSE)) ** 2
    telling = ids[:, :8]
    effects = np.sin(
        12.9898 * telling + 78.233 * np.arange(telling.shape[1])
    )  # between −1 and 1, different for each id
    logits = 1.2 * effects.sum(axis=1) + 0.4 * (np.log1p(dense[:, :4]) - 1).sum(axis=1) - 1.6
    label = rng.random(num_samples) < 1 / (1 + np.exp(-logits))
    return {"dense": dense.astype(np.int32), "ids": ids, "label": label.astype(np.int32)}


def _loss(params: Any, batch: Any) -> Any:
    dense = jnp.log1p(jnp.maximum(batch["dense"], 0).astype(jnp.float32))
    logits = predict_clicks(params, dense, batch["ids"])
    losses = optax.sigmoid_binary_cross_entropy(logits, batch["label"])
    hits = (logits > 0) == (batch["label"] > 0)
    return masked_mean(losses, batch), {"accuracy": masked_mean(hits, batch)}


def _open_criteo(path: Path, cardinalities: Sequence[int]) -> tuple[Source, Source]:
    file = path / "train.txt" if path.is_dir() else path
    if not file.exists():
        raise FormatError(f"{file}: there is no such file; expected Criteo's train.txt as it lies in the archive")
    files = open_files(file)
    index = RecordIndex.build(files, scan_filled_lines, kind="filled-lines")
    whole = RecordSource(files, index, _Clicks(tuple(cardinalities)), {"format": "Criteo's clicks"})
    border = len(whole) - len(whole) // _DAYS
    if border == len(whole):
        raise FormatError(f"{file}: holds {len(whole)} lines, expected at least {_DAYS}, of which one is to test")
    return _Stretch(whole, 0, border), _Stretch(whole, border, len(whole))


@dataclass(frozen=True)
class _Clicks(Decoder):
    """Lines of a label, 13 numbers in decimal and 26 in hexadecimal digits, between tabs; numbers may be missing."""

    cardinalities: tuple[int, ...]

    @property
    def sample_spec(self) -> Any:
        shapes = {"dense": (_NUM_DENSE,), "ids": (len(self.cardinalities),), "label": ()}
        return {name: jax.ShapeDtypeStruct(shape, np.int32) for name, shape in shapes.items()}

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        for row, payload in enumerate(payloads):
            fields = bytes(payload).split(b"\t")
            try:
                label, *numbers = [int(field or b"0") for field in fields[: 1 + _NUM_DENSE]]
                values = [int(field or b"0", 16) for field in fields[1 + _NUM_DENSE :]]
                if len(fields) != _NUM_FIELDS or label not in (0, 1):
                    raise ValueError(f"{len(fields)} fields, label {fields[0][:8]!r}")
                out["dense"][row] = numbers
            except (ValueError, OverflowError) as error:
                raise RecordError(
                    f"{where(row)}: is no sample of Criteo's ({error}); expected {_NUM_FIELDS} fields between tabs: a "
                    f"label 0 or 1, {_NUM_DENSE} whole numbers and {len(self.cardinalities)} hexadecimal ones"
                ) from error
            out["label"][row] = label
            out["ids"][row] = [value % rows for value, rows in zip(values, self.cardinalities, strict=True)]


@dataclass(frozen=True)
class _Stretch(Wrapping):
    """The samples of a source from one number to before another."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def sample_spec(self) -> Any:
        return self.source.sample_spec

    def at(self, seed: int | None, epoch: int) -> Source:
        return _Stretch(source_at(self.source, seed, epoch), self.start, self.stop)

    def prepare(self, indices: Indices) -> None:
        prepare(self.source, indices[(indices >= 0) & (indices < len(self))] + self.start)

    def read(self, indices: Indices, out: Any) -> None:
        check_indices(indices, len(self), where=f"samples {self.start:,} to {self.stop - 1:,}")
        self.source.read(indices + self.start, out)

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), "samples": f"{len(self):,}, from number {self.start:,} on"}
