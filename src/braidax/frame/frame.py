"""`Frame`: a Polars plan and the gang that computes it."""

import secrets
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, final

from braidax.errors import ArgumentError, GangError
from braidax.frame.collecting import collect, keep, profile, run
from braidax.frame.explaining import computed_on_one_rank, explain
from braidax.frame.plan.building import HIDDEN
from braidax.frame.plan.supplying import scan
from braidax.frame.polars import Schema, pl
from braidax.frame.replaying import MAX_REPLAYS, Kept, Lineage, replayed
from braidax.frame.sight.bar import Show
from braidax.frame.sight.profiled import Profile
from braidax.frame.spilling.memory import Memory
from braidax.frame.writing import Format, check_written, new_folder, write_bounded, write_part
from braidax.gang import Gang

_ELSEWHERE = ("collect_", "sink_", "describe", "show", "remote", "fetch", "serialize", "inspect")
_Result = TypeVar("_Result")
Files = str | Path | list[str] | list[Path]


@final
class Frame:
    """A table that the ranks of a gang compute: every verb of `polars.LazyFrame`, and what gangs add.

    Verbs return frames of the same gang; frames among their arguments must be of that gang, too. What `group_by` and
    the like return has `agg`, as with Polars.

    When a rank is lost, another process takes its place, and what is under way is computed again: from the sources of
    the plan, or the last `persist`. Of a persisted table that a rank has taken along the plan is known: it is computed
    again, too. Functions of yours in a plan may therefore be called again. `max_replays` says how often at most.

    **Arguments:** `lazy_frame`: any plan of Polars. `gang`: computes it. `memory`: bounds what each rank takes for it.
    """

    def __init__(self, lazy_frame: "pl.LazyFrame", gang: Gang, *, memory: Memory | None = None) -> None:
        self._lazy_frame = lazy_frame
        self._gang = gang
        self._memory = memory
        self._kept: tuple[Kept, ...] = ()

    @property
    def lazy_frame(self) -> "pl.LazyFrame":
        """The plan."""
        return self._lazy_frame

    def collect_schema(self) -> Schema:
        """Returns the columns and their dtypes. **Raises:** what Polars does for a plan that cannot be."""
        return self._lazy_frame.collect_schema()

    @property
    def gang(self) -> Gang:
        """What computes it."""
        return self._gang

    def collect(self, *, max_replays: int = MAX_REPLAYS, show: Show = "nothing") -> "pl.DataFrame":
        """Computes the table, and brings it here. **Arguments:** **Raises:** as `braidax.frame.collect`."""
        return self._replayed(
            lambda: collect(self._lazy_frame, self._gang, memory=self._memory, max_replays=0, show=show), max_replays
        )

    def persist(self, *, max_replays: int = MAX_REPLAYS, show: Show = "nothing") -> "Frame":
        """Computes the table, and keeps it on the ranks, where frames of it begin.

        The ranks give it up when the last frame of it is gone and another one is computed, or with their gang. Its
        plan, with the tables in memory that it reads, is held as long, to compute it again when a rank is lost.

        **Arguments:** `max_replays`, `show`: of computing it now. **Raises:** as `collect`.
        """
        name, lazy_frame, gang, memory = f"frame-{secrets.token_hex(8)}", self._lazy_frame, self._gang, self._memory
        lineage = Lineage(name, lambda: keep(lazy_frame, gang, name, memory), [one.lineage for one in self._kept])
        schema = self._replayed(lambda: keep(lazy_frame, gang, name, memory, show=show), max_replays)
        return self._of(scan(name, schema), (Kept(lineage, gang),))

    def shuffle(self, *, seed: int = 0) -> "Frame":
        """Returns the rows in another order, each order being as likely: the same for any number of ranks.

        **Arguments:** `seed`: of the order. Polars keeps what it hashes the same within a version only.
        """
        place, key = HIDDEN + "place", HIDDEN + "key"
        order = self._lazy_frame.with_row_index(place).with_columns(pl.col(place).hash(seed).alias(key))
        return self._of(order.sort(key, place).drop(key, place), self._kept)

    def sink_arrow(
        self, folder: str | PathLike[str], *, max_replays: int = MAX_REPLAYS, show: Show = "nothing"
    ) -> list[int]:
        """Computes the table into a new folder of Arrow files, one of each rank, which `braidax.open` opens.

        **Arguments:** `folder`: on a disk that all ranks and this process share; it must not be there.
        `max_replays`: as of `collect`; each replay writes into a folder of its own, which gets the name when whole.
        `show`: as of `collect`.

        **Returns:** the rows of each file. **Raises:** as `collect`; `ArgumentError` for a path that is taken.
        """
        return self._replayed(lambda: self._sink(folder, "arrow", show), max_replays)

    def sink_parquet(
        self, folder: str | PathLike[str], *, max_replays: int = MAX_REPLAYS, show: Show = "nothing"
    ) -> list[int]:
        """Computes the table into a new folder of Parquet files, one of each rank: as `sink_arrow`."""
        return self._replayed(lambda: self._sink(folder, "parquet", show), max_replays)

    def _sink(self, folder: str | PathLike[str], format: Format, show: Show) -> list[int]:
        name = f"frame-{secrets.token_hex(8)}"
        with new_folder(folder) as unfinished:
            if self._memory is not None:
                written = run(
                    self._lazy_frame,
                    self._gang,
                    write_bounded,
                    str(unfinished),
                    format,
                    memory=self._memory,
                    show=show,
                )
                return check_written(unfinished, written)
            keep(self._lazy_frame, self._gang, name, show=show)
            try:
                written = self._gang.run(write_part, self._gang.kept(name), str(unfinished), format)
                return check_written(unfinished, written)
            finally:
                if name in self._gang.names():  # else it went with the ranks
                    self._gang.delete(name)

    def _replayed(self, compute: Callable[[], _Result], max_replays: int) -> _Result:
        tables = [one.lineage for one in self._kept]
        return replayed(self._gang, compute, max_replays=max_replays, tables=tables)

    def explain(self) -> str:
        """Returns the plan, and which of it exchanges rows: as `braidax.frame.explain`."""
        return explain(self._lazy_frame)

    def profile(self, *, max_replays: int = MAX_REPLAYS, show: Show = "nothing") -> "tuple[pl.DataFrame, Profile]":
        """Computes the table, brings it here, and tells what each rank did: as `braidax.frame.profile`.

        **Raises:** as `collect`.
        """
        return self._replayed(
            lambda: profile(self._lazy_frame, self._gang, memory=self._memory, max_replays=0, show=show), max_replays
        )

    @property
    def on_one_rank(self) -> tuple[str, ...]:
        """What one rank computes for all, as far as the plan tells: operations, and single expressions of others."""
        return computed_on_one_rank(self._lazy_frame)

    def _of(self, lazy_frame: "pl.LazyFrame", kept: tuple[Kept, ...]) -> "Frame":
        frame = Frame(lazy_frame, self._gang, memory=self._memory)
        frame._kept = kept
        return frame

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", *_ELSEWHERE)):
            raise AttributeError(
                f"a Frame has no {name!r}: it would compute in this process what the gang keeps; use collect, persist "
                "or sink_parquet, or give lazy_frame to braidax.frame.collect"
            )
        return _lent(getattr(self._lazy_frame, name), self, self._kept)

    def __repr__(self) -> str:
        return f"Frame on {self._gang.size} ranks:\n{self._lazy_frame.explain(optimized=False)}"


