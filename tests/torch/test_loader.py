"""The drop-in for torch's DataLoader: the same batches, fetched in parallel; resumable, shared out among ranks."""

import collections
import itertools
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, StackDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from braidax.data.formats.arrays.arrays import from_arrays
from braidax.errors import ArgumentError, MissingExtra, RecordError, WaitTimeout
from braidax.torch import DataLoader
from braidax.torch import order as order_module
from braidax.torch.tempo import Tempo
from tests.support.gang.forks import fork_children

Point = collections.namedtuple("Point", ["x", "name"])


class Rows:
    """Samples made by a function of their index."""

    def __init__(self, row: Callable[[int], Any], length: int = 23) -> None:
        self.row = row
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.row(index)


class Columns(Rows):
    """The same, many at a time; notes how many were asked for at once."""

    def __init__(self, row: Callable[[int], Any], length: int = 23) -> None:
        super().__init__(row, length)
        self.asked: list[int] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(len(indices))
        return [self.row(index) for index in indices]


class Stream(IterableDataset):
    """Numbers in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


def record(index: int) -> dict[str, Any]:
    return {"x": np.full((2, 3), index, np.int16), "y": index / 2, "name": f"sample {index}", "raw": bytes([index])}


DATA: dict[str, Callable[[], Any]] = {
    "dict": lambda: Rows(record),
    "tuple": lambda: Rows(lambda index: (torch.arange(3) + index, index)),
    "namedtuple": lambda: Rows(lambda index: Point(torch.tensor(float(index)), f"p{index}")),
    "nested": lambda: Rows(lambda index: {"a": [index, {"b": np.float64(index)}], "c": (bool(index % 2),)}),
    "numbers": lambda: list(range(100, 123)),
    "getitems": lambda: Columns(record),
    "tensors": lambda: TensorDataset(torch.arange(46.0).reshape(23, 2), torch.arange(23)),
    "stack": lambda: StackDataset(a=torch.arange(23), b=list("abcdefghijklmnopqrstuvw")),
    "subset": lambda: Subset(TensorDataset(torch.arange(50)), range(3, 26)),
    "mapping": lambda: {index: index * 2 for index in range(23)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batches": {"batch_size": 5},
    "dropped": {"batch_size": 5, "drop_last": True},
    "exact": {"batch_size": 23},
    "large": {"batch_size": 100},
    "single": {"batch_size": None},
    "collated": {"batch_size": 4, "collate_fn": lambda samples: [len(samples), samples]},
    "converted": {"batch_size": None, "collate_fn": lambda sample: ("one", sample)},
    "sampler": {"batch_size": 4, "sampler": [3, 1, 4, 1, 5, 9, 2]},
    "single sampler": {"batch_size": None, "sampler": range(22, -1, -3)},
    "batch_sampler": {"batch_sampler": [[0, 5], [2], (7, 7, 1)]},
    "ranks": {"batch_size": 4, "sampler": lambda data: DistributedSampler(data, num_replicas=3, rank=1)},
}


def options_of(name: str, data: Any) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if callable(options.get("sampler")):
        options["sampler"] = options["sampler"](data)
    return options


def assert_same(ours: Any, theirs: Any) -> None:
    """Asserts that two batches are equal in type and value, all the way down."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(ours, np.ndarray):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs


