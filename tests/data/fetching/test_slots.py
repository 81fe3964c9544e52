"""Slots: memory comes back when nobody looks at it any more, and never before."""

import gc
import mmap
import random
import weakref
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from braidax.data.fetching.slots import Slots
from braidax.data.knobs import Knobs
from braidax.data.loader import DataLoader
from braidax.data.sharding.load_plan import LoadPlan, plan_load
from braidax.data.workers.alignment import ALIGNMENT
from tests.support.data.troubled import eventually

ROWS = 8 * 64


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Leaves what tests before have left behind out of the many collections of garbage here."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"))


@pytest.fixture
def plan(mesh: Mesh) -> LoadPlan:
    batch = {name: jax.ShapeDtypeStruct((ROWS,), np.float32) for name in ("split", "partly", "whole")}
    return plan_load(batch, mesh, {"split": P(("data", "model")), "partly": P("model"), "whole": P()})


def load(slots: Slots, plan: LoadPlan, value: float) -> tuple[dict[str, jax.Array], int]:
    """Fills a slot with one value and returns its arrays and its address."""
    memory = slots.take()
    memory.view(np.float32)[:] = value
    return plan.batch(plan.arrays(memory)), memory.ctypes.data


def free(slots: Slots) -> list[int]:
    """The addresses of the slots that would be handed out next."""
    gc.collect()
    return [memory.ctypes.data for memory in slots._free.slots]


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 1000, 1 << 20])
def test_a_slot_is_aligned_and_writable(num_bytes: int) -> None:
    slots = Slots(num_bytes, keep=2)
    taken = [slots.take() for _ in range(5)]
    for number, memory in enumerate(taken):
        assert (memory.dtype, memory.shape) == (np.uint8, (num_bytes,))
        assert num_bytes == 0 or memory.ctypes.data % ALIGNMENT == 0
        memory[:] = number
    for number, memory in enumerate(taken):
        assert (memory == number).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are asked for on Linux")
def test_slots_that_fill_large_pages_well_lie_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[int, int]]()

    class Watched(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            asked.append((len(self), option))
            raise OSError("there are none")  # which changes nothing

    monkeypatch.setattr(mmap, "mmap", Watched)
    for num_bytes in (3 << 19, 1 << 21, 5 << 20, (3 << 19) - 1, (1 << 21) + 1):
        memory = Slots(num_bytes, keep=1).take()
        assert (memory.nbytes, memory.ctypes.data % ALIGNMENT) == (num_bytes, 0)
        memory[[0, -1]] = 7
    assert asked == [(pages << 21, mmap.MADV_HUGEPAGE) for pages in (1, 1, 3)]


def test_a_slot_comes_back_when_its_last_view_is_gone() -> None:
    slots = Slots(4096, keep=2)
    memory = slots.take()
    address = memory.ctypes.data
    view = memory[64:128].view(np.float32).reshape(4, 4)[1:]
    del memory
    assert free(slots) == []
    assert slots.take().ctypes.data != address
    del view
    assert address in free(slots)
    assert any(slots.take().ctypes.data == address for _ in range(2))


def test_no_more_free_slots_are_kept_than_asked_for() -> None:
    slots = Slots(4096, keep=3)
    taken = [slots.take() for _ in range(10)]
    taken.clear()
    assert len(free(slots)) == 3


def test_slots_may_die_before_their_memory() -> None:
    slots = Slots(4096, keep=3)
    memory = slots.take()
    memory[:] = 7
    gone = weakref.ref(slots)
    del slots
    gc.collect()
    assert gone() is None
    assert (memory == 7).all()


@pytest.fixture
def leavings(monkeypatch: pytest.MonkeyPatch) -> deque[Any]:
    found: deque[Any] = deque(maxlen=3)
    monkeypatch.setattr("braidax.data.fetching.slots._leavings", found)
    return found


def test_slots_leave_their_memory_to_others_of_the_size(leavings: deque[Any]) -> None:
    slots = Slots(4096, keep=2)
    seen = slots.take()
    early = slots.take().ctypes.data
    del slots
    assert [memory.ctypes.data for memory in leavings] == [early]
    late = seen.ctypes.data
    del seen  # the last view of a slot whose Slots are gone
    assert late in [memory.ctypes.data for memory in leavings]
    other, again = Slots(8192, keep=2), Slots(4096, keep=2)
    assert other.take().ctypes.data not in (early, late)
    assert len(leavings) == 2
    taken = [again.take() for _ in range(3)]
    assert {early, late} < {memory.ctypes.data for memory in taken}
    assert len({memory.ctypes.data for memory in taken}) == 3
    assert not leavings


def test_no_more_memory_is_left_than_the_next_slots_need(leavings: deque[Any]) -> None:
    large = Slots((8 << 20) + 1, keep=2)
    large.take()
    del large
    assert not leavings
    slots = Slots(4096, keep=1)
    taken = [slots.take() for _ in range(6)]
    taken.clear()
    assert len(leavings) == 3
    del slots
    assert len(leavings) == 3


def _array(arrays: dict[str, jax.Array]) -> Any:
    return arrays["split"]


def _numpy_of_whole(arrays: dict[str, jax.Array]) -> Any:
    return np.asarray(arrays["whole"])


def _numpy_slice(arrays: dict[str, jax.Array]) -> Any:
    return np.asarray(arrays["partly"].addressable_shards[3].data)[5:9]


def _shard(arrays: dict[str, jax.Array]) -> Any:
    return arrays["partly"].addressable_shards[5].data


def _moved(arrays: dict[str, jax.Array]) -> Any:
    return jax.device_put(arrays["whole"], jax.devices()[2])


def _same_placed_again(arrays: dict[str, jax.Array]) -> Any:
    return jax.device_put(arrays["split"], arrays["split"].sharding)


def _jitted_identity(arrays: dict[str, jax.Array]) -> Any:
    return jax.jit(lambda tree: tree)(arrays)


def _jitted_slice(arrays: dict[str, jax.Array]) -> Any:
    return jax.jit(lambda tree: (tree["whole"], tree["partly"].reshape(8, -1)))(arrays)


def _computed_and_dropped(arrays: dict[str, jax.Array]) -> Any:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 4000, lambda i, y: jnp.sin(y + x + i), x))
    slow(arrays["whole"])
    return arrays["split"]


