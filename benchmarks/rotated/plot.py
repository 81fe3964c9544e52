"""The paper's bars of memory, redrawn beside what the same sizes need here."""

import io
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.harness.files import write_whole
from benchmarks.harness.systems import OURS
from benchmarks.rotated.memory import PAPER
from benchmarks.rotated.ways import DDP, RTP

# GB on 8 A100s of 80 GB, as the chart of its repository tells; None: they did not fit.
THEIRS: dict[str, tuple[float | None, ...]] = {
    "DP": (46.3, 75.4, None, None),
    "FSDP": (26.1, 42.5, None, None),
    "RTP": (5.9, 11.3, 29.1, 53.4),
    "RTP in place": (5.8, 11.2, 28.6, 53.0),
}
NAMES = ("340M", "774M", "1.5B", "2.7B")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws both, each with a scale of its own: their samples a device are not known."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {(row.system, row.at): row.median for row in rows if row.case == PAPER}
    names = list(dict.fromkeys(row.at for row in rows if row.case == PAPER))
    own = {way: tuple(found.get((way, name)) for name in names) for way in (DDP, OURS, RTP)}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for axis, title, labels, bars in (
        (axes[0], "as published, 8 A100 80 GB", NAMES, THEIRS),
        (axes[1], "compiled here, 8 devices, 1 x 1,024 tokens each", names, own),
    ):
        for number, (name, values) in enumerate(bars.items()):
            places = [at + (number - len(bars) / 2 + 0.5) * 0.8 / len(bars) for at in range(len(labels))]
            heights = [value or 0 for value in values]
            drawn = axis.bar(places, heights, 0.8 / len(bars), label=name)
            axis.bar_label(drawn, [f"{value:.3g}" if value else "OOM" for value in values], fontsize=7, rotation=90)
        axis.set_xticks(range(len(labels)), labels)
        axis.set(title=title, ylabel="GB a device")
        axis.margins(y=0.15)
        axis.legend(fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format=path.suffix.removeprefix("."))
    write_whole(path, drawn.getvalue())
