"""What is trained: LM1B, DLRM, BERT, ResNet-50 and a table alone, of sizes that fit this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from braidax.data import open as open_source
from braidax.tasks import bert_model, dlrm_model, lm1b_model
from braidax.tasks.dlrm import _CARDINALITIES, make_clicks
from braidax.tasks.resnet_model import WideResNet
from braidax.tasks.task import classification, image_task, rising_and_falling

VOCABULARY = 793_470  # of the One Billion Word benchmark
STEPS = 20  # words of a sequence
_NUM_NUMBERS = 13  # of a sample of DLRM
_NUM_CLASSES = 1000


class Adagrad(NamedTuple):
    """Its rate, what accumulators begin with, and what is added below the root."""

    rate: float
    initial: float
    eps: float

    def optax(self) -> optax.GradientTransformation:
        """Returns the optimizer."""
        return optax.adagrad(self.rate, initial_accumulator_value=self.initial, eps=self.eps)


@dataclass(frozen=True, eq=False)
class Model:
    """A loss, and what it is trained on.

    **Fields:** `name`: with the sizes. `init`: from a key to `(params, variables)`. `loss`: `(params, batch, key,
    variables) -> (loss, {"variables": …})`. `optimizer`. `spec`: of a global batch. `batch`: from a number to a batch
    on the host. `tables`: names of the variables that are read by rows only. `adagrad`: what the optimizer is, if it
    is that.
    """

    name: str
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation
    spec: Any
    batch: Callable[[int], Any]
    tables: tuple[str, ...] = ()
    adagrad: Adagrad | None = None

    def batches(self, count: int) -> list[Any]:
        """Returns the first few batches."""
        return [self.batch(number) for number in range(count)]

    def update(self, state: Any, batch: Any) -> Any:
        """Takes a training step: of `(params, opt_state, variables, number, key)`, gives the next and the loss."""
        params, opt_state, variables, number, key = state
        evaluate = jax.value_and_grad(self.loss, has_aux=True)
        (loss, aux), gradients = evaluate(params, batch, jax.random.fold_in(key, number), variables)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, aux["variables"], number + 1, key), loss


def lm1b(
    vocabulary: int,
    width: int,
    batch_size: int,
    *,
    most: int | None = None,
    num_sampled: int = 64,
    state: int | None = None,
) -> Model:
    """Returns the language model; nearly all parameters, and little of the work, are in its tables.

    **Arguments:** `width`: of the tables. `state`: of the LSTM; by default 64, or what the tables have. `most`: no word
    has a larger number; the last by default. `num_sampled`: candidates, which all devices share.
    """
    sizes = lm1b_model.Sizes(vocabulary, width, state or min(width, 64), width, dropout=0.0)

    def init(key: jax.Array) -> tuple[Any, Any]:
        return lm1b_model.init_language_model(key, sizes), {}

    def loss(params: Any, batch: Any, key: jax.Array, variables: Any) -> Any:
        words, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        outputs = lm1b_model.read_words(params, words, key=None, dropout=0.0)
        candidates = lm1b_model.sample_classes(key, vocabulary, num_sampled)
        losses = lm1b_model.sampled_softmax(params["softmax"], outputs, targets, candidates)
        return losses.mean(), {"variables": variables}

    def batch(number: int) -> Any:
        return {"tokens": words_of(number, (batch_size, STEPS + 1), vocabulary, most)}

    adagrad = Adagrad(0.2, 1 / STEPS**2, 1e-7)
    return Model(
        f"LM1B, V={vocabulary:,}, D={width}{f', LSTM of {state:,}' if state else ''}, {batch_size} x {STEPS} words, "
        f"{num_sampled:,} candidates",
        init,
        loss,
        adagrad.optax(),
        {"tokens": jax.ShapeDtypeStruct((batch_size, STEPS + 1), jnp.int32)},
        batch,
        ("embedding", "softmax/bias", "softmax/weight"),
        adagrad,
    )


def dlrm(max_rows: int, batch_size: int) -> Model:
    """Returns the model of clicks: 26 tables of width 16. **Arguments:** `max_rows`: of a table, at most."""
    cardinalities = tuple(min(rows, max_rows) for rows in _CARDINALITIES)
    sizes = dlrm_model.Sizes(cardinalities, _NUM_NUMBERS, (512, 256, 64, 16), (512, 256))

    def init(key: jax.Array) -> tuple[Any, Any]:
        return dlrm_model.init_dlrm(key, sizes), {}

    def loss(params: Any, batch: Any, key: jax.Array, variables: Any) -> Any:
        dense = jnp.log1p(jnp.maximum(batch["dense"], 0).astype(jnp.float32))
        logits = dlrm_model.predict_clicks(params, dense, batch["ids"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean(), {"variables": variables}

    def batch(number: int) -> Any:
        clicks = make_clicks(cardinalities, (number + 1) * batch_size)
        return {name: leaf[number * batch_size :] for name, leaf in clicks.items()}

    adagrad = Adagrad(0.02, 0.0, 1e-8)
    return Model(
        f"DLRM, {sum(cardinalities):,} rows in 26 tables, {batch_size} samples",
        init,
        loss,
        adagrad.optax(),
        _spec_of(batch(0)),
        batch,
        tuple(f"tables/table_{number:02}" for number in range(len(cardinalities))),
        adagrad,
    )


def of_bert(network: Any, sizes: bert_model.Sizes) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the `init` and the `loss` of a model that is called as `bert_model.Bert` is."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        words = jnp.zeros((1, sizes.positions), jnp.int32)
        return network.init(key, words, jnp.ones(1, jnp.int32), train=False)["params"], {}

    def loss(params: Any, batch: Any, key: jax.Array, variables: Any) -> Any:
        given = batch["words"], batch["num_words"]
        logits: Any = network.apply({"params": params}, *given, train=True, rngs={"dropout": key})
        return classification(logits, batch)[0], {"variables": variables}

    return init, loss


def bert(batch_size: int, sizes: bert_model.Sizes) -> Model:
    """Returns BERT as a classifier, with AdamW and the task's schedule."""
    init, loss = of_bert(bert_model.Bert(8, sizes), sizes)

    def batch(number: int) -> Any:
        random = np.random.default_rng(number)
        return {
            "words": words_of(number, (batch_size, sizes.positions), sizes.vocabulary),
            "num_words": random.integers(1, sizes.positions + 1, batch_size, np.int32),
            "label": random.integers(0, 8, batch_size, np.int32),
        }

    layers, width = sizes.num_layers, sizes.width
    return Model(
        f"BERT, {layers} layers, D={width}, V={sizes.vocabulary:,}, {batch_size} x {sizes.positions} words",
        init,
        loss,
        rising_and_falling(1e-4)(1000),
        _spec_of(batch(0)),
        batch,
        ("word_embedding/embedding",),
    )


