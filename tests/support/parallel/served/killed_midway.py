"""Publishes a base and a delta, and is killed while it makes the second delta durable: `braidax launch --initialize
nothing --module tests.support.parallel.served.killed_midway FOLDER FILE`; the file has the table as it was whole."""

import os
import signal
import sys
from typing import Any

import jax
import numpy as np

from braidax.gang import LocalGang
from tests.support.parallel.served.publishing import BATCHES, make_step


def die(descriptor: Any) -> None:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, whole = sys.argv[1:]
    with LocalGang(1) as gang, make_step(gang) as step:
        state = step.init(jax.random.key(0))
        step.publish(folder)
        state, _ = step.update(state, BATCHES[0])
        step.publish(folder)
        np.save(whole, step.table("table"))
        state, _ = step.update(state, BATCHES[1])
        os.fsync = die
        step.publish(folder)
