"""One trace of the spans of all processes, by one clock."""

import json
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from braidax.connections.coordination import Coordination
from braidax.connections.hosts import host_id
from braidax.errors import ArgumentError, CommError
from braidax.program.coordination import coordination
from braidax.spans import LaneTotal, Span, Trace

if TYPE_CHECKING:
    from braidax.comm import Communicator

_PIECE_BYTES = 1 << 20  # of a value of JAX's coordination service, whose messages have a limit


@dataclass(frozen=True)
class TracePart:
    """What one process has recorded, as another one is told it; a rank of a gang may return it.

    **Fields:** `rank`; `host`: its name. `clock`: which one `time.perf_counter` reads there: processes with the same
    one need not be aligned. `since_epoch`: seconds of the wall clock where that one is at 0. `spans`; `totals`: by
    lane.
    """

    rank: int
    host: str
    clock: str
    since_epoch: float
    spans: tuple[Span, ...]
    totals: dict[str, LaneTotal]

    @staticmethod
    def of(trace: Trace, rank: int) -> "TracePart":
        """Returns what a trace of this process has recorded."""
        clock = host_id().partition("/")[0]  # of a machine since it was started, whatever its networks are
        since = time.time() - time.perf_counter()
        return TracePart(rank, socket.gethostname(), clock, since, tuple(trace.spans), trace.totals())


def gather_traces(trace: Trace, *, comm: "Communicator | None" = None, timeout_seconds: float = 60.0) -> Trace | None:
    """Returns one trace of the spans of all processes; all call it, behind the run.

    **Arguments:** `trace`: of this process, such as its report's. `comm`: of the processes, in place of those of
    `jax.distributed`. `timeout_seconds`: the limit of the wait for each process, without `comm`.

    **Returns:** in the first process what `merge_traces` makes of all; None in the others. **Raises:** `CommError`,
    `WaitTimeout` where one does not come.
    """
    if comm is not None:
        told = comm.all_gather(_packed(TracePart.of(trace, comm.rank)))
        return merge_traces([_unpacked(bytes(one)) for one in told]) if comm.rank == 0 else None
    service = coordination()
    if service is None or jax.process_count() == 1:
        return merge_traces([TracePart.of(trace, 0)])
    words, process = service.numbered("traces"), jax.process_index()
    own = TracePart.of(trace, process)
    if process > 0:
        _leave(words, process, _packed(own))
        return None
    others = [_taken(words, one, timeout_seconds) for one in range(1, jax.process_count())]
    return merge_traces([own, *others])


def merge_traces(parts: Sequence[TracePart]) -> Trace:
    """Returns one trace of several processes, by the clock of the first one.

    Processes of one machine read the same clock. Others are moved by the median distance of the ends of the steps that
    both have, which are one moment where a step ends with all of them; without such steps by their wall clocks, which
    are as good as the machines keep them.

    **Arguments:** `parts`: one of each process. **Returns:** a trace whose spans say in `process` the rank, the host
    and, of other processes of that rank, their names. **Raises:** `ArgumentError` for no parts, or a rank twice.
    """
    ranks = [part.rank for part in parts]
    if not parts or len(set(ranks)) < len(ranks):
        raise ArgumentError(f"parts are of the ranks {ranks}: expected one part of each process, and at least one")
    first = parts[0]
    merged = Trace(max_spans=max(1, sum(len(part.spans) for part in parts)))
    for part in parts:
        name, moved = f"rank {part.rank} · {part.host}", _distance(first, part)
        merged.take(
            [
                span._replace(start=span.start + moved, process=" · ".join([name, *filter(None, [span.process])]))
                for span in part.spans
            ],
            part.totals,
        )
    return merged


def _distance(first: TracePart, part: TracePart) -> float:
    """Returns what to add to the clock of a part."""
    if part.clock == first.clock:
        return 0.0
    ends, others = _ends(first), _ends(part)
    shared = ends.keys() & others.keys()
    if shared:
        return statistics.median(ends[name] - others[name] for name in shared)
    return part.since_epoch - first.since_epoch


def _ends(part: TracePart) -> dict[str, float]:
    return {span.name: span.end for span in part.spans if span.lane == "step"}


def _packed(part: TracePart) -> bytes:
    totals = {lane: (each.num_spans, each.seconds, each.num_bytes) for lane, each in part.totals.items()}
    return json.dumps([part.rank, part.host, part.clock, part.since_epoch, part.spans, totals]).encode()


def _unpacked(data: bytes) -> TracePart:
    try:
        rank, host, clock, since, spans, totals = json.loads(data)
        found: Any = {lane: LaneTotal(*each) for lane, each in totals.items()}
        return TracePart(rank, host, clock, since, tuple(Span(*each) for each in spans), found)
    except (ValueError, TypeError, AttributeError) as error:
        raise CommError(
            f"a process has sent {len(data)} bytes that are no spans ({error}): run one version of braidax everywhere"
        ) from error


def _leave(words: Coordination, process: int, data: bytes) -> None:
    pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
    for at, piece in enumerate(pieces):
        words.set(f"{process}/{at}", piece)
    words.set(f"{process}/count", str(len(pieces)).encode())


def _taken(words: Coordination, process: int, timeout_seconds: float) -> TracePart:
    told = f"the spans of process {process}"
    remedy = "every process calls gather_traces; its log says why one does not, or raise timeout_seconds"
    count = words.get(f"{process}/count", meaning=told, remedy=remedy, timeout_seconds=timeout_seconds)
    pieces = [
        words.get(f"{process}/{at}", meaning=told, remedy=remedy, timeout_seconds=timeout_seconds)
        for at in range(int(count))
    ]
    words.delete(str(process))
    return _unpacked(b"".join(pieces))
