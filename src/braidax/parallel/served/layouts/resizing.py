"""How parts of tables come to servers that do not have them: between two updates, wholly or not at all."""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, NamedTuple, final

import numpy as np

from braidax.errors import ArgumentError, BraidaxError, CallFailed, CommError, PeerLost, WaitTimeout
from braidax.parallel.served.asking import Asking
from braidax.parallel.served.meetings.world import World

from .layout import Layout

_log = logging.getLogger("braidax")
_TOLD: Mapping[str, Callable[[str, int], BraidaxError]] = {
    "CallFailed": CallFailed,
    "PeerLost": PeerLost,
    "WaitTimeout": lambda words, _: WaitTimeout(words),
    "CommError": lambda words, _: CommError(words),
}
"""What may keep parts from where they are to be, as others raise it."""


class _Ahead(NamedTuple):
    """What is copied while others train. **Fields:** `layout`: for which. `copied`: when all is. `stop`: ends it."""

    layout: Layout
    copied: "Future[None]"
    stop: threading.Event


@final
class Resizing:
    """Changes which servers have which parts; all who train call a method, between two updates.

    **Arguments:** `asking`: whose layout changes. `make`: returns what makes room for a part of so many: kind, part,
    parts. `world`: of servers and those who train. `meet`: returns when all of these have called it.
    """

    def __init__(
        self,
        asking: Asking,
        make: Callable[[str, int, int], list[Any]],
        world: World,
        meet: Callable[[], None],
    ) -> None:
        self._asking, self._make, self._world, self._meet = asking, make, world, meet
        self._is_first = world.workers is None or world.workers.rank == 0
        self._ahead: _Ahead | None = None
        num_filled = asking.num_ranks * asking.layout.copies
        self._threads = ThreadPoolExecutor(1 + num_filled, thread_name_prefix="braidax-resizing")

    def recover(self, settle: Callable[[], object]) -> None:
        """Lets spare servers take the place of those that are lost, or those that have come in their place where none
        is spare. **Arguments:** `settle`: returns when servers have all that was pushed, and nobody asks anything."""
        wanted = self._of_first(self._asking.wanted() if self._is_first else [])
        if not wanted:
            return
        settle()
        begun = time.monotonic()
        if any(lost == other for lost, other in wanted) and not self._meets_again(wanted):
            wanted = [pair for pair in wanted if pair[0] != pair[1]]
        for lost, other in wanted:
            layout, words = self._asking.layout.replaced(lost, other), f"to server {other} in place of {lost}"
            _, failed = self._change(layout, [other], words)
            if isinstance(failed, PeerLost):  # another one takes the place before the next update, if there is one
                _log.warning("%s", failed)
            elif failed is not None:
                raise failed
            else:
                self._asking.found([other])
                who = "another process" if lost == other else f"server {other}"
                _log.warning("%s has taken the place of server %d in %.1f s", who, lost, time.monotonic() - begun)

    def _meets_again(self, wanted: Sequence[Sequence[int]]) -> bool:
        """Goes on in a world in which other processes are there in place of lost servers. **Returns:** whether."""
        generation = -1
        if self._is_first:
            self._give_up_ahead()
            with contextlib.suppress(BraidaxError, OSError):  # they are asked for once more
                generation = self._asking.call()
        generation = self._of_first(generation)
        if generation < 0:
            return False
        if why := self._world.move(generation):
            _log.warning("servers that have come in place of lost ones could not be met: %s", why)
            return False
        self._asking.found({*self._asking.spares} - {other for _, other in wanted})
        return True

    def resize(self, num_servers: int) -> None:
        """Lets so many servers have parts. **Raises:** as `ServedStep.resize`."""
        if (layout := self._resized(num_servers)) is None:
            return
        former, begun = self._asking.layout, time.monotonic()
        num_bytes, failed = self._change(layout, layout.ranks, f"to {num_servers} servers")
        if failed is not None:
            raise failed
        _log.warning(
            "%d servers have the tables in place of %d: %s bytes were moved in %.3f s",
            num_servers,
            former.num_parts,
            f"{num_bytes:,}",
            time.monotonic() - begun,
        )

    def prepare(self, num_servers: int) -> None:
        """Begins to copy what so many servers will have, while others train. **Raises:** as `ServedStep.resize`."""
        layout = self._resized(num_servers)
        if not self._is_first or (self._ahead is not None and self._ahead.layout == layout):
            return
        self._give_up_ahead()
        if layout is not None:
            stop = threading.Event()
            self._ahead = _Ahead(layout, self._threads.submit(self._copy_ahead, layout, stop), stop)

    def close(self) -> None:
        """Ends what is copied ahead. A second call does nothing."""
        if self._ahead is not None:
            self._ahead.stop.set()
        self._threads.shutdown()

    def _resized(self, num_servers: int) -> Layout | None:
        """Returns the layout for so many servers; None where there are as many."""
        if type(num_servers) is not int:
            raise ArgumentError(f"num_servers={num_servers!r}: expected a whole number of servers")
        given = [num_servers] if self._world.workers is None else [int(one) for one in self._all(num_servers)]
        if len({*given}) > 1:
            raise ArgumentError(f"num_servers={num_servers}, and processes say {given}: expected the same of all")
        former = self._asking.layout
        if num_servers == former.num_parts:
            return None
        spares, lost = self._of_first([self._asking.spares, self._asking.lost()] if self._is_first else [])
        num_live = len({*former.ranks, *spares} - {*lost})
        if not former.copies <= num_servers <= num_live:
            raise ArgumentError(
                f"num_servers={num_servers}: expected {former.copies} to {num_live}, as Served has "
                f"copies={former.copies}, and {num_live} of the gang's {self._asking.num_ranks} ranks are not lost; "
                f"start the gang with more ranks, and Served(spares=…) keeps some of them without rows"
            )
        return former.resized(num_servers, spares, lost)

    def _change(self, layout: Layout, targets: Sequence[int], words: str) -> tuple[int, BraidaxError | None]:
        """Goes on with another layout, or with the former one.

        **Arguments:** `targets`: the servers whose parts change. `words`: where these go, for errors.

        **Returns:** the bytes that servers have sent to others; why it has not come to that. **Raises:** `PeerLost`
        when one who trains is gone.
        """
        former, num_bytes, raised = self._asking.layout, 0, None
        try:
            if self._is_first:
                try:
                    num_bytes = self._brought(layout, targets)
                except (BraidaxError, OSError) as error:
                    raised = error
            name = next((one for one in _TOLD if one in {kind.__name__ for kind in type(raised).__mro__}), "CommError")
            told = None if raised is None else [name, str(raised), getattr(raised, "rank", -1)]
            failed, num_bytes = self._of_first([told, num_bytes] if self._is_first else [])
            if failed is None:
                self._meet()
        except BaseException:
            self._drop(targets)
            raise
        if failed is not None:
            self._drop(targets)
            kind, why, rank = failed
            stay = f"they stay on {former.num_parts} servers"
            found = _TOLD[kind](f"tables were not moved {words}, {stay}: {why}", int(rank))
            found.__cause__ = raised
            return 0, found
        late = self._commit(layout, targets, former) if self._is_first else None
        self._asking.adopt(layout)
        self._meet()
        if late is not None:
            raise late
        return int(num_bytes), None

    def _brought(self, layout: Layout, targets: Sequence[int]) -> int:
        """Makes all parts that are coming, and fills them: with what has changed since, where rows were copied ahead.

        **Returns:** the bytes that servers have sent to others.
        """
        if (ahead := self._ahead) is not None and ahead.layout == layout:
            self._ahead = None
            try:
                ahead.copied.result()
                return self._bring(layout, targets, "rest")
            except (BraidaxError, OSError) as error:
                _log.warning("what was copied ahead for %d servers is copied anew: %s", layout.num_parts, error)
                self._drop(targets)
        self._give_up_ahead()
        return self._bring(layout, targets, "all")

    def _copy_ahead(self, layout: Layout, stop: threading.Event) -> None:
        begun = time.monotonic()
        try:
            num_bytes = self._bring(layout, layout.ranks, "ahead", stop.is_set)
        except BaseException:
            self._drop(layout.ranks)
            raise
        if not stop.is_set():
            words = "%s bytes were copied ahead for %d servers in %.3f s"
            _log.warning(words, f"{num_bytes:,}", layout.num_parts, time.monotonic() - begun)

    def _give_up_ahead(self) -> None:
        """Lets go of what was copied ahead."""
        if (ahead := self._ahead) is not None:
            self._ahead = None
            ahead.stop.set()
            with contextlib.suppress(BraidaxError, OSError):
                ahead.copied.result()
            self._drop(ahead.layout.ranks)

    def _bring(
        self,
        layout: Layout,
        targets: Sequence[int],
        what: Literal["all", "ahead", "rest"],
        is_over: Callable[[], bool] = lambda: False,
    ) -> int:
        """Makes all parts that are coming, and copies their rows: once, before others train on, or again behind that.

        **Arguments:** `is_over`: whether it is to end. **Returns:** the bytes that servers have sent to others.
        """
        size, having = layout.num_parts, self._asking.having
        pairs = [(rank, part) for rank in targets for part in layout.parts_of(rank)]
        if what != "rest":
            self._at_once(lambda rank, part, _: self._told(rank, self._make("make coming", part, size)) and 0, pairs)

        def fill(rank: int, part: int, others: Callable[[], bool]) -> int:
            question = self._asking.packed("fill", part, {"having": having, "ahead": what == "ahead"})
            while not others() and not is_over():
                answer = self._told(rank, question)
                if answer.fields["is_copied" if what == "ahead" else "is_full"]:
                    return int(answer.fields["num_bytes"])
            return 0

        return sum(self._at_once(fill, pairs))

    def _at_once(
        self, work: Callable[[int, int, Callable[[], bool]], int], pairs: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Works on all parts at once, and returns when nobody works any more. **Arguments:** `work`: is given a server,
        a part, and what tells whether another one has failed."""
        failed: list[BaseException] = []

        def one(pair: tuple[int, int]) -> int:
            try:
                return work(*pair, lambda: bool(failed))
            except BaseException as error:
                failed.append(error)
                raise

        futures = [self._threads.submit(one, pair) for pair in pairs]
        wait(futures)
        if failed:
            raise failed[0]
        return [future.result() for future in futures]

    def _told(self, rank: int, question: list[Any]) -> Any:
        answer = self._asking.ask(rank, question)
        if isinstance(answer, PeerLost):
            raise answer
        return answer

    def _commit(self, layout: Layout, targets: Sequence[int], former: Layout) -> BraidaxError | None:
        """Lets servers go on with what has come. Whoever is lost meanwhile is a lost server of the new layout.

        **Returns:** what a server raises, or that it is late: the others have gone on.
        """
        raised: BraidaxError | None = None
        others = [rank for rank in former.ranks if rank not in layout.ranks and rank not in self._asking.lost()]
        for rank in (*targets, *others):
            try:
                self._asking.ask(rank, self._asking.packed("commit", -1, {"own": layout.parts_of(rank)}))
            except BraidaxError as error:
                raised = raised or error
        return raised

    def _drop(self, targets: Sequence[int]) -> None:
        """Lets go of what was to come."""
        if self._is_first:
            for rank in targets:
                try:
                    self._asking.ask(rank, self._asking.packed("drop", -1, {}))
                except BraidaxError as error:  # it goes with the step, or with the next attempt
                    _log.warning("server %d may keep room for parts that were not moved to it: %s", rank, error)

    def _of_first(self, value: Any) -> Any:
        """Returns what the first of all has given, of JSON."""
        if self._world.workers is None:
            return json.loads(json.dumps(value))
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        self._meet()
        return json.loads(bytes(np.asarray(self._world.workers.broadcast(text))))

    def _all(self, value: int) -> Sequence[Any]:
        assert self._world.workers is not None, "there are several"
        self._meet()
        return self._world.workers.all_gather(np.array(value))