def _gradient_closure(arrays: dict[str, jax.Array]) -> Any:
    return jax.vjp(lambda x: jnp.sin(x) * arrays["whole"], arrays["whole"])[1]


HOLDERS = [
    _array,
    _numpy_of_whole,
    _numpy_slice,
    _shard,
    _moved,
    _same_placed_again,
    _jitted_identity,
    _jitted_slice,
    _computed_and_dropped,
    _gradient_closure,
]


def contents(held: Any) -> list[np.ndarray]:
    leaves = [leaf for leaf in jax.tree.leaves(held) if isinstance(leaf, (jax.Array, np.ndarray))]
    return [np.array(leaf) for leaf in leaves]


@pytest.mark.parametrize("hold", HOLDERS)
def test_what_is_held_never_changes(plan: LoadPlan, hold: Any) -> None:
    slots = Slots(plan.num_bytes, keep=4)
    arrays, address = load(slots, plan, 1.0)
    held = hold(arrays)
    before = contents(held)
    assert before
    del arrays
    for value in range(2, 8):  # whatever is free is written over
        load(slots, plan, value)
        gc.collect()
    for old, new in zip(before, contents(held), strict=True):
        np.testing.assert_array_equal(old, new)
    del held
    assert eventually(lambda: address in free(slots), seconds=30)  # what was computed of it may still be running


@pytest.mark.parametrize("hold", [_array, _numpy_of_whole, _numpy_slice, _shard])
def test_a_slot_stays_out_while_its_memory_is_seen(plan: LoadPlan, hold: Any) -> None:
    slots = Slots(plan.num_bytes, keep=4)
    arrays, address = load(slots, plan, 1.0)
    held = hold(arrays)
    del arrays
    assert address not in free(slots)
    del held
    assert address in free(slots)


