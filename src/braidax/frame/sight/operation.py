"""One operation of a plan, and what ranks did for it."""

from dataclasses import dataclass
from typing import final

from braidax.frame.sight.measuring import PHASES, Phase, Work


@final
@dataclass(frozen=True)
class Operation:
    """One operation of a plan, and what each rank did for it.

    **Fields:** `text`: as `explain` shows it. `depth`: in the tree of the plan. `inputs`: numbers of the operations
    that it reads. `within`: the number of the operation with which it was computed as one piece, which has its time;
    None where it has its own. `on_one_rank`: what rank 0 computed for all. `works`: of each rank.
    """

    text: str
    depth: int
    inputs: tuple[int, ...]
    within: int | None
    on_one_rank: tuple[str, ...]
    works: tuple[Work, ...]

    @property
    def num_rows(self) -> int | None:
        """Rows of the result, of all ranks; None where no rank ever had them as such."""
        counts = [work.num_rows for work in self.works if work.num_rows is not None]
        return sum(counts) if counts else None

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the result in memory, of all ranks."""
        counts = [work.num_bytes for work in self.works if work.num_bytes is not None]
        return sum(counts) if counts else None

    @property
    def skew(self) -> float | None:
        """Rows of the rank that has most of them, over those of an even part; 1 is even. None without rows."""
        if not self.num_rows:
            return None
        return max(work.num_rows or 0 for work in self.works) * len(self.works) / self.num_rows

    def seconds(self, phase: Phase) -> float:
        """Returns the seconds of a phase, of the rank that took longest."""
        return max(work.seconds.get(phase, 0.0) for work in self.works)


def told_of(work: Work) -> str:
    """Says what a rank did."""
    words = [] if work.num_rows is None else [f"{work.num_rows:,} rows, {size_of(work.num_bytes or 0)}"]
    if work.num_exchanges:
        words.append(
            f"sent {work.sent_rows:,} rows, {size_of(work.sent_bytes)} in {work.num_exchanges} "
            f"exchange{'' if work.num_exchanges == 1 else 's'}"
        )
    if work.spilled_bytes:
        words.append(f"spilled {size_of(work.spilled_bytes)}, read back {size_of(work.read_back_bytes)}")
    words += [f"{phase} {work.seconds[phase]:.3f} s" for phase in PHASES if work.seconds.get(phase, 0.0) >= 0.0005]
    return "; ".join(words)


def size_of(num_bytes: float) -> str:
    """Returns bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
