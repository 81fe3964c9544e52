"""Runtime per sample and per device, as the seed's figures show it."""

import collections
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.harness.files import write_whole
from benchmarks.naive.loading import ALONE
from benchmarks.naive.systems import OPENCV, OURS, SIZES

_AT = re.compile(r"batch (\d+), devices (\d+), threads 2")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws medians over the batch size of ours and of OpenCV, the quickest peer, shaded from smallest to largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    for (name, each), axis in zip(itertools.product(SIZES, ("sample", "device")), axes.flat, strict=True):
        lines: dict[tuple[str, int], list[tuple[int, list[float]]]] = collections.defaultdict(list)
        for row in rows:
            at = _AT.fullmatch(row.at)
            if at and row.case == f"{name}, {ALONE}" and row.system in (OURS, OPENCV):
                batch, devices = map(int, at.groups())
                times = devices if each == "device" else 1
                lines[row.system, devices].append((batch, [1e6 / value * times for value in row.values]))
        for (system, devices), points in sorted(lines.items()):
            sizes = [size for size, _ in sorted(points)]
            figures = [sorted(values) for _, values in sorted(points)]
            medians = [values[len(values) // 2] for values in figures]
            style = "-o" if system == OURS else "--s"
            line = axis.plot(sizes, medians, style, label=f"{system}, {devices} devices")[0]
            low, high = [values[0] for values in figures], [values[-1] for values in figures]
            axis.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2)
        axis.set(title=f"{name}, per {each}", xlabel="batch size", ylabel="us, min to max", xscale="log", yscale="log")
        ticks = sorted({batch for points in lines.values() for batch, _ in points})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.minorticks_off()
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=3)
    figure.suptitle("Loader alone, 2 threads: runtime per sample and per device")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format=path.suffix.removeprefix("."))
    write_whole(path, drawn.getvalue())
