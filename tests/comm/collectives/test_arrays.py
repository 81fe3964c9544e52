"""Collectives of arrays: what they refuse, and that what C computes is what NumPy does."""

import functools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.errors import ArgumentError, CommError
from tests.support.comm.ranks import outcomes, results

DTYPES = [
    np.dtype(f"{kind}{size}")
    for kind, sizes in {"i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (4, 8)}.items()
    for size in sizes
]
OTHER_DTYPES = [
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(">f4"),
    np.dtype(bool),
    np.dtype(np.complex64),
]


def _drawn(dtype: np.dtype[Any], rank: int, count: int) -> Any:
    draw = np.random.default_rng(rank)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return draw.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    found = draw.normal(size=count).astype(dtype)
    if dtype.kind == "f" and count > 8:
        found[[rank, 3]] = np.nan, np.inf
        found[5] = -0.0 if rank else 0.0
    return found


@pytest.mark.parametrize("transport", ["in-process", "ucx"])
@pytest.mark.parametrize("dtype", [*DTYPES, *OTHER_DTYPES], ids=str)
def test_reductions_are_those_of_numpy(dtype: np.dtype[Any], transport: str) -> None:
    operations = [np.add, np.multiply, np.maximum, np.minimum, np.hypot]
    if dtype.kind == "b":
        operations = [np.logical_or, np.add, np.maximum]
    elif dtype.kind == "c":
        operations = operations[:2]
    elif dtype.kind in "iu":
        operations = [*operations[:4], np.bitwise_xor]

    def reduced(comm: Communicator) -> list[Any]:
        with np.errstate(all="ignore"):
            return [
                comm.all_reduce(_drawn(dtype, comm.rank, count), each) for count in (1, 67, 9000) for each in operations
            ]

    found = results(2, reduced, transport=transport)
    with np.errstate(all="ignore"):
        expected = [
            each(_drawn(dtype, 0, count), _drawn(dtype, 1, count)) for count in (1, 67, 9000) for each in operations
        ]
    for rank in range(2):
        for one, other in zip(found[rank], expected, strict=True):
            assert one.dtype == dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("transport", ["in-process", "ucx"])
def test_memory_of_any_kind_is_reduced(transport: str) -> None:
    """Also what C cannot run: views with gaps, misaligned arrays, lists, and subclasses; and that again and again."""

    def reduced(comm: Communicator) -> None:
        spaced = np.arange(20.0)[::2]
        misaligned = np.frombuffer(bytearray(8 * 10 + 1), np.uint8)[1:].view(np.float64)
        assert not misaligned.flags.aligned
        misaligned[:] = np.arange(10)
        operands: list[Any] = [spaced, misaligned, list(range(10)), np.ma.masked_array(np.arange(10.0))]
        for _ in range(3):
            for operand in operands:
                np.testing.assert_array_equal(comm.all_reduce(operand), 3 * np.asarray(operand))

    results(3, reduced, transport=transport)


def _read_only(shape: Any) -> Any:
    array = np.empty(shape)
    array.flags.writeable = False
    return array


_SHARED = np.zeros(12)
REFUSED: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "dtype of out": (
        lambda comm: comm.all_reduce(np.ones(4), out=np.empty(4, np.float32)),
        r"out= has dtype=float32, shape=\(4,\): expected dtype=float64, shape=\(4,\)",
    ),
    "shape of out": (
        lambda comm: comm.all_reduce(np.ones(4), out=np.empty((2, 2))),
        r"out= has dtype=float64, shape=\(2, 2\): expected dtype=float64, shape=\(4,\)",
    ),
    "read only": (lambda comm: comm.all_reduce(np.ones(4), out=_read_only(4)), "out= has .* writable and contiguous"),
    "gaps": (lambda comm: comm.all_reduce(np.ones(4), out=np.empty(8)[::2]), "out= has .* writable and contiguous"),
    "overlap": (
        lambda comm: comm.all_reduce(_SHARED[:8], out=_SHARED[4:]),
        "out= shares memory with array=: expected memory of its own, or array= itself",
    ),
    "block of out": (
        lambda comm: comm.reduce_scatter(np.ones((comm.size, 3)), out=np.empty((comm.size, 3))),
        r"out= has dtype=float64, shape=\(2, 3\): expected dtype=float64, shape=\(1, 3\)",
    ),
    "exchange in place": (
        lambda comm: comm.all_to_all_into(_SHARED, _SHARED),
        "out= shares memory with array=: expected memory of its own$",
    ),
    "exchange of unequal blocks": (
        lambda comm: comm.all_to_all_into(np.ones(3), np.empty(3)),
        r"array= has shape \(3,\): expected dim 0 to be a multiple of the 2 ranks",
    ),
    "objects": (
        lambda comm: comm.all_gather_into(np.array([{}]), np.empty((2, 1), object)),
        "array= has dtype=object: expected numbers or bytes",
    ),
    "broadcast of objects": (
        lambda comm: comm.broadcast_into(np.array([{}])),
        "array= has dtype=object: expected numbers or bytes",
    ),
    "broadcast from nobody": (
        lambda comm: comm.broadcast_into(np.ones(2), root=2),
        "root=2: expected a rank from 0 to",
    ),
    "gathered shape": (
        lambda comm: comm.all_gather_into(np.ones(3), np.empty(6)),
        r"out= has dtype=float64, shape=\(6,\): expected dtype=float64, shape=\(2, 3\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_on_both_ranks_ends_the_generation_with_its_words(case: str) -> None:
    call, words = REFUSED[case]

    def refused(comm: Communicator) -> None:
        for good in (np.ones(4), np.ones(12), _SHARED[:8]):
            comm.all_reduce(good)  # so that the same operand has come before
            for root in (0, 1):
                comm.broadcast_into(good.copy(), root=root)
        with pytest.raises(ArgumentError, match=words):
            call(comm)

    for found in outcomes(2, refused, transport="ucx"):
        assert found is None or isinstance(found, CommError), found


_NOT_FILLED = r"array= has dtype=float64, shape=\(4,\), and cannot be filled: expected a writable and contiguous one"


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ([1.0] * 4, "array= is a list: expected a NumPy array, which the root's fills"),
        (np.ones(8)[::2], _NOT_FILLED),
        (_read_only(4), _NOT_FILLED),
    ],
    ids=["list", "gaps", "read only"],
)
@pytest.mark.parametrize("transport", ["in-process", "ucx"])
def test_what_a_broadcast_cannot_fill_is_refused(array: Any, words: str, transport: str) -> None:
    """The root may give any of them, also again."""

    def broadcast(comm: Communicator) -> Any:
        for _ in range(3):
            place = np.full(4, np.nan)
            assert comm.broadcast_into(array if comm.rank == 1 else place, root=1) is (
                array if comm.rank == 1 else place
            )
            assert comm.rank == 1 or place.tolist() == np.asarray(array).tolist()
        return comm.broadcast_into(np.ones(4) if comm.rank == 0 else array)

    found = outcomes(2, broadcast, transport=transport)
    assert isinstance(found[1], ArgumentError)
    assert isinstance(found[0], CommError)
    assert all(re.search(words, str(each)) for each in found), found


