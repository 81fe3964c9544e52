"""The load plan: every shard of every leaf is what NumPy would slice, on any mesh, for any spec, shape and dtype."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.data import DataLoader
from braidax.data.fetching import several
from braidax.data.fetching.fetch import Fetch
from braidax.data.fetching.slots import Slots
from braidax.data.sharding import load_plan
from braidax.data.sharding.load_plan import LoadPlan, plan_load, replicate_on_device
from braidax.data.workers.alignment import ALIGNMENT
from braidax.errors import ArgumentError, SpecError

DTYPES = [np.bool_, np.uint8, np.int32, jnp.bfloat16, np.float32, np.float16]
MESHES = [(8,), (4, 2), (2, 4), (2, 2, 2), (1,), (4,), (3, 2), (5,), (7,)]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh over some of the 8 devices, in any order, with automatic or explicit axes."""
    shape = draw(st.sampled_from(MESHES))
    devices = draw(st.permutations(jax.devices()))[: math.prod(shape)]
    kind = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    return Mesh(np.array(devices).reshape(shape), tuple("abc"[: len(shape)]), axis_types=(kind,) * len(shape))


@st.composite
def leaf_specs(draw: st.DrawFn, mesh: Mesh, batch_size: int) -> tuple[jax.ShapeDtypeStruct, P]:
    """A leaf `[batch_size, …]` and a spec that fits it: axes are dealt to the dims in any order."""
    num_dims = draw(st.integers(1, 4))
    dealt: list[list[str]] = [[] for _ in range(num_dims)]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(-1, num_dims - 1))
        parts = math.prod(mesh.shape[other] for other in dealt[dim]) * mesh.shape[axis]
        if dim > 0 or (dim == 0 and batch_size % parts == 0):
            dealt[dim].append(axis)
    sizes = [batch_size]
    for axes in dealt[1:]:
        sizes.append(math.prod(mesh.shape[axis] for axis in axes) * draw(st.integers(1, 3)))
    entries = [tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in dealt]
    while entries and entries[-1] is None and draw(st.booleans()):
        entries.pop()
    return jax.ShapeDtypeStruct(tuple(sizes), draw(st.sampled_from(DTYPES))), P(*entries)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], Mesh, dict[str, Any]]:
    """A batch with its specs: some leaves on the common mesh, some on another, some under one spec together."""
    mesh = draw(meshes())
    batch_size = draw(st.sampled_from([1, 2, 3, 8, 24, 40])) * draw(st.sampled_from([1, *mesh.shape.values()]))
    batch: dict[str, Any] = {}
    specs: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 4))):
        name = f"leaf{number}"
        kind = draw(st.sampled_from(["spec", "sharding", "prefix"]))
        if kind == "spec":
            batch[name], specs[name] = draw(leaf_specs(mesh, batch_size))
        elif kind == "sharding":
            own = draw(meshes())
            batch[name], spec = draw(leaf_specs(own, batch_size))
            specs[name] = NamedSharding(own, spec)
        else:
            first, specs[name] = draw(leaf_specs(mesh, batch_size))
            batch[name] = (first, {"second": jax.ShapeDtypeStruct(first.shape, draw(st.sampled_from(DTYPES)))})
    return batch, mesh, specs


def values_like(batch: Any, seed: int = 0) -> Any:
    """Returns the whole batch in NumPy, all bits random where the dtype allows."""
    rng = np.random.default_rng(seed)

    def values(leaf: Any) -> np.ndarray:
        if leaf.dtype == np.bool_:
            return rng.integers(0, 2, leaf.shape).astype(np.bool_)
        if leaf.dtype in (np.uint8, np.int32):
            info = np.iinfo(leaf.dtype)
            return rng.integers(info.min, info.max, leaf.shape, dtype=leaf.dtype, endpoint=True)
        return rng.standard_normal(leaf.shape).astype(leaf.dtype)

    return jax.tree.map(values, batch)


def fill(plan: LoadPlan, memory: np.ndarray, whole: Any, max_rows: int = 7) -> None:
    for reading in plan.reads(max_rows):
        for target, box, leaf in zip(plan.rows(memory, reading), reading.boxes, jax.tree.leaves(whole), strict=True):
            assert target is not None
            assert target.flags.c_contiguous
            assert box is None or target.shape[1:] == tuple(stop - start for start, stop in box)
            target[...] = leaf[reading.start : reading.stop]


