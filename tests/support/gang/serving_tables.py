"""Tables on the ranks of a gang, wherever these come from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax.parallel as bx
from braidax.gang import Gang

NUM_ROWS, WIDTH, NUM_IDS, NUM_UPDATES = 50, 4, 24, 3


def check_tables_are_served(gang: Gang) -> None:
    """Trains with a table on the gang's ranks, and compares it with one device that has the table itself."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"table": jax.random.normal(key, (NUM_ROWS, WIDTH)), "kernel": jnp.ones(WIDTH)}

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(params["table"][batch] @ params["kernel"]) - 0.5).mean()

    random, optimizer, key = np.random.default_rng(0), optax.adagrad(0.3), jax.random.key(2)
    batches = [random.integers(0, NUM_ROWS, NUM_IDS).astype(np.int32) for _ in range(NUM_UPDATES)]
    with bx.parallelize(
        loss,
        optimizer,
        jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]),
        {"data": bx.Hybrid(tables="servers")},
        init=init,
        batch=jax.ShapeDtypeStruct((NUM_IDS,), jnp.int32),
        servers=gang,
    ) as step:
        state = step.init(key)
        params = jax.tree.map(jnp.asarray, step.to_dense(state).params)
        opt_state = optimizer.init(params)
        for batch in batches:
            state, metrics = step.update(state, batch)
            expected, gradients = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            params = optax.apply_updates(params, updates)
            np.testing.assert_allclose(metrics["loss"], expected, rtol=2e-5)
        np.testing.assert_allclose(step.table("table"), params["table"], rtol=2e-5, atol=1e-6)
        assert (np.asarray(params["table"]) != np.asarray(init(key)["table"])).any()