def test_what_is_no_array_is_not_filled() -> None:
    def refused(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="out= is a bytearray: expected a NumPy array of dtype=float64, shape="):
            comm._group.arrays.all_reduce(np.ones(4), np.add, bytearray(32))

    results(1, refused)


def test_a_rank_that_fills_an_array_and_one_that_does_not_work_with_each_other() -> None:
    def reduced(comm: Communicator) -> list[Any]:
        out = np.empty(5, np.int64) if comm.rank else None
        return [comm.all_reduce(np.full(5, comm.rank + number), out=out).tolist() for number in range(3)]

    expected = [[1.0 + 2 * number] * 5 for number in range(3)]
    assert (
        results(2, lambda comm: [np.asarray(each, np.float64).tolist() for each in reduced(comm)], transport="ucx")
        == [expected] * 2
    )


def test_the_same_collective_again_gets_results_of_its_own() -> None:
    def reduced(comm: Communicator) -> None:
        found = [comm.all_reduce(np.full(1000, float(number))) for number in range(20)]
        for number, each in enumerate(found):
            assert np.all(each == 2 * number)
        assert len({each.ctypes.data for each in found}) == len(found)

    for transport in ("in-process", "ucx"):
        results(2, reduced, transport=transport)


@pytest.mark.parametrize("transport", ["in-process", "tcp", "ucx"])
def test_what_comes_again_is_told_apart(transport: str) -> None:
    """Collectives that differ in their reduction, root, dtype, shape or result alone; each of them several times."""

    def repeated(comm: Communicator) -> None:
        own = np.full((2, 3), comm.rank + 2.0)
        for again in range(3):
            for operand in (own, own.astype(np.float32), own.reshape(3, 2), own.reshape(6)):
                for reduction, expected in ((np.add, 5), (np.multiply, 6), (np.maximum, 3), (np.minimum, 2)):
                    out = None if again else np.empty_like(operand)
                    found = comm.all_reduce(operand, reduction, out=out)
                    assert (found.dtype, found.shape) == (operand.dtype, operand.shape)
                    assert np.all(found == expected)
                    assert out is None or found is out
            assert comm.reduce_scatter(own).tolist() == [[5] * 3]
            gathered = comm.all_gather_into(own, np.empty((2, 2, 3)))
            assert gathered.tolist() == [[[2] * 3] * 2, [[3] * 3] * 2]
            roots: list[Any] = [0, 1, np.int64(1)]
            for root in roots:
                for count in (4, 5):
                    array = np.full(count, comm.rank)
                    assert comm.broadcast_into(array, root=root) is array
                    assert array.tolist() == [root] * count
            comm.barrier()

    results(2, repeated, transport=transport)


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_little_arrays_of_any_size_arrive(transport: str) -> None:
    """Those that travel with what begins a collective: UCX takes some of them at once, which have to be copied."""

    def exchanged(comm: Communicator) -> None:
        for count in (0, 1, 7, 8, 91, 92, 93, 94, 127, 128, 129, 300, 2048):
            own = np.arange(comm.size * count).astype(np.uint8).reshape(comm.size, count)
            for again in range(2):
                found = comm.all_to_all_into(own + np.uint8(10 * comm.rank + again), np.empty_like(own))
                for rank, part in enumerate(found):
                    np.testing.assert_array_equal(part, own[comm.rank] + np.uint8(10 * rank + again))

    results(3, exchanged, transport=transport)


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_large_blocks_at_any_address_arrive(transport: str) -> None:
    """A rank's own block is written past the caches, line by line, if it is larger than them."""

    def exchanged(comm: Communicator) -> None:
        for more, begin in ((-64, 0), (0, 0), (1, 0), (64, 16), (77, 3), (130, 63)):
            num_bytes = comm.size * ((8 << 20) + more)
            drawn = np.random.default_rng(comm.rank).bytes(num_bytes + begin)
            own = np.frombuffer(drawn, np.uint8)[begin:].reshape(comm.size, -1)
            whole = np.full(num_bytes + 128, 7, np.uint8)
            out = whole[64 - begin : 64 - begin + num_bytes].reshape(comm.size, -1)
            comm.all_to_all_into(own, out)
            np.testing.assert_array_equal(out[comm.rank], own[comm.rank])
            other = np.random.default_rng(1 - comm.rank).bytes(num_bytes + begin)
            expected = np.frombuffer(other, np.uint8)[begin:].reshape(comm.size, -1)[comm.rank]
            np.testing.assert_array_equal(out[1 - comm.rank], expected)
            assert set(whole[: 64 - begin]) | set(whole[64 - begin + num_bytes :]) == {7}

    results(2, exchanged, transport=transport)


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_an_array_that_is_not_writable_is_not_filled_the_second_time(transport: str) -> None:
    def filled(comm: Communicator) -> None:
        array = np.full(4, comm.rank)
        comm.broadcast_into(array, root=0)
        array.flags.writeable = False
        comm.broadcast_into(array + 1 if comm.rank == 0 else array, root=0)

    found = outcomes(2, filled, transport=transport)
    assert isinstance(found[1], ArgumentError)
    assert isinstance(found[0], CommError | None)


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_bytes_are_received_only_where_they_may_be_written(transport: str) -> None:
    """Arrays of any dtype and layout: what cannot be filled as it is, is not."""
    dtypes = ["f8", ">i2", "c16", "S3", "M8[s]", "i4,f8", ml_dtypes.bfloat16]
    forms = [(), (0,), (5,), (2, 3), (1, 0, 2)]
    refused: list[Callable[[], Any]] = [
        lambda: _read_only(5),
        lambda: np.zeros((4, 4)).T[1:],
        lambda: np.zeros(10)[::2],
    ]

    def moved(comm: Communicator) -> None:
        for dtype in dtypes:
            for shape in forms:
                num_bytes = np.empty(shape, dtype).nbytes
                sent = np.arange(num_bytes).astype(np.uint8).tobytes()
                if comm.rank == 0:
                    comm.send_buffer(np.frombuffer(sent, np.uint8).copy(), 1)
                    continue
                place = np.zeros(shape, dtype)
                assert comm.recv_buffer(place, 0) == num_bytes
                assert place.tobytes() == sent
        if comm.rank:
            for make in refused:
                place = make()
                before = place.tolist()
                with pytest.raises((TypeError, ValueError, BufferError, ArgumentError)):
                    comm._progress.receive_now(0, 7, place)
                assert place.tolist() == before

    results(2, moved, transport=transport)


