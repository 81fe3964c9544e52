"""Batches gathered from columns into the memory of tensors: the same as torch's, and whose memory is used again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset, TensorDataset

import braidax as bx
from braidax.errors import RecordError
from braidax.torch import DataLoader, hugging_face
from braidax.torch.hugging_face import viewed
from braidax.torch.memory import Memory

WIDE = 8192  # values of a row: batches of 8 rows are large enough for their memory to be used again


def wide(num_rows: int = 40) -> torch.Tensor:
    return torch.arange(num_rows * WIDE, dtype=torch.int32).reshape(num_rows, WIDE)


def npz(folder: Path) -> bx.data.Source:
    np.savez(folder / "data.npz", x=np.arange(120, dtype=np.float32).reshape(40, 3), n=np.arange(40))
    return bx.open(folder / "data.npz")


def npy(folder: Path) -> bx.data.Source:
    np.save(folder / "data.npy", np.arange(240, dtype=np.uint16).reshape(40, 3, 2))
    return bx.open(folder / "data.npy")


def images() -> datasets.Dataset:
    pixels = np.arange(40 * 6, dtype=np.uint8).reshape(40, 2, 3)
    features = datasets.Features({"image": datasets.Array2D((2, 3), "uint8"), "label": datasets.Value("int32")})
    return datasets.Dataset.from_dict({"image": pixels, "label": np.arange(40)}, features)


class Negated(TensorDataset):
    """A class of the user's own, whose samples are not its tensors' rows."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(-tensor for tensor in super().__getitem__(index))


GATHERED: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda folder: TensorDataset(wide(), torch.arange(40)),
    "dtypes": lambda folder: TensorDataset(
        torch.arange(80.0).bfloat16().reshape(40, 2), torch.arange(40) % 3 == 0, torch.arange(40) * 1j
    ),
    "not contiguous": lambda folder: TensorDataset(torch.arange(120.0).reshape(3, 40).T),
    "no width": lambda folder: TensorDataset(torch.zeros(40, 0), torch.arange(40)),
    "subset": lambda folder: Subset(TensorDataset(wide()), [3, 1, 39, 0, 7, 7]),
    "subset of a subset": lambda folder: Subset(Subset(TensorDataset(wide()), range(5, 30)), range(2, 20, 3)),
    "npz": npz,
    "npy": npy,
    "slice": lambda folder: npz(folder)[5:35:2],
    "table": lambda folder: datasets.Dataset.from_dict({"x": wide().numpy()}).with_format("torch"),
    "subset of a table": lambda folder: Subset[Any](cast(Any, images().with_format("numpy")), range(30, 10, -1)),
    "images": lambda folder: images().with_format("torch"),
}
LONG_WAY: dict[str, Callable[[Path], Any]] = {
    "class of the user": lambda folder: Negated(torch.arange(40)),
    "gradients": lambda folder: TensorDataset(torch.arange(40.0, requires_grad=True)),
    "negative indices": lambda folder: Subset(TensorDataset(torch.arange(40)), [-1, 3, -40]),
    "bools": lambda folder: datasets.Dataset.from_dict({"x": [True, False] * 20}).with_format("torch"),
}


@pytest.mark.parametrize("threads", [None, 0, 3])
@pytest.mark.parametrize("data", GATHERED | LONG_WAY)
def test_columns_give_the_batches_of_torch(data: str, threads: int | None, tmp_path: Path) -> None:
    dataset = (GATHERED | LONG_WAY)[data](tmp_path)
    loader = DataLoader(dataset, batch_size=8, threads=threads)
    theirs = list(TorchLoader(dataset, batch_size=8))
    for _ in range(2):  # what the first epoch found serves the second
        ours = list(loader)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert type(mine) is type(other)
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert (loader._gathered is not None and loader._gathered._like is not None) == (data in GATHERED)


