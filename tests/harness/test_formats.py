"""Every format is compared with a library that delivers the same, and a claim says which ones it was made without."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.formats import __main__ as benchmark
from benchmarks.formats import measuring, written
from benchmarks.formats.cases import BATCH, FORMATS, Format
from benchmarks.harness import Report, absent

QUICK = {"megatron"}  # whose library reads at random and whole


def _report() -> Report:
    return Report(argparse.Namespace(quick=True, json=None, only=None, benchmark="formats"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset closes no file
@pytest.mark.parametrize(
    "known",
    [pytest.param(one, marks=[] if one.key in QUICK else pytest.mark.slow, id=one.key) for one in FORMATS],
)
def test_ours_delivers_what_the_libraries_do(known: Format, tmp_path: Path) -> None:
    if missing := [module for module in known.needs if absent(module)]:
        pytest.fail(f"{known.name} needs {missing}")
    size = BATCH[known.kind]
    bench = benchmark.Bench(_report(), dict.fromkeys(BATCH, 2 * size), 1)
    firsts = bench.measure(known, tmp_path)
    lines = [f"{known.name}: {library.name}" for library in known.libraries]
    assert [len(seconds) for seconds in firsts] == [1] * len(lines)
    for line, library in zip(lines, known.libraries, strict=True):
        rows = [row for row in bench.report.rows if row.at == line]
        measured = {row.system for row in rows if row.values}
        ways = {benchmark.LIBRARY: library.at_random, benchmark.WHOLE: library.whole or library.stream}
        there = set() if absent(library.module) else {way for way, opened in ways.items() if opened}
        assert {system.partition(", 2")[0] for system in measured} == {benchmark.OURS, *there}
        assert all(row.values[0] > 0 for row in rows if row.values)
        assert {row.metric for row in rows if row.values} == {benchmark.RATE, benchmark.FIRST}


def test_a_library_that_delivers_something_else_is_noticed() -> None:
    def seen(*arrays: Any, in_order: bool = True) -> list[Any]:
        return measuring.looked_at(lambda: iter([{"x": np.asarray(array)} for array in arrays]), in_order=in_order)

    right = np.arange(4, dtype=np.int32)
    measuring.check_same("a", seen(right, right), seen(right, right))
    measuring.check_same("a", seen(right, 2 * right, in_order=False), seen(2 * right, right, in_order=False))
    for other in (right.astype(np.int64), right[::-1], right[:3]):
        with pytest.raises(ValueError, match=r"a: ours delivers .*'x': 'int32.*, its library .*, or other values"):
            measuring.check_same("a", seen(right), seen(other))
    with pytest.raises(ValueError, match="a: ours delivers"):
        measuring.check_same("a", seen(right, right), seen(right, right + 1))
    with pytest.raises(ValueError, match="a: ours delivers"):
        measuring.check_same("a", seen(right, in_order=False), seen(right + 1, in_order=False))


def test_photographs_may_differ_by_rounding_and_other_images_may_not() -> None:
    photo = np.full((2, *written.PHOTO, 3), 7, np.uint8)
    small = np.full((2, 32, 32, 3), 7, np.uint8)
    measuring.check_same("a", [{"x": photo}], [{"x": photo + 1}])
    with pytest.raises(ValueError, match="a: ours delivers"):
        measuring.check_same("a", [{"x": photo}], [{"x": photo + 3}])
    with pytest.raises(ValueError, match="a: ours delivers"):
        measuring.check_same("a", [{"x": small}], [{"x": small + 1}])


def test_claims_name_what_they_were_made_without() -> None:
    report = _report()
    for at, ours, theirs in (("npy: NumPy", [2, 2], [1, 1]), ("CSV: Polars", [3, 3], [4, 2])):
        report.add(benchmark.CASE, benchmark.OURS, benchmark.RATE, "samples/s", ours, at=at)
        report.add(benchmark.CASE, benchmark.LIBRARY, benchmark.RATE, "samples/s", theirs, at=at)
    bench = benchmark.Bench(report, {}, 1)
    report.add(benchmark.CASE, benchmark.OURS, benchmark.RATE, "samples/s", [1, 1], at="WebDataset: webdataset")
    bench.missing("WebDataset: webdataset", benchmark.LIBRARY, "not installed (webdataset)")
    bench.missing("Zarr", benchmark.OURS, "not installed (zarr)")
    benchmark.claim(report, [[0.1, 0.2], [0.4, 0.3]], ["Zarr"])
    formats, first = report.claims
    assert formats.holds
    assert formats.value == pytest.approx((3 / 4 + 3 / 2) / 2)
    assert formats.worst.at == "CSV: Polars"
    assert formats.without == ("WebDataset: webdataset", "Zarr")
    assert (first.value, first.low, first.high, first.holds) == (pytest.approx(0.35), 0.3, 0.4, True)


def test_a_claim_without_any_library_is_not_made() -> None:
    report = _report()
    report.add(benchmark.CASE, benchmark.OURS, benchmark.RATE, "samples/s", [1], at="npy: NumPy")
    benchmark.Bench(report, {}, 1).missing("npy: NumPy", benchmark.LIBRARY, "not installed (numpy)")
    benchmark.claim(report, [], ["Zarr"])
    (claim,) = report.claims
    assert claim.holds is None
    assert claim.why == "no library is there: npy: NumPy, Zarr"


def test_an_epoch_counts_from_the_opening_to_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.formats.measuring.time.perf_counter", lambda: now[0])

    def begin() -> Iterator[Any]:
        now[0] += 2.0  # opening
        for _ in range(3):
            now[0] += 1.0
            yield {"x": np.zeros(2)}

    epoch = measuring.Epoch(begin, 30)
    assert epoch() == pytest.approx(6.0)
    assert epoch() == pytest.approx(6.0)
    assert epoch.first_seconds == [3.0, 3.0]


def test_every_library_has_a_way() -> None:
    assert all(one.at_random or one.whole or one.stream for known in FORMATS for one in known.libraries)
    assert len({known.key for known in FORMATS}) == len(FORMATS)
