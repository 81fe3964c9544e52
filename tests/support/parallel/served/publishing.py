"""Steps whose tables are published."""

from typing import Any

import jax
import optax

import braidax.parallel as bx
from braidax.gang import LocalGang
from tests.support.parallel.models import specs
from tests.support.parallel.served.models import init, loss, zipf_batches

BATCHES = zipf_batches(12)


def make_step(gang: LocalGang, *, optimizer: Any = None, own: Any = None, **served: Any) -> Any:
    """Returns a step on two devices whose table is on servers. **Arguments:** `own`: optimizers of rows."""
    strategies = {"data": bx.Hybrid(tables=bx.Served(**served), row_optimizers=own or {})}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    given = optax.adagrad(0.1) if optimizer is None else optimizer
    return bx.parallelize(loss, given, mesh, strategies, init=init, batch=specs(BATCHES[0]), servers=gang)
