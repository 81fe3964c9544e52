"""The contract of what starts ranks, carries calls to them and sees them end."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from braidax.gang.calling.parcels import Parcel


@dataclass(frozen=True)
class Message:
    """A call on its way to one rank, as `Member.answer` takes it.

    **Fields:** `head`: for this rank alone. `body`: the same object for all ranks of the call.
    """

    head: Parcel
    body: Parcel


@dataclass(frozen=True)
class Ended:
    """The process of a rank ended by itself.

    **Fields:** `host`, `pid`: of the process; `pid` is None where nobody knows it. `how`: in words, such as `was ended
    by signal 9 (SIGKILL)`. `time_seconds`: when that was seen (`time.time`). `log`: the last lines that it wrote.
    """

    host: str
    pid: int | None
    how: str
    time_seconds: float
    log: tuple[str, ...] = ()


class Ranks(ABC):
    """The ranks of a gang, from its start to its end. Every rank owes one answer for each message.

    A rank is a process, or a part of one, that makes a `Member` and hands it what comes. One thread at a time uses
    this, but for `wake`.
    """

    @abstractmethod
    def ask(self, messages: Mapping[int, Message]) -> None:
        """Begins to send messages, by rank; each of these ranks has answered all before."""

    @abstractmethod
    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, Parcel | Ended]:
        """Waits until ranks have answered or ended, and returns what is new, by rank.

        It is empty behind the limit, and when `wake` was called. Of each rank that owes an answer, that answer or its
        end comes once; the end of one that owes none comes as soon as it is known, or instead of its next answer.
        """

    @abstractmethod
    def wake(self) -> None:
        """Lets the `answers` that is under way, or else the next one, return at once; any thread may call it."""

    @abstractmethod
    def abort(self, ranks: Collection[int], call: int, reason: str) -> None:
        """Tells ranks that are busy with a call to `Member.abort` it, without waiting until they do."""

    @abstractmethod
    def kill(self, ranks: Collection[int]) -> None:
        """Ends the processes of ranks by force, or where that cannot be done, gives them up: they answer no more."""

    @abstractmethod
    def replace(self, ranks: Collection[int], deadline: float) -> None:
        """Starts other processes for ranks that have ended or were killed. The others go on.

        **Arguments:** `deadline`: by `time.monotonic`.

        **Raises:** `GangError` when they cannot be started; those that were are as if they had been killed.
        """

    @abstractmethod
    def end(self, reason: Literal["stop", "interrupt"]) -> None:
        """Ends all processes, by force where they do not end within seconds, and gives up everything else.

        It raises nothing but `KeyboardInterrupt`. A second call does nothing.
        """
