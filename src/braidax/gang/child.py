"""A rank of a `LocalGang`: it does what comes over a socket, until its parent closes that or is gone."""

import contextlib
import faulthandler
import os
import pickle
import queue
import socket
import threading
from dataclasses import dataclass, field

from braidax.comm import TcpStore, Tuning
from braidax.connections.channel import Channel
from braidax.gang.calling.parcels import Parcel, channel_of, framed, unframed
from braidax.gang.member import Member
from braidax.lifeline import LIFELINE, end_with

CALL, ABORT = 0, 1
"""The kinds of messages to a rank: a call, of head and body; an abort, of the number of the call and the reason."""

ANSWER = 0
"""The kind of all messages on the way back."""


@dataclass(frozen=True)
class Birth:
    """What a rank is told first. It travels over the socket: nobody else on the machine sees the secret.

    **Fields:** `rank`, `transport`: of the gang. `store`: host, port and secret of its store. `deadline`: until when
    all must have met first, by `time.monotonic`, which all processes of a machine share. `timeout_seconds`: that each
    later wait may take. `tuning`: as `connect` takes it.
    """

    rank: int
    transport: str
    store: tuple[str, int, bytes] = field(repr=False)
    deadline: float
    timeout_seconds: float
    tuning: Tuning


def main(control: int) -> None:
    """Serves a gang until the other end of the socket closes.

    **Arguments:** `control`: the descriptor of the socket.
    """
    os.set_inheritable(control, False)
    end_with(int(os.environ.pop(LIFELINE)))
    faulthandler.enable()  # a crash in native code shows where
    with contextlib.closing(channel_of(socket.socket(fileno=control))) as channel:
        _, first, _ = unframed(channel.take(None), num_kinds=2)
        birth: Birth = pickle.loads(first[0])
        host, port, secret = birth.store
        member = Member(
            TcpStore(host, port, secret=secret, timeout_seconds=birth.timeout_seconds),
            rank=birth.rank,
            transport=birth.transport,
            timeout_seconds=birth.timeout_seconds,
            tuning=birth.tuning,
            first_deadline=birth.deadline,
        )
        calls: queue.SimpleQueue[tuple[Parcel, Parcel] | None] = queue.SimpleQueue()
        listening = threading.Thread(target=_listen, args=(channel, member, calls), name="braidax-control", daemon=True)
        listening.start()
        try:
            while (call := calls.get()) is not None:
                answer = member.answer(*call)
                del call  # the next one may be long in coming
                channel.send(framed(ANSWER, answer))
                channel.drain(None)
                del answer
        except ConnectionError:
            pass
        finally:
            channel.cut()
            listening.join()
            member.leave()


def _listen(channel: Channel, member: Member, calls: "queue.SimpleQueue[tuple[Parcel, Parcel] | None]") -> None:
    """Receives calls for the main thread, and aborts the one under way when it is told to, until the channel ends."""
    try:
        while True:
            kind, head, body = unframed(channel.take(None), num_kinds=2)
            if kind == CALL:
                calls.put((head, body))
            else:
                member.abort(int.from_bytes(head[0], "little"), bytes(head[1]).decode())
            del head, body
    except OSError:
        pass
    finally:
        calls.put(None)