def assert_same(array: jax.Array, expected: np.ndarray, sharding: NamedSharding) -> None:
    """Compares sharding, shape, dtype and every shard on its device with the NumPy reference."""
    assert array.sharding == sharding
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    places = sharding.devices_indices_map(expected.shape)
    assert {shard.device for shard in array.addressable_shards} == set(places)
    for shard in array.addressable_shards:
        got = np.asarray(shard.data)
        want = expected[places[shard.device]]
        assert got.shape == want.shape
        np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


def expected_shardings(mesh: Mesh, batch: dict[str, Any], specs: dict[str, Any]) -> list[NamedSharding]:
    full = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: NamedSharding(mesh, spec) if isinstance(spec, P) else spec, part),
        specs,
        batch,
        is_leaf=lambda value: isinstance(value, (P, NamedSharding)),
    )
    return jax.tree.leaves(full)


def test_no_thread_is_the_first_to_ask_for_the_devices_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    begun = list[bool]()
    begin = several._begin

    def noted(fetch: Fetch, *given: Any, **options: Any) -> Any:
        begun.append(all("by_index" in vars(leaf) for leaf in fetch._plan.leaves))
        return begin(fetch, *given, **options)

    monkeypatch.setattr(several, "_begin", noted)
    with DataLoader({"x": np.zeros((8, 3), np.float32)}, mesh, P("a"), batch_size=4) as loader:
        next(iter(loader))
    assert begun
    assert all(begun)


@settings(max_examples=25)
@given(case=cases(), max_rows=st.integers(1, 50))
def test_every_shard_is_the_slice_that_numpy_takes(case: tuple[Any, Mesh, Any], max_rows: int) -> None:
    batch, mesh, specs = case
    plan, whole = plan_load(batch, mesh, specs), values_like(batch)
    memory = Slots(plan.num_bytes, keep=1).take()
    memory[:] = 0xA5
    fill(plan, memory, whole, max_rows)
    arrays = plan.batch(plan.arrays(memory))
    assert jax.tree.structure(arrays) == jax.tree.structure(batch)
    shardings = expected_shardings(mesh, batch, specs)
    assert jax.tree.leaves(plan.shardings) == shardings
    for array, expected, sharding in zip(jax.tree.leaves(arrays), jax.tree.leaves(whole), shardings, strict=True):
        assert_same(array, expected, sharding)


@settings(max_examples=25)
@given(case=cases())
def test_the_way_of_accelerators_gives_the_same(case: tuple[Any, Mesh, Any]) -> None:
    batch, mesh, specs = case
    plan, whole = plan_load(batch, mesh, specs), values_like(batch)
    memory = Slots(plan.num_bytes, keep=1).take()
    fill(plan, memory, whole)
    for leaf, expected in zip(plan.leaves, jax.tree.leaves(whole), strict=True):
        views = {bounds: leaf.slice(memory, bounds) for bounds in leaf.slices}
        assert_same(replicate_on_device(leaf, views), expected, leaf.sharding)


@settings(max_examples=25)
@given(case=cases(), number=st.integers(1, 3), spare=st.integers(0, 2))
def test_several_batches_lie_in_the_memory_of_as_many(case: tuple[Any, Mesh, Any], number: int, spare: int) -> None:
    batch, mesh, specs = case
    plan = plan_load(batch, mesh, specs)
    assume(bool(plan.stacks))
    wholes = [jax.tree.map(lambda leaf, by=by: np.roll(leaf, by), values_like(batch)) for by in range(number)]
    memory = Slots((number + spare) * plan.num_bytes, keep=1).take()
    for (start, stop, _), rows in plan.rows_of_several(memory, number, number + spare):
        for leaf, values in zip(rows, zip(*map(jax.tree.leaves, wholes), strict=True), strict=True):
            assert leaf is not None
            leaf[...] = np.concatenate([whole[start:stop] for whole in values])
    made = [plan.batch(arrays) for arrays in plan.arrays_of_several(memory, number, number + spare)]
    for one, whole in zip(made, wholes, strict=True):
        for array, expected, leaf in zip(jax.tree.leaves(one), jax.tree.leaves(whole), plan.leaves, strict=True):
            assert_same(array, expected, leaf.sharding)


