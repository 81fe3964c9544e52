"""The last mile for foreign iterators: whatever they yield arrives whole, in order, and no thread is left."""

import gc
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.data.fetching.fetch import Threads
from braidax.data.prefetch import prefetch_to_device
from braidax.errors import ArgumentError, FormatError, RecordError, SpecError, WaitTimeout
from tests.support.data.numbered import reading_threads


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"))


def batch(number: int, size: int = 8) -> dict[str, np.ndarray]:
    x = np.arange(size * 6, dtype=np.float32).reshape(size, 6) + 1000 * number
    return {"x": x, "id": np.full(size, number, np.int32)}


def batches(count: int) -> list[dict[str, np.ndarray]]:
    return [batch(number) for number in range(count)]


def assert_batches(got: Any, expected: list[dict[str, np.ndarray]]) -> None:
    got = list(got)
    assert len(got) == len(expected)
    for one, want in zip(got, expected, strict=True):
        assert set(one) == set(want)
        for name in want:
            assert one[name].dtype == want[name].dtype
            np.testing.assert_array_equal(np.asarray(one[name]), want[name])


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_a_list_and_a_generator(mesh: Mesh, prefetch: int) -> None:
    specs = {"x": P("data", "model"), "id": P()}
    assert_batches(prefetch_to_device(batches(7), mesh, specs, prefetch=prefetch), batches(7))
    generator = (one for one in batches(7))
    assert_batches(prefetch_to_device(generator, mesh, specs, prefetch=prefetch), batches(7))
    assert reading_threads() == []


def test_batches_are_sharded_as_told(mesh: Mesh) -> None:
    other = jax.make_mesh((2,), ("stage",), devices=jax.devices()[3:5])
    specs = {"x": P("data", "model"), "id": NamedSharding(other, P("stage"))}
    for got in prefetch_to_device(batches(3), mesh, specs):
        assert got["x"].sharding == NamedSharding(mesh, P("data", "model"))
        assert got["id"].sharding == NamedSharding(other, P("stage"))


def test_one_buffer_used_for_every_batch(mesh: Mesh) -> None:
    def reuse() -> Iterator[Any]:
        buffer = batch(0)
        for number in range(20):
            for name, values in batch(number).items():
                buffer[name][...] = values
            yield buffer
            for values in buffer.values():
                values[...] = -1

    for specs in (P("data"), {"x": P(None, "model"), "id": P()}):
        assert_batches(prefetch_to_device(reuse(), mesh, specs, prefetch=3), batches(20))


def test_slots_are_used_again_and_never_too_early(mesh: Mesh) -> None:
    kept = [got["x"] for number, got in enumerate(prefetch_to_device(batches(60), mesh, P("data"))) if number % 7 == 3]
    gc.collect()
    for number, x in zip(range(3, 60, 7), kept, strict=True):
        np.testing.assert_array_equal(np.asarray(x), batch(number)["x"])


