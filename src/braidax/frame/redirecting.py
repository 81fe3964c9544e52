"""Programs that are written for Polars in one process: what they collect runs on the ranks of a gang."""

import functools
import inspect
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from braidax.errors import CallFailed
from braidax.frame.collecting import collect, keep
from braidax.frame.plan.supplying import Reading, wanted
from braidax.frame.polars import pl, register_io_source
from braidax.frame.sight.bar import Show
from braidax.gang import Gang

_SINKS = ("sink_csv", "sink_ipc", "sink_ndjson", "sink_parquet")
_ALONE = ("collect_async", "collect_batches", "describe", "show", "sink_batches", "sink_delta", "sink_iceberg")
_PASSED_ON = ("engine", "lazy", "optimizations")  # what says how Polars computes, among the options of a sink


@dataclass
class Ran:
    """Where plans ran. **Fields:** `num_on_ranks`: that many did there. `alone`: the calls that were left to Polars."""

    num_on_ranks: int = 0
    alone: Counter[str] = field(default_factory=Counter[str])

    def told(self, num_ranks: int) -> str:
        """Returns it in a line. **Arguments:** `num_ranks`: how many there are."""
        plans, ranks = _number(self.num_on_ranks, "plan"), _number(num_ranks, "rank")
        alone = ", ".join(f"{count} × {call}" for call, count in sorted(self.alone.items())) or "none"
        return f"{plans} ran on {ranks}; on Polars alone, in this process: {alone}"


@contextmanager
def on_ranks(gang: Gang, *, show: Show = "nothing") -> Generator[Ran]:
    """Lets `LazyFrame.collect` of this process run on the ranks of a gang, inside the block; then all is as before.

    `sink_parquet`, `sink_ipc`, `sink_csv` and `sink_ndjson` compute there as well, and Polars writes here what comes of
    it, one rank's rows after the other. A call that says how Polars is to compute (`engine=`, `background=`,
    `optimizations=`, `lazy=`) is left to Polars as it is, and so are all other ways to compute a plan; what Polars
    calls by itself, and what becomes of a `DataFrame` at once, is Polars' own and not counted.

    **Arguments:** `show`: as of `braidax.frame.collect`, of all that the ranks compute.

    **Returns:** where plans ran so far. **Raises:** inside the block what Polars would for a plan that fails on its
    rows, with what the rank tells as a note.
    """
    redirected = _Redirected(gang, show)
    new = {"collect": redirected.collect(pl.LazyFrame.collect)}
    new |= {name: redirected.sink(getattr(pl.LazyFrame, name)) for name in _SINKS}
    new |= {name: redirected.left(getattr(pl.LazyFrame, name)) for name in _ALONE}
    places: list[tuple[Any, str, Any]] = [(pl.LazyFrame, name, function) for name, function in new.items()]
    places.append((pl, "collect_all", redirected.left(pl.collect_all)))
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, function in places:
            setattr(place, name, function)
        yield redirected.ran
    finally:
        for place, name, function in before:
            setattr(place, name, function)


class _Redirected:
    """What stands for functions of Polars meanwhile. **Fields:** `ran`: where plans did."""

    def __init__(self, gang: Gang, show: Show) -> None:
        self.ran = Ran()
        self._gang = gang
        self._show: Show = show

    def collect(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Computes on the ranks, unless an option is given."""

        @functools.wraps(original)
        def call(lazy_frame: Any, *args: Any, **options: Any) -> Any:
            if not self._is_own():
                return original(lazy_frame, *args, **options)
            given = _unusual(original, options)
            if args or given:
                self.ran.alone[_shown("collect", given)] += 1
                return original(lazy_frame, *args, **options)
            with _as_polars():
                found = collect(lazy_frame, self._gang, show=self._show)
            self.ran.num_on_ranks += 1
            return found

        return call

    def sink(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Computes on the ranks, and lets Polars write the rows, unless an option says how Polars is to compute."""

        @functools.wraps(original)
        def call(lazy_frame: Any, *args: Any, **options: Any) -> Any:
            if not self._is_own():
                return original(lazy_frame, *args, **options)
            given = {key: value for key, value in _unusual(original, options).items() if key in _PASSED_ON}
            if given:
                self.ran.alone[_shown(original.__name__, given)] += 1
                return original(lazy_frame, *args, **options)
            with _as_polars(), _computed(lazy_frame, self._gang, self._show) as computed:
                original(computed, *args, **options)
            self.ran.num_on_ranks += 1
            return None

        return call

    def left(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Leaves it to Polars."""

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            if self._is_own():
                self.ran.alone[original.__name__] += 1
            return original(*args, **options)

        return call

    def _is_own(self) -> bool:
        """Says whether a program calls, and not Polars."""
        frame = inspect.currentframe()
        caller = frame and frame.f_back and frame.f_back.f_back
        module = "" if caller is None else str(caller.f_globals.get("__name__", ""))
        return module.partition(".")[0] != "polars"


def _unusual(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are others than a function has by default."""
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    return {name: value for name, value in options.items() if name not in defaults or value is not defaults[name]}


def _shown(name: str, options: Mapping[str, Any]) -> str:
    simple = (str, bool, int, float)
    given = [f"{key}={value!r}" if isinstance(value, simple) else f"{key}=…" for key, value in options.items()]
    return f"{name}({', '.join(given)})"


@contextmanager
def _as_polars() -> Generator[None]:
    """Raises what Polars would in this process, where it was Polars that failed on a rank."""
    try:
        yield
    except CallFailed as failed:
        cause = failed.__cause__
        if not isinstance(cause, pl.exceptions.PolarsError | pl.exceptions.PanicException):
            raise
        cause.add_note(f"on rank {failed.rank} of a gang")
        for note in getattr(failed, "__notes__", ()):
            cause.add_note(note)
        raise cause from None


@contextmanager
def _computed(lazy_frame: "pl.LazyFrame", gang: Gang, show: Show) -> "Generator[pl.LazyFrame]":
    """Computes a plan on ranks, and yields a scan that brings their rows here, one rank's after the other."""
    name = f"sunk-{secrets.token_hex(8)}"
    schema = keep(lazy_frame, gang, name, show=show)

    def rows(columns: Any, predicate: Any, num_rows: int | None, batch_size: int | None) -> "Iterator[pl.DataFrame]":
        for rank in range(gang.size):
            part = gang.get(name, ranks=[rank])[0].frame
            for frame in Reading(wanted(part, columns, predicate)).batches():
                yield frame if num_rows is None else frame.head(num_rows)
                num_rows = None if num_rows is None else max(0, num_rows - frame.height)

    try:
        yield register_io_source(rows, schema=schema, is_pure=True)
    finally:
        gang.delete(name)


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
