"""Workers of one run, as threads of this process: each has a step, a mesh and a connection of its own."""

import functools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax.parallel as bx
from braidax.gang import Gang

WORDS, WIDTH, BATCH, READ = 50, 8, 12, 3
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-2),
    "adagrad": optax.adagrad(0.1),
    "scheduled": optax.adamw(optax.linear_schedule(0.1, 0.01, 20), mask=partial(jax.tree.map, lambda x: x.ndim > 1)),
}

SUMMED = {  # which sum over all gradients
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5)),
    "clipped adagrad": optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.3)),
}


def init(key: jax.Array) -> Any:
    words, kernel = jax.random.split(key)
    return {
        "words": jax.random.normal(words, (WORDS, WIDTH)),
        "deep": {"weight": jnp.eye(WIDTH), "kernel": jax.random.normal(kernel, (WIDTH,))},
        "bias": jnp.zeros(()),
    }


def loss(params: Any, batch: Any, key: jax.Array) -> Any:
    """Draws by its key, too: each worker draws what a microbatch of one device does."""
    read = jnp.take(params["words"], batch["ids"], axis=0).mean(1)
    read *= 1 + 0.1 * jax.random.normal(key, read.shape)
    told = jnp.tanh(read @ params["deep"]["weight"]) @ params["deep"]["kernel"] + params["bias"]
    return jnp.square(told - batch["target"]).mean(), {"told": told.mean()}


def sampled(params: Any, batch: Any, key: jax.Array) -> Any:
    """Reads rows that it draws, besides those of the batch."""
    drawn = jnp.take(params["words"], jax.random.randint(key, (4,), 0, WORDS), axis=0)
    read = jnp.take(params["words"], batch["ids"], axis=0).mean(1)
    return jnp.square(read @ params["deep"]["kernel"] - batch["target"]).mean() + jnp.square(drawn).sum() / 100


def dense_loss(params: Any, batch: Any) -> Any:
    """Reads no variable by rows."""
    one_hot = jax.nn.one_hot(batch["ids"][:, 0], WORDS)
    told = jnp.tanh(one_hot @ params["words"] @ params["deep"]["weight"]) @ params["deep"]["kernel"] + params["bias"]
    return jnp.square(told - batch["target"]).mean()


def batches(count: int, size: int = BATCH) -> list[Any]:
    random = np.random.default_rng(0)
    drawn = ((random.zipf(1.3, (size, READ)) % WORDS, random.normal(size=size)) for _ in range(count))
    return [{"ids": ids.astype(np.int32), "target": target.astype(np.float32)} for ids, target in drawn]


def spec(size: int) -> Any:
    return {
        "ids": jax.ShapeDtypeStruct((size, READ), jnp.int32),
        "target": jax.ShapeDtypeStruct((size,), jnp.float32),
    }


def one_device() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])


def make_step(
    servers: Any, strategy: Any = None, *, optimizer: str = "adam", size: int = BATCH, fn: Any = loss, **more: Any
) -> Any:
    strategies = {"data": bx.ParameterServers() if strategy is None else strategy}
    given: Any = {"mesh": one_device(), "init": init, "batch": spec(size), "servers": servers, **more}
    return bx.parallelize(fn, {**OPTIMIZERS, **SUMMED}[optimizer], strategies=strategies, **given)


def own_part(batch: Any, worker: int, workers: int) -> Any:
    """Returns the samples of a worker, as microbatches of one device have them."""
    return jax.tree.map(lambda leaf: leaf[worker::workers], batch)


def on_one_device(
    optimizer: str, data: list[Any], *, microbatches: int = 1, fn: Any = loss, told: str = "loss", **more: Any
) -> tuple[list[float], Any]:
    """Returns the losses and the parameters of single-device training.

    **Arguments:** `told`: in place of losses. `more`: of `parallelize`.
    """
    made = _alone if more else _alone_once
    step = made(optimizer, len(data[0]["target"]), microbatches, fn, told, **more)
    state, losses = step.init(jax.random.key(0)), list[float]()
    for batch in data:
        state, metrics = step.update(state, batch)
        losses.append(float(metrics[told]))
    return losses, jax.tree.map(np.asarray, state.params)


def _alone(optimizer: str, size: int, microbatches: int, fn: Any, told: str, **more: Any) -> Any:
    """A step on one device, which keeps no state."""
    strategies = {"data": bx.DataParallel()}
    made: Any = {"init": init, "batch": spec(size), "microbatches": microbatches}
    made |= {"metrics": [told] if told == "grad_norm" else [], **more}
    return bx.parallelize(fn, {**OPTIMIZERS, **SUMMED}[optimizer], one_device(), strategies, **made)


_alone_once = functools.cache(_alone)


def team(gang: Gang, workers: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """Returns what each worker does with its seat. **Arguments:** `work`: is given its number, and `servers`."""
    found: list[Any] = [None] * workers
    raised: list[BaseException] = []

    def run(number: int, seat: Any) -> None:
        try:
            found[number] = work(number, seat)
        except BaseException as error:  # noqa: BLE001 (whatever it is, the test shows it)
            raised.append(error)

    with bx.open_meeting(gang, workers=workers, timeout_seconds=60) as meeting:
        threads = [
            threading.Thread(target=run, args=(number, meeting.of_worker(number)), name=f"worker {number}")
            for number in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if raised:
        raise raised[0]
    return found


def assert_close(found: Any, expected: Any, *, exactly: bool = False) -> None:
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=0 if exactly else 1e-6)