def numbers(loader: Any) -> list[int]:
    return torch.cat([batch.reshape(-1) for batch in loader]).tolist()


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("threads", [None, 0, 3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("data", DATA)
def test_batches_are_those_of_torch(data: str, options: str, threads: int | None) -> None:
    dataset = DATA[data]()
    ours = DataLoader(dataset, **options_of(options, dataset), threads=threads)
    theirs = TorchLoader(dataset, **options_of(options, dataset))
    assert len(ours) == len(theirs)
    for _ in range(2):
        assert_same(list(ours), list(theirs))


@pytest.mark.parametrize("data", ["numbers", "subset", "getitems"])
def test_a_shuffled_epoch_has_every_sample_once(data: str) -> None:
    collate = {
        "collate_fn": lambda samples: torch.tensor([s["y"] * 2 if isinstance(s, dict) else s[0] for s in samples])
    }
    options: dict[str, Any] = {} if data == "numbers" else collate
    ours, theirs = (kind(DATA[data](), batch_size=4, shuffle=True, **options) for kind in (DataLoader, TorchLoader))
    first, second = numbers(ours), numbers(ours)
    assert sorted(first) == sorted(second) == sorted(numbers(theirs))
    assert first != second
    assert [len(batch) for batch in ours] == [len(batch) for batch in theirs]


def test_the_seed_is_drawn_from_torch() -> None:
    def epochs(generator: Any = None) -> list[list[int]]:
        loader = DataLoader(range(50), batch_size=7, shuffle=True, generator=generator)
        return [numbers(loader), numbers(loader)]

    torch.manual_seed(5)
    first = epochs()
    torch.manual_seed(5)
    assert epochs() == first
    assert epochs() != first
    assert epochs(torch.Generator().manual_seed(1)) == epochs(torch.Generator().manual_seed(1))
    assert epochs(torch.Generator().manual_seed(1)) != epochs(torch.Generator().manual_seed(2))


def test_set_epoch_chooses_the_order() -> None:
    loader = DataLoader(range(50), batch_size=7, shuffle=True)
    first, second = numbers(loader), numbers(loader)
    loader.set_epoch(0)
    assert numbers(loader) == first
    loader.sampler.set_epoch(1)  # what training scripts do
    assert numbers(loader) == second
    sampler = DistributedSampler(range(50), num_replicas=2, rank=0)
    loader = DataLoader(range(50), batch_size=7, sampler=sampler)
    assert numbers(loader) == numbers(loader)
    loader.set_epoch(3)
    assert sampler.epoch == 3


def test_a_thousand_million_samples_need_no_memory() -> None:
    class Endless(Rows):
        pass

    tracemalloc.start()
    try:
        batch = next(iter(DataLoader(Endless(lambda index: index, 10**9), batch_size=8, shuffle=True)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(batch.tolist())) == 8
    assert peak < 3_000_000


# ---- ranks


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(order_module, "rank_and_size", lambda: (rank, size))

    return become


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_samples", [48, 50, 59, 7, 1])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(
    num_samples: int, drop_last: bool, as_rank: Callable[[int, int], None]
) -> None:
    whole: list[list[int]] = []
    for size in (1, 2, 3, 4):
        parts: list[list[list[int]]] = []
        for rank in range(size):
            as_rank(rank, size)
            generator = torch.Generator().manual_seed(0)
            loader = DataLoader(range(num_samples), 12 // size, shuffle=True, drop_last=drop_last, generator=generator)
            parts.append(batches_of(loader))
            assert len(parts[-1]) == len(loader)
            assert len(loader.sampler) == sum(map(len, parts[-1]))
            assert len(loader.batch_sampler) == len(loader)
        for batches in zip(*parts, strict=True):
            assert len({len(batch) for batch in batches}) == 1
        together = [list(itertools.chain(*batches)) for batches in zip(*parts, strict=True)]
        if size == 1:
            whole = together
            assert sorted(itertools.chain(*whole)) == (
                sorted(range(num_samples)) if not drop_last else sorted(itertools.chain(*whole))
            )
        for batch, expected in zip(together, whole, strict=True):
            assert batch[: len(expected)] == expected
            assert len(batch) - len(expected) < size
            assert len(batch) == 12 or batch is together[-1]


def test_a_resumed_run_may_have_another_number_of_ranks(as_rank: Callable[[int, int], None]) -> None:
    as_rank(0, 1)
    loader = DataLoader(range(40), batch_size=8, shuffle=True)
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), batches_of(batches)
    parts = []
    for rank in range(2):
        as_rank(rank, 2)
        again = DataLoader(range(40), batch_size=4, shuffle=True)
        again.load_state_dict(state)
        parts.append(batches_of(again))
    assert [left + right for left, right in zip(*parts, strict=True)] == rest


# ---- resume

SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "own": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "single": lambda: {"batch_size": None, "shuffle": True},
    "sampler": lambda: {"batch_size": 4, "sampler": SequentialSampler(range(22))},
    "random": lambda: {"batch_size": 4, "sampler": RandomSampler(range(22), generator=torch.Generator())},
    "subset": lambda: {"batch_size": None, "sampler": SubsetRandomSampler(range(22), generator=torch.Generator())},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(22), generator=torch.Generator()), 4, False)},
    "ranks": lambda: {"batch_size": 4, "sampler": DistributedSampler(range(22), num_replicas=2, rank=1)},
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_resumed_loader_goes_on_exactly(kind: str) -> None:
    loader = DataLoader(range(22), **SAMPLERS[kind]())
    list(loader)
    loader.set_epoch(1)
    states, batches = [loader.state_dict()], []
    for batch in loader:
        batches.append(np.asarray(batch).tolist())
        states.append(loader.state_dict())
    after = loader.state_dict()
    loader.set_epoch(2)
    following = [np.asarray(batch).tolist() for batch in loader]
    for num_done, state in enumerate(states):
        torch.manual_seed(num_done)
        again = DataLoader(range(22), **SAMPLERS[kind]())
        again.load_state_dict(state)
        assert repr(again.state_dict()) == repr(state)
        assert [np.asarray(batch).tolist() for batch in again] == batches[num_done:]
        again.set_epoch(2)
        assert [np.asarray(batch).tolist() for batch in again] == following
    again = DataLoader(range(22), **SAMPLERS[kind]())
    again.load_state_dict(after)
    again.set_epoch(2)
    assert [np.asarray(batch).tolist() for batch in again] == following


