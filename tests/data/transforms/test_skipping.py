import fcntl
import io
import itertools
import json
import multiprocessing
import os
import pickle
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import xxhash
from jax.sharding import PartitionSpec as P
from PIL import Image

import braidax.data as sources
from braidax.data.loader import DataLoader
from braidax.data.source import Source, allocate, prepare, source_at
from braidax.data.storage import Remote
from braidax.data.transforms.mapped import mapped
from braidax.data.transforms.mixture import mix
from braidax.data.transforms.skipping import candidate, skipping
from braidax.errors import ArgumentError, FormatError, ReadError, RecordError, WaitTimeout
from tests.support.data.formats.reading import read
from tests.support.data.numbered import Numbers
from tests.support.data.storage.faulty_server import Reply, serving

BAD = (3, 8, 9, 40, 77, 95)


class Faulty(Numbers):
    """Numbers of which some cannot be read; counts the reads that had one of them."""

    stamp: str | None = "as it was"

    def __init__(
        self, num_samples: int, bad: Iterable[int] = (), error: Callable[[str], Exception] = RecordError
    ) -> None:
        super().__init__(num_samples)
        self.bad = frozenset(bad)
        self.error = error
        self.failures: list[int] = []

    def read(self, indices: np.ndarray, out: Any) -> None:
        for record in indices.tolist():
            if record in self.bad:
                self.failures.append(len(indices))
                raise self.error(f"file, record {record}: is torn")
        super().read(indices, out)

    def describe(self) -> dict[str, str]:
        return {"format": "numbers", "files": "1: file"}


def good_for(record: int, num_samples: int, bad: Iterable[int]) -> int:
    """The record that is read for another, by the definition."""
    tried = (candidate(record, attempt, num_samples) for attempt in range(1000))
    return record if record not in bad else next(other for other in tried if other not in bad)


def expected(num_samples: int, bad: Iterable[int]) -> list[int]:
    return [good_for(record, num_samples, bad) for record in range(num_samples)]


def lines(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()][1:]


def test_the_candidates_are_the_same_in_all_versions() -> None:
    assert [candidate(0, 0, 1 << 40), candidate(0, 1, 1 << 40), candidate(12345, 7, 1 << 40)] == [
        744435828515,
        814935633024,
        517684327984,
    ]
    drawn = [candidate(record, attempt, 10) for record in range(500) for attempt in range(4)]
    counts = np.bincount(drawn, minlength=10)
    assert len(counts) == 10
    assert counts.min() > 150


def test_bad_records_are_replaced_and_written_down(tmp_path: Path) -> None:
    source = Faulty(100, BAD)
    skipped = skipping(source, ledger=tmp_path / "ledger.jsonl")
    assert skipped.sample_spec == source.sample_spec
    assert len(skipped) == 100
    out = read(skipped)
    assert out["id"].tolist() == expected(100, BAD)
    np.testing.assert_array_equal(out["x"], np.array(expected(100, BAD))[:, None] + np.arange(6) / 8)
    entries = lines(tmp_path / "ledger.jsonl")
    assert sorted(entry["record"] for entry in entries) == sorted(BAD)
    for entry in entries:
        assert entry == {
            "record": entry["record"],
            "error": f"file, record {entry['record']}: is torn",
            "replaced_by": good_for(entry["record"], 100, BAD),
        }
    header = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])
    assert header == {
        "ledger": 2,
        "samples": 100,
        "stamp": xxhash.xxh3_128_hexdigest(b"as it was"),
        "files": "1: file",
        "source": {"format": "numbers", "files": "1: file"},
    }
    assert skipped.describe() == {
        "format": "numbers",
        "files": "1: file",
        "bad records": f"skipped, 6 of at most 100 in {tmp_path / 'ledger.jsonl'}",
    }


def test_known_records_are_not_read_again(tmp_path: Path) -> None:
    source = Faulty(100, BAD)
    skipped = skipping(source, ledger=tmp_path / "ledger.jsonl")
    read(skipped)
    assert source.failures
    source.failures.clear()
    assert read(skipped)["id"].tolist() == expected(100, BAD)
    assert source.failures == []
    again = skipping(source, ledger=tmp_path / "ledger.jsonl")
    assert read(again, [77, 0, 3, 3])["id"].tolist() == [expected(100, BAD)[record] for record in (77, 0, 3, 3)]
    assert source.failures == []
    assert len(lines(tmp_path / "ledger.jsonl")) == 6


