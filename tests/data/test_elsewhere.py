"""Sources are data sources of other libraries as they stand: torch, Grain and, at night, tf.data."""

from typing import Any, cast

import numpy as np
import pytest
import torch

import braidax.data as data
from braidax.torch import DataLoader as DropIn
from tests.support.data.numbered import Numbers


def watched(num_samples: int) -> tuple[data.Source, list[int]]:
    """Returns a source, and how many samples each read of it brings."""
    windows: list[int] = []
    source = Numbers(num_samples, before=lambda indices: windows.append(len(indices)))
    return data.filter(source, lambda sample: sample["id"] % 2 == 0), windows


def test_torch() -> None:
    source, windows = watched(80)
    windows.clear()
    batches = list(torch.utils.data.DataLoader(cast(Any, source), batch_size=8, shuffle=True))
    assert sorted(number for batch in batches for number in batch["id"].tolist()) == list(range(0, 80, 2))
    for batch in batches:
        torch.testing.assert_close(batch["x"][:, 0], batch["id"].to(torch.float32))
    assert windows == [8] * 5  # each batch is one read
    sampled = torch.utils.data.Subset(cast(Any, source), [3, 1])
    assert [int(sampled[place]["id"]) for place in range(2)] == [6, 2]


def test_the_drop_in_for_torch() -> None:
    source, windows = watched(80)
    windows.clear()
    batches = [batch["id"].tolist() for batch in DropIn(source, batch_size=8, threads=2)]
    assert batches == [list(range(start, start + 16, 2)) for start in range(0, 80, 16)]
    assert sum(windows) <= 40 + 8  # and some are read as many at a time


def test_grain() -> None:
    grain = pytest.importorskip("grain")
    source, _ = watched(80)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    dataset = grain.MapDataset.source(source)
    assert [int(sample["id"]) for sample in dataset[:3]] == [0, 2, 4]
    batches = list(dataset.shuffle(seed=3).batch(8))
    assert sorted(number for batch in batches for number in batch["id"].tolist()) == list(range(0, 80, 2))
    assert batches[0]["x"].shape == (8, 6)
    loader = grain.DataLoader(
        data_source=source, sampler=grain.samplers.SequentialSampler(40, grain.sharding.NoSharding()), worker_count=0
    )
    assert [int(sample["id"]) for sample in loader] == list(range(0, 80, 2))


@pytest.mark.slow
def test_tf_data() -> None:
    tf = pytest.importorskip("tensorflow")
    source, windows = watched(80)
    windows.clear()

    def read(rows: np.ndarray) -> Any:
        return data.to_numpy(source[rows])["id"]

    indices = tf.data.Dataset.range(len(source)).shuffle(len(source), seed=1).batch(8)
    batches = list(indices.map(lambda rows: tf.numpy_function(read, [rows], tf.int32)).as_numpy_iterator())
    assert sorted(number for batch in batches for number in batch.tolist()) == list(range(0, 80, 2))
    assert windows == [8] * 5
    signature = {"id": tf.TensorSpec((), tf.int32), "x": tf.TensorSpec((6,), tf.float32)}
    generated = tf.data.Dataset.from_generator(lambda: iter(source), output_signature=signature)
    assert [int(sample["id"]) for sample in generated] == list(range(0, 80, 2))
