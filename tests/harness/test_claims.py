"""Claims are made against the best peer, turn by turn, and say which peers they were made without."""

import math

import pytest

from benchmarks.harness import Report, arguments, installed, machine, report, take_turns


def _report(*asked: str) -> Report:
    return Report(arguments("comm", "Messages.", ["messages"]).parse_args(asked))


def test_a_claim_is_a_ratio_against_the_best_peer() -> None:
    found = _report()
    found.add("photos", "ours", "throughput", "samples/s", [90, 100, 110])
    found.add("photos", "slow", "throughput", "samples/s", [10, 10, 10])
    found.add("photos", "quick", "throughput", "samples/s", [100, 50, 55])
    claim = found.against("photos", "photos", "throughput", ours="ours", peers=["slow", "quick"], at_least=1.8)
    assert claim.worst.peer == "quick"
    assert (claim.value, claim.low, claim.high) == (2, 0.9, 2)
    assert claim.holds is True
    assert str(claim) == "2 (0.9–2) x quick"
    assert claim.lost == ()


def test_of_what_is_no_rate_less_is_better() -> None:
    found = _report()
    found.add("messages", "ours", "one way", "us", [10, 10])
    found.add("messages", "gloo", "one way", "us", [40, 40])
    found.add("messages", "mpi4py", "one way", "us", [5, 6])
    claim = found.against("messages", "messages", "one way", ours="ours", peers=["gloo", "mpi4py"])
    assert (claim.worst.peer, claim.value, claim.holds) == ("mpi4py", 0.55, False)
    assert [line.peer for line in claim.lost] == ["mpi4py"]


def test_a_claim_about_lines_counts_by_the_worst_and_keeps_all() -> None:
    found = _report()
    for at, ours, gloo in (("8 B", 1, 4), ("1 MiB", 10, 5), ("1 GiB", 10, 20)):
        found.add("all_reduce", "ours", "time", "us", [ours], at=at)
        found.add("all_reduce", "gloo", "time", "us", [gloo], at=at)
    claim = found.against("all_reduce", "all_reduce", "time", ours="ours", peers=["gloo"])
    assert [(line.at, line.ratio) for line in claim.comparisons] == [("8 B", 4), ("1 MiB", 0.5), ("1 GiB", 2)]
    assert str(claim) == "0.5 x gloo at 1 MiB"
    assert [line.at for line in claim.lost] == ["1 MiB"]
    chosen = found.against("some", "all_reduce", "time", ours="ours", peers=["gloo"], at=["8 B", "1 GiB"])
    assert chosen.value == 2


def test_a_claim_about_several_cases_counts_by_the_worst_line_of_all() -> None:
    found = _report()
    for case, ours, gloo in (("2 ranks", 1, 2), ("4 ranks", 4, 3)):
        for at, factor in (("8 B", 1), ("1 MiB", 10), ("1 GiB", 1000)):
            found.add(case, "tcp", "time", "us", [factor * ours], at=at)
            found.add(case, "gloo", "time", "us", [factor * gloo], at=at)
    found.add("2 ranks", "ucx", "time", "us", [1], at="8 B")
    found.add("2 ranks", "ucx", "time", "us", [1], at="1 MiB")
    found.missing("2 ranks", "mpi4py", "no mpirun")
    compared = [("2 ranks", "tcp", ["gloo"]), ("4 ranks", "tcp", ["gloo"]), ("2 ranks", "ucx", ["mpi4py"])]
    claim = found.against_everywhere("all", compared, "time", at=["8 B", "1 MiB"], at_least=0.9)
    assert (claim.value, claim.holds, claim.worst.at) == (0.75, False, "4 ranks, 8 B, tcp")
    assert len(claim.comparisons) == 4
    assert claim.without == ("mpi4py",)
    assert found.claims == [claim]


def test_a_peer_that_was_stopped_early_counts_in_the_rounds_in_which_it_ran() -> None:
    found = _report()
    found.add("texts", "ours", "throughput", "samples/s", [4, 4, 400])
    found.add("texts", "slow", "throughput", "samples/s", [2, 1])
    line = found.against("texts", "texts", "throughput", ours="ours", peers=["slow"]).worst
    assert (line.ratio, line.low, line.high, line.runs) == (3, 2, 4, 2)