def _lent(value: Any, frame: Frame, kept: tuple[Kept, ...]) -> Any:
    """Returns what an attribute of Polars is for a frame: plans are frames, and calls take and return them."""
    if isinstance(value, pl.LazyFrame):
        return frame._of(value, kept)  # pyright: ignore[reportPrivateUsage]
    if callable(value):
        return _call(value, frame, kept)
    if type(value).__module__.startswith("polars.lazyframe"):
        return _Grouped(value, frame, kept)
    return value


def _call(function: Callable[..., Any], frame: Frame, kept: tuple[Kept, ...]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        found = list(kept)
        args = tuple(_plain(one, frame, found) for one in args)
        kwargs = {name: _plain(one, frame, found) for name, one in kwargs.items()}
        return _lent(function(*args, **kwargs), frame, tuple(found))

    return call


def _plain(value: Any, frame: Frame, kept: list[Kept]) -> Any:
    if not isinstance(value, Frame):
        return value
    if value.gang is not frame.gang:
        raise ArgumentError("a frame of another gang: expected frames of one gang; collect one of them before")
    kept += value._kept  # pyright: ignore[reportPrivateUsage]
    return value.lazy_frame


class _Grouped:
    """What `group_by` and the like return."""

    def __init__(self, value: Any, frame: Frame, kept: tuple[Kept, ...]) -> None:
        self._value, self._frame, self._kept = value, frame, kept

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _lent(getattr(self._value, name), self._frame, self._kept)


def of_kept(name: str, schema: Schema, gang: Gang) -> Frame:
    """Returns a frame of what ranks keep under a name (`Partition`s), which they give up when no frame reads it."""

    def compute() -> None:
        raise GangError("what ranks took over from a cluster was lost with one of them: take it over again")

    frame = Frame(scan(name, schema), gang)
    frame._kept = (Kept(Lineage(name, compute, []), gang),)  # pyright: ignore[reportPrivateUsage]
    return frame


def concat(frames: Sequence[Frame], *, how: str = "vertical") -> Frame:
    """Returns frames of one gang one below the other, or side by side: `polars.concat`."""
    if not frames:
        raise ArgumentError("frames is empty: expected at least one")
    kept: list[Kept] = []
    plans = [_plain(frame, frames[0], kept) for frame in frames]
    concatenated: Any = pl.concat(plans, how=how)  # pyright: ignore[reportArgumentType]
    return frames[0]._of(concatenated, tuple(kept))  # pyright: ignore[reportPrivateUsage]


def from_polars(table: "pl.DataFrame | pl.LazyFrame", gang: Gang, *, memory: Memory | None = None) -> Frame:
    """Returns a frame of a table in memory, or of any plan. **Arguments:** `memory`: as of `Frame`."""
    return Frame(table.lazy(), gang, memory=memory)


def scan_parquet(source: Files, *, gang: Gang, memory: Memory | None = None, **options: Any) -> Frame:
    """Returns a frame of Parquet files, of which each rank reads its part. **Arguments:** as `polars.scan_parquet`."""
    return Frame(pl.scan_parquet(source, **options), gang, memory=memory)


def scan_csv(source: Files, *, gang: Gang, memory: Memory | None = None, **options: Any) -> Frame:
    """Returns a frame of CSV files, of which each rank reads its part. **Arguments:** as `polars.scan_csv`."""
    return Frame(pl.scan_csv(source, **options), gang, memory=memory)


def scan_ndjson(source: Files, *, gang: Gang, memory: Memory | None = None, **options: Any) -> Frame:
    """Returns a frame of files with an object of JSON a line. **Arguments:** as `polars.scan_ndjson`."""
    return Frame(pl.scan_ndjson(source, **options), gang, memory=memory)


def scan_ipc(source: Files, *, gang: Gang, memory: Memory | None = None, **options: Any) -> Frame:
    """Returns a frame of Arrow files, of which each rank reads its part. **Arguments:** as `polars.scan_ipc`."""
    return Frame(pl.scan_ipc(source, **options), gang, memory=memory)
