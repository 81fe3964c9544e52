"""Who writes what: every element once, by a process that holds it, in equal parts."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.format.reading import read_content
from braidax.checkpoint.snapshot import hold as snapshot
from braidax.checkpoint.snapshot import ownership
from braidax.checkpoint.snapshot.boxes import Box, extents, joined, overlap, split, volume, whole
from braidax.checkpoint.snapshot.hold import hold
from braidax.checkpoint.snapshot.ownership import Placed
from braidax.errors import CheckpointError
from tests.support.checkpoint.saving import bits, commit_as_many, devices_shared_by, load, read_all


@pytest.fixture
def four_processes() -> Iterator[None]:
    """Has two devices belong to each of four processes."""
    with devices_shared_by(4):
        yield


def sharding(shape: tuple[int, ...], spec: P, devices: Any = None) -> NamedSharding:
    chosen = np.array(jax.devices() if devices is None else devices)[: math.prod(shape)].reshape(shape)
    return NamedSharding(Mesh(chosen, ("a", "b", "c")[: len(shape)]), spec)


def owned(*leaves: Placed) -> list[dict[int, list[Box]]]:
    return list(ownership.ownership(leaves))


def test_neighbors_are_joined() -> None:
    grid = [((i, i + 1), (4 * j, 4 * j + 4)) for i in range(3) for j in range(2)]
    assert joined(reversed(grid)) == [((0, 3), (0, 8))]
    assert joined(grid[1:]) == [((0, 1), (4, 8)), ((1, 3), (0, 8))]
    assert joined([((0, 2),), ((4, 6),)]) == [((0, 2),), ((4, 6),)]
    assert joined([()]) == [()]
    assert joined([((0, 0), (0, 4)), ((0, 0), (4, 8))]) == [((0, 0), (0, 8))]


def test_a_box_is_split_by_rows_or_along_its_longest_dim() -> None:
    assert split(((2, 6), (0, 9)), 2) == [((2, 4), (0, 9)), ((4, 6), (0, 9))]
    assert split(((0, 3), (0, 9)), 2) == [((0, 3), (0, 4)), ((0, 3), (4, 9))]
    assert split(((0, 3), (0, 3)), 4) == [((0, 3), (0, 3))]
    assert split((), 2) == [()]
    assert [extents(part) for part in split(((0, 100),), 3)] == [(33,), (33,), (34,)]


@pytest.mark.usefixtures("four_processes")
def test_what_is_split_over_processes_each_writes_for_itself() -> None:
    (shares,) = owned(Placed((8, 16), 4, sharding((8,), P("a"))))
    assert shares == {process: [((2 * process, 2 * process + 2), (0, 16))] for process in range(4)}
    (shares,) = owned(Placed((8, 16), 4, sharding((4, 2), P("b", "a"))))
    assert shares == {process: [((0, 8), (4 * process, 4 * process + 4))] for process in range(4)}


@pytest.mark.usefixtures("four_processes")
def test_replicas_are_shared_out_by_rows() -> None:
    (shares,) = owned(Placed((64, 1024), 4, sharding((8,), P())))
    assert shares == {process: [((16 * process, 16 * process + 16), (0, 1024))] for process in range(4)}
    # Two processes hold each half.
    (shares,) = owned(Placed((64, 1024), 4, sharding((2, 4), P("a"))))
    assert shares == {process: [((16 * process, 16 * process + 16), (0, 1024))] for process in range(4)}


@pytest.mark.usefixtures("four_processes")
def test_small_leaves_go_to_those_that_have_least_to_write() -> None:
    replicated = sharding((8,), P())
    large = Placed((1 << 16,), 4, sharding((4,), P("a")))  # on processes 0 and 1
    shares = owned(large, *[Placed((10,), 4, replicated)] * 4, Placed((), 4, replicated))
    assert [list(share) for share in shares] == [[0, 1], [2], [3], [2], [3], [2]]


@pytest.mark.usefixtures("four_processes")
def test_what_each_process_has_for_itself_process_0_writes() -> None:
    shares = owned(Placed((10,), 4, None), Placed((4, 4), 4, sharding((2,), P("a"), jax.devices()[4:])))
    assert shares == [{0: [((0, 10),)]}, {2: [((0, 4), (0, 4))]}]


@st.composite
def placements(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = draw(st.sampled_from([(8,), (4, 2), (2, 2, 2), (4,), (2, 2), (3,), (1,)]))
    devices = draw(st.permutations(jax.devices()))
    num_dims = draw(st.integers(0, 3))
    dealt: list[list[int]] = [[] for _ in range(num_dims)]
    for axis in range(len(shape)):
        dim = draw(st.integers(-1, num_dims - 1))
        if dim >= 0:
            dealt[dim].append(axis)
    sizes = tuple(math.prod(shape[axis] for axis in axes) * draw(st.sampled_from([1, 3, 8])) for axes in dealt)
    spec = P(*(tuple("abc"[axis] for axis in axes) or None for axes in dealt))
    return sizes, sharding(shape, spec, devices)


@pytest.mark.usefixtures("four_processes")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(placements(), min_size=1, max_size=4), st.sampled_from([1, 1 << 16]))
def test_every_element_is_written_once_by_who_holds_it(drawn: list[Any], small_bytes: int) -> None:
    ownership.ownership.cache_clear()
    before, ownership.SMALL_BYTES = ownership.SMALL_BYTES, small_bytes
    try:
        shares = owned(*(Placed(shape, 4, placed) for shape, placed in drawn))
    finally:
        ownership.SMALL_BYTES = before
    for (shape, placed), share in zip(drawn, shares, strict=True):
        count = np.zeros(shape, int)
        for process, boxes in share.items():
            held = [
                tuple(slice_.indices(size)[:2] for slice_, size in zip(index, shape, strict=True))
                for device, index in placed.devices_indices_map(shape).items()
                if device.id // 2 == process
            ]
            for box in boxes:
                count[tuple(slice(*bounds) for bounds in box)] += 1
                found = joined({part for one in held if (part := overlap(one, box)) is not None})
                assert sum(map(volume, found)) == volume(box)
        assert (count == 1).all()


@pytest.mark.usefixtures("four_processes")
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(placements(), placements()), min_size=1, max_size=3), st.sampled_from(["float32", "int4"]))
def test_what_many_write_is_restored_anywhere(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Any], dtype: str
) -> None:
    before, ownership.SMALL_BYTES = ownership.SMALL_BYTES, 1
    tree, like = {}, {}
    for number, ((shape, placed), (_, other)) in enumerate(drawn):
        values = jnp.asarray(np.arange(math.prod(shape)).reshape(shape) % 7).astype(dtype)
        tree[str(number)] = jax.device_put(values, placed)
        fits = len(other.spec) <= len(shape)
        target = other if fits else NamedSharding(other.mesh, P())
        try:
            target.shard_shape(shape)
        except ValueError:
            target = NamedSharding(other.mesh, P())
        like[str(number)] = jax.ShapeDtypeStruct(shape, values.dtype, sharding=target)
    try:
        folder = commit_as_many(tmp_path_factory.mktemp("many"), tree, 4)
    finally:
        ownership.SMALL_BYTES = before
    got = load(folder, like)
    for name, array in got.items():
        assert bits(array) == bits(tree[name])
        assert array.sharding == like[name].sharding


@pytest.mark.usefixtures("four_processes")
def test_each_file_is_a_valid_one_with_plain_names_for_whole_leaves(tmp_path: Path) -> None:
    tree = {
        "table": jax.device_put(np.arange(64.0).reshape(8, 2, 4), sharding((2,), P(None, "a"), jax.devices()[::2])),
        "stage": jax.device_put(np.ones((4, 4), np.float32), sharding((2,), P("a"), jax.devices()[6:])),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), sharding((8,), P("a"))),
        "n": 3,
        "here": np.arange(3),
    }
    folder = commit_as_many(tmp_path, tree, 4)
    found = {process: safetensors.numpy.load_file(folder / data_file(process)) for process in range(4)}
    assert {process: {name: array.shape for name, array in file.items()} for process, file in found.items()} == {
        0: {"here": (3,), "keys[0:2,0:2]": (2, 2), "table[0:8,0:1,0:4]": (8, 1, 4)},
        1: {"keys[2:4,0:2]": (2, 2), "table[0:8,1:2,0:4]": (8, 1, 4)},
        2: {"keys[4:6,0:2]": (2, 2)},
        3: {"keys[6:8,0:2]": (2, 2), "stage": (4, 4)},
    }
    content = read_all(folder)
    np.testing.assert_array_equal(content["table"], np.arange(64.0).reshape(8, 2, 4))
    np.testing.assert_array_equal(content["keys"], jax.random.key_data(tree["keys"]))
    np.testing.assert_array_equal(content["stage"], np.ones((4, 4)))
    assert content["n"] == 3


@pytest.mark.usefixtures("four_processes")
def test_files_of_other_checkpoints_are_noticed(tmp_path: Path) -> None:
    tree = {"x": jax.device_put(np.ones((8, 4)), sharding((8,), P("a")))}
    first, second = (commit_as_many(tmp_path, tree, 4, step) for step in (1, 2))
    for name in (manifest_file(2), data_file(2)):
        shutil.copy(first / name, second / name)
    with pytest.raises(CheckpointError, match=r"step-00000002/manifest-00002.json: is not of the same checkpoint as"):
        read_content(second)
    (first / manifest_file(3)).unlink()
    with pytest.raises(CheckpointError, match=r"manifest-00003.json: cannot be read, so this is no finished"):
        read_content(first)


@pytest.mark.usefixtures("four_processes")
def test_a_part_that_nobody_wrote_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"x": jax.device_put(np.ones((8, 4)), sharding((8,), P("a")))}
    found = ownership.ownership
    monkeypatch.setattr(snapshot, "ownership", lambda placed: ({**found(placed)[0], 1: []},))
    with pytest.raises(CheckpointError, match=r"has 24 elements of leaf 'x' \(float32\[8, 4\]\), expected 32: its pro"):
        read_content(commit_as_many(tmp_path, tree, 4))


@pytest.mark.usefixtures("four_processes")
def test_a_snapshot_is_no_larger_than_the_share() -> None:
    tree = {"x": jax.device_put(np.ones((64, 1024), np.float32), sharding((8,), P()))}
    helds = [hold(tree, process=process, num_processes=4) for process in range(4)]
    assert [held.num_bytes for held in helds] == [64 * 1024] * 4
    digests = {held.copy().digest for held in helds}
    assert len(digests) == 1
    other = {"x": jax.device_put(np.ones((64, 1024), np.float32), sharding((8,), P(None, "a")))}
    assert hold(other, process=0, num_processes=4).copy().digest not in digests


def test_all_of_a_leaf_is_one_box() -> None:
    assert whole((2, 3)) == ((0, 2), (0, 3))
    assert volume(whole(())) == 1