def test_good_windows_are_read_once(tmp_path: Path) -> None:
    windows: list[int] = []
    source = Numbers(100, lambda indices: windows.append(len(indices)))
    read(skipping(source, ledger=tmp_path / "ledger.jsonl"))
    assert windows == [100]


def test_one_bad_record_costs_few_reads(tmp_path: Path) -> None:
    windows: list[int] = []
    source = Faulty(1024, [700])
    source.before = lambda indices: windows.append(len(indices))
    read(skipping(source, ledger=tmp_path / "ledger.jsonl"))
    assert len(windows) + len(source.failures) <= 2 * 10 + 4


@pytest.mark.parametrize("threads", [1, 4, 16])
def test_batches_do_not_depend_on_threads_or_what_is_known(tmp_path: Path, threads: int) -> None:
    source = Faulty(400, range(0, 400, 9))
    skipped = skipping(source, ledger=tmp_path / "ledger.jsonl")
    want = np.array(expected(400, source.bad))
    start = threading.Barrier(threads)

    def go(seed: int) -> None:
        start.wait(10)
        for window in np.split(np.random.default_rng(seed).permutation(400), 20):
            assert read(skipped, window.tolist())["id"].tolist() == want[window].tolist()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(go, range(threads)))
    entries = lines(tmp_path / "ledger.jsonl")
    assert sorted(entry["record"] for entry in entries) == sorted(source.bad)
    assert {entry["record"]: entry["replaced_by"] for entry in entries} == {n: want[n] for n in source.bad}


def test_many_bad_records_among_few(tmp_path: Path) -> None:
    bad = [record for record in range(40) if record % 4]
    skipped = skipping(Faulty(40, bad), ledger=tmp_path / "ledger.jsonl")
    assert read(skipped, [1])["id"].tolist() == [good_for(1, 40, bad)]
    found = {entry["record"]: entry["replaced_by"] for entry in lines(tmp_path / "ledger.jsonl")}
    assert set(found) <= set(bad)
    assert all(other % 4 == 0 for other in found.values())
    assert read(skipped)["id"].tolist() == expected(40, bad)


