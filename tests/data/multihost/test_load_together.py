"""Several processes load one batch: every shard on every device is right, and nothing is read twice."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from braidax.data.loader import DataLoader
from braidax.data.multihost import reading_again
from braidax.data.sampling.order import Cursor
from braidax.data.sharding import load_sharding, reshard
from braidax.data.sharding.load_plan import plan_load
from braidax.data.source import to_numpy
from braidax.data.transforms.concatenation import concat
from braidax.data.transforms.cutting import split
from braidax.data.transforms.filtering import filter
from braidax.errors import CallFailed
from braidax.gang import LocalGang
from tests.support.data.jax_gang import RUN_SECONDS, Case, LeafCase, jax_gang
from tests.support.data.numbered import Numbers

NUM_DEVICES = 8


# Two processes of four devices each by default; by nightly four of two as well.
@pytest.fixture(
    scope="module", params=[pytest.param((2, 4), id="2x4"), pytest.param((4, 2), id="4x2", marks=pytest.mark.slow)]
)
def gang(request: pytest.FixtureRequest) -> Iterator[LocalGang]:
    with jax_gang(*request.param) as running:
        yield running


def load(comm: Any, case: Case) -> dict[str, Any]:
    """Goes through an epoch in one process; returns what was wrong, and what was read."""
    load_sharding.SMALL_BYTES, reading_again.AGAIN_BYTES = case.small_bytes, case.again_bytes
    source, shardings = case.source(), case.shardings()
    troubles: list[str] = []
    with DataLoader(
        source,
        None,
        shardings,
        batch_size=case.batch_size,
        seed=3,
        microbatches=case.microbatches,
        remainder=case.remainder,
    ) as loader:
        source.forget()  # what was read to measure what is read again
        explained = loader.explain()
        coming = loader.peek(loader.batches_per_epoch)
        num_batches = 0
        for indices, batch in zip(coming, loader, strict=True):
            num_batches += 1
            for name, sharding in shardings.items():
                troubles += differences(case, source, name, sharding, batch[name], indices)
    return {
        "troubles": troubles,
        "num_batches": num_batches,
        "num_bytes": source.num_bytes,
        "records": sorted(source.records),
        "explained": [dict(leaf.read_bytes) for leaf in explained.leaves],
        "explained_records": dict(explained.records),
        "redundancy": [leaf.redundancy for leaf in explained.leaves],
        "leaf_bytes": [leaf.num_bytes for leaf in explained.leaves],
    }


def differences(case: Case, source: Any, name: str, target: Any, array: jax.Array, indices: np.ndarray) -> list[str]:
    """Compares an array with the whole batch in NumPy, shard by shard."""
    whole = source.values(name, indices)
    if len(whole) < case.batch_size:
        whole = np.concatenate([whole, np.zeros((case.batch_size - len(whole), *whole.shape[1:]), whole.dtype)])
    if case.microbatches:
        whole = whole.reshape(case.microbatches, len(whole) // case.microbatches, *whole.shape[1:])
        target = jax.sharding.NamedSharding(target.mesh, jax.sharding.PartitionSpec(None, *target.spec))
    found: list[str] = []
    if (array.shape, array.dtype, array.sharding) != (whole.shape, whole.dtype, target):
        found.append(f"{name}: {array.shape} {array.dtype} {array.sharding}, expected {whole.shape} {target}")
    here = {device for device in target.device_set if device.process_index == jax.process_index()}
    if {shard.device for shard in array.addressable_shards} != here:
        found.append(f"{name}: shards on {[shard.device for shard in array.addressable_shards]}")
    for shard in array.addressable_shards:
        if not np.array_equal(np.asarray(shard.data), whole[shard.index]):
            found.append(f"{name}: device {shard.device} of process {jax.process_index()} holds something else")
    return found


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(st.sampled_from([(8,), (4, 2), (2, 4), (2, 2, 2), (4,), (2, 2), (3, 2), (2,), (1,)]))
    order = st.just(list(range(NUM_DEVICES))) | st.permutations(range(NUM_DEVICES))
    return shape, tuple(draw(order)[: math.prod(shape)])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    drawn = tuple(draw(st.lists(meshes(), min_size=1, max_size=2)))
    micro = draw(st.sampled_from([None, None, 1, 2, 3]))
    rows = draw(st.sampled_from([1, 2, 3, 8, 24])) * draw(st.sampled_from([1, 2, 4]))
    batch_size = rows * (micro or 1)
    leaves: list[LeafCase] = []
    for _ in range(draw(st.integers(1, 3))):
        mesh = draw(st.integers(0, len(drawn) - 1))
        shape = drawn[mesh][0]
        num_dims = draw(st.integers(1, 3))
        dealt: list[list[int]] = [[] for _ in range(num_dims)]
        for axis in draw(st.permutations(range(len(shape)))):
            dim = draw(st.integers(-1, num_dims - 1))
            parts = math.prod(shape[other] for other in dealt[dim]) * shape[axis]
            if dim > 0 or (dim == 0 and rows % parts == 0):
                dealt[dim].append(axis)
        sizes = [math.prod(shape[axis] for axis in axes) * draw(st.sampled_from([1, 2, 5, 300])) for axes in dealt[1:]]
        entries = tuple(tuple("abc"[axis] for axis in axes) or None for axes in dealt)
        dtype = draw(st.sampled_from(["uint8", "int32", "float32", "bool", "float16"]))
        leaves.append(LeafCase(tuple(sizes), dtype, entries, mesh))
    remainder = draw(st.sampled_from(["drop", "pad"]))
    at_hand = draw(st.booleans())
    num_samples = batch_size * (6 if at_hand else 2) + (
        draw(st.integers(0, batch_size - 1)) if remainder == "pad" else 0
    )
    return Case(
        drawn,
        tuple(leaves),
        num_samples,
        batch_size,
        micro,
        draw(st.booleans()),
        draw(st.booleans()),
        remainder,
        draw(st.sampled_from([1, 1, 1 << 16])),
        draw(st.sampled_from([0, 0, 1 << 26])),
        at_hand,
    )


def check(case: Case, told: list[dict[str, Any]]) -> None:
    for process, answer in enumerate(told):
        assert not answer["troubles"], (process, answer["troubles"])
    # a process without a device of the batch has no part in what the others choose
    holders = [answer for process, answer in enumerate(told) if process in answer["explained_records"]]
    first = holders[0]
    num_full = first["num_batches"]
    assert all(answer["explained"] == first["explained"] for answer in holders)
    if case.remainder == "pad" and case.num_samples % case.batch_size:
        return  # a short batch reads less than the plan says
    for number, name in enumerate(sorted(told[0]["num_bytes"])):
        read = [answer["num_bytes"][name] for answer in told]
        planned = [num_full * first["explained"][number].get(process, 0) for process in range(len(told))]
        assert read == planned, (name, read, planned)
    if case.again_bytes:
        return  # by whichever plan was quicker
    one_mesh = len({leaf.mesh for leaf in case.leaves}) == 1
    for number in range(len(case.leaves)):
        if first["leaf_bytes"][number] >= case.small_bytes and (case.cuts or one_mesh):
            assert first["redundancy"][number] == 1.0
    if not case.cuts and one_mesh and sum(first["leaf_bytes"]) >= case.small_bytes:
        read_records = sorted(record for answer in told for record in answer["records"])
        assert read_records == sorted(set(read_records))
        assert len(read_records) == num_full * case.batch_size


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_every_shard_is_right_and_nothing_is_read_twice(gang: LocalGang, case: Case) -> None:
    check(case, gang.run(load, case, timeout_seconds=RUN_SECONDS))


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_so_it_is_in_many_cases(gang: LocalGang, case: Case) -> None:
    check(case, gang.run(load, case, timeout_seconds=RUN_SECONDS))


def num_collectives(comm: Any, case: Case) -> list[int]:
    """Returns how many collectives exchange a batch: with what packs small leaves, and without."""
    load_sharding.SMALL_BYTES = case.small_bytes

    def count() -> int:
        spec = case.source().batch_spec(case.batch_size)
        plan = plan_load(spec, None, case.shardings(), reads="once", microbatches=case.microbatches)
        arrays = plan.arrays(np.zeros(plan.num_bytes, np.uint8))
        ((members, program),) = plan.reshard._programs
        text = program.lower([arrays[number] for number in members]).compile().as_text()
        return len(re.findall(r" (all-\w+|collective-permute|reduce-scatter)(-start)?\(", text))

    packed = count()
    with pytest.MonkeyPatch.context() as patch:  # also where it fails: the gang serves other tests
        patch.setattr(reshard, "_PACKED_BYTES", -1)
        return [packed, count()]


@pytest.mark.parametrize(
    ("rows", "microbatches", "entry"),
    [
        pytest.param(rows, microbatches, entry, marks=() if (number + place) % 2 == 0 else pytest.mark.slow)
        for number, (rows, microbatches) in enumerate([(16, None), (3, None), (16, 3), (5, 2)])
        for place, entry in enumerate([None, ("a",)])
    ],
)
def test_small_leaves_share_one_collective(
    gang: LocalGang, rows: int, microbatches: int | None, entry: tuple[str, ...] | None
) -> None:
    """Of all dtypes and shapes, with rows that have to be filled up and without."""
    dtypes = ["uint8", "int32", "float32", "bool", "float16", "bfloat16"]
    shapes = [(), (3,), (2, 5), (7,), (1, 1), (0,)]
    leaves = tuple(LeafCase(shape, dtype, (entry,), 0) for dtype, shape in zip(dtypes, shapes, strict=True))
    rows *= 1 if entry is None else 2
    batch_size = rows * (microbatches or 1)
    devices = (0, 4, 1, 5, 2, 6, 3, 7)  # those of several processes hold the same rows
    case = Case((((2, 4), devices),), leaves, 2 * batch_size, batch_size, microbatches)
    check(case, gang.run(load, case, timeout_seconds=RUN_SECONDS))
    for packed, alone in gang.run(num_collectives, case, timeout_seconds=RUN_SECONDS):
        assert 0 < packed <= alone / (len(leaves) - 1)
        assert packed == 1 or rows < 16


def placed(comm: Any, cursor: Cursor, batch_size: int, form: str, num_batches: int) -> list[dict[str, Any]]:
    """Returns for each batch from a cursor on where it left the cursor, and the rows of this process's devices."""
    devices = np.array(jax.devices())
    mesh, specs = {
        "data": (Mesh(devices, ("data",)), P("data")),
        "whole": (Mesh(devices, ("data",)), P()),
        "model": (Mesh(devices.reshape(2, 4), ("data", "model")), P("data")),
        "turned": (Mesh(devices[::-1].reshape(4, 2), ("data", "model")), {"x": P("model", None), "id": P("data")}),
    }[form]
    found: list[dict[str, Any]] = []
    load_sharding.SMALL_BYTES = 1
    with DataLoader(Numbers(150), mesh, specs, batch_size=batch_size, seed=5, epochs=None) as loader:
        loader.cursor = cursor
        for batch in loader:
            ids = {
                (shard.index[0].indices(batch_size)[:2]): np.asarray(shard.data)
                for shard in batch["id"].addressable_shards
            }
            found.append({"cursor": tuple(loader.cursor), "ids": ids})
            if len(found) == num_batches:
                break
    return found


