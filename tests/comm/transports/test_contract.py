"""The contract of transports: the same checks, over all of them, in worlds of 1 to 4 ranks."""

import functools
from collections.abc import Callable, Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from tests.support.comm.transports import checks
from tests.support.comm.transports.tcps import TCPS
from tests.support.comm.transports.threads import make
from tests.support.comm.transports.worlds import Check, Rank, run_mpi, run_threads

CHECKS = (*checks.CONNECTED, *checks.CONNECTING)
IN_THREADS = ("in-process", *TCPS, "ucx")
# By default some sizes of most, and by nightly all. C and Python meet by day in test_tcp.py and tests/comm/faults.
QUICK_SIZES = {
    "in-process": (2,),
    "tcp": (1, 3),
    "tcp over sockets": (2,),
    "tcp in Python": (2,),
    "tcp of both": (),
    "ucx": (3,),
}
WORLDS = [
    pytest.param(name, size, marks=() if size in QUICK_SIZES[name] else pytest.mark.slow)
    for name in IN_THREADS
    for size in (1, 2, 3, 4)
]
ALONE = [
    pytest.param(name, size, marks=() if size in QUICK_SIZES[name][-1:] else pytest.mark.slow)
    for name in IN_THREADS
    for size in (1, 2, 3, 4)
]


@pytest.fixture(scope="module")
def mpi_output() -> Callable[[int], str]:
    """What the ranks of an MPI launcher print when they run all checks, once for each size."""

    @functools.cache
    def output(size: int) -> str:
        done = run_mpi(size, "checks", *(check.__name__ for check in CHECKS))
        return f"{done.stdout}\nexit status {done.returncode}"

    return output


@pytest.fixture(scope="module")
def in_one_world() -> Callable[[str, int], tuple[Sequence[Check], BaseException | None]]:
    """Runs the checks that leave a world as they found it, one after the other: which passed, and what ended it."""

    @functools.cache
    def outcome(name: str, size: int) -> tuple[Sequence[Check], BaseException | None]:
        passed: list[Check] = []

        def all_of_them(rank: Rank) -> None:
            for check in checks.IN_ONE_WORLD:
                check(rank)
                rank.barrier()
                if rank.rank == 0:
                    passed.append(check)

        try:
            run_threads(functools.partial(make, name), size, all_of_them)
        except BaseException as error:  # noqa: BLE001 (the check that did not pass raises it)
            return passed, error
        return passed, None

    return outcome


@pytest.mark.parametrize(("name", "size"), WORLDS)
@pytest.mark.parametrize("check", checks.IN_ONE_WORLD, ids=lambda check: check.__name__)
def test_contract(
    check: Check, name: str, size: int, in_one_world: Callable[[str, int], tuple[Sequence[Check], BaseException | None]]
) -> None:
    passed, error = in_one_world(name, size)
    assert check in passed, error


@pytest.mark.parametrize(("name", "size"), ALONE)
@pytest.mark.parametrize("check", [*checks.CLOSING, *checks.CONNECTING], ids=lambda check: check.__name__)
def test_contract_of_a_world_of_its_own(check: Check, name: str, size: int) -> None:
    run_threads(functools.partial(make, name), size, check, connects=check in checks.CONNECTED)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4))])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_over_mpi(check: Check, size: int, mpi_output: Callable[[int], str]) -> None:
    output = mpi_output(size)
    assert output.count(f"{check.__name__} ok") == size, output
    assert output.endswith("exit status 0"), output


@pytest.mark.parametrize("name", IN_THREADS)
@hypothesis.settings(max_examples=4)
@hypothesis.given(seed=strategies.integers(0, 1 << 30), size=strategies.integers(1, 4))
def test_storms(name: str, seed: int, size: int) -> None:
    run_threads(functools.partial(make, name), size, functools.partial(checks.check_storm, seed=seed))


@pytest.mark.parametrize("name", IN_THREADS)
def test_nothing_is_left_after_close(name: str) -> None:
    for _ in range(2):  # a library may keep what it needs once
        run_threads(functools.partial(make, name), 3, checks.check_order_within_a_tag)
        left = checks.num_descriptors_and_threads()
    run_threads(functools.partial(make, name), 3, checks.check_order_within_a_tag)
    assert checks.num_descriptors_and_threads(at_most=left) <= left


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_THREADS)
def test_a_message_longer_than_an_int32_can_say(name: str) -> None:
    length = (1 << 31) + 4099
    sent, place = np.zeros(length, np.uint8), np.ones(length, np.uint8)
    sent[:: 1 << 20] = np.arange(len(sent[:: 1 << 20])) % 251
    sent[-1] = 77

    def check(rank: Rank) -> None:
        if rank.rank == 0:
            rank.wait(rank.send(1, 1, memoryview(sent)))
        else:
            received = rank.receive(0, 1, memoryview(place))
            rank.wait(received)
            assert received.num_bytes == length

    run_threads(functools.partial(make, name), 2, check)
    assert np.array_equal(sent, place)