def test_the_budget(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    skipped = skipping(Faulty(100, BAD), ledger=ledger, budget=5)
    message = (
        f"6 records are bad, more than budget=5; ledger={str(ledger)!r} lists them, the last is: file, record 95: is "
        "torn: mend the data, or raise the budget"
    )
    with pytest.raises(RecordError, match=re.escape(message)):
        read(skipped, range(100))
    assert sorted(entry["record"] for entry in lines(ledger)) == sorted(BAD)
    with pytest.raises(RecordError, match=r"6 records are bad, more than budget=5; .*record 95: is torn"):
        skipping(Faulty(100, BAD), ledger=ledger, budget=5)
    source = Faulty(100, BAD)
    assert read(skipping(source, ledger=ledger, budget=6))["id"].tolist() == expected(100, BAD)
    assert sorted(entry["record"] for entry in lines(ledger)) == sorted(BAD)
    with pytest.raises(ArgumentError, match=r"budget=-1: expected"):
        skipping(source, ledger=ledger, budget=-1)


def test_a_budget_of_zero_raises_the_first_error(tmp_path: Path) -> None:
    skipped = skipping(Faulty(100, BAD), ledger=tmp_path / "ledger.jsonl", budget=0)
    assert read(skipped, [0, 1])["id"].tolist() == [0, 1]
    with pytest.raises(RecordError, match=r"1 records are bad, more than budget=0; .*record 3: is torn"):
        read(skipped, range(10))


def test_all_records_are_bad(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(RecordError, match=r"21 records are bad, more than budget=20; .*is torn: mend the data"):
        read(skipping(Faulty(1000, range(1000)), ledger=ledger, budget=20))
    assert len(lines(ledger)) == 21
    assert {entry["replaced_by"] for entry in lines(ledger)} == {None}
    ledger.unlink()
    with pytest.raises(
        RecordError, match=r"record \d is bad \(file, record \d: is torn\), and so are the 64 that were"
    ):
        read(skipping(Faulty(5, range(5)), ledger=ledger))


@pytest.mark.parametrize("error", [FormatError, WaitTimeout, ArgumentError])
def test_other_errors_are_not_skipped(tmp_path: Path, error: type[Exception]) -> None:
    skipped = skipping(Faulty(100, BAD, error), ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(error, match="record 3: is torn"):
        read(skipped)
    assert lines(tmp_path / "ledger.jsonl") == []


def cut_image(where: str) -> Exception:
    """What Pillow raises for an image that ends too early."""
    data = io.BytesIO()
    Image.new("RGB", (40, 40), "red").save(data, "PNG")
    with pytest.raises(OSError, match="truncated") as caught:
        Image.open(io.BytesIO(data.getvalue()[:80])).load()
    return caught.value


def caused(cause: Exception, error: type[Exception] = RecordError) -> Callable[[str], Exception]:
    def made(where: str) -> Exception:
        raised = error(where)
        raised.__cause__ = cause
        return raised

    return made


class ServerError(Exception):
    """As libraries of networks have them: no error of Python's own."""


OF_THE_BYTES = {
    "ValueError": ValueError,
    "zlib": zlib.error,
    "Pillow": cut_image,
    "explained": caused(ValueError("digits"), KeyError),
}
OUTAGES = {
    "ConnectionError": ConnectionError,
    "timeout": lambda where: TimeoutError(60, where),
    "disk": lambda where: OSError(5, where),
    "library": ServerError,
    "file gone": FileNotFoundError,
    "memory": MemoryError,
    "no number": OSError,
    "wrapped": caused(ConnectionError("reset")),
    "wrapped by a value": caused(ServerError("503"), ValueError),
    "ours": ReadError,
}


@pytest.mark.parametrize("error", OF_THE_BYTES.values(), ids=OF_THE_BYTES)
def test_what_the_bytes_show_is_skipped(tmp_path: Path, error: Callable[[str], Exception]) -> None:
    skipped = skipping(Faulty(100, BAD, error), ledger=tmp_path / "a.jsonl")
    assert read(skipped)["id"].tolist() == expected(100, BAD)
    assert sorted(entry["record"] for entry in lines(tmp_path / "a.jsonl")) == sorted(BAD)


@pytest.mark.parametrize("error", OUTAGES.values(), ids=OUTAGES)
def test_an_outage_is_no_bad_record(tmp_path: Path, error: Callable[[str], Exception]) -> None:
    source = Faulty(100, BAD, error)
    skipped = skipping(source, ledger=tmp_path / "a.jsonl")
    with pytest.raises((ReadError, RecordError)):
        read(skipped)
    assert lines(tmp_path / "a.jsonl") == []
    source.bad = frozenset()  # the network is back
    assert read(skipped)["id"].tolist() == list(range(100))


def test_a_server_that_fails_makes_no_bad_records(tmp_path: Path) -> None:
    """It answers 503 for a while: nothing is written down, and all records are there when it is back."""
    text = b"".join(b'{"x": %d}\n' % number for number in range(200))
    with serving({"a.jsonl": text}) as server:
        remote = Remote(cache_bytes=0, retries=1)
        source = skipping(sources.open(f"{server.url}/a.jsonl", remote=remote), ledger=tmp_path / "ledger.jsonl")
        healthy, server.answer = server.answer, lambda request: Reply(status=503)
        with pytest.raises(ReadError, match="503"):
            read(source)
        assert lines(tmp_path / "ledger.jsonl") == []
        server.answer = healthy
        assert read(source)["x"].tolist() == list(range(200))


@pytest.mark.parametrize("bad", [[0], [3, 280], [299]])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("columns", [None, {"x": "int32"}])
def test_a_bad_line_among_the_first_does_not_refuse_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: list[int], kind: str, columns: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "jsonl":
        path = jsonl(tmp_path / "a.jsonl", bad)
    else:
        path = tmp_path / "a.csv"
        path.write_text("x,y\n" + "".join("1,2,3\n" if number in bad else f"{number},2\n" for number in range(300)))
    source = sources.open(path, columns=columns)
    with pytest.raises(RecordError, match=re.escape(path.name)):
        read(source, bad[:1])
    assert read(skipping(source))["x"].tolist() == expected(300, bad)


def test_a_file_of_bad_lines_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="at byte 0"):
        sources.open(jsonl(tmp_path / "a.jsonl", range(300)))


def jsonl(path: Path, bad: Iterable[int]) -> Path:
    path.write_text("".join("{torn\n" if number in bad else f'{{"x": {number}}}\n' for number in range(300)))
    return path


def test_a_mended_file_has_a_ledger_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = jsonl(tmp_path / "a.jsonl", [280])
    assert read(skipping(sources.open(path)))["x"][280] != 280
    (before,) = tmp_path.glob("skipped-*.jsonl")
    jsonl(path, [])
    os.utime(path, ns=(5, 5))
    assert read(skipping(sources.open(path)))["x"].tolist() == list(range(300))
    assert len(list(tmp_path.glob("skipped-*.jsonl"))) == 2
    with pytest.raises(ArgumentError, match="belongs to another source"):
        skipping(sources.open(path), ledger=before)


def test_two_loaders_in_one_folder_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    for name, bad in (("train", 280), ("test", 290)):
        (tmp_path / name).mkdir()
        path = jsonl(tmp_path / name / "a.jsonl", [bad])
        loader = DataLoader(path, mesh, P(), batch_size=300, seed=None, on_error="skip")
        (batch,) = loader
        assert [place for place, x in enumerate(batch["x"].tolist()) if x != place] == [bad]


def test_a_loader_counts_what_was_skipped(tmp_path: Path) -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    source = skipping(Faulty(100, BAD), ledger=tmp_path / "a.jsonl")
    with DataLoader(mapped(source, lambda window: window), mesh, P(), batch_size=20, epochs=3) as loader:
        assert loader.stats().num_skipped == 0
        list(loader)
        assert loader.stats().num_skipped == 3 * len(BAD)  # found in one epoch, known in the others
        assert sum(span.lane == "skip" for span in loader.trace.spans) == 3 * len(BAD)
    with DataLoader(Numbers(100), mesh, P(), batch_size=20) as loader:
        list(loader)
        assert loader.stats().num_skipped == 0


def test_what_is_known_of_a_source_without_a_stamp_is_looked_at_again(tmp_path: Path) -> None:
    """Another object of the same length and kind: nothing tells them apart, so no good record of it is replaced."""
    first, second = Faulty(100, [3, 8]), Faulty(100, [8, 40])
    first.stamp = second.stamp = None
    read(skipping(first, ledger=tmp_path / "a.jsonl"))
    assert read(skipping(second, ledger=tmp_path / "a.jsonl"))["id"].tolist() == expected(100, [8, 40])


def test_transforms_on_both_sides_of_skipping_draw_other_numbers(tmp_path: Path) -> None:
    def drawn(window: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {**window, f"r{len(window)}": rng.random().astype(np.float32)}

    inside = mapped(Numbers(50), drawn)
    once = mapped(skipping(inside, ledger=tmp_path / "a.jsonl"), drawn)
    out = read(mapped(mix([(once, 1)]), drawn))
    names = sorted(name for name in out if name.startswith("r"))
    assert len(names) == 3
    for one, other in itertools.combinations(names, 2):
        assert not np.isin(out[one], out[other]).any()


def test_a_record_that_is_not_there_is_not_skipped(tmp_path: Path) -> None:
    skipped = skipping(Numbers(10), ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(RecordError, match="there is no record 10"):
        read(skipped, [0, 10])
    assert lines(tmp_path / "ledger.jsonl") == []


def test_a_line_that_was_not_finished(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    read(skipping(Faulty(100, [3]), ledger=ledger))
    whole = ledger.read_bytes()
    with ledger.open("ab") as file:
        file.write(b'{"record": 8, "error": "' + b"x" * 300)
    assert read(skipping(Faulty(100, [3, 9]), ledger=ledger))["id"].tolist() == expected(100, [3, 9])
    assert ledger.read_bytes().startswith(whole)
    assert [entry["record"] for entry in lines(ledger)] == [3, 9]


def test_a_ledger_that_is_none(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    read(skipping(Faulty(100, [3]), ledger=ledger))
    with pytest.raises(
        ArgumentError,
        match=r"ledger=.*: belongs to another source or version: .*'samples': 100.*expected {'samples': 101",
    ):
        skipping(Faulty(101, [3]), ledger=ledger)
    ledger.write_text("hello\n")
    with pytest.raises(FormatError, match=r"ledger.jsonl: the line b'hello' is none of a ledger \(JSONDecodeError"):
        skipping(Faulty(100), ledger=ledger)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FormatError, match=r"folder: the ledger cannot be opened \(.*\); give one that can be written"):
        skipping(Faulty(100), ledger=tmp_path / "folder")
    assert lines_of(skipping(Faulty(100), ledger=tmp_path / "new" / "a.jsonl"), tmp_path / "new" / "a.jsonl") == []


def lines_of(source: Source, ledger: Path) -> list[dict[str, Any]]:
    read(source)
    return lines(ledger)


def _read_all(ledger: Path, seed: int) -> None:
    source = Faulty(300, range(0, 300, 7))
    skipped = skipping(source, ledger=ledger)
    for window in np.split(np.random.default_rng(seed).permutation(300), 30):
        out = allocate(skipped.sample_spec, len(window))
        skipped.read(window, out)
        assert out["id"].tolist() == [good_for(record, 300, source.bad) for record in window.tolist()]


def test_processes_share_a_ledger(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_read_all, args=(ledger, seed), daemon=True) for seed in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(entry["record"] for entry in lines(ledger)) == list(range(0, 300, 7))


def test_bad_records_of_others_count(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    one, other = (skipping(Faulty(100, BAD), ledger=ledger, budget=4) for _ in range(2))
    read(one, [3, 8, 9])
    read(other, [9, 40])
    with pytest.raises(RecordError, match=r"5 records are bad, more than budget=4"):
        read(one, [77])
    assert [entry["record"] for entry in lines(ledger)] == [3, 8, 9, 40, 77]


def test_a_ledger_that_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[candidate.__module__], "_LOCK_SECONDS", 0.02)
    with (tmp_path / "ledger.jsonl").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(WaitTimeout, match=r"ledger.jsonl: another process holds the ledger's lock for 0.02 s"):
            skipping(Numbers(10), ledger=tmp_path / "ledger.jsonl")


class Drawn(Faulty):
    """Samples that differ from epoch to epoch: record `i` is number `i + epoch`, and some numbers are bad."""

    epoch = 0

    def read(self, indices: np.ndarray, out: Any) -> None:
        super().read((indices + self.epoch) % self.num_samples, out)

    def at(self, seed: int | None, epoch: int) -> "Drawn":
        drawn = Drawn(self.num_samples, self.bad)
        drawn.epoch = epoch
        return drawn


def test_samples_that_differ_from_epoch_to_epoch(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    skipped = skipping(Drawn(50, [10, 20]), ledger=ledger, budget=2)
    for _ in range(2):
        for epoch in range(5):
            bad = [10 - epoch, 20 - epoch]
            want = [(record + epoch) % 50 for record in expected(50, bad)]
            assert read(source_at(skipped, 7, epoch))["id"].tolist() == want
    assert [(entry["record"], entry["seed"], entry["epoch"]) for entry in lines(ledger)] == [(10, 7, 0), (20, 7, 0)]
    drawn = source_at(skipping(Drawn(50, [10, 20]), ledger=ledger), 7, 0)
    read(drawn)
    assert drawn.source.failures == []


def test_a_source_that_is_the_same_in_each_epoch_stays_itself(tmp_path: Path) -> None:
    skipped = skipping(Numbers(10), ledger=tmp_path / "ledger.jsonl")
    assert source_at(skipped, 0, 3) is skipped


class Ahead(Faulty):
    asked: tuple[int, ...] = ()

    def prepare(self, indices: np.ndarray) -> None:
        self.asked = tuple(indices.tolist())


def test_preparing_is_passed_on_for_what_will_be_read(tmp_path: Path) -> None:
    source = Ahead(10, [4])
    skipped = skipping(source, ledger=tmp_path / "ledger.jsonl")
    read(skipped)
    prepare(skipped, np.array([4, 5]))
    assert source.asked == (good_for(4, 10, [4]), 5)


def test_it_can_be_sent_to_another_process(tmp_path: Path) -> None:
    skipped = skipping(Faulty(100, BAD), ledger=tmp_path / "ledger.jsonl")
    read(skipped, [3])
    again = pickle.loads(pickle.dumps(skipped))
    assert read(again)["id"].tolist() == expected(100, BAD)
    assert again.source.failures
    assert len(lines(tmp_path / "ledger.jsonl")) == 6