def resnet(stages: tuple[int, ...], size: int, batch_size: int, *, norm: Literal["batch", "group"] = "batch") -> Model:
    """Returns a residual network with AdamW.

    **Arguments:** `stages`: blocks in each. `size`: of images, in pixels. `norm`: as of `WideResNet`.
    """

    def batch(number: int) -> Any:
        random = np.random.default_rng(number)
        return {
            "image": random.integers(0, 256, (batch_size, size, size, 3), np.uint8),
            "label": random.integers(0, _NUM_CLASSES, batch_size, np.int32),
        }

    source = open_source(batch(0))
    network = WideResNet(_NUM_CLASSES, stages, num_filters=64, width_factor=1, norm=norm)
    task = image_task(network, source, source, batch_size=batch_size, epochs=1, learning_rate=1e-3)

    def loss(params: Any, batch: Any, key: jax.Array, variables: Any) -> Any:
        return task.loss(params, batch, variables, train=True)

    return Model(
        f"ResNet-{3 * sum(stages) + 2}, {_NUM_CLASSES} classes, {batch_size} images of {size} x {size}",
        task.init,
        loss,
        task.optimizer(1000),
        _spec_of(batch(0)),
        batch,
    )


def lookup(vocabulary: int, width: int, batch_size: int, num_devices: int) -> Model:
    """Returns a table alone: the loss is half the sum of the squares of the rows that are read, over the devices."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        rows, columns = jnp.arange(vocabulary)[:, None], jnp.arange(width)
        return {"table": (rows * 31 + columns * 17) % 101 / 101 - 0.5}, {}

    def loss(params: Any, batch: Any, key: jax.Array, variables: Any) -> Any:
        return jnp.sum(params["table"][batch["ids"]] ** 2) / (2 * num_devices), {"variables": variables}

    def batch(number: int) -> Any:
        return {"ids": words_of(number, (batch_size, STEPS), vocabulary)}

    adagrad = Adagrad(0.02, 0.0, 1e-8)
    return Model(
        f"a table, V={vocabulary:,}, D={width}, {batch_size} x {STEPS} ids",
        init,
        loss,
        adagrad.optax(),
        _spec_of(batch(0)),
        batch,
        ("table",),
        adagrad,
    )


def words_of(seed: int, shape: tuple[int, ...], vocabulary: int, most: int | None = None) -> NDArray[np.int32]:
    """Returns words by Zipf's law, as they come in text. **Arguments:** `most`: as of `lm1b`."""
    words = (vocabulary + 1.0) ** np.random.default_rng(seed).random(shape) - 1
    return np.minimum(words, vocabulary - 1 if most is None else most).astype(np.int32)


def _spec_of(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
