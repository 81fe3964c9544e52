"""Traces of several processes: one clock, names of processes, and what each of them sends."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from braidax.errors import ArgumentError, CommError
from braidax.spans import LaneTotal, Span, Trace
from braidax.tune import TracePart, gather_traces, merge_traces
from braidax.tune.attribution import gathering
from tests.support.data.jax_gang import RUN_SECONDS, jax_gang


def part(rank: int, clock: str, ends: dict[int, float], *, since_epoch: float = 0.0) -> TracePart:
    spans = [Span("step", f"step {number}", "devices", end - 1.0, 1.0, 0) for number, end in ends.items()]
    spans.append(Span("decode", "images", "MainThread", 0.5, 0.25, 9, "loader worker 0"))
    return TracePart(rank, f"host-{rank}", clock, since_epoch, tuple(spans), {"step": LaneTotal(len(ends), 1.0, 0)})


def starts(trace: Trace, rank: int) -> list[float]:
    return [span.start for span in trace.spans if span.process == f"rank {rank} · host-{rank}"]


def test_processes_of_one_machine_have_one_clock() -> None:
    merged = merge_traces([part(0, "a", {1: 2.0}), part(1, "a", {1: 3.0})])
    assert (starts(merged, 0), starts(merged, 1)) == ([1.0], [2.0])
    assert merged.totals()["step"] == LaneTotal(2, 2.0, 0)
    assert [span.process for span in merged.spans if span.lane == "decode"] == [
        "rank 0 · host-0 · loader worker 0",
        "rank 1 · host-1 · loader worker 0",
    ]


def test_other_machines_are_aligned_by_the_ends_of_steps() -> None:
    other = part(1, "b", {2: 103.0, 3: 104.25, 4: 110.0}, since_epoch=7.0)
    merged = merge_traces([part(0, "a", {1: 2.0, 2: 3.0, 3: 4.0}), other])  # by 100 and by 100.25 s: the middle
    assert starts(merged, 1) == pytest.approx([1.875, 3.125, 8.875])


def test_without_a_step_that_both_have_the_wall_clocks_count() -> None:
    merged = merge_traces([part(0, "a", {1: 2.0}, since_epoch=50.0), part(1, "b", {2: 13.0}, since_epoch=40.0)])
    assert starts(merged, 1) == [2.0]


def test_each_process_has_a_group_of_tracks(tmp_path: Path) -> None:
    merge_traces([part(0, "a", {1: 2.0}), part(1, "a", {1: 3.0})]).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert sorted(names.values()) == [
        "rank 0 · host-0",
        "rank 0 · host-0 · loader worker 0",
        "rank 1 · host-1",
        "rank 1 · host-1 · loader worker 0",
    ]
    assert {(names[one["pid"]], one["name"]) for one in events if one["ph"] == "X" and one["cat"] == "step"} == {
        ("rank 0 · host-0", "step 1"),
        ("rank 1 · host-1", "step 1"),
    }


@pytest.mark.parametrize("ranks", [(), (1, 1)])
def test_parts_are_one_of_each_process(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="expected one part of each process, and at least one"):
        merge_traces([part(rank, "a", {1: 2.0}) for rank in ranks])


def _recorded(rank: int) -> Trace:
    trace = Trace()
    trace.record(Span("step", f"step {rank}", "devices", 1.0 + rank, 2.0, os.getpid()), inner_seconds=0.5)
    return trace


def _told(gathered: Trace | None) -> Any:
    if gathered is None:
        return None
    spans = [(one.process.partition(" ·")[0], one.name, one.start, one.num_bytes) for one in gathered.spans]
    return os.getpid(), spans, gathered.totals()["step"].seconds


def _by_communicator(comm: Any) -> Any:
    return _told(gather_traces(_recorded(comm.rank), comm=comm))


def _by_service(comm: Any) -> Any:
    told = [_told(gather_traces(_recorded(comm.rank))) for _ in range(2)]  # each time in a folder of its own
    comm.barrier()  # the first one has taken what the second one left
    return told[1]


def test_a_process_alone_has_its_own() -> None:
    process, spans, _ = _told(gather_traces(_recorded(0)))
    assert spans == [("rank 0", "step 0", 1.0, process)]


def test_ranks_of_a_gang_and_processes_of_jax_send_theirs() -> None:
    with jax_gang(2, 1) as gang:
        gang.run(_in_small_pieces)
        for way in (_by_communicator, _by_service):
            (process, spans, seconds), none = gang.run(way, timeout_seconds=RUN_SECONDS)
            assert none is None
            assert [one[:3] for one in spans] == [("rank 0", "step 0", 1.0), ("rank 1", "step 1", 2.0)]
            assert spans[0][3] == process != spans[1][3]
            assert seconds == 3.0


def _in_small_pieces(comm: Any) -> None:
    gathering._PIECE_BYTES = 100


def test_what_is_no_spans_is_refused() -> None:
    with pytest.raises(CommError, match=r"a process has sent 2 bytes that are no spans .*one version of braidax"):
        gathering._unpacked(b"[]")
