"""What the loader says it will do, on meshes that are not there."""

import contextlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.data import DataLoader, Explanation, simulated_mesh
from braidax.data.fetching.fetch import Fetch
from braidax.data.sharding.explain import SimulatedDevice, explain
from braidax.data.sharding.load_plan import plan_load
from braidax.errors import ArgumentError
from braidax.spans import Trace
from tests.support.data.jax_gang import Counting, CountingSliced

TOKENS = {"leaf0": jax.ShapeDtypeStruct((512,), np.int32), "leaf1": jax.ShapeDtypeStruct((), np.int32)}


def explained(axes: dict[str, int], num_processes: int, spec: P, *, cuts: bool = False, batch: int = 64) -> Explanation:
    source = (CountingSliced if cuts else Counting)(TOKENS, 1024)
    mesh = simulated_mesh(axes, num_processes=num_processes)
    specs = {"leaf0": spec, "leaf1": P(*spec[:1])}
    with DataLoader(source, mesh, specs, batch_size=batch) as loader:
        found = loader.explain()
    assert source.records == []  # nothing is read for it
    return found


def test_data_parallel_needs_no_exchange() -> None:
    found = explained({"data": 8}, 4, P("data"))
    assert found.redundancy == 1
    assert [leaf.why for leaf in found.leaves] == ["", ""]
    assert [leaf.load for leaf in found.leaves] == [P("data"), P("data")]
    assert found.records == dict.fromkeys(range(4), 16)
    assert found.read_bytes == dict.fromkeys(range(4), 16 * (2048 + 4))


def test_what_a_model_axis_replicates_is_cut_along_it() -> None:
    found = explained({"data": 2, "model": 4}, 4, P("data"))  # each half of the batch is on two processes
    assert found.redundancy == 1
    assert [leaf.load[0] for leaf in found.leaves] == [("data", "model")] * 2
    assert found.leaves[0].why == "rows are cut along model, read once and put together on the devices"
    assert found.records == dict.fromkeys(range(4), 16)


def test_a_model_axis_inside_processes_changes_nothing() -> None:
    found = explained({"data": 4, "model": 2}, 4, P("data"))
    assert [leaf.why for leaf in found.leaves] == ["", ""]
    assert found.records == dict.fromkeys(range(4), 16)


def cpu_mesh(shape: tuple[int, ...], processes: list[int], names: tuple[str, ...] = ("data", "model")) -> Mesh:
    devices = [SimulatedDevice(number, process, platform="cpu") for number, process in enumerate(processes)]
    return Mesh(np.array(devices, dtype=object).reshape(shape), names)


def exchanging(mesh: Mesh, *specs: P) -> list[int] | None:
    """Returns the ids of the devices that exchange the first leaf, in order; None for those of the mesh itself."""
    spec = {str(number): jax.ShapeDtypeStruct((64, 1024), np.int32) for number in range(len(specs))}
    cut_dims = [1] * len(specs)
    plan = plan_load(spec, mesh, dict(zip(spec, specs, strict=True)), reads="once", cut_dims=cut_dims)
    assert explain(plan).redundancy == 1
    found = plan.leaves[0].loading.sharding.mesh
    return None if found.devices.shape == mesh.devices.shape else [device.id for device in found.devices.flat]


def test_cpu_devices_of_a_process_that_hold_the_same_exchange_it_once() -> None:
    two_each = [0, 0, 1, 1, 2, 2, 3, 3]
    mesh = cpu_mesh((2, 4), two_each)
    assert exchanging(mesh, P("data")) == [0, 2, 4, 6]
    assert exchanging(mesh, P("data"), P()) == [0, 2, 4, 6]
    assert exchanging(mesh, P()) == [0, 2, 4, 6]
    assert exchanging(mesh, P(), P(None, "model")) is None  # their other leaf differs
    assert exchanging(cpu_mesh((2, 4), [0, 0, 1, 1, 2, 2, 2, 3]), P("data")) is None  # no runs of one length
    assert exchanging(cpu_mesh((2, 4), [0, 1, 0, 1, 2, 3, 2, 3]), P("data")) is None  # no runs
    assert exchanging(cpu_mesh((2, 4), [0] * 4 + [1] * 4), P()) == [0, 4]
    assert exchanging(cpu_mesh((2, 2, 2), two_each, ("a", "b", "c")), P("a")) == [0, 2, 4, 6]
    assert exchanging(simulated_mesh({"data": 2, "model": 4}, num_processes=4), P("data")) is None  # not on CPU


