"""When another mix is said to be better than the one that was found."""

import argparse

from benchmarks.balance.tuned import better_mixes
from benchmarks.harness import Report


def _report(**taken: list[float]) -> Report:
    report = Report(argparse.Namespace(quick=False, json=None, only=None, benchmark="balance"))
    for name, seconds in taken.items():
        report.add("tuned, digits", name, "time", "ms", seconds)
    return report


def test_a_mix_is_better_where_it_was_faster_in_each_round() -> None:
    report = _report(tuned=[10, 20, 10], always=[9, 19, 9.9], mostly=[5, 10, 10], never=[11, 21, 11])
    assert better_mixes(report, "tuned, digits", ["always", "mostly", "never"]) == ["always"]
    assert report.notes == [
        "tuned, digits: of all others mostly is the fastest, which takes 0.5 of its time, 0.5 to 1 in 3 rounds"
    ]


def test_a_mix_that_could_not_run_is_no_better() -> None:
    report = _report(tuned=[10], there=[11])
    report.missing("tuned, digits", "absent", "its batch cannot be cut")
    assert better_mixes(report, "tuned, digits", ["there", "absent"]) == []
