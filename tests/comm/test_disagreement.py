"""Ranks that do not bring the same to a collective: all are told, by an error that names both; none gets a number."""

import re
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from braidax.comm import Communicator, Tuning
from braidax.errors import ArgumentError, CommError
from tests.support.comm.ranks import in_turns, outcomes, results

TRANSPORTS = ["in-process", "tcp", "ucx"]
LIMIT_SECONDS = 20.0
SIZES_DIFFER = "do all ranks call the same operations in the same order, with the same shapes and dtypes?"

Call = Callable[[Communicator], Any]
DISAGREEMENTS: dict[str, tuple[Call, Call, str, str]] = {
    "dtype": (
        lambda comm: comm.all_reduce(np.ones(4, np.float32)),
        lambda comm: comm.all_reduce(np.ones(4, np.int32)),
        "all_reduce(add) of float32[4]",
        "all_reduce(add) of int32[4]",
    ),
    "dtype of many": (
        lambda comm: comm.all_reduce(np.ones(100_000, np.float32)),
        lambda comm: comm.all_reduce(np.ones(100_000, np.uint32)),
        "all_reduce(add) of float32[100000]",
        "all_reduce(add) of uint32[100000]",
    ),
    "dtype of the same size": (
        lambda comm: comm.all_reduce(np.ones(3, ml_dtypes.bfloat16)),
        lambda comm: comm.all_reduce(np.ones(3, np.float16)),
        "all_reduce(add) of bfloat16[3]",
        "all_reduce(add) of float16[3]",
    ),
    "bytes": (
        lambda comm: comm.all_reduce(np.ones(2)),
        lambda comm: comm.all_reduce(np.ones(3)),
        "all_reduce(add) of float64[2]",
        "all_reduce(add) of float64[3]",
    ),
    "shape": (
        lambda comm: comm.all_reduce(np.ones((2, 3))),
        lambda comm: comm.all_reduce(np.ones(6)),
        "all_reduce(add) of float64[2, 3]",
        "all_reduce(add) of float64[6]",
    ),
    "few and many": (
        lambda comm: comm.all_reduce(np.ones(10)),
        lambda comm: comm.all_reduce(np.ones(1_000_000)),
        "all_reduce(add) of float64[10]",
        "all_reduce(add) of float64[1000000]",
    ),
    "operation": (
        lambda comm: comm.all_reduce(np.ones(10)),
        lambda comm: comm.all_reduce(np.ones(10), np.maximum),
        "all_reduce(add) of float64[10]",
        "all_reduce(maximum) of float64[10]",
    ),
    "dtype of reduce": (
        lambda comm: comm.reduce(np.ones(10)),
        lambda comm: comm.reduce(np.ones(10, np.int64)),
        "reduce to root 0(add) of float64[10]",
        "reduce to root 0(add) of int64[10]",
    ),
    "root of reduce": (
        lambda comm: comm.reduce(np.ones(50_000), root=0),
        lambda comm: comm.reduce(np.ones(50_000), root=1),
        "reduce to root 0(add) of float64[50000]",
        "reduce to root 1(add) of float64[50000]",
    ),
    "dtype of reduce_scatter": (
        lambda comm: comm.reduce_scatter(np.ones((comm.size, 3))),
        lambda comm: comm.reduce_scatter(np.ones((comm.size, 3), np.int64)),
        "reduce_scatter(add) of float64",
        "reduce_scatter(add) of int64",
    ),
    "dtype of a large reduce_scatter": (
        lambda comm: comm.reduce_scatter(np.ones((comm.size, 100_000))),
        lambda comm: comm.reduce_scatter(np.ones((comm.size, 100_000), np.int64)),
        "reduce_scatter(add) of float64",
        "reduce_scatter(add) of int64",
    ),
    "root of broadcast": (
        lambda comm: comm.broadcast(np.ones(3), root=0),
        lambda comm: comm.broadcast(np.ones(3), root=1),
        "broadcast from root 0",
        "broadcast from root 1",
    ),
    "root of broadcast_into": (
        lambda comm: comm.broadcast_into(np.ones(3), root=0),
        lambda comm: comm.broadcast_into(np.ones(3), root=1),
        "broadcast_into from root 0 of float64[3]",
        "broadcast_into from root 1 of float64[3]",
    ),
    "dtype of a large broadcast_into": (
        lambda comm: comm.broadcast_into(np.ones(500_000)),
        lambda comm: comm.broadcast_into(np.ones(500_000, np.int64)),
        "broadcast_into from root 0 of float64[500000]",
        "broadcast_into from root 0 of int64[500000]",
    ),
    "root of gather": (
        lambda comm: comm.gather(np.ones(3), root=1),
        lambda comm: comm.gather(np.ones(3), root=0),
        "gather to root 1",
        "gather to root 0",
    ),
    "kind": (
        lambda comm: comm.barrier(),
        lambda comm: comm.all_to_all([b"x"] * comm.size),
        "barrier",
        "all_to_all",
    ),
    "another kind": (
        lambda comm: comm.all_gather(np.ones(1000)),
        lambda comm: comm.broadcast(np.ones(1000)),
        "all_gather",
        "broadcast from root 0",
    ),
    "one begun": (
        lambda comm: comm.start.all_reduce(np.ones(4, np.float32)).wait(),
        lambda comm: comm.start.all_reduce(np.ones(4, np.int32)).wait(),
        "all_reduce(add) of float32[4]",
        "all_reduce(add) of int32[4]",
    ),
}


