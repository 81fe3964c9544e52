"""What the tests of tasks share: samples as a batch, and a few updates on one device."""

import math
from typing import Any

import jax
import numpy as np

from braidax.data import Source
from braidax.parallel import DataParallel, parallelize
from braidax.tasks.task import Task


def batch_of(source: Source, num_samples: int, first: int = 0) -> dict[str, Any]:
    """Reads samples as JAX arrays."""
    batch = jax.tree.map(lambda spec: np.zeros((num_samples, *spec.shape), spec.dtype), source.sample_spec)
    source.read(np.arange(first, first + num_samples), batch)
    return jax.tree.map(jax.numpy.asarray, batch)


def count(tree: Any) -> int:
    """Returns the number of parameters, of arrays or specs."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def losses_of(task: Task, batches: list[Any]) -> list[float]:
    """Takes a step a batch on one device, and returns the loss of each."""
    mesh, optimizer = jax.make_mesh((1,), ("data",)), task.optimizer(len(batches))
    step = parallelize(task.loss, optimizer, mesh, {"data": DataParallel()}, init=task.init, batch=batches[0])
    state, losses = step.init(jax.random.key(0)), list[float]()
    for batch in batches:
        state, metrics = step.update(state, batch)
        losses.append(float(metrics["loss"]))
    return losses