def test_many_shapes_do_not_pile_up() -> None:
    """A group remembers some schedules, and makes the others anew."""

    def reduced(comm: Communicator) -> int:
        for count in range(1, 700):
            np.testing.assert_array_equal(comm.all_reduce(np.full(count, 1, np.int16)), 2)
        repeats = comm._group.arrays.repeats
        assert repeats is not None
        return len(repeats)

    assert max(results(2, reduced, transport="ucx")) <= 256


@pytest.mark.parametrize("count", [3, 100_000])
def test_reducing_by_an_operation_of_ones_own(count: int) -> None:
    larger = np.frompyfunc(max, 2, 1)

    def reduced(comm: Communicator) -> Any:
        with pytest.raises(ArgumentError, match="expected one that"):
            comm.all_reduce(np.ones(count), larger)

    for found in outcomes(2, reduced, transport="ucx"):
        assert found is None or isinstance(found, CommError)


def test_sums_of_many_ranks_have_the_same_bits_everywhere() -> None:
    def reduced(comm: Communicator) -> list[bytes]:
        draw = np.random.default_rng(comm.rank)
        return [
            comm.all_reduce(draw.normal(size=count).astype(np.float32)).tobytes()
            for count in (7, 3000, 40_000, 400_000)
        ]

    found = results(5, reduced, transport="ucx")
    assert functools.reduce(lambda one, other: one if one == other else [], found) == found[0]