def test_a_state_survives_torch_save_and_counts_batches_handed_out_only(tmp_path: Path) -> None:
    loader = DataLoader(range(40), batch_size=4, shuffle=True, threads=2)
    batches = iter(loader)
    first = next(batches).tolist()
    torch.save(loader.state_dict(), tmp_path / "state")
    assert loader.state_dict()["position"] == 4
    again = DataLoader(range(40), batch_size=4, shuffle=True)
    again.load_state_dict(torch.load(tmp_path / "state"))
    rest = batches_of(batches)
    assert batches_of(again) == rest
    assert sorted(itertools.chain(first, *rest)) == list(range(40))


def test_another_epoch_is_not_entered_in_its_middle() -> None:
    loader = DataLoader(range(20), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    for epoch, expected in ((0, 4), (1, 5)):
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        assert len(batches_of(loader)) == expected


def test_a_sampler_that_does_not_repeat_itself_is_an_error() -> None:
    loader = DataLoader(range(20), batch_size=4, sampler=RandomSampler(range(20)))
    next(iter(loader))
    again = DataLoader(range(20), batch_size=4, sampler=RandomSampler(range(20)))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ArgumentError, match=r"sampler=BatchSampler does not give the indices again.*generator="):
        list(again)
    short = DataLoader(range(20), sampler=[])
    short.load_state_dict(DataLoader(range(20), sampler=[]).state_dict() | {"batches": 3})
    with pytest.raises(ArgumentError, match=r"sampler=BatchSampler does not give"):
        list(short)


def test_a_sampler_may_keep_its_own_state() -> None:
    class Counting(list[int]):
        calls = 0

        def __iter__(self) -> Iterator[int]:
            self.calls += 1
            return iter([number * self.calls for number in (1, 2, 3)])

        def state_dict(self) -> dict[str, int]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    loader = DataLoader(range(20), sampler=Counting(range(3)))
    list(loader)
    next(iter(loader))
    again = DataLoader(range(20), sampler=Counting(range(3)))
    again.load_state_dict(loader.state_dict())
    assert numbers(again) == [4, 6]


def test_a_foreign_state_is_an_error() -> None:
    state = DataLoader(range(20), shuffle=True).state_dict()
    with pytest.raises(ArgumentError, match=r"expected \['batches', 'checksum', 'epoch', 'samplers'\]"):
        DataLoader(range(20), sampler=[1]).load_state_dict(state)
    with pytest.raises(ArgumentError, match=r"state_dict says num_samples: 20, .* has 21; .* over the same data set"):
        DataLoader(range(21), shuffle=True).load_state_dict(state)
    with pytest.raises(ArgumentError, match="state_dict says shuffle: True"):
        DataLoader(range(20)).load_state_dict(state)


def test_a_stream_is_passed_on_to_torch_and_resumed_by_skipping() -> None:
    ours, theirs = DataLoader(Stream(), batch_size=4), TorchLoader(Stream(), batch_size=4)
    assert len(ours) == len(theirs)
    assert_same(list(ours), list(theirs))
    assert_same(list(DataLoader(Stream(), batch_size=None)), list(range(10)))
    next(iter(ours))
    again = DataLoader(Stream(), batch_size=4)
    again.load_state_dict(ours.state_dict())
    assert batches_of(again) == [[4, 5, 6, 7], [8, 9]]


# ---- threads