@pytest.mark.parametrize(("case", "transport"), in_turns(DISAGREEMENTS, TRANSPORTS, every=3))
def test_all_ranks_are_told_what_both_sides_brought(case: str, transport: str) -> None:
    ours, theirs, one, other = DISAGREEMENTS[case]
    for size, odd in ((2, 1), (4, 2)):
        start = time.monotonic()
        found = outcomes(size, lambda comm, odd=odd: (theirs if comm.rank == odd else ours)(comm), transport=transport)
        assert time.monotonic() - start < LIMIT_SECONDS
        for rank, error in enumerate(found):
            assert isinstance(error, CommError), (rank, error)
            assert one in str(error), (rank, error)
            assert other in str(error), (rank, error)
            assert re.search(rf"rank {odd} \(host [^)]*\)", str(error)), (rank, error)


@pytest.mark.parametrize(
    ("case", "hosts"),
    in_turns(
        ["dtype", "dtype of many", "few and many", "operation", "root of broadcast"], ["aabb", "abab", "aaab"], every=3
    ),
)
def test_so_it_is_over_several_hosts(case: str, hosts: str) -> None:
    ours, theirs, one, other = DISAGREEMENTS[case]
    tunings = [Tuning(host=host) for host in hosts]
    for odd in range(4):
        found = outcomes(4, lambda comm, odd=odd: (theirs if comm.rank == odd else ours)(comm), tunings=tunings)
        for error in found:
            assert isinstance(error, CommError)
            if SIZES_DIFFER not in str(error):  # of a large array, heard before what it is brought to
                assert one in str(error)
                assert other in str(error)


def test_the_words() -> None:
    ours, theirs, *_ = DISAGREEMENTS["dtype"]
    found = outcomes(2, lambda comm: (theirs if comm.rank else ours)(comm))
    sides = [
        r"rank 0 \(host .*\) brings all_reduce\(add\) of float32\[4\] to a collective, "
        r"rank 1 \(host .*\) all_reduce\(add\) of int32\[4\]",
        r"rank 1 \(host .*\) brings all_reduce\(add\) of int32\[4\] to a collective, "
        r"rank 0 \(host .*\) all_reduce\(add\) of float32\[4\]",
    ]
    words = rf"({'|'.join(sides)}); expected the same of all ranks: call the same operations in the same order"
    for error in found:
        assert re.search(words, str(error)), error


def test_long_descriptions_differ_too() -> None:
    fields = [(f"field_{index}", "<f4") for index in range(40)]
    one, other = (np.dtype(fields), np.dtype([*fields[:-1], ("last", "<f4")]))

    def call(comm: Communicator) -> Any:
        return comm.all_reduce(np.zeros(2, other if comm.rank else one), np.maximum)

    for error in outcomes(2, call):  # NumPy reduces no structs: each rank is told so
        assert isinstance(error, ArgumentError | CommError)

    def shaped(comm: Communicator) -> Any:
        return comm.all_reduce(np.zeros((1,) * 60 + (2, 3) if comm.rank else (1,) * 60 + (3, 2)))

    for error in outcomes(2, shaped):
        assert isinstance(error, CommError)
        assert "all_reduce(add) of float64[1, 1, " in str(error)


@pytest.mark.parametrize("value", [[1, 2], 3.5, ((1, 2), (3, 4)), np.float32(2)])
def test_what_is_no_array_is_made_one(value: Any) -> None:
    def check(comm: Communicator) -> None:
        expected = np.asarray(value) + np.asarray(value)
        for found in (comm.all_reduce(value), comm.start.all_reduce(value).wait()):
            assert (found.dtype, found.shape, found.tolist()) == (expected.dtype, expected.shape, expected.tolist())
        reduced = comm.reduce(value)
        assert comm.rank or reduced.tolist() == expected.tolist()
        pair = [value, value]
        assert comm.reduce_scatter(pair).tolist() == [expected.tolist()]

    results(2, check)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm: comm.all_reduce([[1], [2, 3]]), "array= is a list of which NumPy makes no array"),
        (lambda comm: comm.all_reduce(["a", "b"]), "array= has dtype=<U1, of which operation=add makes <U2"),
        (
            lambda comm: comm.all_reduce([1, 2], np.true_divide),
            "dtype=int64, of which operation=divide makes float64",
        ),
        (lambda comm: comm.all_reduce([None]), "array= has dtype=object: expected numbers"),
        (lambda comm: comm.reduce([1], root="0"), "root='0': expected a rank from 0 to 0"),
        (lambda comm: comm.send(b"", 0, tag="x"), "tag='x': expected a whole number"),
    ],
)
def test_what_cannot_be_reduced_is_refused(call: Call, words: str, unchecked: None) -> None:
    def refused(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=words):
            call(comm)

    results(1, refused)