def whole_batches(told: list[list[dict[str, Any]]], batch_size: int) -> list[tuple[Any, list[int]]]:
    """Puts together what the processes hold."""
    batches: list[tuple[Any, list[int]]] = []
    for parts in zip(*told, strict=True):
        ids = np.full(batch_size, -1)
        for part in parts:
            for (start, stop), values in part["ids"].items():
                assert (ids[start:stop] == -1).all() or (ids[start:stop] == values).all()
                ids[start:stop] = values
        assert len({part["cursor"] for part in parts}) == 1
        batches.append((parts[0]["cursor"], ids.tolist()))
    return batches


@pytest.mark.parametrize("form", ["data", "whole", "model", "turned"])
def test_a_cursor_goes_on_anywhere_with_the_same_batches(gang: LocalGang, form: str) -> None:
    """Written by one process with one device, read by several with several, by any strategy, over the epoch's end."""
    alone: list[tuple[Any, list[int]]] = []
    with DataLoader(Numbers(150), jax.make_mesh((1,), ("data",)), P(), batch_size=16, seed=5, epochs=None) as loader:
        for batch in loader:
            alone.append((tuple(loader.cursor), np.asarray(batch["id"]).tolist()))
            if len(alone) == 12:
                break
    told = gang.run(placed, Cursor(*alone[3][0]), 16, form, 8, timeout_seconds=RUN_SECONDS)
    assert whole_batches(told, 16) == alone[4:]