@settings(max_examples=25)
@given(case=cases(), max_rows=st.integers(1, 50))
def test_ranges_of_rows_cover_the_batch_once(case: tuple[Any, Mesh, Any], max_rows: int) -> None:
    batch, mesh, specs = case
    plan = plan_load(batch, mesh, specs)
    ranges = [(reading.start, reading.stop) for reading in plan.reads(max_rows)]
    covered = [row for start, stop in ranges for row in range(start, stop)]
    assert covered == list(range(plan.batch_size))
    assert all(0 < stop - start <= max_rows for start, stop in ranges)
    for start, stop in ranges:  # and each lies in one piece in every leaf
        for leaf in plan.leaves:
            view = leaf.view(np.zeros(plan.num_bytes, np.uint8), start, stop)
            assert view is not None
            assert view.shape == (stop - start, *leaf.shape[1:])


@settings(max_examples=25)
@given(case=cases())
def test_no_two_things_share_a_byte_of_the_slot(case: tuple[Any, Mesh, Any]) -> None:
    batch, mesh, specs = case
    plan = plan_load(batch, mesh, specs)
    stretches: list[tuple[int, int]] = []
    for leaf in plan.leaves:
        row_bytes = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
        stretches += [(place.offset, place.offset + (place.stop - place.start) * row_bytes) for place in leaf.rows]
        for bounds, offset in leaf.copies.items():
            size = math.prod(stop - start for start, stop in bounds) * leaf.dtype.itemsize
            stretches.append((offset, offset + size))
        assert all(place.offset % ALIGNMENT == 0 for place in leaf.rows)
        assert all(offset % ALIGNMENT == 0 for offset in leaf.copies.values())
    stretches.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(stretches))
    assert stretches[-1][1] <= plan.num_bytes


