"""What a delta of published tables takes beside the rows that have changed."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import braidax as bx
from benchmarks.harness import Report
from benchmarks.servers.disk import zipf_ids
from benchmarks.servers.steps import Steps
from braidax.gang import LocalGang

_NUM_BATCHES, _NUM_SERVERS = 10, 2
DELTA, ROWS = "delta", "values of rows that have changed"


def delta_case(report: Report, *, num_rows: int, size: int, widths: tuple[int, ...]) -> None:
    """Counts bytes of a delta behind some updates by Adagrad. **Arguments:** `size`: ids of a batch."""
    case = f"delta, {num_rows:,} rows, {_NUM_BATCHES} batches of {size:,} ids, Zipf"
    ratios = [_ratio(report, case, num_rows, size, width) for width in widths]
    report.at_most("delta", max(ratios), 1.1)


def _ratio(report: Report, case: str, num_rows: int, size: int, width: int) -> float:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    ids = zipf_ids(num_rows, (_NUM_BATCHES, size), hashed=True)
    with LocalGang(_NUM_SERVERS) as gang, tempfile.TemporaryDirectory() as folder:
        made: Any = bx.parallelize(
            lambda params, batch: (params["table"][batch] ** 2).sum(),
            optax.adagrad(0.1),
            mesh,
            {"data": bx.Hybrid(tables="servers")},
            init=lambda key: {"table": jax.random.normal(key, (num_rows, width))},
            batch=jax.ShapeDtypeStruct((size,), np.int32),
            servers=gang,
        )
        with made as step:
            steps = Steps(step, [*ids])
            before = step.table("table")
            step.publish(folder)
            steps.take()
            step.publish(folder)
            changed = int((step.table("table") != before).any(1).sum())
        taken = next(Path(folder).glob("*.delta")).stat().st_size
    at = f"{width} float32 a row"
    report.add(case, DELTA, "bytes", "MB", [taken / 1e6], at=at)
    report.add(case, ROWS, "bytes", "MB", [changed * width * 4 / 1e6], at=at)
    return taken / (changed * width * 4)
