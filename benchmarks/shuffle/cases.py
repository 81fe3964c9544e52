"""What all cases share: how much is measured, where, and how a case runs its systems."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import braidax as bx
from benchmarks.harness import Report, absent, say, take_turns
from benchmarks.harness.machine import num_cores
from benchmarks.shuffle import alone, systems
from benchmarks.shuffle.timing import Make

THROUGHPUT = "throughput"
_SHUFFLES = ("py1e", "naive")
MOSAIC = [f"Streaming, {shuffle}" for shuffle in _SHUFFLES]
_NEEDS = {
    "HF": ("datasets",),
    "braidax, HF": ("datasets",),  # which writes the folder
    "braidax.torch": ("torch",),
    "braidax.torch, HF": ("torch", "datasets"),
    "torch": ("torch",),
    "torch, HF": ("torch", "datasets"),
    "Grain": ("grain",),
    "tf.data": ("tensorflow",),
}


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`. **Fields:** `seconds`: of a figure."""

    num_tokens: int  # records
    num_texts: int
    num_photos: int
    rounds: int
    seconds: float
    grain_threads: tuple[int, ...]
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Bench:
    """A run. **Fields:** `folder`: of the inputs. `streaming`: the Python of an environment with MosaicML Streaming."""

    report: Report
    scale: Scale
    folder: Path
    streaming: str | None

    @property
    def threads(self) -> int:
        """As many as there are cores: ours has no more where the processor is what limits."""
        return num_cores()

    def measure(
        self, case: str, running: Mapping[str, Callable[[], float]], *, rounds: int | None = None, at: str = ""
    ) -> None:
        """Lets the systems take turns, and reports them, those that are not there included."""
        found: dict[str, Callable[[], float]] = {}
        for name, run in running.items():
            if why := _why_not(name):
                self.report.missing(case, name, why, at=at)
            else:
                found[name] = _told(name, run)
        for name, values in take_turns(found, rounds=rounds or self.scale.rounds, longest_seconds=6).items():
            self.report.add(case, name, THROUGHPUT, "samples/s", values, at=at)

    def claim(
        self, name: str, case: str, ours: str, peers: Sequence[str], *, at_least: float, at: Sequence[str] | None = None
    ) -> None:
        """Claims ours against the best of the peers, where ours was measured."""
        if why := _why_not(ours):
            self.report.not_measured(name, f">= {at_least:g}", f"{ours}: {why}")
        else:
            self.report.against(name, case, THROUGHPUT, ours=ours, peers=peers, at_least=at_least, at=at)

    def mosaic(self, case: str, kind: str, source: Path, batch_size: int) -> dict[str, Callable[[], float]]:
        """Returns MosaicML Streaming, where it is there; in its main process: with workers it hung here."""
        if self.streaming is None:
            for shuffle in _SHUFFLES:
                self.report.missing(case, f"Streaming, {shuffle}", "not installed (see --streaming)")
            return {}
        return {
            f"Streaming, {shuffle}": partial(
                alone.streaming,
                self.streaming,
                kind,
                source,
                self.folder / f"{kind}_mds",
                shuffle=shuffle,
                batch_size=batch_size,
                seconds=self.scale.seconds,
            )
            for shuffle in _SHUFFLES
        }


def hugging_face(path: Path, form: str | None = None) -> Any:
    """Opens a folder of Hugging Face, in its own format or another one."""
    import datasets

    dataset: Any = datasets.load_from_disk(str(path))
    return dataset.with_format(form) if form else dataset


def stored(address: str) -> bx.data.Source:
    """Opens an object, without the disk cache: the peers have none."""
    return bx.open(address, remote=bx.data.Remote(cache_bytes=0))


def ours(source: bx.data.Source, batch_size: int, *, threads: int | None = None) -> Make:
    """Returns what begins our loader on a source that is open."""
    return partial(systems.ours, source, batch_size, threads=threads)


def _why_not(name: str) -> str:
    """Returns why a system is not there, by the longest beginning of its name that is known."""
    known = max((start for start in _NEEDS if name.startswith(start)), key=len, default="")
    return next((why for module in _NEEDS.get(known, ()) if (why := absent(module))), "")


def _told(name: str, run: Callable[[], float]) -> Callable[[], float]:
    def told() -> float:
        start = time.perf_counter()
        figure = run()
        say(f"  {name}: {figure:,.0f} ({time.perf_counter() - start:.1f} s)")
        return figure

    return told
