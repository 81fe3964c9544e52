"""What happens on devices whose memory cannot be read in place; the CPU backend has pinned memory as well."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import SingleDeviceSharding

from braidax.checkpoint.snapshot import staging
from braidax.checkpoint.snapshot.hold import hold
from braidax.checkpoint.snapshot.staging import Copy, Cut, copy, stage
from tests.support.checkpoint.donating import save_in_every_way


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_is_read_in_place", lambda array: False)


def cut(array: jax.Array, *index: slice) -> Cut:
    part = np.asarray(array)[index]
    return Cut(np.zeros(part.shape, part.dtype), array, index or None)


def test_a_fused_step_that_donates_is_saved_bit_for_bit_in_every_way(tmp_path: Path) -> None:
    save_in_every_way(tmp_path, jax.make_mesh((4, 2), ("a", "b")))


def test_what_is_on_its_way_survives_donation() -> None:
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    for seed in range(20):
        x = step(jax.random.normal(jax.random.key(seed), (256, 256)))
        want = np.array(x)
        (waiting,) = stage([cut(x)])
        assert waiting.source.sharding.memory_kind == "pinned_host"
        for _ in range(3):
            x = step(x)
        copy(waiting)
        np.testing.assert_array_equal(waiting.destination, want)


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint8", "float8_e4m3fn", "bfloat16", "float32", "complex64"])
def test_dtypes_keep_their_bits(dtype: str) -> None:
    x = jnp.arange(16).astype(dtype).reshape(4, 4)
    key = jax.random.key(3)
    pieces = hold({"x": x, "scalar": x[0, 1], "nothing": x[:0], "key": key}).copy().pieces
    taken = {piece.path: piece.array for piece in pieces}
    for name, want in (("x", x), ("scalar", x[0, 1]), ("nothing", x[:0]), ("key", jax.random.key_data(key))):
        assert (taken[name].dtype, taken[name].shape) == (want.dtype, want.shape)
        assert taken[name].tobytes() == np.asarray(want).tobytes()


def test_a_part_is_cut_on_its_device_whatever_mesh_is_set() -> None:
    x = jax.device_put(np.arange(32.0).reshape(8, 4), jax.devices()[3])
    with jax.set_mesh(jax.make_mesh((8,), ("a",))):
        (waiting,) = stage([cut(x, slice(2, 4), slice(0, 4))])
    assert (waiting.source.sharding.memory_kind, waiting.source.devices()) == ("pinned_host", {jax.devices()[3]})
    copy(waiting)
    np.testing.assert_array_equal(waiting.destination, np.arange(8.0, 16.0).reshape(2, 4))


def test_what_lies_in_host_memory_already_is_copied_at_once() -> None:
    there = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    wanted = cut(jax.device_put(np.arange(4.0), there))
    assert not stage([wanted])
    np.testing.assert_array_equal(wanted.destination, np.arange(4.0))


@pytest.mark.parametrize(("num_at_once", "num_left"), [(0, 1), (1, 1), (3, 3), (9, 9), (10, 10)])
def test_no_more_is_in_pinned_memory_than_may_be(
    monkeypatch: pytest.MonkeyPatch, num_at_once: int, num_left: int
) -> None:
    left, most, copied_at_once = set[int](), list[int](), list[float]()
    pinned = staging._pinned

    def take(cuts: list[Cut]) -> list[jax.Array]:
        found = pinned(cuts)
        left.update(map(id, found))
        most.append(len(left))
        return found

    def let_go(part: Copy) -> None:
        left.remove(id(part.source))
        copy(part)
        copied_at_once.append(part.destination[0])

    monkeypatch.setattr(staging, "_MAX_PINNED_BYTES", 4000 * num_at_once)
    monkeypatch.setattr(staging, "_TRANSFER_BYTES", 4000)
    monkeypatch.setattr(staging, "_pinned", take)
    monkeypatch.setattr(staging, "copy", let_go)
    cuts = [cut(jnp.full(1000, number, jnp.float32)) for number in range(10)]
    waiting = stage(cuts)
    assert max(most) == max(num_at_once, 1)  # one that alone is more has no other way
    assert copied_at_once == list(range(10 - num_left))  # the first of them
    assert not any(part.destination.any() for part in waiting)
    for part in waiting:
        copy(part)
    for number, wanted in enumerate(cuts):
        np.testing.assert_array_equal(wanted.destination, np.full(1000, number, np.float32))


def test_small_arrays_are_handed_over_together(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    pinned = staging._pinned
    monkeypatch.setattr(staging, "_pinned", lambda cuts: (groups.append(len(cuts)), pinned(cuts))[1])
    monkeypatch.setattr(staging, "_TRANSFER_BYTES", 100)
    sizes = (10, 15, 1, 30, 2, 2, 40)
    waiting = stage([cut(jnp.arange(size, dtype=jnp.float32)) for size in sizes])
    assert groups == [2, 1, 1, 2, 1]
    for part, size in zip(waiting, sizes, strict=True):
        copy(part)
        np.testing.assert_array_equal(part.destination, np.arange(size))


def test_what_there_is_no_pinned_memory_for_is_copied_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinned = staging._pinned

    def short(cuts: list[Cut]) -> list[jax.Array]:
        if cuts[0].destination.size > 20:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory in xla_gpu_host_bfc")
        return pinned(cuts)

    monkeypatch.setattr(staging, "_pinned", short)
    monkeypatch.setattr(staging, "_TRANSFER_BYTES", 1)
    cuts = [cut(jnp.arange(size, dtype=jnp.float32)) for size in (10, 30, 20, 40)]
    waiting = stage(cuts)
    assert [part.destination.size for part in waiting] == [10, 20]
    np.testing.assert_array_equal(cuts[1].destination, np.arange(30))
    np.testing.assert_array_equal(cuts[3].destination, np.arange(40))
    told = "the loop waits for a copy of %d bytes to the host: RESOURCE_EXHAUSTED: out of memory in xla_gpu_host_bfc"
    assert [record.getMessage() for record in caplog.records] == [told % 120, told % 160]


def test_other_errors_of_a_transfer_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cuts: list[Cut]) -> list[jax.Array]:
        raise JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(staging, "_pinned", broken)
    with pytest.raises(JaxRuntimeError, match="the device is gone"):
        stage([cut(jnp.ones(3))])