@pytest.mark.parametrize("transport", ["in-process", "tcp", "ucx"])
def test_an_overflow_is_told_as_numpy_is_told_to(transport: str) -> None:
    def reduced(comm: Communicator) -> str:
        largest = np.full(3000, np.finfo(np.float32).max, np.float32)
        for _ in range(2):  # the second time in fewer steps
            with np.errstate(over="ignore"):
                assert np.all(np.isinf(comm.all_reduce(largest)))
            told: list[str] = []
            with np.errstate(over="call", call=lambda kind, _, told=told: told.append(kind)):
                comm.all_reduce(largest)
            assert told == ["overflow"]
        with np.errstate(under="ignore"):
            assert not np.any(comm.all_reduce(np.full(9, 1e-30, np.float32), np.multiply))
        with np.errstate(invalid="ignore"):
            assert np.all(np.isnan(comm.all_reduce(np.array([np.inf if comm.rank else -np.inf]))))
        with np.errstate(all="raise"):
            assert np.all(comm.all_reduce(np.ones(9)) == 2)
            assert np.isnan(comm.all_reduce(np.array([np.nan]), np.maximum)[0])
            comm.barrier()
            comm.all_reduce(largest, np.multiply)
        return "no error"

    found = outcomes(2, reduced, transport=transport)
    assert any(isinstance(each, FloatingPointError) and "overflow" in str(each) for each in found)
    for each in found:
        assert isinstance(each, FloatingPointError) or "FloatingPointError" in str(each)
