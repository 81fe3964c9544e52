"""Where servers of tables and those who train meet."""

import contextlib
import json
import secrets
import socket
import uuid
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from braidax.comm import Communicator, TcpStore, TcpStoreServer, connect
from braidax.comm.rendezvous import give_up_meeting
from braidax.connections.coordination import Coordination
from braidax.connections.hosts import host_addresses
from braidax.errors import ArgumentError, CommError, WaitTimeout

_STORE_SECONDS = 10.0  # a store is there before anybody is told of it, and one that is not there any more stays away


@dataclass(frozen=True, repr=False)
class Meeting:
    """Where the servers and the workers of one run meet: a store. It goes to other processes by pickle or as JSON.

    **Fields:** `address`: of the store, `"host:port"`; `secret`: its. `job`: names the world. `transport`: of messages.
    `timeout_seconds`: the limit of each wait. `num_servers`: the first ranks. `num_workers`: the ranks behind them.
    `worker`: which of these joins by it; None where that is not said yet.
    """

    address: str
    secret: bytes
    job: str
    transport: str
    timeout_seconds: float
    num_servers: int
    num_workers: int
    worker: int | None = None

    def of_worker(self, number: int) -> "Meeting":
        """Returns it for one worker. **Arguments:** `number`: of it, 0 to `num_workers - 1`, each once."""
        if not 0 <= number < self.num_workers:
            raise ArgumentError(f"worker {number} of {self.num_workers}: expected 0 <= number < {self.num_workers}")
        return replace(self, worker=number)

    def join(self, rank: int, *, generation: int = 0, timeout_seconds: float | None = None) -> Communicator:
        """Joins the world, once all others do.

        **Arguments:** `generation`: how often all were to meet before. `timeout_seconds`: that this may take; None for
        the limit of each wait. **Raises:** as `connect`.
        """
        with self.store() as store:
            world = connect(
                store,
                rank=rank,
                size=self.num_servers + self.num_workers,
                transport=self.transport,
                job=self.job,
                generation=generation,
                on_loss="peer",
                timeout_seconds=self.timeout_seconds if timeout_seconds is None else timeout_seconds,
            )
        world.timeout_seconds = self.timeout_seconds
        return world

    def give_up(self, reason: str, *, generation: int = 0) -> None:
        """Lets those raise `Aborted` who wait in `join` for others. **Arguments:** `reason`: why not all will come.
        `generation`: as of `join`."""
        # Nobody meets in a store that is gone.
        with contextlib.suppress(CommError, WaitTimeout), self.store() as store:
            give_up_meeting(store, job=self.job, generation=generation, reason=reason)

    def store(self, timeout_seconds: float = _STORE_SECONDS) -> TcpStore:
        """Opens the store. **Arguments:** `timeout_seconds`: the limit of a wait at most. **Raises:** as `TcpStore`."""
        host, _, port = self.address.rpartition(":")
        seconds = min(self.timeout_seconds, timeout_seconds)
        return TcpStore(host, int(port), secret=self.secret, timeout_seconds=seconds)

    def to_json(self) -> bytes:
        """Returns it for the other processes of a job."""
        return json.dumps({**asdict(self), "secret": self.secret.hex()}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Meeting":
        """Undoes `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        fields["secret"] = bytes.fromhex(fields["secret"])
        return cls(**fields)


@contextlib.contextmanager
def begin_meeting(
    hosts: tuple[str, ...],
    *,
    num_workers: int,
    transport: str,
    timeout_seconds: float,
    others: Coordination | None = None,
    reach: Literal["here", "all"] = "here",
) -> Generator[Meeting, None, None]:
    """Keeps a store as long as servers and workers join.

    **Arguments:** `hosts`: of the servers. `others`: where the other processes of the job are told; None if nobody is.
    `reach`: whether workers on other hosts may come; where servers are elsewhere they may.
    """
    is_here = reach == "here" and others is None and all(name == socket.gethostname() for name in hosts)
    secret = secrets.token_bytes(32)
    with TcpStoreServer(host="127.0.0.1" if is_here else "", secret=secret) as store:
        address = f"{'127.0.0.1' if is_here else host_addresses()[0]}:{store.address.rpartition(':')[2]}"
        job = f"tables {uuid.uuid4().hex}"
        meeting = Meeting(address, secret, job, transport, timeout_seconds, len(hosts), num_workers)
        if others is not None:
            others.set("meeting", meeting.to_json())
        yield meeting


def find_meeting(others: Coordination, *, timeout_seconds: float) -> Meeting:
    """Returns what the process that has the gang has begun. **Raises:** `CommError` when it has not in time."""
    text = others.find("meeting", timeout_seconds=timeout_seconds)
    if text is None:
        raise CommError(
            f"process 0 has not told within {timeout_seconds:g} s where its servers are; expected it to call "
            "parallelize, too, with servers= and the same tables"
        )
    return Meeting.from_json(text)
