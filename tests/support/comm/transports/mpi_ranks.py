"""One rank under an MPI launcher: runs the checks that its arguments name, and prints how each went.

Several things to do are told apart by the word `then`.
"""

import itertools
import signal
import sys
import time
import traceback

from mpi4py import MPI

from braidax.comm.transports.mpi import MpiTransport
from braidax.connections.world import World
from braidax.errors import CommError
from tests.support.comm.transports import checks
from tests.support.comm.transports.worlds import SECRET, Rank, hosts, run

LIMIT_SECONDS = 150  # a little more than the launcher's


def say(*words: object) -> None:
    """Prints a line whole, whatever other ranks print."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def run_check(name: str) -> None:
    """Runs a check on a communicator of its own, so that a connection that fails disturbs no other."""
    comm = MPI.COMM_WORLD.Dup()
    transport = MpiTransport(comm)
    addresses = comm.allgather(transport.address)[::-1]  # our ranks are not MPI's
    rank = Rank(transport, World(comm.size - 1 - comm.rank, addresses, hosts(comm.size), SECRET))
    check = getattr(checks, name)
    began = time.monotonic()
    run(rank, check, connects=check in checks.CONNECTED)
    say(f"{name} ok {time.monotonic() - began:.3f}")


def refuse(*, addresses: list[bytes]) -> None:
    """Prints why a world is refused."""
    try:
        transport = MpiTransport()
    except CommError as error:
        say(type(error).__name__, error)
        return
    try:
        transport.connect(World(MPI.COMM_WORLD.rank, addresses, hosts(len(addresses)), SECRET), timeout_seconds=5)
    except CommError as error:
        say(type(error).__name__, error)
    finally:
        transport.close(timeout_seconds=0)


def break_mpi() -> None:
    """Prints how operations end when MPI fails under them."""
    transport = MpiTransport()
    rank = Rank(transport, World(0, [transport.address], hosts(1), SECRET))
    rank.connect()
    operations = [rank.receive(0, 1, bytearray(1 << 20)), rank.send(0, 2, bytearray(1 << 20))]
    transport._mpi_ranks[0] = 7
    operations.append(rank.send(0, 2, bytearray(1 << 20)))
    operations += [rank.receive(0, 1, bytearray(1)), rank.send(0, 2, b"1")]
    transport.poll(0.0)
    for operation in operations:
        say(type(operation.error).__name__, operation.error)
    rank.close()


def leave_nothing() -> None:
    """Prints what is left after a second world."""
    for _ in range(2):  # MPI may keep what it needs once
        run_check("check_sizes")
        left = checks.num_descriptors_and_threads()
    run_check("check_sizes")
    assert checks.num_descriptors_and_threads(at_most=left) <= left
    say("nothing left")


def do(what: str, *arguments: str) -> None:
    """Does one thing."""
    match what:
        case "checks":
            for name in arguments:
                run_check(name)
        case "refuse":
            for text in arguments:
                refuse(addresses=text.encode().split(b","))
        case "break":
            break_mpi()
        case "leave":
            leave_nothing()
        case "fail":
            assert MPI.COMM_WORLD.rank != 1, "rank 1 fails"
            run_check("check_sizes")
        case other:
            raise ValueError(other)


def main() -> None:
    """Does what the arguments say; one rank that fails ends all, and none outlives its limit."""
    signal.alarm(LIMIT_SECONDS)
    try:
        for is_word, words in itertools.groupby(sys.argv[1:], lambda word: word != "then"):
            if is_word:
                do(*words)
    except BaseException:  # noqa: BLE001
        say(f"rank {MPI.COMM_WORLD.rank}:", traceback.format_exc())
        MPI.COMM_WORLD.Abort(1)
