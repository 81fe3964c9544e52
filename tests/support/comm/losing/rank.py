"""A server or a trainer for the trials: works until it is told to stop, whatever happens to another rank meanwhile.

The first ranks serve, all others train, in teams. A trainer asks all servers, reduces and streams in its team, and
exchanges values with its neighbor there; servers reduce among themselves. All that comes is compared with what it must
be. What raises that a rank is lost is left out from then on; nothing else may be raised.

It lives once for each line of its input, see `tests.support.comm.faults.rank`, and stops when another line comes. It
says when it has `joined`, when a rank is `lost`, and how all `ended`.
"""

import faulthandler
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from braidax.comm import Communicator, Tuning, connect
from braidax.comm.stores.file import FileStore
from braidax.errors import BraidaxError, PeerLost, WaitTimeout
from tests.support.comm.faults.rank import described, descriptors, left_over, say
from tests.support.comm.relay import RelayedStore
from tests.support.comm.transports.tcps import transport_of

_LARGEST = 17  # powers of two: 2¹⁷ float64 are 1 MiB
_LOOK_SECONDS = 0.005
_NUM_ROUNDS = 2  # that must go on when a rank is lost


class Life:
    """One life of a rank. **Arguments:** `comm`: of all. `given`: what the test says."""

    def __init__(self, comm: Communicator, given: dict[str, Any]) -> None:
        self.comm = comm
        self.servers = list(range(given["num_servers"]))
        self.draw = random.Random(f"{given['seed']} {comm.rank}")
        self.is_server = comm.rank in self.servers
        color = (
            0
            if self.is_server
            else 1 + (comm.rank - len(self.servers)) * given["num_teams"] // (comm.size - len(self.servers))
        )
        self.team = comm.split(color)
        self.ranks = [int(found[0]) for found in self.team.all_gather(np.array([comm.rank]))]
        self.shared = random.Random(f"{given['seed']} {self.ranks}")  # drawn alike in the team
        self.done: Counter[str] = Counter()  # since a rank was lost
        self.errors: list[dict[str, Any]] = []
        self.stops = threading.Event()
        self.ends = threading.Event()
        self._reading = threading.Thread(target=self._read)
        self._looking = threading.Thread(target=self._look)
        self._reading.start()
        self._looking.start()

    def work(self) -> None:
        """Does what there is to do until the word to stop."""
        if self.is_server:
            with self.comm.serve(lambda source, value: 2 * value + self.comm.rank) as server:
                self._rounds([self._reduce])
                self._end_asking()
                server.wait()
            return
        self._rounds([self._reduce, self._swap, self._ask, self._stream])
        self._end_asking()

    def _end_asking(self) -> None:
        for server in self.servers:
            if server != self.comm.rank:
                self._try("end_asking", lambda server=server: self.comm.end_asking(server))

    def close(self) -> None:
        """Ends the threads, which takes the word to stop."""
        self._reading.join()
        self.ends.set()
        self._looking.join()

    def _rounds(self, parts: list[Callable[[], None]]) -> None:
        num_rounds = 0  # since a rank was lost
        while True:
            num_rounds += bool(self.comm.lost or self.comm._progress.failure)
            stops = self.stops.is_set() and num_rounds > _NUM_ROUNDS
            if self._has_team():
                found = self._try("agree", lambda stops=stops: self.team.all_reduce(np.array([stops]), np.maximum))
                if found is not None and found[0]:
                    return
            elif stops:
                return
            elif self.is_server:
                self.ends.wait(_LOOK_SECONDS)
            for part in parts:
                part()

    def _has_team(self) -> bool:
        return len(self.ranks) > 1 and not self.team.lost

    def _try(self, name: str, call: Callable[[], Any]) -> Any:
        """Returns what a call returns, or None if it raises that another rank is lost."""
        was_lost = bool(self.comm.lost)
        try:
            found = call()
        except PeerLost as error:
            self.comm._progress.check()  # that this one is lost is its end
            self.errors.append({"name": name, **described(error)})
            return None
        if was_lost:
            self.done[name] += 1
        return found

    def _reduce(self) -> None:
        count = int(2 ** self.shared.uniform(0, _LARGEST))
        if not self._has_team():
            return
        array = np.arange(count, dtype=np.float64) + self.team.rank
        out = np.zeros_like(array)
        found = self._try("reduce", lambda: self.team.all_reduce(array, out=out))
        expected = self.team.size * (array - self.team.rank) + sum(range(self.team.size))
        if found is not None:
            np.testing.assert_array_equal(found, expected)
        else:
            assert (out == 0).all()  # or what was asked for, and nothing in between

    def _swap(self) -> None:
        """Exchanges values with the neighbors of the team: one may have left the round where a third one was lost."""
        count = int(2 ** self.shared.uniform(0, _LARGEST))
        if not self._has_team():
            return
        after, before = ((self.team.rank + step) % self.team.size for step in (1, -1))
        request = self.team.start.send(np.full(count, self.team.rank), after, tag=1)
        received = self.team.start.recv(before, tag=1)
        for each in (received, request):
            found = self._try("swap", lambda each=each: self._patiently(each))
            if each is received and isinstance(found, np.ndarray):
                np.testing.assert_array_equal(found, np.full(count, before))

    def _patiently(self, request: Any) -> Any:
        while True:
            try:
                return request.wait(0.2)
            except WaitTimeout:
                if not self._has_team():
                    return True

    def _ask(self) -> None:
        for server in self.servers:
            if server in self.comm.lost:
                continue
            value = np.full(int(2 ** self.draw.uniform(0, _LARGEST)), self.draw.random())
            found = self._try(f"ask {server}", lambda server=server, value=value: self.comm.ask(server, value))
            if found is not None:
                np.testing.assert_array_equal(found, 2 * value + server)

    def _stream(self) -> None:
        lengths = [int(2 ** self.shared.uniform(0, 12)) for _ in range(20)]
        if not self._has_team():
            return
        size, rank = self.team.size, self.team.rank

        def take() -> bool:
            parts = ((index % size, [np.full(length, rank)]) for index, length in enumerate(lengths))
            expected = lengths[rank::size]  # of each source
            counts = [0] * size
            for source, buffers in self.team.exchange(parts, chunk_bytes=1 << 14, window_bytes=1 << 19):
                found = np.frombuffer(buffers[0], np.int64)
                np.testing.assert_array_equal(found, np.full(expected[counts[source]], source))
                counts[source] += 1
            assert counts == [len(expected)] * size
            return True

        self._try("stream", take)

    def _read(self) -> None:
        sys.stdin.readline()
        self.stops.set()

    def _look(self) -> None:
        while not self.ends.wait(_LOOK_SECONDS):
            if self.comm.lost or self.comm._progress.failure is not None:
                say({"event": "lost", "lost": sorted(self.comm.lost), "at": time.monotonic()})
                return