class Tensor:
    """Looks like a foreign tensor: nothing but `__array__`."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._values if dtype is None else self._values.astype(dtype)


def test_what_numpy_takes_is_taken(mesh: Mesh) -> None:
    tensors = ((Tensor(one["x"]), [Tensor(one["id"])]) for one in batches(3))
    for number, (x, (identity,)) in enumerate(prefetch_to_device(tensors, mesh, P("data"))):
        np.testing.assert_array_equal(np.asarray(x), batch(number)["x"])
        np.testing.assert_array_equal(np.asarray(identity), batch(number)["id"])
    on_device = (jax.tree.map(jax.numpy.asarray, one) for one in batches(3))
    assert_batches(prefetch_to_device(on_device, mesh, P("data")), batches(3))


@pytest.mark.parametrize("order", ["F", "strided", "reversed"])
def test_arrays_of_any_layout(mesh: Mesh, order: str) -> None:
    whole = batch(5, size=16)["x"]
    layouts = {"F": np.asfortranarray(whole), "strided": whole[::2], "reversed": whole[::-1]}
    for spec in (P("data"), P(None, "model")):
        (got,) = prefetch_to_device([layouts[order]], mesh, spec)
        np.testing.assert_array_equal(np.asarray(got), layouts[order])


def test_shapes_may_change(mesh: Mesh) -> None:
    sizes = [8, 8, 16, 4, 8, 4]
    expected = [batch(number, size) for number, size in enumerate(sizes)]
    assert_batches(prefetch_to_device(iter(expected), mesh, P("data")), expected)


def test_a_batch_that_does_not_divide_raises_where_it_comes(mesh: Mesh) -> None:
    stream = prefetch_to_device([*batches(3), batch(3, 6), batch(4)], mesh, P("data"), prefetch=4)
    assert_batches(itertools.islice(stream, 3), batches(3))
    with pytest.raises(SpecError, match="batch_size=6 is not divisible by 4"):
        next(stream)
    assert reading_threads() == []


def test_the_error_of_the_iterator_is_raised_as_it_is_where_it_came(mesh: Mesh) -> None:
    error = KeyError("spoiled")

    def spoiled() -> Iterator[Any]:
        yield from batches(4)
        raise error

    stream = prefetch_to_device(spoiled(), mesh, P("data"), prefetch=3)
    assert_batches(itertools.islice(stream, 4), batches(4))
    with pytest.raises(KeyError) as caught:
        next(stream)
    assert caught.value is error
    assert reading_threads() == []
    with pytest.raises(StopIteration):
        next(stream)


def test_an_endless_iterator_and_break(mesh: Mesh) -> None:
    closed = threading.Event()

    def endless() -> Iterator[Any]:
        try:
            for number in itertools.count():
                yield batch(number)
        finally:
            closed.set()

    for number, got in enumerate(prefetch_to_device(endless(), mesh, P("data"))):
        np.testing.assert_array_equal(np.asarray(got["id"]), number)
        if number == 9:
            break
    assert reading_threads() == []
    gc.collect()
    assert closed.is_set()


def test_closing_early_leaves_no_thread(mesh: Mesh) -> None:
    stream: Any = prefetch_to_device(itertools.repeat(batch(0)), mesh, P("data"))
    next(stream)
    assert reading_threads()
    stream.close()
    assert reading_threads() == []
    assert list(stream) == []


def test_nothing_starts_before_the_first_batch_is_asked_for(mesh: Mesh) -> None:
    drawn: list[int] = []
    stream = prefetch_to_device((drawn.append(number) or batch(number) for number in range(9)), mesh, P("data"))
    assert drawn == []
    assert reading_threads() == []
    assert len(list(stream)) == 9
    assert drawn == list(range(9))


def test_no_more_than_prefetch_is_asked_for_ahead(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, submit = list[str](), Threads.submit

    def watched(self: Threads, *arguments: Any) -> Any:
        asked.append("batch")
        return submit(self, *arguments)

    monkeypatch.setattr(Threads, "submit", watched)
    for number, _ in enumerate(prefetch_to_device(batches(9), mesh, P("data"), prefetch=3)):
        assert len(asked) == number + 4  # the one in use, and three ahead


def test_no_batch_at_all(mesh: Mesh) -> None:
    assert list(prefetch_to_device([], mesh, P("data"))) == []


def test_wide_numbers_become_narrow_ones_where_they_fit(mesh: Mesh) -> None:
    wide = {"i": np.arange(8) - 4, "f": np.linspace(0, 1, 8), "u": np.arange(8, dtype=np.uint64)}
    (got,) = prefetch_to_device([wide], mesh, P("data"))
    assert {name: str(array.dtype) for name, array in got.items()} == {"i": "int32", "f": "float32", "u": "uint32"}
    for name, values in wide.items():
        np.testing.assert_array_equal(np.asarray(got[name]), values.astype(got[name].dtype))


def test_a_number_that_does_not_fit_raises_where_it_comes(mesh: Mesh) -> None:
    large = np.arange(8)
    large[5] = 2**31
    stream = prefetch_to_device([np.arange(8), large], mesh, P("data"))
    next(stream)
    with pytest.raises(RecordError) as caught:
        next(stream)
    assert "record 5" in str(caught.value)
    assert "2147483648" in str(caught.value)
    assert "int32" in str(caught.value)


@pytest.mark.parametrize("value", [np.float32(3), 7, np.array("text")])
def test_a_leaf_without_a_batch_dim_is_refused(mesh: Mesh, value: Any) -> None:
    with pytest.raises(RecordError, match=rf"holds {type(value).__name__} .*expected numeric arrays with a leading"):
        list(prefetch_to_device([{"x": np.zeros(8), "y": value}], mesh, P("data")))


@pytest.mark.parametrize("values", [np.array(["a"] * 8), np.array([{}] * 8)])
def test_a_leaf_that_is_no_number_is_refused(mesh: Mesh, values: np.ndarray) -> None:
    with pytest.raises(FormatError, match="a batch of the iterator"):
        list(prefetch_to_device([values], mesh, P("data")))


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (8, 1), (0, 8)])
def test_leaves_of_unequal_length_are_refused(mesh: Mesh, sizes: tuple[int, int]) -> None:
    uneven = {"a": np.zeros(sizes[0], np.int32), "b": np.zeros((sizes[1], 2), np.int32)}
    with pytest.raises(RecordError, match=rf"leaves with \[{sizes[0]}, {sizes[1]}\] samples"):
        list(prefetch_to_device([uneven], mesh, P()))


def test_a_spec_tree_that_does_not_fit_raises(mesh: Mesh) -> None:
    with pytest.raises(SpecError, match="does not fit the batch"):
        next(prefetch_to_device(batches(2), mesh, {"x": P("data")}))


@pytest.mark.parametrize("prefetch", [0, -1])
def test_prefetch_must_be_positive(mesh: Mesh, prefetch: int) -> None:
    with pytest.raises(ArgumentError, match=f"prefetch={prefetch} is not a positive integer"):
        prefetch_to_device(batches(2), mesh, P("data"), prefetch=prefetch)


def test_an_iterator_that_hangs_is_given_up_within_the_limit(mesh: Mesh) -> None:
    release = threading.Event()

    def hanging() -> Iterator[Any]:
        yield batch(0)
        release.wait(60)

    stream = prefetch_to_device(hanging(), mesh, P("data"), timeout_seconds=0.5)
    try:
        next(stream)
        with pytest.raises(WaitTimeout, match=r"next batch of the iterator did not come within timeout_seconds=0\.5"):
            next(stream)
    finally:
        release.set()


def test_the_iterator_is_drawn_from_by_one_thread(mesh: Mesh) -> None:
    drawn_by: set[str] = set()

    def watched() -> Iterator[Any]:
        for number in range(20):
            drawn_by.add(threading.current_thread().name)
            yield batch(number)

    list(prefetch_to_device(watched(), mesh, P("data"), prefetch=4))
    assert drawn_by == {"braidax-prefetch-0"}