def test_a_batch_that_is_held_keeps_its_values_and_memory_that_is_free_is_used_again() -> None:
    loader = DataLoader(TensorDataset(wide(80)), batch_size=8, threads=0)
    held, arrays, addresses = list[Any](), list[Any](), list[int]()
    for _ in range(3):
        for number, (batch,) in enumerate(loader):
            addresses.append(batch.data_ptr())
            assert batch[:, 0].tolist() == [WIDE * row for row in range(8 * number, 8 * number + 8)]
            if number == 2:
                held.append(batch[3:5])  # a view
                arrays.append(batch.numpy()[7])  # and an array
            del batch
    assert len(set(addresses[1:])) < 8
    assert all(view[:, 0].tolist() == [WIDE * 19, WIDE * 20] for view in held)
    assert all(array[0] == WIDE * 23 for array in arrays)
    assert len({array.__array_interface__["data"][0] for array in arrays}) == 3


def test_memory_holds_few_tensors_that_nobody_uses() -> None:
    memory = Memory()
    used = [memory.tensor((1 << 16,), torch.uint8) for _ in range(9)]
    del used
    (free,) = memory._free.values()
    assert len(free) == 4
    assert memory.tensor((10,), torch.float64).shape == (10,)
    assert len(memory._free) == 1


def test_rows_of_many_chunks_are_gathered_by_their_addresses() -> None:
    parts = [datasets.Dataset.from_dict({"x": np.full((3, 5), number, np.int16)}) for number in range(40)]
    dataset = datasets.concatenate_datasets(parts).with_format("torch")
    assert dataset.data.column("x").num_chunks == 40
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    for _ in range(2):
        batches = list(loader)
        found = torch.cat([batch["x"] for batch in batches])
        assert sorted(found[:, 0].tolist()) == [row // 3 for row in range(120)]
        assert torch.equal(found, found[:, :1].expand(-1, 5))
    assert loader._gathered is not None
    assert loader._gathered._like is not None


def test_a_format_that_changes_between_epochs_is_found_anew() -> None:
    dataset = datasets.Dataset.from_dict({"x": np.arange(20), "y": np.arange(20.0)}).with_format("torch")
    loader = DataLoader(dataset, batch_size=10)
    assert list(next(iter(loader))) == ["x", "y"]
    dataset.set_format("torch", columns=["y"], dtype=torch.float64)
    assert [batch["y"].dtype for batch in loader] == [torch.float64] * 2
    assert all(list(batch) == ["y"] for batch in loader)


def test_lists_of_lists_that_differ_are_not_taken_for_an_array() -> None:
    found = viewed(pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])[1:])
    assert found is not None
    assert found.tolist() == [[[5, 6], [7, 8]]]
    assert viewed(pa.array([[[1, 2], [3, 4]], [[5, 6], [7]]])) is None
    assert viewed(pa.array([[[1, 2]], [[5, 6], [7, 8]]])) is None
    assert viewed(pa.array([[[1, 2]], [[5, None]]])) is None
    assert viewed(pa.array([[[1, 2]], [None]])) is None
    assert viewed(pa.array([True, False])) is None


def test_an_error_of_a_source_names_the_record(tmp_path: Path) -> None:
    source = npz(tmp_path)

    def broken(sample: Any) -> Any:
        if (np.asarray(sample["n"]) == 21).any():
            raise ValueError("it is 21")
        return sample

    loader = DataLoader(bx.data.mapped(source, broken), batch_size=8, threads=2)
    found = list[Any]()
    with pytest.raises(RecordError, match="it is 21"):
        for batch in loader:
            found.append(batch["n"].tolist())
    assert found == [list(range(8)), list(range(8, 16))]


def test_rows_that_a_column_does_not_have_are_not_read() -> None:
    """A data set's own choice of rows, which may come from a file, is looked at before memory is."""
    column = hugging_face._Column(pa.chunked_array([pa.array([1, 2]), pa.array([3])]))
    out = np.zeros(2, np.int64)
    assert column.gather(np.array([2, 0]), out)
    assert out.tolist() == [3, 1]
    for rows in ([0, -1], [-2, 0], [1, 3]):
        assert not column.gather(np.array(rows), out)
