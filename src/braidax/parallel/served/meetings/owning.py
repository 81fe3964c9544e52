"""Who owns the servers of a run: the ranks of a gang serve, and others are started in place of those that are lost."""

import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import Literal, final

from braidax.connections.coordination import Coordination
from braidax.errors import BraidaxError, CommError, PeerLost, WaitTimeout
from braidax.gang import Gang
from braidax.parallel.served.on_servers.serving import serve, serve_in_place

from .meeting import Meeting, begin_meeting
from .replacing import not_started, open_keys, wanted_ranks

_ENDED_SECONDS = 10.0  # that other servers may take to end when one is lost
_LOOK_SECONDS = 0.2  # between looks whether servers are there, and all that are wanted


@final
class Owner:
    """Lets the ranks of a gang serve, until closed: those of it that are lost it replaces when who trains wants that.

    Where a rank is lost before all have met, nobody waits for it.

    **Arguments:** `gang`: which runs; its ranks do nothing else meanwhile. `meeting`: where all meet.
    """

    def __init__(self, gang: Gang, meeting: Meeting) -> None:
        self._gang, self.meeting = gang, meeting
        self._serving, self._left = gang.submit(serve, meeting), threading.Event()
        self._replaced: set[int] = set()
        self._watching = threading.Thread(target=self._watch, name="braidax-meeting")
        self._watching.start()

    def _watch(self) -> None:
        number, has_given_up = 0, False
        with contextlib.suppress(CommError, WaitTimeout), open_keys(self.meeting) as keys:
            while not self._left.wait(_LOOK_SECONDS):
                if not has_given_up and self.has_lost:
                    self.meeting.give_up("a server has ended")
                    has_given_up = True
                if (ranks := wanted_ranks(keys, number)) is not None:
                    try:
                        self._replace(number, ranks)
                    except (BraidaxError, OSError) as error:
                        not_started(keys, number, f"the gang has started no other process: {error}")
                    number += 1

    def _replace(self, number: int, ranks: Sequence[int]) -> None:
        """Lets others come in place of servers that who trains has lost."""
        self._gang.replace(ranks, others="leave")
        self._replaced.update(ranks)
        for rank in ranks:
            self._gang.submit(serve_in_place, self.meeting, number, rank, ranks=[rank])

    @property
    def has_lost(self) -> bool:
        """Whether a server has ended, or all."""
        return self._serving.done or bool(self._gang.lost)

    def knows(self, lost: set[int]) -> bool:
        """Returns whether the gang has seen by itself that ranks are lost."""
        return lost <= {*self._gang.lost} | self._replaced

    def await_end(self) -> None:
        """Raises why servers have not come, when they tell it in time."""
        with contextlib.suppress(WaitTimeout):
            self._serving.result(timeout_seconds=_ENDED_SECONDS)

    def close(self) -> None:
        """Replaces nobody any more. A second call does nothing."""
        self._left.set()
        self._watching.join()


@contextlib.contextmanager
def owning(
    gang: Gang,
    *,
    num_workers: int,
    timeout_seconds: float,
    others: Coordination | None = None,
    reach: Literal["here", "all"] = "here",
) -> Generator[Owner]:
    """Lets the ranks of a gang serve. **Arguments:** of `Owner`, and of `begin_meeting`."""
    with begin_meeting(
        gang.hosts,
        num_workers=num_workers,
        transport=gang.transport,
        timeout_seconds=timeout_seconds,
        others=others,
        reach=reach,
    ) as meeting:
        owner = Owner(gang, meeting)
        try:
            yield owner
        except (CommError, WaitTimeout) as error:
            if owner.has_lost and not isinstance(error, PeerLost):
                owner.await_end()  # which says why they have not come
            raise
        finally:
            owner.close()