def pointers(array: jax.Array) -> dict[Any, int]:
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@pytest.mark.parametrize("row_bytes", [1, 4, 20, 48, 64, 100, 3072, 9001])
@pytest.mark.parametrize("spec", [P(), P("data"), P("model"), P(("data", "model"))])
def test_contiguous_slices_are_not_copied(row_bytes: int, spec: P) -> None:
    """On CPU the devices use the slot's memory as it is, at aligned addresses whatever the size of a row."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    batch = {"x": jax.ShapeDtypeStruct((24, row_bytes), np.uint8)}
    plan, whole = plan_load(batch, mesh, spec), values_like(batch)
    memory = Slots(plan.num_bytes, keep=1).take()
    fill(plan, memory, whole)
    array = plan.batch(plan.arrays(memory))["x"]
    first = memory.ctypes.data
    for pointer in pointers(array).values():
        assert first <= pointer < first + plan.num_bytes
        assert pointer % ALIGNMENT == 0
    assert_same(array, whole["x"], NamedSharding(mesh, spec))
    memory[:] = 0
    assert not np.asarray(array).any()  # the very same bytes


def test_rows_of_one_piece_stay_in_one_piece_where_alignment_allows() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    aligned = plan_load(jax.ShapeDtypeStruct((32, 16), np.float32), mesh, P("data")).leaves[0]
    assert [(place.start, place.stop) for place in aligned.rows] == [(0, 32)]
    odd = plan_load(jax.ShapeDtypeStruct((32, 4097), np.uint8), mesh, P("data")).leaves[0]
    assert [(place.start, place.stop) for place in odd.rows] == [(start, start + 4) for start in range(0, 32, 4)]
    assert [place.offset for place in odd.rows] == [16448 * number for number in range(8)]
    assert len(odd.copies) == 0
    small = plan_load(jax.ShapeDtypeStruct((32, 3), np.uint8), mesh, P("data")).leaves[0]
    assert [(place.start, place.stop) for place in small.rows] == [(0, 32)]
    assert [bounds[0][0] for bounds in small.copies] == [4, 8, 12, 16, 20, 24, 28]


def test_a_slice_that_several_devices_hold_is_put_once() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    batch = {"rows": jax.ShapeDtypeStruct((8, 6), np.int32), "part": jax.ShapeDtypeStruct((8, 6), np.int32)}
    plan = plan_load(batch, mesh, {"rows": P("data"), "part": P(None, "model")})
    by_path = {leaf.path: leaf for leaf in plan.leaves}
    assert sorted(by_path["['rows']"].slices) == [((start, start + 2), (0, 6)) for start in range(0, 8, 2)]
    assert all(len(devices) == 2 for devices in by_path["['rows']"].slices.values())
    assert sorted(by_path["['part']"].slices) == [((0, 8), (0, 3)), ((0, 8), (3, 6))]
    assert all(len(devices) == 4 for devices in by_path["['part']"].slices.values())
    assert [bounds[0][0] for bounds in by_path["['rows']"].copies] == [2, 4, 6]
    assert set(by_path["['part']"].copies) == set(by_path["['part']"].slices)
    memory = Slots(plan.num_bytes, keep=1).take()
    fill(plan, memory, values_like(batch))
    arrays = plan.batch(plan.arrays(memory))
    assert len(set(pointers(arrays["rows"]).values())) == 4
    assert len(set(pointers(arrays["part"]).values())) == 2


def test_replicas_on_an_accelerator_come_from_its_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    plan = plan_load(jax.ShapeDtypeStruct((8, 6), np.int32), mesh, P("model"))
    memory = Slots(plan.num_bytes, keep=1).take()
    fill(plan, memory, np.arange(48, dtype=np.int32).reshape(8, 6))
    leaf, sent, device_put = plan.leaves[0], list[str](), jax.device_put

    def watched(values: Any, devices: Any) -> Any:
        sent.extend("host" if isinstance(value, np.ndarray) else "device" for value in values)
        return device_put(values, devices)

    monkeypatch.setattr(jax, "device_put", watched)
    array = replicate_on_device(leaf, {bounds: leaf.slice(memory, bounds) for bounds in leaf.slices})
    assert sent == ["host"] * 2 + ["device"] * 6
    np.testing.assert_array_equal(np.asarray(array), np.arange(48).reshape(8, 6))


def test_arrays_keep_the_memory_alive() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    plan = plan_load(jax.ShapeDtypeStruct((8, 16), np.float32), mesh, P("data"))
    slots = Slots(plan.num_bytes, keep=2)
    memory = slots.take()
    memory.view(np.float32)[:] = 5
    array = plan.batch(plan.arrays(memory))
    del memory
    other = [slots.take() for _ in range(3)]
    for each in other:
        each[:] = 0
    assert (np.asarray(array) == 5).all()


def test_sizes_of_the_plan() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    batch = {"x": jax.ShapeDtypeStruct((16, 5, 3), np.uint8), "y": jax.ShapeDtypeStruct((16,), np.int32)}
    plan = plan_load(batch, mesh, {"x": P(), "y": P()})
    assert plan.sample_bytes == 19
    assert plan.batch_size == 16
    assert plan.num_bytes == 256 + 64
    assert [leaf.path for leaf in plan.leaves] == ["['x']", "['y']"]


def test_a_dim_of_size_zero() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    plan = plan_load({"x": jax.ShapeDtypeStruct((16, 0), np.float32)}, mesh, P("data"))
    array = plan.batch(plan.arrays(Slots(plan.num_bytes, keep=1).take()))["x"]
    assert (array.shape, array.sharding.spec) == ((16, 0), P("data"))


@pytest.mark.parametrize(("stored", "held"), [("int64", "int32"), ("float64", "float32"), ("uint64", "uint32")])
def test_a_dtype_that_jax_would_cut_is_refused(stored: str, held: str) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    with pytest.raises(ArgumentError) as caught:
        plan_load({"x": jax.ShapeDtypeStruct((8,), np.dtype(stored))}, mesh, P("data"))
    assert f"leaf ['x'] of the batch has dtype={stored}, which JAX would hold as {held}" in str(caught.value)
    assert "jax_enable_x64" in str(caught.value)


def test_a_batch_without_leaves_is_refused() -> None:
    with pytest.raises(ArgumentError, match="has no leaves"):
        plan_load({}, jax.make_mesh((8,), ("data",)), P("data"))


def test_a_spec_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="batch_size=12 is not divisible by 8"):
        plan_load({"x": jax.ShapeDtypeStruct((12,), np.int32)}, jax.make_mesh((8,), ("data",)), P("data"))


def filled(plan: LoadPlan, batch: dict[str, Any]) -> list[jax.Array]:
    memory = Slots(plan.num_bytes, keep=1).take()
    for leaf, name in zip(plan.leaves, sorted(batch), strict=True):
        leaf.fill(memory, batch[name])
    return plan.arrays(memory)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_many_small_arrays_are_made_by_one_program(kind: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what they would be one by one, whatever JAX is told to look for, and large ones are not copied."""
    mesh = Mesh(np.array(jax.devices()[3:4]), ("a",), axis_types=(kind,))
    rows = np.arange(6)
    odd = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0, 0x80000000, 1], np.uint32).view(np.float32)
    batch: dict[str, Any] = {
        "bool": rows % 2 == 0,
        "byte": rows.astype(np.int8),
        "half": rows.astype(jnp.bfloat16),
        "nan": odd,
        "pair": np.stack([rows, -rows], axis=1).astype(np.int32),
        "wide": np.ones((6, 1 << 14), np.float32),
    }
    spec = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}
    plan = plan_load(spec, mesh, P("a"))
    assert sorted(plan._small) == [0, 1, 2, 3, 4]
    assert plan_load({name: spec[name] for name in ("bool", "byte", "half")}, mesh, P("a"))._small == {}
    made: list[int] = []
    real = load_plan.LoadPlan._array
    monkeypatch.setattr(load_plan.LoadPlan, "_array", lambda *given: (made.append(1), real(*given))[1])
    for option, alone in ((None, 1), ("jax_debug_nans", 6), ("jax_debug_infs", 6), ("jax_disable_jit", 6)):
        made.clear()
        if option:
            jax.config.update(option, True)
        try:
            arrays = filled(plan, batch)
        finally:
            if option:
                jax.config.update(option, False)
        assert len(made) == alone
        for leaf, name, array in zip(plan.leaves, sorted(batch), arrays, strict=True):
            assert array.sharding == leaf.sharding
            assert array.committed
            assert np.asarray(array).tobytes() == batch[name].tobytes()
            assert array.dtype == batch[name].dtype