def test_samples_of_a_batch_are_fetched_at_the_same_time() -> None:
    together = threading.Barrier(4)
    loader = DataLoader(Rows(lambda index: together.wait(30) * 0 + index, 16), batch_size=4, threads=4)
    assert numbers(loader) == list(range(16))


def test_batches_to_come_are_fetched_while_one_is_used() -> None:
    fetched = [threading.Event() for _ in range(40)]
    batches = iter(DataLoader(Rows(lambda index: fetched[index].set() or index, 40), threads=1, prefetch_factor=7))
    next(batches)
    assert fetched[7].wait(30)
    assert not fetched[8].is_set()


def test_getitems_is_asked_for_parts_of_a_batch_once_it_has_returned_a_list() -> None:
    dataset = Columns(record, 48)
    assert len(list(DataLoader(dataset, batch_size=12, threads=3, prefetch_factor=1))) == 4
    assert sum(dataset.asked) == 48
    assert dataset.asked[:1] == [12]
    assert set(dataset.asked) == {12, 4}


def test_getitems_may_return_a_whole_batch() -> None:
    class Whole(Rows):
        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor(indices)

    loader = DataLoader(Whole(int, 20), batch_size=8, collate_fn=lambda batch: batch, threads=2)
    assert batches_of(loader) == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


def test_a_collate_function_is_called_by_one_thread_at_a_time_in_order() -> None:
    busy, seen, let_on = threading.Lock(), list[int](), [threading.Event() for _ in range(12)]

    def row(index: int) -> int:
        if index % 4 == 0:  # the first batch is complete last
            let_on[index].wait(30)
        else:
            for event in let_on:
                event.set()
        return index

    def collate(samples: list[int]) -> list[int]:
        assert busy.acquire(blocking=False)
        seen.append(samples[0])
        busy.release()
        return samples

    assert list(DataLoader(Rows(row, 12), batch_size=4, collate_fn=collate, threads=8)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert seen == [0, 4, 8]


def test_threads_compute_on_one_core_and_under_the_modes_of_the_caller() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rows = Rows(lambda index: [torch.get_num_threads(), torch.is_grad_enabled()], 8)
        with torch.no_grad():
            assert list(DataLoader(rows, batch_size=None, threads=2)) == [[1, False]] * 8
        assert list(DataLoader(rows, batch_size=None, threads=1)) == [[1, True]] * 8
        assert torch.get_num_threads() == 3
        later = list[int]()
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)
    with torch.device("meta"):
        assert next(iter(DataLoader(range(3), threads=1))).device.type == "meta"


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("braidax-torch")]


def test_threads_end_with_the_loop() -> None:
    loader = DataLoader(range(100), batch_size=4, threads=3)
    for batch in loader:
        assert len(batch) == 4
        assert len(running()) == 3
        break
    assert running() == []
    with pytest.raises(ZeroDivisionError):
        for batch in loader:
            batch[0].item() // 0
    assert running() == []
    list(loader)
    assert running() == []


def test_leaving_the_loop_waits_for_items_under_way_and_begins_no_others() -> None:
    begun, ended, second = list[int](), list[int](), threading.Event()

    def row(index: int) -> int:
        begun.append(index)
        if index == 1:
            second.set()
            threading.Event().wait(0.2)  # the loop is left meanwhile
        ended.append(index)
        return index

    batches = iter(DataLoader(Rows(row, 40), threads=1, prefetch_factor=30))
    next(batches)
    assert second.wait(30)
    del batches
    assert begun == ended == [0, 1]


def test_two_passes_at_once_do_not_meet() -> None:
    loader = DataLoader(range(40), batch_size=4, threads=2)
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [
        (list(range(start, start + 4)),) * 2 for start in range(0, 40, 4)
    ]


# ---- errors


