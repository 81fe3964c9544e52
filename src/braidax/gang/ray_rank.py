"""A rank on Ray: an actor."""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np

from braidax.gang.calling.parcels import own, shown_to_pickle
from braidax.gang.member import Member
from braidax.gang.ray_store import RayStore, import_ray

Arrays = list[np.ndarray[Any, np.dtype[np.uint8]]]


@final
class RayRank:
    """An actor that is a rank; Ray shows what it prints with `repr` of it in front.

    Its methods run in its main thread, but for `abort` and `stay`, which are called in a group of their own.
    """

    def __init__(self, address: str, rank: int, member: Mapping[str, Any]) -> None:
        self._rank = rank
        self._member = Member(RayStore(address), rank=rank, **member)

    def __repr__(self) -> str:
        return f"rank {self._rank}"

    def where(self) -> tuple[str, int]:
        """Returns the names of the host and of the process."""
        return socket.gethostname(), os.getpid()

    def answer(self, head: Arrays, body: Arrays) -> Arrays:
        """Answers what `Member.answer` does. All are parts as arrays, which Ray shares as they are."""
        return shown_to_pickle(self._member.answer(own(head), own(body)))

    def hand(self, token: str, references: list[Any]) -> tuple[None, None]:
        """Has objects of Ray ready for a call, as `Member.hand` does: Ray brings them to this host."""
        self._member.hand(token, import_ray().get(references))
        return None, None

    def take_back(self, token: str) -> None:
        """Does what `Member.take_back` does."""
        self._member.take_back(token)

    def result(self, name: str, fn: Callable[[Any], Any]) -> tuple[None, Any]:
        """Returns, behind None, a function's result of what is kept under a name: Ray keeps it for whoever asked."""
        return None, fn(self._member.kept(name))

    def abort(self, call: int, reason: str) -> None:
        """Does what `Member.abort` does."""
        self._member.abort(call, reason)

    def stay(self) -> None:
        """Never returns: a call of this fails when the actor ends."""
        threading.Event().wait()

    def move(self, address: str) -> None:
        """Meets at another store from now on."""
        self._member.move(RayStore(address))

    def leave(self) -> None:
        """Leaves the other ranks."""
        self._member.leave()