def test_one_slot_serves_many_batches_in_turn(plan: LoadPlan) -> None:
    slots = Slots(plan.num_bytes, keep=4)
    addresses: set[int] = set()
    for value in range(6):
        arrays, address = load(slots, plan, value)
        assert all((np.asarray(array) == value).all() for array in arrays.values())
        addresses.add(address)
        del arrays
        gc.collect()
    assert len(addresses) == 1


def test_donating_a_batch_corrupts_no_other(plan: LoadPlan) -> None:
    slots = Slots(plan.num_bytes, keep=4)
    step = jax.jit(lambda tree: {name: array * 2 + 1 for name, array in tree.items()}, donate_argnums=0)
    batches = [load(slots, plan, value)[0] for value in range(6)]
    kept = [np.asarray(batches[number]["whole"]) for number in (1, 3)]
    outputs = {number: step(batches[number]) for number in (0, 2, 4)}
    for number in (0, 2, 4):
        assert all(array.is_deleted() for array in batches[number].values())
    later = [load(slots, plan, 100 + value)[0] for value in range(4)]
    for number, output in outputs.items():
        for array in output.values():
            for shard in array.addressable_shards:  # replicas shared the memory that was donated
                assert (np.asarray(shard.data) == 2 * number + 1).all()
    for number in (1, 3, 5):
        assert all((np.asarray(array) == number).all() for array in batches[number].values())
    assert [int(view[0]) for view in kept] == [1, 3]
    assert all((np.asarray(array) == 100 + v).all() for v, tree in enumerate(later) for array in tree.values())


def test_a_running_step_still_sees_its_batch(plan: LoadPlan) -> None:
    """The batch is dropped by the user while the computation that reads it is still queued."""
    slots = Slots(plan.num_bytes, keep=2)

    @jax.jit
    def slow(tree: dict[str, jax.Array]) -> jax.Array:
        start = jnp.zeros((), jnp.float32)
        many = jax.lax.fori_loop(0, 2000, lambda i, total: total + jnp.sin(total + i), start)
        return tree["whole"].max() + 0.0 * many

    slow(load(slots, plan, 0.0)[0])
    results: list[jax.Array] = []
    for value in range(1, 30):
        arrays, _ = load(slots, plan, value)
        results.append(slow(arrays))
        del arrays
    assert [float(result) for result in results] == list(range(1, 30))


def test_a_loader_goes_round_in_a_few_slots(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"x": np.arange(640 * 16, dtype=np.float32).reshape(640, 16)}
    loader = DataLoader(data, mesh, P("data"), batch_size=16, knobs=Knobs(threads=2, prefetch=2))
    made, empty = list[int](), np.empty

    def watched(shape: Any, *arguments: Any, **options: Any) -> np.ndarray:
        if shape == 16 * 16 * 4 + ALIGNMENT:
            made.append(shape)
        return empty(shape, *arguments, **options)

    monkeypatch.setattr(np, "empty", watched)
    for batch in loader:
        del batch
    assert 1 <= len(made) <= 8  # three in flight, one in use, and what the collector has not seen yet


def test_batches_that_a_user_keeps_hold_what_they_held(mesh: Mesh) -> None:
    """Several epochs over a small source, with a random choice of batches, views and donations alive."""
    data = {"x": np.arange(96 * 40, dtype=np.float32).reshape(96, 40), "id": np.arange(96, dtype=np.int32)}
    specs = {"x": P("data", "model"), "id": P()}
    choose = random.Random(0)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    loader = DataLoader(data, mesh, specs, batch_size=16, epochs=5, knobs=Knobs(threads=3, prefetch=3))
    kept: list[tuple[np.ndarray, Any, int]] = []
    expected = loader.peek(len(loader))
    for number, batch in enumerate(loader):
        what = choose.randrange(5)
        if what == 0:
            kept.append((expected[number], batch["x"], 1))
        elif what == 1:
            kept.append((expected[number], np.asarray(batch["x"]), 1))
        elif what == 2:
            kept.append((expected[number], double(batch["x"]), 2))
        if len(kept) > 6:
            kept.pop(choose.randrange(len(kept)))
        np.testing.assert_array_equal(np.asarray(batch["id"]), expected[number])
    assert len(kept) > 3
    for indices, held, factor in kept:
        np.testing.assert_array_equal(np.asarray(held), data["x"][indices] * factor)
