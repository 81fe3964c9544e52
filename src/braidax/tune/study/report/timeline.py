"""What ran when in a few steps of a setting, read from its trace."""

import gzip
import json
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

from braidax.errors import ArgumentError
from braidax.pictures.drawing import Box, Drawing, Shape, Stroke, Words

from .charts import milliseconds

_STEPS = 3
_ROLES = {
    "wait": "data_wait",
    "read": "data_wait",
    "decode": "data_wait",
    "collate": "data_wait",
    "host-to-device": "dispatch",
    "checkpoint": "snapshot_stall",
    "comm": "exposed_communication",
    "step": "compute",
    "devices": "compute",
    "loop": "dispatch",
}
_ROW, _LEFT = 16.0, 190.0


def timeline(path: Path, first_step: int, *, width: float = 760.0) -> Drawing:
    """Draws three steps of a trace from one on: a row for each lane and thread that did anything in them.

    **Arguments:** `path`: compressed JSON, as `Trace.save` writes it. `first_step`: counted from 0 in the run.

    **Raises:** `ArgumentError` for a file that is no such trace.
    """
    try:
        events = cast("list[dict[str, Any]]", json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
        tracks = {(one["pid"], one["tid"]): str(one["args"]["name"]) for one in events if one["name"] == "thread_name"}
        spans = [one for one in events if one["ph"] == "X"]
        first = min(one["pid"] for one in spans if one["cat"] == "step")
        steps = sorted(_interval(one) for one in spans if one["cat"] == "step" and one["pid"] == first)
        begun, ended = steps[first_step][0], steps[min(first_step + _STEPS, len(steps)) - 1][1]
        rows: defaultdict[str, list[tuple[float, float, str, str]]] = defaultdict(list)
        for one in spans:
            start, end = _interval(one)
            if start < ended and end > begun:
                row = _row(one["pid"], first, tracks[one["pid"], one["tid"]])
                rows[row].append((max(start, begun), min(end, ended), str(one["cat"]), str(one["name"])))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise ArgumentError(
            f"{path} is no trace of this study ({type(error).__name__}: {error}); bring it back, or give another "
            "--out, where all is measured anew"
        ) from error
    return _drawn(rows, begun, ended, width)


def _drawn(rows: dict[str, list[tuple[float, float, str, str]]], begun: float, ended: float, width: float) -> Drawing:
    scale, shapes = (width - _LEFT - 10) / max(ended - begun, 1e-9), list[Shape]()
    for row, (name, spans) in enumerate(rows.items()):
        y = 4 + row * _ROW
        shapes.append(Words(_LEFT - 8, y + 10, _short(name), 10, "end", "faint"))
        shapes.append(Stroke(_LEFT, y + _ROW - 2, width - 10, y + _ROW - 2, "line", 0.5))
        for start, end, lane, what in sorted(spans):
            tip = f"{lane}, {what}: {milliseconds((end - start) / 1e6)} ms"
            box = Box(_LEFT + (start - begun) * scale, y, max(0.6, (end - start) * scale), _ROW - 4, "other", tip, 0.85)
            shapes.append(_with_role(box, lane, what))
    bottom = 4 + len(rows) * _ROW
    for tick in range(5):
        x = _LEFT + (width - _LEFT - 10) * tick / 4
        at = milliseconds((ended - begun) / 1e6 * tick / 4)
        shapes.append(Words(x, bottom + 12, f"{at} ms", 10, "end" if tick == 4 else "middle", "faint"))
    return Drawing("What ran when", width, bottom + 18, tuple(shapes))


def _with_role(box: Box, lane: str, what: str) -> Box:
    role = _ROLES.get(lane, "bubble" if "stage" in lane else "other")
    if lane == "loop":
        role = {"data wait": "data_wait", "snapshot stall": "snapshot_stall"}.get(what, role)
    return Box(box.x, box.y, box.width, box.height, role, box.tip, box.opacity)


def _interval(event: dict[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _row(process: int, first: int, name: str) -> str:
    """Returns what to call a thread, also of another process than the first."""
    return name if process == first else f"process {process - first}: {name}"


def _short(name: str) -> str:
    return name if len(name) <= 34 else f"{name[:33]}…"
