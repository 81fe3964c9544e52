"""What `benchmarks.pipedream` counts and compares, and how its processes are asked."""

import argparse
import os
from dataclasses import replace

import pytest

from benchmarks.harness import Report
from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import bubble, memory, searches
from benchmarks.pipedream.cuts import Cuts
from benchmarks.pipedream.group import Failed, group
from benchmarks.pipedream.programs import gpt_program
from benchmarks.pipedream.searches import joined
from braidax.parallel.stages.schedules import Costs, Kind, Timed, simulate

TOLD = "tests.support.harness.told"


def _report() -> Report:
    return Report(argparse.Namespace(quick=False, json=None, only=None, benchmark="pipedream"))


def test_processes_are_bound_and_asked_and_tell_why_not() -> None:
    core = min(os.sched_getaffinity(0))
    with group(TOLD, ("process",), [{core}, {core}]) as running:
        assert running.ask("told") == [f"process {rank} of 2 on [{core}]" for rank in range(2)]
        with pytest.raises(Failed, match=r"^ValueError: no stage$"):
            running.ask("fallen")
    with pytest.raises(Failed, match=r"^ValueError: no word$"), group(TOLD, ("",), [{core}]):
        pass
    with pytest.raises(Failed, match=r"^a process ended with 1$"), group("no_such_module", (), [{core}]):
        pass


def test_what_waits_is_what_does_not_compute_from_the_first_to_the_last_operation() -> None:
    """Of costs that are known: those that are found again give the same simulation."""
    schedule = searches.NAMED["ZB-H1"](2, 4)
    known = Costs((1.0, 1.5), (0.0, 1.0), (2.0, 1.0), (0.25,), (1, 1))
    simulation = simulate(schedule, known)
    operations = [replace(one, start=one.start + 7, end=one.end + 7) for own in simulation.timed for one in own]
    assert bubble.waiting(operations) == pytest.approx(sum(map(simulation.bubble, range(2))) / 2)
    assert bubble.costs(schedule, operations) == known
    whole = simulate(searches.NAMED["1F1B"](2, 4), known)
    found = bubble.costs(whole.schedule, [one for own in whole.timed for one in own])
    assert found.input_seconds == (2.0, 2.0)
    assert found.weight_seconds == (0.0, 0.0)


def test_a_transfer_takes_what_a_device_stood_still_for_it_from_its_beginning_to_its_end() -> None:
    """The second activation is there at 2.25, while the second stage computes: that is seen at 4.5, and waited for."""
    times = {"0F0": (0, 1), "0F1": (1, 2), "0B0": (4.25, 6), "0B1": (7.75, 9.5)}
    times |= {"1F0": (1.25, 2), "1B0": (2, 4), "1F1": (4.5, 5.5), "1B1": (5.5, 7.5)}
    schedule = searches.NAMED["1F1B"](2, 2)
    computed = [one for one in schedule.operations() if one.kind is not Kind.UPDATE]
    operations = [Timed(one, one.stage, *times[str(one)]) for one in computed]
    assert bubble.costs(schedule, operations).transfer_seconds == (0.25,)


def test_sums_are_no_activations_wherever_they_begin() -> None:
    """Those of the first device begin behind its first passes; of them alone 1F1B would hold more than its formula."""
    found = _report()
    memory.memory(found, ("1F1B",), width=16, samples=4, num_devices=2, microbatches=2)
    held, formula, planned = (row.values[0] for row in found.rows)
    assert 0 < held <= formula
    assert planned == pytest.approx(held, rel=0.1)


def test_stages_are_joined_with_their_transfers() -> None:
    costs = Costs((1.0, 2.0, 3.0, 4.0), (1.0,) * 4, (2.0,) * 4, (0.1, 0.2, 0.3), (1, 2, 3, 4))
    assert joined(costs, 2) == Costs((3.0, 7.0), (2.0, 2.0), (4.0, 4.0), (0.2,), (3, 7))


def test_searches_are_compared_with_what_is_shortest() -> None:
    found = _report()
    searches.beside_the_shortest(found, searches.INSTANCES[-1:], 1)
    searches.with_a_heavy_head(found, (2,), 8)
    claims = {claim.name: claim for claim in found.claims}
    assert claims["search"].value == pytest.approx(1.0, abs=0.02)
    assert claims["search_heavy_head"].value is not None
    assert claims["search_heavy_head"].value > 1.05
    assert {row.system for row in found.rows if row.case == "a heavy head"} == {"searched", *searches.NAMED}


def test_all_cuts_are_looked_at_that_may_be_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.pipedream import cuts as module
    from braidax.parallel.stages.segments import counted

    monkeypatch.setattr(module, "measured", counted)
    cuts = Cuts(gpt_program(Shape(64, 64, 4, 8, 1, backward="kept", output="apart")), 1)
    ours = cuts.automatic(3)
    number = cuts.num_segments
    assert len(cuts.candidates(3, 1e9)) == (number - 1) * (number - 2) // 2
    assert ours in cuts.candidates(3, cuts.expected(ours) * 1.001)
    assert all(cuts.expected(one) >= cuts.expected(ours) * 0.999 for one in cuts.candidates(3, 1e9))
    assert [*map(len, (cuts.stages(ours), cuts.by(lambda _: 1.0, 3)))] == [3, 4]