def test_what_costs_nothing_is_no_negative_ratio() -> None:
    found = _report()
    found.add("stall", "ours", "stall", "ms", [-2, 0, 4, 4])
    found.add("stall", "peer", "stall", "ms", [8, 0, 8, -1])
    line = found.against("stall", "stall", "stall", ours="ours", peers=["peer"]).worst
    assert (line.low, line.ratio, line.high) == (0, 1.5, math.inf)


def test_a_claim_about_ours_that_cannot_run_is_not_made() -> None:
    found = _report()
    found.missing("messages", "ours ucx", "not installed (libucx)")
    claim = found.against("shared", "messages", "one way", ours="ours ucx", peers=["mpi4py"])
    assert str(claim) == "not measured: ours ucx: not installed (libucx)"
    assert claim.holds is None


def test_a_peer_that_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = _report()
    needs = {"json": "json", "Ray": "no_such_ray", "Dask": "no_such_dask"}
    assert installed(found, "objects", {"ours": 1, "json": 2, "Ray": 3, "Dask": 4}, needs) == {"ours": 1, "json": 2}
    found.add("objects", "ours", "one way", "us", [1], at="8 B")
    found.add("objects", "json", "one way", "us", [3], at="8 B")
    claim = found.against("vs", "objects", "one way", ours="ours", peers=["json", "Ray", "Dask"])
    assert (claim.value, claim.without) == (3, ("Ray", "Dask"))
    assert str(claim) == "3 x json at 8 B, without Ray, Dask"
    alone = found.against("alone", "objects", "one way", ours="ours", peers=["Ray"])
    assert (alone.value, alone.holds) == (None, None)
    assert str(alone) == "not measured: no peer is there: Ray"
    assert found.notes == [
        "Ray is missing: not installed (no_such_ray)",
        "Dask is missing: not installed (no_such_dask)",
    ]
    assert "Ray is missing" in capsys.readouterr().err
    assert found.finish() == 0
    shown = capsys.readouterr().out
    assert "not measured: no peer is there: Ray" in shown
    assert "without Ray, Dask" in shown


def test_a_peer_without_figures_or_reason_is_a_mistake() -> None:
    found = _report()
    found.add("objects", "ours", "one way", "us", [1])
    with pytest.raises(ValueError, match="vs: Ray has no 'one way' in 'objects' at '', and no reason is given why"):
        found.against("vs", "objects", "one way", ours="ours", peers=["Ray"])
    with pytest.raises(ValueError, match="vs: theirs has no 'one way' in 'objects' at any line"):
        found.against("vs", "objects", "one way", ours="theirs", peers=["ours"])


def test_a_quick_run_judges_no_claim(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, status in ((["--quick"], 0), ([], 3)):
        found = _report(*asked)
        found.at_most("rss", [3, 2, 4], 1.2)
        assert str(found.claims[0]) == "3 (2–4)"
        assert found.finish() == status
    assert "not judged, as --quick measures too little: rss" in capsys.readouterr().err


def test_systems_take_turns_and_a_slow_one_stops() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return len(order)

    figures = take_turns({"a": lambda: turn("a"), "b": lambda: turn("b")}, rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert figures == {"a": [1, 4, 5], "b": [2, 3, 6]}
    slow = take_turns({"a": lambda: turn("a")}, rounds=5, longest_seconds=-1)
    assert len(slow["a"]) == 2


def test_one_core_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "num_cores", lambda: 1)
    assert _report().notes == ["this machine has one core: all processes and threads share it, and nothing here scales"]
    assert "one core" in capsys.readouterr().err
    told = {"cpu": "X", "cores": 1, "memory_gib": 2, "python": "3", "versions": {}, "date": "D", "commit": "C"}
    assert machine.summary(told) == "D, X, 1 core, 2 GiB, Python 3, , commit C"
