"""Steps whose servers have copies, for tests that kill some, and other servers in place of these."""

import os
from typing import Any

import jax
import numpy as np
import optax

import braidax.parallel as bx
from braidax.comm import Communicator
from braidax.errors import GangError, PeerLost
from braidax.gang import LocalGang
from tests.support.parallel.models import specs
from tests.support.parallel.served.models import init, loss, zipf_batches

OPTIMIZERS = {
    "adagrad": optax.adagrad(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9)),
}


def own_pid(comm: Communicator) -> int:
    """Returns the process of the rank."""
    return os.getpid()


def mend(gang: LocalGang) -> None:
    """Starts another process in place of each that was killed."""
    try:
        gang.run(own_pid)
    except (PeerLost, GangError):
        gang.replace()
        gang.run(own_pid)


def make_step(gang: LocalGang, optimizer: str, *, copies: int = 2, spares: int = 0) -> Any:
    """Returns a step on two devices whose table is on servers. **Arguments:** `optimizer`: its name."""
    strategies = {"data": bx.Hybrid({"params/table": bx.Served(copies=copies, spares=spares)})}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    batch = specs(zipf_batches(1)[0])
    return bx.parallelize(loss, OPTIMIZERS[optimizer], mesh, strategies, init=init, batch=batch, servers=gang)


def assert_equal(found: Any, expected: Any) -> None:
    """Fails unless two runs have the same losses and the same state, bit by bit."""
    assert found[0] == expected[0]
    for one, two in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_array_equal(one, two)
