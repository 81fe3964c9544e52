"""The chart of Parallax, redrawn beside what steps over links came to here."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.harness.files import write_whole
from benchmarks.servers.link_worker import PS
from benchmarks.servers.steps import DENSE, ROWS

# Thousands of words or images a second on 48 GPUs, 8 machines (Parallax, EuroSys 2019); of images it equals Horovod.
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "LM1B, words": {"TF-PS": 98.9, "Horovod": 45.5, "Parallax": 274.0},
    "ResNet-50, images": {"TF-PS": 5.8, "Horovod": 7.6, "Parallax": 7.6},
}
OWN = {PS: "parameter servers", DENSE: "all-reduce", ROWS: "hybrid"}


def draw(rows: Sequence[Row], counted: Mapping[str, tuple[str, str, int]], path: Path) -> None:
    """Draws both, each with a scale of its own: two processes on two cores are not 48 GPUs.

    **Arguments:** `counted`: by what is counted the case, its line, and how many of them a step has.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(PUBLISHED), figsize=(10, 7), constrained_layout=True)
    for column, (what, published) in enumerate(PUBLISHED.items()):
        case, at, count = counted[what]
        found = {row.system: row.median for row in rows if (row.case, row.at, row.metric) == (case, at, "time")}
        own = {name: count / found[system] for system, name in OWN.items() if system in found}
        for axis, bars, title in (
            (axes[0][column], published, "as published, 48 GPUs, 100 Gbit/s"),
            (axes[1][column], own, f"here, 2 processes on 2 cores, {at}"),
        ):
            axis.bar_label(axis.bar(list(bars), list(bars.values())), fmt="%.3g", fontsize=8)
            axis.set(title=title, ylabel=f"{what}, thousands a second")
            axis.margins(y=0.15)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format=path.suffix.removeprefix("."))
    write_whole(path, drawn.getvalue())
