"""What all ranks did for a plan, operation by operation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import final

from braidax.frame.explaining import told
from braidax.frame.plan.layout import ranges_wanted
from braidax.frame.plan.nodes import Node, topological
from braidax.frame.plan.ways import WHOLE_PLAN
from braidax.frame.plan.words import words
from braidax.frame.polars import pl
from braidax.frame.sight.measuring import PHASES, Measured, Phase, Work
from braidax.frame.sight.operation import Operation, size_of, told_of
from braidax.frame.sight.page import page_of


@final
@dataclass(frozen=True)
class Profile:
    """What a plan did on the ranks of a gang; printed, it is the plan with rows, bytes and seconds.

    Every second of a rank counts for one operation and one phase: `local` is Polars; `partition` all else that an
    operation does for its exchanges (hashes, splitters, parts of rows); `serialize` rows into buffers and back; `wire`
    buffers on their way, from when all ranks have come; `wait` until all have come; `spill` rows to disk and back.
    Polars computes what lies between two exchanges as one piece: its time and rows are those of the last operation of
    the piece. In bounded memory several operations go on at once: a second is of what was begun last.

    **Fields:** `operations`: as `explain` shows them, the last one first. `rests`: of each rank, what it did for no
    operation: it read the plan, it compared hashes. `seconds`: of all, the plan and the result on their way included.
    """

    operations: tuple[Operation, ...]
    rests: tuple[Work, ...]
    seconds: float

    @property
    def on_one_rank(self) -> tuple[str, ...]:
        """What one rank computed for all: operations, and single expressions of others."""
        return tuple(
            f"{operation.text.partition('   ←')[0]}: {what}"
            for operation in self.operations
            for what in operation.on_one_rank
        )

    def rank_seconds(self, rank: int) -> Mapping[Phase, float]:
        """Returns the seconds of a rank by phase, of all operations and of what was for none."""
        works = [self.rests[rank], *(operation.works[rank] for operation in self.operations)]
        return {phase: sum(work.seconds.get(phase, 0.0) for work in works) for phase in PHASES}

    def table(self) -> "pl.DataFrame":
        """Returns a row for each operation and rank, with the number of the operation."""
        rows = [
            {
                "operation": number,
                "text": operation.text,
                "rank": rank,
                "rows": work.num_rows,
                "bytes": work.num_bytes,
                "sent_rows": work.sent_rows,
                "sent_bytes": work.sent_bytes,
                "exchanges": work.num_exchanges,
                "spilled_bytes": work.spilled_bytes,
                "read_back_bytes": work.read_back_bytes,
                **{f"{phase}_seconds": work.seconds.get(phase, 0.0) for phase in PHASES},
            }
            for number, operation in enumerate(self.operations)
            for rank, work in enumerate(operation.works)
        ]
        return pl.DataFrame(rows, infer_schema_length=None)

    def save_html(self, path: str | PathLike[str]) -> None:
        """Writes a page that needs nothing else: the plan, and for each operation a bar for each rank.

        **Raises:** `OSError` where it cannot be written.
        """
        page = page_of(self.operations, self.rests, summary=_summary_of(self))
        Path(path).write_text(page, encoding="utf-8")

    def __str__(self) -> str:
        lines = [_summary_of(self)]
        for number, operation in enumerate(self.operations):
            indent = "  " * operation.depth
            lines.append(f"{number:>3} {indent}{operation.text}{_numbers(operation)}")
            lines += [
                f"    {indent}    one rank computed {what}"
                for what in operation.on_one_rank
                if f"on one rank: {what}" not in operation.text and not operation.text.endswith("← on one rank")
            ]
            for rank, work in enumerate(operation.works):
                if work.num_exchanges or work.spilled_bytes or work.seconds.get("local"):
                    lines.append(f"    {indent}    rank {rank}: {told_of(work)}")
        for rank in range(len(self.rests)):
            shares = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.rank_seconds(rank).items())
            lines.append(f"rank {rank}: {shares}")
        return "\n".join(lines)


def profile_of(root: Node, measured: Sequence[Measured], seconds: float) -> Profile:
    """Returns the profile of a plan. **Arguments:** `root`: equal to that of the ranks. `measured`: by each of them."""
    order = topological(root)
    places = {id(node): place for place, node in enumerate(order)}
    seen: dict[int, int] = {}  # the number of an operation by its place
    shown: list[tuple[int, Node, int, int | None]] = []

    def visit(node: Node, depth: int, reader: int | None) -> None:
        place = places[id(node)]
        if place not in seen:
            seen[place] = len(shown)
            shown.append((place, node, depth, reader))
            for source in node.inputs:
                visit(source, depth + 1, place)

    visit(root, 0, None)
    operations: list[Operation] = []
    wanted = ranges_wanted(root)
    alone = WHOLE_PLAN in measured[0].on_one_rank.get(places[id(root)], ())
    for place, node, depth, reader in shown:
        works = tuple(one.works[place] for one in measured)
        within = measured[0].within.get(place, reader if works[0].num_rows is None else None)
        operations.append(
            Operation(
                words(node) if alone else told(node, wanted.get(id(node))),
                depth,
                tuple(seen[places[id(source)]] for source in node.inputs),
                None if within is None else seen[within],
                measured[0].on_one_rank.get(place, ()),
                works,
            )
        )
    return Profile(tuple(operations), tuple(one.rest for one in measured), seconds)


def _summary_of(profile: Profile) -> str:
    """Says a profile in one line."""
    ranks = range(len(profile.rests))
    inside = max(sum(profile.rank_seconds(rank).values()) for rank in ranks)
    alone = len(profile.on_one_rank)
    return (
        f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}, {profile.seconds:.3f} s, of which {inside:.3f} s on the "
        f"ranks; on one rank: {alone} operations and expressions"
    )


def _numbers(operation: Operation) -> str:
    if operation.num_rows is None:
        return "" if operation.within is None else f"   [computed with {operation.within}]"
    skew = "" if operation.skew is None else f", skew {operation.skew:.2f}"
    return f"   [{operation.num_rows:,} rows, {size_of(operation.num_bytes or 0)}{skew}]"