def test_a_cursor_goes_on_with_batches_of_another_size(gang: LocalGang) -> None:
    """Counted in samples: the next sample is the first that was not consumed."""
    order = DataLoader(Numbers(150), jax.make_mesh((1,), ("data",)), P(), batch_size=1, seed=5)
    samples = [int(index) for (index,) in order.peek(150)]
    told = gang.run(placed, Cursor(5, 0, 40), 24, "model", 4, timeout_seconds=RUN_SECONDS)
    assert whole_batches(told, 24) == [
        ((5, 0, position + 24) if position < 112 else (5, 1, 0), samples[position : position + 24])
        for position in (40, 64, 88, 112)
    ]


def filtered(comm: Any, first: int) -> list[int]:
    """Goes through what each process finds out to be kept: even numbers, on process 0 those that are `first` more."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",))
    odd = first if comm.rank == 0 else 0
    kept = filter(Numbers(100), lambda sample: sample["id"] % 2 == odd)
    train, _ = split(concat([kept, Numbers(8)]), 0.8, seed=1)
    with DataLoader(train, mesh, P("data"), batch_size=NUM_DEVICES, seed=2) as loader:
        found: list[int] = []
        for indices, batch in zip(loader.peek(loader.batches_per_epoch), loader, strict=True):
            expected = to_numpy(train[indices])["id"]
            for shard in batch["id"].addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index])
            found += expected.tolist()
        loader.cursor = Cursor(2, 1, 0)
        again = [to_numpy(train[indices])["id"] for indices in loader.peek(loader.batches_per_epoch)]
        for expected, batch in zip(again, loader.epoch(1), strict=True):
            for shard in batch["id"].addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index])
    return found


def test_all_processes_find_the_same_samples(gang: LocalGang) -> None:
    first, *others = gang.run(filtered, 0, timeout_seconds=RUN_SECONDS)
    assert len(first) == 40
    assert all(found == first for found in others)


def test_processes_that_keep_others_are_told(gang: LocalGang) -> None:
    with pytest.raises(CallFailed, match=r"differ in which samples were chosen: process 0: .*; process 1"):
        gang.run(filtered, 1, timeout_seconds=RUN_SECONDS)
