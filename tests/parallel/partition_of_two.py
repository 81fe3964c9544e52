"""What two processes search together: `braidax launch --module tests.parallel.partition_of_two` prints their finds."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import braidax.parallel as bx
from braidax.parallel.ids import measure_touched
from braidax.parallel.partition import Axes, search_partitions
from tests.parallel.models import make_mesh
from tests.parallel.test_hybrid import init, make_batch, pooled

HYBRID = {"data": bx.Hybrid(), "model": bx.Hybrid()}


def slow_elsewhere(paths: Sequence[str], ways: Sequence[Axes]) -> dict[Axes, list[float]]:
    """Process 0 finds `data` fastest and process 1 both axes, each the slowest way of the other."""
    mine = {("data", "model"): (9.0, 1.0), ("data",): (1.0, 9.0), ("model",): (4.0, 4.0)}
    return {way: [mine[way][jax.process_index()]] * 3 for way in ways}


def found_by_both(mesh: Mesh) -> list[Any]:
    """Returns the axes by simulated seconds, and what global arrays tell of a table."""
    host = [make_batch(seed) for seed in range(2)]
    split = NamedSharding(mesh, P(("data", "model")))
    batches = [
        jax.tree.map(
            lambda leaf: jax.make_array_from_callback(leaf.shape, split, lambda index, leaf=leaf: leaf[index]), batch
        )
        for batch in host
    ]
    options: Any = {"init": init, "batches": batches}
    found = search_partitions(pooled, optax.sgd(0.1), mesh, HYBRID, measure=slow_elsewhere, **options)
    touched = measure_touched(pooled, num_parts=8, **options).tables["params/table"]
    assert touched == measure_touched(pooled, init=init, batches=host, num_parts=8).tables["params/table"]
    return [list(found.tables[0].axes), touched.num_touched]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(found_by_both(make_mesh("4x2 auto"))) + "\n")