def test_a_sequence_is_cut_where_the_source_can_and_by_rows_where_it_cannot() -> None:
    able = explained({"data": 2, "seq": 4}, 8, P("data", "seq"), cuts=True)
    assert able.leaves[0].load == P("data", "seq")
    assert able.leaves[0].read_bytes == dict.fromkeys(range(8), 32 * 128 * 4)
    assert able.leaves[0].redundancy == 1
    unable = explained({"data": 2, "seq": 4}, 8, P("data", "seq"))
    assert unable.leaves[0].load[0] == ("data", "seq")
    assert unable.records == dict.fromkeys(range(8), 8)
    assert unable.redundancy == 1


def test_a_small_leaf_is_read_by_all_where_nothing_else_is_exchanged() -> None:
    found = explained({"data": 2, "seq": 4}, 8, P("data", "seq"), cuts=True)
    assert found.leaves[1].why == "small: every process that holds it reads it"
    assert found.leaves[1].redundancy == 4
    assert found.leaves[1].num_bytes == 256


def test_stages_read_their_own_leaves() -> None:
    mesh = simulated_mesh({"data": 8}, num_processes=4)
    first, second = (jax.sharding.Mesh(mesh.devices[part], ("data",)) for part in (slice(4), slice(4, 8)))
    specs = {"leaf0": NamedSharding(first, P("data")), "leaf1": NamedSharding(second, P("data"))}
    with DataLoader(CountingSliced(TOKENS, 1024), None, specs, batch_size=64) as loader:
        found = loader.explain()
    assert found.leaves[0].read_bytes == {0: 32 * 2048, 1: 32 * 2048, 2: 0, 3: 0}
    assert found.leaves[1].read_bytes == {0: 0, 1: 0, 2: 32 * 4, 3: 32 * 4}
    assert found.redundancy == 1


def test_few_rows_are_dealt_to_all_processes() -> None:
    mesh = simulated_mesh({"data": 2, "model": 16}, num_processes=8)  # 4 rows for 16 devices of 4 processes
    batch = {"long": jax.ShapeDtypeStruct((8, 1 << 16), np.int32)}
    found = explain(plan_load(batch, mesh, P("data"), reads="once"))
    assert found.records == dict.fromkeys(range(8), 1)
    assert found.redundancy == 1


def test_thousands_of_devices() -> None:
    mesh = simulated_mesh({"data": 256, "model": 16}, num_processes=512)
    batch = {"tokens": jax.ShapeDtypeStruct((8192, 512), np.int32), "label": jax.ShapeDtypeStruct((8192,), np.int32)}
    for spec in (P(), P("data"), P(("model", "data")), P("data", "model")):
        plan = plan_load(batch, mesh, {"tokens": spec, "label": P(*spec[:1])}, reads="once")
        found = explain(plan)
        assert found.redundancy == 1
        assert found.records == dict.fromkeys(range(512), 16)


class Announced(CountingSliced):
    """Takes note of what is announced."""

    def prepare_slices(self, indices: np.ndarray, boxes: Any) -> None:
        self.announced.append((indices.tolist(), list(boxes)))

    @property
    def announced(self) -> list[Any]:
        return self.__dict__.setdefault("_announced", [])


def test_what_a_process_reads_in_part_is_announced_before() -> None:
    """On the other half of a sequence's devices nobody is here: this process fetches its part of the rows alone."""
    devices = np.array([*jax.devices()[:2], SimulatedDevice(100, 1), SimulatedDevice(101, 1)], dtype=object)
    mesh = jax.sharding.Mesh(devices.reshape(2, 2), ("seq", "data"))
    form = {"leaf0": jax.ShapeDtypeStruct((8, 512), np.int32), "leaf1": jax.ShapeDtypeStruct((8,), np.int32)}
    plan = plan_load(form, mesh, {"leaf0": P("data", "seq"), "leaf1": P("data")}, reads="once", cut_dims=[1, 0])
    source = Announced(TOKENS, 64)
    fetch = Fetch(plan, threads=1, trace=Trace())
    batch = fetch.start(lambda: (source, np.arange(20, 28)))
    with contextlib.suppress(Exception):  # arrays of devices that are not there cannot be made
        batch.future.result(timeout=60)
    fetch.close(timeout_seconds=60)
    assert source.announced == [(list(range(20, 28)), [((0, 256),), ()])]
    assert sorted(source.records) == list(range(20, 28))


def test_it_is_told_in_words() -> None:
    told = str(explained({"data": 2, "model": 4}, 4, P("data")))
    assert "a batch of 64: redundancy 1" in told
    assert "0-3" in told
    assert "['leaf0']" in told


@pytest.mark.parametrize("num_processes", [0, 3, 16])
def test_processes_that_cannot_share_the_devices_are_refused(num_processes: int) -> None:
    with pytest.raises(ArgumentError, match=f"num_processes={num_processes}: expected a positive number that divides"):
        simulated_mesh({"data": 8}, num_processes=num_processes)
