"""The loader: batches that depend on nothing but (seed, epoch, position), cursors, errors, threads that end."""

import contextlib
import itertools
import json
import logging
import math
import threading
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.data.knobs import Knobs
from braidax.data.loader import DataLoader
from braidax.data.sampling.order import Cursor
from braidax.errors import ArgumentError, BraidaxError, SpecError
from tests.support.data.numbered import Large, Numbers, all_ids, check, ids, peeked, reading_threads


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"))


# Batches


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_threads_and_prefetch_change_nothing(mesh: Mesh, threads: int, prefetch: int) -> None:
    expected = peeked(DataLoader(Numbers(100), mesh, P("data"), batch_size=8, seed=3, epochs=2), 24)
    knobs = Knobs(threads=threads, prefetch=prefetch)
    loader = DataLoader(Numbers(100), mesh, P("data"), batch_size=8, seed=3, epochs=2, knobs=knobs)
    got: list[list[int]] = []
    for batch in loader:
        check(batch)
        got.append(ids(batch))
    assert got == expected


@pytest.mark.parametrize("shape", [(1,), (2,), (8,), (4, 2), (2, 2, 2)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_changes_nothing(shape: tuple[int, ...], kind: AxisType) -> None:
    names = tuple("abc"[: len(shape)])
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(kind,) * len(shape))
    specs = {"x": P(names), "id": P(names[-1])}
    loader = DataLoader(Numbers(50), mesh, specs, batch_size=16, seed=9)
    batches = list(loader)
    one = DataLoader(Numbers(50), jax.make_mesh((1,), ("a",), devices=jax.devices()[:1]), P(), batch_size=16, seed=9)
    for batch, alone in zip(batches, one, strict=True):
        for name, spec in specs.items():
            assert batch[name].sharding == NamedSharding(mesh, spec)
            np.testing.assert_array_equal(np.asarray(batch[name]), np.asarray(alone[name]))
    assert loader.shardings == {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def test_a_batch_read_in_pieces_is_whole(mesh: Mesh) -> None:
    pieces: list[int] = []
    source = Large(40, lambda indices: pieces.append(len(indices)))
    specs = {"x": P("data"), "id": P(), "large": P("data", "model")}
    loader = DataLoader(source, mesh, specs, batch_size=16, knobs=Knobs(threads=3))
    for batch in loader:
        check(batch)
        want = np.asarray(batch["id"]) % 251
        large = np.asarray(batch["large"])
        np.testing.assert_array_equal(large, np.broadcast_to(want[:, None].astype(np.uint8), large.shape))
    assert max(pieces) <= 2
    assert sum(pieces) == 32


def test_reads_finish_in_any_order_and_batches_in_one(mesh: Mesh) -> None:
    """A sample of the first batch waits until the third was read; had reads to finish in order, this would hang."""
    third_was_read, finished = threading.Event(), list[int]()
    source = Numbers(48)
    loader = DataLoader(source, mesh, P("data"), batch_size=8, knobs=Knobs(threads=8, prefetch=3))
    expected = peeked(loader, 6)

    def before(indices: np.ndarray) -> None:
        (number,) = (number for number, batch in enumerate(expected) if set(indices.tolist()) <= set(batch))
        if expected[0][0] in indices:
            assert third_was_read.wait(60)
        finished.append(number)
        if number == 2:
            third_was_read.set()

    source.before = before
    assert all_ids(loader) == expected
    assert max(place for place, number in enumerate(finished) if number == 0) > finished.index(2)


def test_indices_are_64_bits_wide(mesh: Mesh) -> None:
    source = Numbers(16)
    list(DataLoader(source, mesh, P("data"), batch_size=8))
    assert source.dtypes == {np.dtype(np.int64)}


def test_no_seed_is_the_order_of_the_source(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(24), mesh, P("data"), batch_size=8, seed=None, epochs=2)
    assert all_ids(loader) == [list(range(start, start + 8)) for start in (0, 8, 16)] * 2


def test_the_loader_compiles_nothing(mesh: Mesh) -> None:
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        seen.append(event)

    specs = {"x": P("data", "model"), "id": P()}
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        list(DataLoader(Numbers(50), mesh, specs, batch_size=8, epochs=2, remainder="pad"))
        assert [event for event in seen if "compile" in event or "trac" in event] == []
        jax.jit(lambda x: x * 3 + 1)(np.float32(1))
        assert [event for event in seen if "compile" in event]  # the listener would have seen it
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# Cursors, peek, epochs


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_resume_at_every_batch_is_the_uninterrupted_run(mesh: Mesh, remainder: Any) -> None:
    def make() -> DataLoader:
        return DataLoader(Numbers(43), mesh, P("data"), batch_size=8, seed=5, epochs=3, remainder=remainder)

    whole, cursors, loader = list[list[int]](), list[Cursor](), make()
    cursors.append(loader.cursor)
    for batch in loader:
        whole.append(ids(batch))
        cursors.append(loader.cursor)
    assert len(whole) == len(make()) == (15 if remainder == "drop" else 18)
    assert cursors[-1] == Cursor(5, 3, 0)
    for done in range(len(whole)):
        resumed = make()
        resumed.cursor = Cursor(*json.loads(json.dumps(cursors[done])))
        assert resumed.cursor == cursors[done]
        assert all_ids(resumed) == whole[done:]


def test_a_cursor_restored_as_arrays_is_one_of_plain_integers(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(32), mesh, P("data"), batch_size=8)
    loader.cursor = Cursor(*(np.asarray(part) for part in (4, 2, 8)))  # pyright: ignore[reportArgumentType]
    assert loader.cursor == Cursor(4, 2, 8)
    assert all(type(part) is int for part in loader.cursor)
    assert jax.tree.leaves(loader.cursor) == [4, 2, 8]
    loader.cursor = Cursor(None, 1, 0)
    assert loader.cursor.seed is None


def test_the_seed_is_a_plain_integer_from_the_start(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(32), mesh, P("data"), batch_size=8, seed=True)
    fresh = DataLoader(Numbers(32), mesh, P("data"), batch_size=8, seed=1)
    assert peeked(loader, 4) == peeked(fresh, 4)


def test_the_cursor_may_be_set_inside_the_loop(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(40), mesh, P("data"), batch_size=8, seed=2)
    whole = all_ids(DataLoader(Numbers(40), mesh, P("data"), batch_size=8, seed=2))
    got: list[list[int]] = []
    jumps = {2: Cursor(2, 0, 8), 6: Cursor(2, 0, 0)}  # the second at the very last batch
    for batch in loader:
        got.append(ids(batch))
        if len(got) in jumps:
            loader.cursor = jumps[len(got)]
    assert got == [whole[0], whole[1], *whole[1:], *whole]


def test_a_cursor_set_behind_the_end_ends_the_loop(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(40), mesh, P("data"), batch_size=8, epochs=2)
    for count, _ in enumerate(loader):
        assert count == 0
        loader.cursor = Cursor(0, 2, 0)
    assert loader.cursor == Cursor(0, 2, 0)


def test_peek_shows_what_comes_across_epochs_and_moves_nothing(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(20), mesh, P("data"), batch_size=8, seed=1, epochs=4, remainder="pad")
    coming = peeked(loader, 12)
    assert [len(batch) for batch in coming] == [8, 8, 4] * 4
    got: list[list[int]] = []
    for number, batch in enumerate(loader):
        assert peeked(loader, 3)[: 11 - number] == coming[number + 1 : number + 4]
        got.append(ids(batch)[: int(np.asarray(batch["mask"]).sum())])
    assert got == coming
    assert loader.peek(0) == []


def test_epochs_differ_and_each_holds_every_sample(mesh: Mesh) -> None:
    batches = all_ids(DataLoader(Numbers(32), mesh, P("data"), batch_size=8, epochs=3))
    passes = [[*itertools.chain(*batches[start : start + 4])] for start in (0, 4, 8)]
    assert all(sorted(one) == list(range(32)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3


def test_each_for_goes_on_where_the_last_one_ended(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(32), mesh, P("data"), batch_size=8)
    first, second = all_ids(loader), all_ids(loader)
    assert loader.cursor == Cursor(0, 2, 0)
    assert first + second == all_ids(DataLoader(Numbers(32), mesh, P("data"), batch_size=8, epochs=2))


@pytest.mark.parametrize(
    ("epochs", "start", "expected"),
    [
        (1, Cursor(0, 0, 8), 3),
        (3, Cursor(0, 1, 0), 8),
        (3, Cursor(0, 2, 16), 2),
        (3, Cursor(0, 3, 0), 12),
        (10, Cursor(0, 7, 0), 12),
    ],
)
def test_a_pass_resumed_in_the_middle_ends_where_it_would_have(
    mesh: Mesh, epochs: int, start: Cursor, expected: int
) -> None:
    loader = DataLoader(Numbers(32), mesh, P("data"), batch_size=8, epochs=epochs)
    loader.cursor = start
    assert len(all_ids(loader)) == expected
    assert loader.cursor.position == 0
    assert loader.cursor.epoch % epochs == 0


def test_a_loop_left_and_begun_again_goes_on(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(64), mesh, P("data"), batch_size=8)
    whole = peeked(loader, 8)
    got: list[list[int]] = []
    for stop_after in (1, 3, 8):
        for batch in loader:
            got.append(ids(batch))
            if len(got) == stop_after:
                break
    assert got == whole


def test_no_end(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(16), mesh, P("data"), batch_size=8, epochs=None)
    coming = peeked(loader, 9)
    batches = iter(loader)
    assert [ids(next(batches)) for _ in range(9)] == coming
    assert loader.cursor == Cursor(0, 4, 8)
    loader.close()
    with pytest.raises(TypeError, match="epochs=None has no length"):
        len(loader)


def test_sizes(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(43), mesh, P("data"), batch_size=8, epochs=3)
    assert (len(loader), loader.batches_per_epoch, loader.num_samples, loader.batch_size) == (15, 5, 43, 8)
    padded = DataLoader(Numbers(43), mesh, P("data"), batch_size=8, epochs=3, remainder="pad")
    assert (len(padded), padded.batches_per_epoch) == (18, 6)
    assert repr(loader).startswith("DataLoader(Numbers of 43 samples, batch_size=8, epochs=3, cursor=Cursor(")


# The padded end


def test_a_padded_batch_says_which_samples_are_real(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(21), mesh, {"x": P("data", "model"), "id": P()}, batch_size=8, remainder="pad")
    batches = list(loader)
    masks = [np.asarray(batch["mask"]).tolist() for batch in batches]
    assert masks == [[True] * 8, [True] * 8, [True] * 5 + [False] * 3]
    assert all(batch["mask"].dtype == np.bool_ for batch in batches)
    assert not np.asarray(batches[2]["x"])[5:].any()
    assert not np.asarray(batches[2]["id"])[5:].any()
    real = [number for batch in batches for number in np.asarray(batch["id"])[np.asarray(batch["mask"])].tolist()]
    assert sorted(real) == list(range(21))
    check(jax.tree.map(lambda leaf: np.asarray(leaf)[:5], batches[2]))


def test_padding_leaves_nothing_of_an_older_batch(mesh: Mesh) -> None:
    loader = DataLoader(Large(18), mesh, P("data"), batch_size=8, epochs=4, remainder="pad", knobs=Knobs(prefetch=1))
    for batch in loader:
        blank = ~np.asarray(batch["mask"])
        assert not np.asarray(batch["large"])[blank].any()
        assert not np.asarray(batch["x"])[blank].any()


def test_a_source_smaller_than_a_batch(mesh: Mesh) -> None:
    (batch,) = DataLoader(Numbers(3), mesh, P("data"), batch_size=8, remainder="pad")
    assert np.asarray(batch["mask"]).tolist() == [True] * 3 + [False] * 5
    assert sorted(ids(batch)[:3]) == [0, 1, 2]


def test_the_mask_is_split_like_the_first_leaf_or_as_the_user_says(mesh: Mesh) -> None:
    specs = {"x": P("data"), "id": P(("data", "model"))}
    loader = DataLoader(Numbers(21), mesh, specs, batch_size=8, remainder="pad")
    assert loader.shardings["mask"] == NamedSharding(mesh, P(("data", "model")))  # "id" is the first of the tree
    assert {batch["mask"].sharding for batch in loader} == {loader.shardings["mask"]}
    for spec in (P("model"), P(), NamedSharding(mesh, P("data"))):
        loader = DataLoader(Numbers(21), mesh, {**specs, "mask": spec}, batch_size=8, remainder="pad")
        want = spec if isinstance(spec, NamedSharding) else NamedSharding(mesh, spec)
        *_, last = loader
        assert last["mask"].sharding == loader.shardings["mask"] == want
        assert np.asarray(last["mask"]).tolist() == [True] * 5 + [False] * 3


def test_a_mask_needs_a_mapping_without_one(mesh: Mesh) -> None:
    masked = {"mask": np.zeros(16, np.int32)}
    for source in (masked, [np.arange(3)] * 16):
        with pytest.raises(ArgumentError, match="remainder='pad' adds the leaf 'mask'"):
            DataLoader(source, mesh, P("data"), batch_size=8, remainder="pad")
        assert len(list(DataLoader(source, mesh, P("data"), batch_size=8))) == 2


def test_a_spec_of_the_mask_is_checked(mesh: Mesh) -> None:
    specs = {"x": P("data"), "id": P(), "mask": P("seq")}
    with pytest.raises(SpecError, match="names the axis 'seq'"):
        DataLoader(Numbers(21), mesh, specs, batch_size=8, remainder="pad")
    with pytest.raises(SpecError, match="does not fit the batch"):
        DataLoader(Numbers(21), mesh, specs, batch_size=8)


# Batch size


@pytest.mark.parametrize(
    ("num_samples", "spec", "remainder", "expected"),
    [
        (1000, P("data"), "drop", 128),
        (100, P("data"), "drop", 100),
        (103, P(("data", "model")), "drop", 96),
        (103, P("data"), "pad", 128),
        (5, P("data"), "drop", 4),
    ],
)
def test_the_default_batch_size_fits_and_is_said(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, num_samples: int, spec: P, remainder: Any, expected: int
) -> None:
    with caplog.at_level(logging.WARNING, logger="braidax"):
        loader = DataLoader(Numbers(num_samples), mesh, spec, remainder=remainder)
    assert loader.batch_size == expected
    (record,) = caplog.records
    assert record.name == "braidax"
    assert f"batch_size was not given; using {expected} " in record.getMessage()


def test_the_default_batch_size_divides_by_an_odd_mesh(caplog: pytest.LogCaptureFixture) -> None:
    mesh = jax.make_mesh((3,), ("data",), devices=jax.devices()[:3])
    assert DataLoader(Numbers(1000), mesh, P("data")).batch_size == 126
    assert "a multiple of the 3 parts" in caplog.text


def test_a_given_batch_size_is_not_talked_about(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    DataLoader(Numbers(100), mesh, P("data"), batch_size=8)
    assert caplog.records == []


# What is left out


def test_a_path_alone_is_enough(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(12, dtype=np.float32))
    with DataLoader(tmp_path / "a.npz", batch_size=4, seed=None) as loader:
        batches = list(loader)
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batches[0]["x"].sharding.device_set == {jax.local_devices()[0]}
    looked_up = jax.jit(lambda table, x: table[x.astype(np.int32)])(np.arange(20) * 2, batches[2]["x"])
    assert looked_up.tolist() == [16, 18, 20, 22]


def test_a_mesh_alone_splits_the_batch_over_all_of_its_axes() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    loader = DataLoader(Numbers(32), mesh, batch_size=16)
    assert all(sharding.spec == P(("data", "model")) for sharding in jax.tree.leaves(loader.shardings))


@pytest.mark.parametrize("specs", [None, P("data")])
def test_the_mesh_that_is_set_is_taken(specs: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        loader = DataLoader(Numbers(32), specs=specs, batch_size=16)
    assert all(sharding == NamedSharding(mesh, P("data")) for sharding in jax.tree.leaves(loader.shardings))


def test_specs_without_any_mesh_are_refused() -> None:
    with pytest.raises(SpecError, match="is a PartitionSpec, but mesh=None; give a mesh"):
        DataLoader(Numbers(32), specs=P("data"), batch_size=16)


@pytest.mark.parametrize("is_set", [True, False])
def test_a_path_is_all_that_is_needed(tmp_path: Path, *, is_set: bool) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(64))
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        (batch,) = DataLoader(tmp_path / "a.npz")
    assert sorted(np.asarray(batch["x"]).tolist()) == list(range(64))
    assert len(batch["x"].sharding.device_set) == (8 if is_set else 1)


# One epoch


def test_an_epoch_leaves_the_cursor_alone(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(50), mesh, P("data"), batch_size=8, seed=3, epochs=2)
    expected = peeked(loader, 12)
    assert [ids(batch) for batch in loader.epoch()] == expected[:6]
    assert loader.cursor == Cursor(3, 0, 0)
    got: list[list[int]] = []
    for number, batch in enumerate(loader):
        got.append(ids(batch))
        if number == 2:
            assert [ids(inner) for inner in loader.epoch()] == expected[:6]
            assert [ids(inner) for inner in loader.epoch(1)] == expected[6:]
            assert loader.cursor == Cursor(3, 0, 24)
    assert got == expected
    assert [ids(batch) for batch in loader.epoch(0)] == expected[:6]
    assert loader.cursor == Cursor(3, 2, 0)


def test_an_epoch_that_is_left_or_closed(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(50), mesh, P("data"), batch_size=8)
    for _ in loader.epoch():
        break
    with pytest.raises(ArgumentError, match="epoch must be at least 0"):
        loader.epoch(-1)
    batches = loader.epoch()
    next(batches)
    loader.close()
    assert reading_threads() == []
    with pytest.raises(BraidaxError, match=r"closed while an epoch\(\) of it was under way"):
        next(batches)


# Batches on the host


def test_batches_stay_on_the_host() -> None:
    expected = peeked(DataLoader(Numbers(50), batch_size=8, seed=3), 6)
    loader = DataLoader(Numbers(50), batch_size=8, seed=3, placement="host", remainder="pad")
    batches = list(loader)
    for batch, wanted in zip(batches, expected, strict=False):
        assert all(type(leaf) is np.ndarray for leaf in batch.values())
        assert batch["id"].tolist() == wanted
        assert batch["mask"].all()
        check(batch)
    assert batches[6]["mask"].tolist() == [True, True, *[False] * 6]
    assert batches[6]["id"][2:].tolist() == [0] * 6
    batches[0]["x"][:] = -1  # ours: no later batch is written there, nor is this one
    assert (batches[1]["x"] >= 0).all()
    with pytest.raises(ArgumentError, match="makes NumPy arrays, which have no shardings; leave placement out"):
        loader.shardings  # noqa: B018


def test_a_batch_on_the_host_keeps_its_memory() -> None:
    first, kept = None, list[Any]()
    for epoch in range(4):
        for batch in DataLoader(Numbers(64), batch_size=8, seed=epoch, placement="host"):
            kept.append((batch["id"].copy(), batch["id"][::2]))
            first = batch["id"].ctypes.data if first is None else first
    assert all(np.array_equal(copy[::2], view) for copy, view in kept)


def test_batches_on_the_host_are_stacks_of_microbatches() -> None:
    loader = DataLoader(Numbers(32), batch_size=8, seed=None, placement="host", microbatches=2)
    assert [batch["id"].tolist() for batch in loader][1] == [[8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_go_with_batches_on_the_host(mesh: Mesh) -> None:
    with pytest.raises(ArgumentError, match="mesh= was given beside placement='host', which puts batches on no device"):
        DataLoader(Numbers(32), mesh, batch_size=8, placement="host")
    with pytest.raises(ArgumentError, match="specs= was given beside placement='host'"):
        DataLoader(Numbers(32), specs=P(), batch_size=8, placement="host")
    with pytest.raises(ArgumentError, match="placement='gpu' is not 'devices' or 'host'"):
        DataLoader(Numbers(32), batch_size=8, placement=cast(Any, "gpu"))


# Batch sizes


@pytest.mark.parametrize("batch_size", [0, -8, 8.0, True, "8"])
@pytest.mark.usefixtures("unchecked")
def test_a_batch_size_is_a_number_of_samples(mesh: Mesh, batch_size: Any) -> None:
    with pytest.raises(ArgumentError, match=f"batch_size={batch_size!r} is not a positive number of samples"):
        DataLoader(Numbers(32), mesh, batch_size=batch_size)


def test_a_batch_size_is_that_of_all_microbatches(mesh: Mesh) -> None:
    loader = DataLoader(Numbers(100), mesh, P("data"), microbatches=3)
    assert loader.batch_size == 96
    with pytest.raises(
        SpecError, match=r"batch_size=30 is not a multiple of 12: .* microbatches=3 into 4 parts; use 24 or 36"
    ):
        DataLoader(Numbers(100), mesh, P("data"), batch_size=30, microbatches=3)