def live(given: dict[str, Any], folder: str) -> dict[str, Any]:
    """Joins, works, and returns how that ended."""
    before = descriptors()
    store = FileStore(folder)
    ended: dict[str, Any] = {"event": "ended", "error": None}
    comm = connect(
        store if given["relay"] is None else RelayedStore(store, rank=given["rank"], port=given["relay"]),
        rank=given["rank"],
        size=given["size"],
        transport=transport_of(given["transport"], given["rank"]),
        job=given["job"],
        generation=given["generation"],
        on_loss="peer",
        timeout_seconds=given["timeout_seconds"],
        tuning=Tuning(
            peer_timeout_seconds=given["peer_timeout_seconds"],
            spin_seconds=given["spin_seconds"],
            host=f"host-{given['rank']}",
        ),
    )
    life = Life(comm, given)
    say({"event": "joined"})
    try:
        life.work()
    except BraidaxError as error:
        ended |= described(error)
    life.close()
    began = time.monotonic()
    comm.close()
    ended |= {"lost": sorted(comm.lost), "errors": life.errors, "done": dict(life.done), "ranks": life.ranks}
    return ended | {"close_seconds": time.monotonic() - began} | left_over(before)


def main() -> None:
    """Lives once for each line."""
    faulthandler.register(signal.SIGUSR1)
    FileStore(sys.argv[1])
    say({"event": "there"})
    while line := sys.stdin.readline():
        say(live(json.loads(line), sys.argv[1]))


if __name__ == "__main__":
    main()