def test_many_small_arrays_of_several_batches_are_made_by_one_call_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(np.array(jax.devices()[3:4]), ("a",))
    spec = {name: jax.ShapeDtypeStruct((6, number + 1), np.int32) for number, name in enumerate("abcde")}
    spec["wide"] = jax.ShapeDtypeStruct((6, 1 << 14), np.float32)
    plan, number, room = plan_load(spec, mesh, P("a")), 3, 4
    memory = Slots(room * plan.num_bytes, keep=1).take()
    ((reading, rows),) = plan.rows_of_several(memory, number, room)
    assert (reading.start, reading.stop) == (0, 6)
    for name, leaf in zip(sorted(spec), rows, strict=True):
        assert leaf is not None
        leaf[...] = np.arange(leaf.size).reshape(leaf.shape) + ord(name[0])
    alone: list[str] = []
    real = load_plan.LoadPlan._array

    def noted(plan: LoadPlan, leaf: Any, *given: Any) -> Any:
        alone.append(leaf.path)
        return real(plan, leaf, *given)

    monkeypatch.setattr(load_plan.LoadPlan, "_array", noted)
    batches = plan.arrays_of_several(memory, number, room)
    assert alone == ["['wide']"] * number
    for place, arrays in enumerate(batches):
        for name, leaf, array in zip(sorted(spec), plan.leaves, arrays, strict=True):
            size = 6 * spec[name].shape[1]
            expected = np.arange(place * size, (place + 1) * size).reshape(spec[name].shape) + ord(name[0])
            np.testing.assert_array_equal(np.asarray(array), expected)
            assert array.sharding == leaf.sharding


def test_small_arrays_of_several_devices_are_made_one_by_one() -> None:
    spec = {name: jax.ShapeDtypeStruct((8,), np.int32) for name in "abcdef"}
    meshes = [Mesh(np.array(jax.devices()[number : number + 1]), ("a",)) for number in range(2)]
    specs = {name: NamedSharding(meshes[number % 2], P("a")) for number, name in enumerate(spec)}
    plan = plan_load(spec, None, specs)
    assert plan._small == {}
    arrays = filled(plan, {name: np.arange(8, dtype=np.int32) for name in spec})
    assert [array.sharding for array in arrays] == list(specs.values())
    assert plan_load(spec, Mesh(np.array(jax.devices()), ("a",)), P("a"))._small == {}
