"""A small language model and a small vision model, the step that trains them, and what an order of samples does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

VOCABULARY = 256
WIDTH = 32


def language_model(batch_tokens: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Returns parameters and loss of a one-layer causal language model over `[batch, batch_tokens]` tokens."""
    keys = jax.random.split(jax.random.key(0), 5)

    def normal(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape) * 0.02

    params = {
        "embed": normal(keys[0], VOCABULARY, WIDTH),
        "mix": normal(keys[1], WIDTH, 3 * WIDTH),
        "up": normal(keys[2], WIDTH, 4 * WIDTH),
        "down": normal(keys[3], 4 * WIDTH, WIDTH),
    }
    causal = np.tril(np.ones((batch_tokens - 1, batch_tokens - 1), bool))

    def loss(params: Any, tokens: Any) -> Any:
        tokens = tokens.astype(jnp.int32) % VOCABULARY
        x = params["embed"][tokens[:, :-1]]
        q, k, v = jnp.split(x @ params["mix"], 3, axis=-1)
        scores = jnp.where(causal, q @ k.swapaxes(1, 2) / WIDTH**0.5, -1e9)
        x = x + jax.nn.softmax(scores) @ v
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return params, loss


def vision_model(size: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Returns parameters and loss of a small convolutional network over uint8 `[batch, size, size, 3]` images."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "first": jax.random.normal(keys[0], (7, 7, 3, 16)) * 0.1,
        "second": jax.random.normal(keys[1], (3, 3, 16, 32)) * 0.1,
        "head": jax.random.normal(keys[2], (32, 10)) * 0.1,
    }

    def loss(params: Any, images: Any) -> Any:
        x = images.astype(jnp.float32) / 255
        for name, stride in (("first", 8), ("second", 4)):
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x, params[name], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        logits = x.mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, images[:, 0, 0, 0].astype(jnp.int32) % 10).mean()

    return params, loss


class Trainer:
    """Trains with Adam on batch after batch. **Arguments:** `model`: parameters and loss. `leaf`: of a batch."""

    def __init__(self, model: tuple[Any, Callable[[Any, Any], Any]], leaf: Callable[[Any], Any]) -> None:
        self._params, loss = model
        self._leaf = leaf
        optimizer = optax.adam(1e-3)
        self._state = optimizer.init(self._params)
        self._num_steps = 0

        @jax.jit
        def update(params: Any, state: Any, batch: Any) -> Any:
            gradients = jax.grad(loss)(params, batch)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(params, updates), state

        self._update = update

    def step(self, batch: Any) -> None:
        """Trains on a batch; at most four steps are under way."""
        self._params, self._state = self._update(self._params, self._state, self._leaf(batch))
        self._num_steps += 1
        if self._num_steps % 4 == 0:
            self.finish()

    def finish(self) -> None:
        """Waits for all steps."""
        jax.block_until_ready(self._params)


def final_loss(order: NDArray[np.int64], inputs: NDArray[Any], labels: NDArray[Any], *, batch_size: int) -> float:
    """Returns the loss over all samples after one epoch of a linear classifier in this order."""
    params = {"w": jnp.zeros((inputs.shape[1], int(labels.max()) + 1)), "b": jnp.zeros(int(labels.max()) + 1)}
    optimizer = optax.adam(3e-2)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y).mean()

    @jax.jit
    def update(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        params, state = update(params, state, inputs[chosen], labels[chosen])
    return float(loss(params, inputs, labels))


def buffered_order(num_samples: int, buffer: int) -> NDArray[np.int64]:
    """Returns the order of a shuffle buffer: from a stream, a random one of the buffer's samples each time."""
    rng, held = np.random.default_rng(0), list(range(min(buffer, num_samples)))
    order: list[int] = []
    for coming in range(len(held), num_samples):
        place = int(rng.integers(len(held)))
        order.append(held[place])
        held[place] = coming
    rng.shuffle(held)
    return np.array(order + held, np.int64)
