"""Tables by rows in checkpoints: restored to another number of shards, and to single-device form."""

from pathlib import Path

import jax
import optax

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from tests.parallel.models import assert_close, copied
from tests.parallel.test_hybrid import make_batch, make_step, placed, pooled


def test_a_checkpoint_goes_on_over_another_number_of_devices_and_whole(tmp_path: Path) -> None:
    optimizer = optax.adam(3e-2)
    eight = make_step(pooled, optimizer)
    state = eight.init(jax.random.key(3))
    for seed in range(2):
        state, _ = eight.update(state, make_batch(seed))
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save(state)

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    two = make_step(pooled, optimizer, mesh)
    assert placed(two)["params/table"] == {"rows"}
    with Checkpointer(tmp_path, Every(1)) as saver:
        restored = saver.restore(two.init(jax.random.key(4)))
    assert restored.params["table"].shape[1] == 2
    assert_close(copied(two.to_dense(restored)), copied(eight.to_dense(state)), atol=0)

    dense = make_step(pooled, optimizer, mesh, strategies={"data": bx.DataParallel()})
    whole, _ = dense.update(two.to_dense(restored), make_batch(2))
    for step, going_on in ((eight, state), (two, restored)):
        going_on, _ = step.update(going_on, make_batch(2))
        assert_close(copied(step.to_dense(going_on)), copied(whole), atol=2e-5)
