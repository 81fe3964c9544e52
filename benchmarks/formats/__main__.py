"""Formats: every format that is read, beside its own library: one epoch in shuffled batches, and the first batch.

Both deliver arrays on the device, the same records in the same order, from files that are in the page cache.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.formats import measuring, written
from benchmarks.formats.cases import BATCH, FORMATS, Format, Kind, Library
from benchmarks.formats.measuring import Begin, Epoch
from benchmarks.harness import Report, Row, absent, arguments, run, say, take_turns
from benchmarks.harness.machine import num_cores

CASE = "formats"
OURS, LIBRARY, WHOLE = "braidax", "its library", "its library, read whole"
RATE, FIRST = "one epoch", "to the first batch"
NO_SUCH_WAY = "no such way"

FULL: dict[Kind, int] = {"rows": 100 * 1024, "images": 50 * 512, "tokens": 400 * 512, "photos": 40 * 64}
QUICK: dict[Kind, int] = {"rows": 2 * 1024, "images": 2 * 512, "tokens": 2 * 512, "photos": 64}
_DISTRIBUTIONS = ("pyarrow", "polars", "datasets", "tensorflow-cpu", "protobuf", "array-record", "webdataset")
_MORE = ("h5py", "zarr", "pillow", "opencv-python-headless")


@dataclass(frozen=True)
class Bench:
    """A run. **Fields:** `sizes`: samples of each kind."""

    report: Report
    sizes: dict[Kind, int]
    rounds: int

    def measure(self, known: Format, folder: Path) -> list[list[float]]:
        """Measures a format beside each of its libraries. **Returns:** of each line our seconds to the first batch."""
        path, num_samples, size = folder / known.file, self.sizes[known.kind], BATCH[known.kind]
        known.write(path, num_samples if known.kind == "photos" else getattr(written, known.kind)(num_samples))
        mine = measuring.ours(known.open, path, size, num_cores())
        orders = measuring.orders_of(num_samples, size)
        found: list[list[float]] = []
        for library in known.libraries:
            at, running = f"{known.name}: {library.name}", {OURS: Epoch(mine, num_samples)}
            why, in_order = absent(library.module), library.stream is None
            seen = measuring.looked_at(mine, in_order=in_order)
            for system, begin in self._ways(library, path, orders):
                if why or begin is None:
                    self.missing(at, system, why or NO_SUCH_WAY)
                else:
                    measuring.check_same(at, seen, measuring.looked_at(begin, in_order=in_order))
                    running[system] = Epoch(begin, num_samples)
            if why:
                self.report.note(f"{library.name} is missing: {why}")
            for system, rates in take_turns(running, rounds=self.rounds, longest_seconds=6).items():
                self.report.add(CASE, system, RATE, "samples/s", rates, at=at)
                self.report.add(CASE, system, FIRST, "s", running[system].first_seconds, at=at)
            found.append(running[OURS].first_seconds)
        return found

    def missing(self, at: str, system: str, why: str) -> None:
        """Says in the table why a library has no figure."""
        self.report.rows.append(Row(CASE, at, system, "", "", (), why))

    def _ways(self, library: Library, path: Path, orders: Any) -> Iterator[tuple[str, Begin | None]]:
        """Yields each way of a library, by one thread and by as many as there are cores; None: it has it not."""
        for threads in sorted({1, num_cores()}):
            said = "" if threads == 1 else f", {threads} threads"
            at_random, whole, stream = library.at_random, library.whole, library.stream
            yield LIBRARY + said, measuring.theirs(at_random, path, orders, threads) if at_random else None
            if stream is not None:
                yield WHOLE + said, measuring.streamed(stream, path, orders, threads)
            else:
                yield WHOLE + said, measuring.theirs(whole, path, orders, threads) if whole else None


def claim(report: Report, firsts: list[list[float]], without: list[str]) -> None:
    """Claims that no format is slower than its own library, and that no first batch takes longer than a second.

    **Arguments:** `firsts`: of each line our seconds, one a round. `without`: formats that cannot be read here.
    """
    lines = list(dict.fromkeys(row.at for row in report.rows if row.system == OURS and row.values))
    systems = [system for system in dict.fromkeys(row.system for row in report.rows) if system != OURS]
    compared = {row.at for row in report.rows if row.system != OURS and row.values}
    alone = [at for at in lines if at not in compared]
    if compared:
        at = [line for line in lines if line in compared]
        made = report.against("formats", CASE, RATE, ours=OURS, peers=systems, at=at)
        report.claims[-1] = replace(made, without=(*alone, *without))
    else:
        report.not_measured("formats", ">= 1", f"no library is there: {', '.join([*alone, *without])}")
    if firsts:
        report.at_most("first_batch", [max(times) for times in zip(*firsts, strict=False)], 1)


def main() -> int:
    parser = arguments("formats", __doc__ or "", [known.key for known in FORMATS])
    options = parser.parse_args()
    report = Report(options, *_DISTRIBUTIONS, *_MORE)
    bench = Bench(report, QUICK if options.quick else FULL, 1 if options.quick else 5)
    firsts: list[list[float]] = []
    without: list[str] = []
    for known in FORMATS:
        if options.only and known.key not in options.only:
            continue
        say(f"{known.name} …")
        if why := next((why for module in known.needs if (why := absent(module))), ""):
            bench.missing(known.name, OURS, why)
            report.note(f"{known.name} is missing: {why}")
            without.append(known.name)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            firsts += bench.measure(known, Path(scratch))
    claim(report, firsts, without)
    return report.finish()


if __name__ == "__main__":
    run(main)