@pytest.mark.parametrize("threads", [None, 0, 3])
def test_an_item_that_cannot_be_had_is_named_after_the_good_batches(threads: int | None) -> None:
    loader = DataLoader(Rows(lambda index: index // (index not in (9, 10)), 20), batch_size=4, threads=threads)
    batches = iter(loader)
    assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(RecordError, match=r"dataset=Rows: its __getitem__ raised ZeroDivisionError.* index 9;") as info:
        next(batches)
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert running() == []
    assert loader.state_dict()["position"] == 8  # the batch is still to come, if the loop ends here
    assert next(batches).tolist() == [12, 13, 14, 15]  # and is left behind, if it goes on
    assert loader.state_dict()["position"] == 16
    assert next(batches).tolist() == [16, 17, 18, 19]
    assert next(batches, None) is None


@pytest.mark.parametrize("threads", [0, 2])
def test_getitems_that_fails_names_the_item_to_blame(threads: int) -> None:
    class Bad(Columns):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            raise KeyError("columns")

    with pytest.raises(RecordError, match=r"__getitem__ raised ZeroDivisionError.*the index 3;"):
        list(DataLoader(Bad(lambda index: 1 // (index - 3)), batch_size=8, threads=threads))
    with pytest.raises(
        RecordError, match=r"__getitems__ raised KeyError: 'columns', for the indices \[0, 1.*23 in all"
    ):
        list(DataLoader(Bad(int), batch_size=100, threads=threads))


def test_getitems_that_returns_too_little_is_an_error() -> None:
    class Forgets(Columns):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return super().__getitems__(indices)[: 5 if len(indices) < 12 else None]

    with pytest.raises(RecordError, match=r"its __getitems__ did not return a list of 6 samples for the indices \[\d"):
        list(DataLoader(Forgets(int, 100), batch_size=12, threads=2, prefetch_factor=1))


@pytest.mark.parametrize("threads", [0, 2])
def test_a_batch_that_cannot_be_collated_is_named(threads: int) -> None:
    loader = DataLoader(Rows(lambda index: torch.zeros(index // 4 + index % 2)), batch_size=4, threads=threads)
    with pytest.raises(RecordError, match=r"collate_fn=default_collate raised RuntimeError: .* items \[0, 1, 2, 3\]"):
        next(iter(loader))


def test_a_batch_that_does_not_come_in_time_is_named() -> None:
    release = threading.Event()
    rows = Rows(lambda index: release.wait(60) and index if index == 5 else index, 12)
    batches = iter(DataLoader(rows, batch_size=4, timeout=0.3, threads=2))
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(WaitTimeout, match=r"items \[4, 5, 6, 7\] did not come within timeout=0.3 seconds"):
        next(batches)
    release.set()
    assert next(batches).tolist() == [4, 5, 6, 7]  # the same again


def test_a_wait_without_limit_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr("braidax.torch.fetch._PATIENCE_SECONDS", 0.05)
    told = list[str]()
    monkeypatch.setattr(
        "braidax.torch.fetch._log.warning", lambda text, *names: (told.append(text % names), release.set())
    )
    assert numbers(DataLoader(Rows(lambda index: release.wait(60) and index, 3), batch_size=3, threads=1)) == [0, 1, 2]
    assert told[0] == "DataLoader: still waiting for the items [0, 1, 2]"


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (range(3), {"batch_size": 0}, "batch_size=0 is not a positive"),
        (range(3), {"num_workers": -1}, "num_workers=-1 is negative"),
        (range(3), {"timeout": -1}, "timeout=-1 is negative"),
        (range(3), {"prefetch_factor": 0}, "prefetch_factor=0 is not a positive"),
        (range(3), {"pin_memory_device": "cuda"}, "pin_memory_device='cuda' has no effect"),
        (range(3), {"threads": -1}, "threads=-1 is negative"),
        (range(3), {"threads": 2, "num_workers": 2}, "threads=2 is for a data set that is indexed by threads"),
        (range(3), {"threads": 0, "timeout": 2}, "threads=0 fetches a batch when it is asked for"),
        (range(3), {"persistent_workers": True}, "persistent_workers=True needs worker processes"),
        (range(3), {"multiprocessing_context": "fork"}, "multiprocessing_context='fork' needs worker processes"),
        (range(3), {"batch_size": None, "drop_last": True}, "leave drop_last out"),
        (range(3), {"shuffle": True, "sampler": [1]}, "shuffle=True must be left out"),
        (range(3), {"batch_sampler": [[1]], "batch_size": 2}, "batch_sampler says all about batches, so batch_size=2"),
        (range(0), {"shuffle": True}, "dataset=range has no samples to shuffle"),
        (Endless(), {}, "dataset=Endless has no __len__"),
        (object(), {}, "dataset=object has no __getitem__"),
        (Stream(), {"shuffle": True}, "dataset=Stream is an IterableDataset.*shuffle=True has no effect"),
        (Stream(), {"sampler": [1]}, "sampler=.* has no effect"),
        (Stream(), {"timeout": 1}, "timeout=1, prefetch_factor=None: an IterableDataset is read ahead by worker"),
        (Stream(), {"threads": 1}, "not for an IterableDataset"),
    ],
)
def test_arguments_that_cannot_work_are_errors(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        DataLoader(dataset, **options)


def test_what_torch_accepts_is_accepted() -> None:
    assert numbers(DataLoader(Endless(), sampler=[5, 6])) == [5, 6]
    assert list(DataLoader([], batch_size=4)) == []
    loader: DataLoader[torch.Tensor] = DataLoader(range(3), worker_init_fn=print, in_order=False)
    with pytest.raises(ArgumentError, match="batch_size cannot be set"):
        loader.batch_size = 3
    loader.collate_fn = sum
    assert list(loader) == [0, 1, 2]


def test_without_torch_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r'needs the module \'torch\'.*pip install "braidax\[torch\]"'):
        DataLoader(range(3))


def test_pinning_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, chosen = list[Any](), list[int]()
    fake = SimpleNamespace(
        is_available=lambda: True,
        current_accelerator=lambda: torch.device("cuda"),
        current_device_index=lambda: 1,
        set_device_index=chosen.append,
    )
    if not torch.accelerator.is_available():
        with pytest.warns(UserWarning, match="pin_memory=True has no effect: torch finds no accelerator"):
            assert numbers(DataLoader(range(3), pin_memory=True)) == [0, 1, 2]
    monkeypatch.setattr(torch, "accelerator", fake)
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", lambda *args: pinned.append(args) or "pinned")
    assert list(DataLoader(range(3), pin_memory=True)) == ["pinned"] * 3
    assert [(batch.tolist(), kind) for batch, kind in pinned] == [([0], "cuda"), ([1], "cuda"), ([2], "cuda")]
    assert chosen == [1, 1, 1]


# ---- how many threads


def limits(rate: Callable[[int], float], periods: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns how many threads fetch in each period, if that many fetch `rate` samples per second."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("braidax.torch.tempo.time.perf_counter", lambda: clock.now)
    tempo, seen = Tempo(None), list[int]()
    for _ in range(periods):
        seen.append(tempo.limit)
        num_takes, speed = 2 * tempo.limit, rate(tempo.limit)
        for _ in range(num_takes):
            num_samples = 1 + int(0.03 * speed / num_takes)
            clock.now += num_samples / speed
            tempo.fetched(num_samples)
    return seen


def test_threads_that_wait_become_many_and_threads_that_compute_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(lambda threads: 200.0 * threads, 6, monkeypatch) == [1, 4, 16, 64, 64, 64]
    assert limits(lambda threads: 200.0 * min(threads, 20), 8, monkeypatch) == [1, 4, 16, 64, 64, 64, 64, 64]
    alone = limits(lambda threads: 1e4 / threads**0.1, 60, monkeypatch)
    assert alone[:3] == [1, 4, 1]
    assert 2 <= alone.count(4) <= 4


def test_threads_that_fetch_whole_batches_are_judged_by_two_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches of 64 on two cores: all end behind 0.16 s, as late as two of one thread."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("braidax.torch.tempo.time.perf_counter", lambda: clock.now)
    tempo, seen = Tempo(None), list[int]()
    for seconds in [0.08, 0.08, *([0.16, 1e-3, 1e-3, 1e-3] * 2)]:
        clock.now += seconds
        tempo.fetched(64)
        seen.append(tempo.limit)
    assert seen == [1, 4, 4, 4, 4, 4, 4, 4, 4, 16]


def test_no_more_threads_are_tried_while_all_cores_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, computed=0.0)
    monkeypatch.setattr("braidax.torch.tempo.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr("braidax.torch.tempo.time.process_time", lambda: clock.computed)
    monkeypatch.setattr("braidax.torch.tempo.usable_cores", lambda: 4)
    tempo, seen = Tempo(None, 4), list[int]()
    for cores in [3.5] * 8 + [1.0] * 8:
        clock.now, clock.computed = clock.now + 0.1, clock.computed + 0.1 * cores
        tempo.fetched(64)
        seen.append(tempo.limit)
    assert seen == [4] * 15 + [16]


def test_a_source_begins_with_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidax.torch.tensors.usable_cores", lambda: 3)
    numbers = from_arrays({"x": np.arange(8)})
    limits = [DataLoader(data)._tempo.limit for data in (numbers, numbers[2:5], [1, 2])]  # pyright: ignore[reportPrivateUsage]
    assert limits == [3, 3, 1]


def test_a_period_with_nothing_to_fetch_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("braidax.torch.tempo.time.perf_counter", lambda: clock.now)
    tempo = Tempo(None)
    for _ in range(100):
        clock.now += 1.0
        tempo.idle()
        tempo.fetched(5)
    assert tempo.limit == 1


# ---- a Hugging Face data set


TABLES: dict[str, dict[str, Any]] = {
    "numbers": {"a": np.arange(50, dtype=np.uint8), "b": np.arange(50.0), "c": np.arange(50, dtype=np.uint16)},
    "lists": {"tokens": np.arange(200, dtype=np.int32).reshape(50, 4), "x": np.float64(np.arange(150)).reshape(50, 3)},
    "fixed": {"tokens": np.arange(200, dtype=np.int16).reshape(50, 4)},
    "not a number": {"x": [1.5, float("nan")] * 25},
    "text": {"y": np.arange(50.0), "text": ["a", "b"] * 25},
    "bools": {"y": [True, False] * 25},
    "nested": {"x": np.zeros((50, 2, 3), np.float32)},
}
FEATURES = {"fixed": datasets.Features({"tokens": datasets.List(datasets.Value("int16"), length=4)})}
CUTS: dict[str, Callable[[datasets.Dataset], datasets.Dataset]] = {
    "whole": lambda dataset: dataset,
    "shuffled": lambda dataset: dataset.shuffle(seed=1),
    "slice": lambda dataset: dataset.select(range(3, 40)),
    "chunks": lambda dataset: datasets.concatenate_datasets([dataset.select(range(9)), dataset.select(range(5, 50))]),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
@pytest.mark.parametrize("table", TABLES)
def test_a_hugging_face_data_set_gives_the_batches_of_torch(table: str, kind: str | None, cut: str) -> None:
    dataset = CUTS[cut](datasets.Dataset.from_dict(TABLES[table], FEATURES.get(table))).with_format(kind)
    theirs = list(TorchLoader(dataset, batch_size=8))
    for threads in (None, 3):
        ours = list(DataLoader(dataset, batch_size=8, threads=threads))
        assert_same(torch.utils._pytree.tree_map(without_nan, ours), torch.utils._pytree.tree_map(without_nan, theirs))


def without_nan(leaf: Any) -> Any:
    return leaf.nan_to_num(-1) if isinstance(leaf, torch.Tensor) else leaf


@pytest.mark.parametrize("cut", ["whole", "shuffled"])
@pytest.mark.parametrize(
    ("table", "num_calls"), [("lists", 1), ("fixed", 1), ("numbers", 1), ("nested", 1), ("text", 7)]
)
def test_tables_of_numbers_are_read_without_a_sample_for_each_row(
    table: str, num_calls: int, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = CUTS[cut](datasets.Dataset.from_dict(TABLES[table], FEATURES.get(table))).with_format("torch")
    calls, whole = list[Any](), datasets.Dataset.__getitems__
    monkeypatch.setattr(datasets.Dataset, "__getitems__", lambda self, keys: calls.append(keys) or whole(self, keys))
    list(DataLoader(dataset, batch_size=8, shuffle=True, threads=0))
    assert len(calls) == num_calls


def test_a_table_with_nulls_or_ragged_lists_behind_the_first_batch_is_read_as_torch_reads_it() -> None:
    for rows in ([[1, 2]] * 8 + [[1], [2]] * 4, [1.0] * 8 + [None] * 8):
        parts = [datasets.Dataset.from_dict({"x": part}) for part in (rows[:8], rows[8:])]
        dataset = datasets.concatenate_datasets(parts).with_format("torch")
        ours, theirs = (outcomes(kind(dataset, batch_size=4)) for kind in (DataLoader, TorchLoader))
        assert_same(torch.utils._pytree.tree_map(without_nan, ours), torch.utils._pytree.tree_map(without_nan, theirs))


def outcomes(loader: Any) -> list[Any]:
    """Returns the batches up to the first error, and its words."""
    batches: list[Any] = []
    try:
        for batch in loader:
            batches.append(batch)
    except Exception as error:  # noqa: BLE001
        batches.append(str(error.__cause__ or error))
    return batches


# ---- processes

WORKERS = """
import sys, torch
from braidax.torch import DataLoader
from braidax.errors import RecordError, WaitTimeout

class Rows:
    def __len__(self): return 20
    def __getitem__(self, index):
        if index == 13: torch.tensor(1) // 0 if torch.utils.data.get_worker_info() else None
        return {"x": torch.full((2,), float(index)), "worker": torch.utils.data.get_worker_info() is not None}

class Hangs(Rows):
    def __getitem__(self, index):
        import time
        if index == 5: time.sleep(60)
        return index

options = dict(batch_size=4, num_workers=2, persistent_workers=True, shuffle=True)
rows = torch.utils.data.Subset(Rows(), [index for index in range(20) if index != 13])
loader = DataLoader(rows, **options)
torch.manual_seed(3)
epochs = [[batch["x"][:, 0].tolist() for batch in loader] for _ in range(2)]
torch.manual_seed(3)
here = DataLoader(rows, batch_size=4, shuffle=True)
assert epochs == [[batch["x"][:, 0].tolist() for batch in here] for _ in range(2)]
assert epochs[0] != epochs[1]
batches = iter(loader)
assert next(batches)["worker"].all()
state = loader.state_dict()
rest = [batch["x"][:, 0].tolist() for batch in batches]
again = DataLoader(rows, batch_size=4, shuffle=True)
again.load_state_dict(state)
assert [batch["x"][:, 0].tolist() for batch in again] == rest and len(rest) == 4
again = DataLoader(rows, **options)
again.load_state_dict(state)
assert [batch["x"][:, 0].tolist() for batch in again] == rest

bad = iter(DataLoader(Rows(), batch_size=4, num_workers=1))
assert [next(bad)["x"][0, 0].item() for _ in range(3)] == [0, 4, 8]
try:
    next(bad)
except RecordError as error:
    assert "RuntimeError for one of the items [12, 13, 14, 15]" in str(error), error
else:
    raise AssertionError
assert next(bad)["x"][0, 0].item() == 16

slow = iter(DataLoader(Hangs(), batch_size=None, num_workers=1, timeout=2))
assert [next(slow) for _ in range(5)] == [0, 1, 2, 3, 4]
try:
    next(slow)
except WaitTimeout as error:
    assert "of the items 5 did not come within timeout=2 seconds" in str(error), error
else:
    raise AssertionError

loose = DataLoader(Rows(), sampler=[1, 2], num_workers=1, in_order=False)
for _ in loose:
    try:
        loose.state_dict()
    except ValueError as error:
        assert "use in_order=True" in str(error)
    else:
        raise AssertionError

from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print("done")
"""

RANKS = """
import sys, torch, torch.distributed as dist
from braidax.torch import DataLoader
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(rank)                         # the ranks' own seeds differ
loader = DataLoader(range(41), batch_size=4, shuffle=True)
for epoch in range(2):
    batches = [batch.tolist() for batch in loader]
    assert len(batches) == len(loader) == 6
    all_ranks = [None, None]
    dist.all_gather_object(all_ranks, batches)
    seen = [index for ranks in zip(*all_ranks) for batch in ranks for index in batch]
    assert sorted(seen[:40] + seen[40:41]) == list(range(41)), seen
    assert seen[41:] == seen[:1]                # repeated from the start, to come out even
    assert [len(batch) for batch in batches] == [4] * 5 + [1]
    if epoch:
        assert all_ranks != last
    last = all_ranks
dropped = DataLoader(range(41), batch_size=4, drop_last=True)
assert [batch.tolist() for batch in dropped][0] == list(range(4 * rank, 4 * rank + 4)) and len(dropped) == 5
dist.destroy_process_group()
print("done")
"""


def start(program: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def programs_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets programs begin with what they import, which takes longer than what they do."""
    fork_children(monkeypatch, "torch", "torch.distributed", "braidax.torch", codes=(WORKERS, RANKS))


@pytest.mark.usefixtures("programs_are_forks")
def test_worker_processes_get_our_order_and_jax_is_left_alone() -> None:
    output, _ = start(WORKERS).communicate(timeout=120)
    assert output == "done\n"


@pytest.mark.usefixtures("programs_are_forks")
def test_ranks_share_one_permutation(tmp_path: Path) -> None:
    processes = [start(RANKS, str(rank), str(tmp_path / "store")) for rank in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [output.splitlines()[-1:] for output in outputs] == [["done"]] * 2, outputs
