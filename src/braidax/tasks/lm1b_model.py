"""A language model whose parameters are nearly all in two tables: LSTM with projection, sampled softmax, in plain JAX.

Sources: Józefowicz et al., "Exploring the Limits of Language Modeling" (arXiv:1602.02410); Jean et al., "On Using Very
Large Target Vocabulary for Neural Machine Translation" (arXiv:1412.2007).

Both tables, and the biases of the softmax, are read by rows only: a step touches the rows of its words and of the
classes that were sampled.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from braidax.errors import ArgumentError

_FORGET_BIAS = 1.0


@dataclass(frozen=True)
class Sizes:
    """How large the model is.

    **Fields:** `vocabulary`: rows of the tables. `embedding`: numbers in a row of the embedding. `state`: of the LSTM.
    `projection`: what the state is projected to, and numbers in a row of the softmax. `dropout`: the share of inputs
    and outputs of the LSTM that is left out while training.
    """

    vocabulary: int
    embedding: int
    state: int
    projection: int
    dropout: float


class Candidates(NamedTuple):
    """The classes that stand for all others in a sampled softmax, each at most once.

    **Fields:** `ids`: int32 `[k]`. `drawn`: bool `[k]`; what is False stands for nothing. `num_tries`: float32, how
    many were drawn, with repeats, until there were that many different ones.
    """

    ids: Int[Array, "k"]
    drawn: Bool[Array, "k"]
    num_tries: Float[Array, ""]


def init_language_model(key: Key[Array, ""], sizes: Sizes) -> dict[str, Any]:
    """Returns first parameters: tables uniform with variance 1 / width, matrices by Glorot, biases 0."""
    keys = jax.random.split(key, 4)

    def table(key: jax.Array, width: int) -> jax.Array:
        limit = math.sqrt(3 / width)
        return jax.random.uniform(key, (sizes.vocabulary, width), jnp.float32, -limit, limit)

    matrix = jax.nn.initializers.glorot_uniform()
    lstm = {
        "kernel": matrix(keys[1], (sizes.embedding + sizes.projection, 4 * sizes.state)),
        "bias": jnp.zeros(4 * sizes.state),
        "projection": matrix(keys[2], (sizes.state, sizes.projection)),
    }
    softmax = {"weight": table(keys[3], sizes.projection), "bias": jnp.zeros(sizes.vocabulary)}
    return {"embedding": table(keys[0], sizes.embedding), "lstm": lstm, "softmax": softmax}


def read_words(
    params: Any, words: Int[Array, "n steps"], *, key: Key[Array, ""] | None, dropout: float
) -> Float[Array, "n steps width"]:
    """Returns what the LSTM, from a zero state on, makes of sequences of words; position `i` has seen words 0 to `i`.

    **Arguments:** `key`: for the dropout; None leaves it out.
    """
    before, behind = (None, None) if key is None else jax.random.split(key)
    inputs = _dropped(params["embedding"][words], before, dropout)
    lstm = params["lstm"]
    from_input, from_output = jnp.split(lstm["kernel"], [inputs.shape[-1]])
    from_inputs = inputs @ from_input + lstm["bias"]  # all steps at once: only what hangs on the state is in the loop

    def advance(carry: tuple[jax.Array, jax.Array], from_input: jax.Array) -> tuple[Any, jax.Array]:
        state, output = carry
        enters, new, stays, leaves = jnp.split(from_input + output @ from_output, 4, axis=-1)
        state = jax.nn.sigmoid(stays + _FORGET_BIAS) * state + jax.nn.sigmoid(enters) * jnp.tanh(new)
        output = (jax.nn.sigmoid(leaves) * jnp.tanh(state)) @ lstm["projection"]
        return (state, output), output

    size, width = lstm["projection"].shape
    start = jnp.zeros((len(words), size)), jnp.zeros((len(words), width))
    _, outputs = jax.lax.scan(advance, start, jnp.swapaxes(from_inputs, 0, 1))
    return _dropped(jnp.swapaxes(outputs, 0, 1), behind, dropout)


def sample_classes(key: Key[Array, ""], num_classes: int, num_sampled: int) -> Candidates:
    """Draws different classes from the log-uniform distribution.

    `P(c) = log((c + 2) / (c + 1)) / log(num_classes + 1)` is Zipf's law, for classes numbered by how often they occur.
    Classes are drawn until there are `num_sampled` different ones. How many draws that takes is random, and at most a
    number so large that it hardly ever does not suffice (thousands of classes: once in a hundred million times); then
    `drawn` says which are missing.

    **Arguments:** `num_sampled`: at most half of `num_classes`, or all of them: these need no drawing.

    **Raises:** `ArgumentError` for any other number.
    """
    if num_sampled == num_classes:
        return Candidates(jnp.arange(num_classes), jnp.ones(num_classes, bool), jnp.array(jnp.inf))
    if not 1 <= num_sampled <= num_classes // 2:
        raise ArgumentError(
            f"num_sampled={num_sampled}: expected between 1 and half of num_classes={num_classes}, or all of them"
        )
    draws = _log_uniform(key, num_classes, _max_tries(num_classes, num_sampled))
    order = jnp.argsort(draws, stable=True)
    ranked = draws[order]
    is_first = jnp.zeros(draws.shape, bool).at[order].set(jnp.diff(ranked, prepend=-1) != 0)
    number = jnp.cumsum(is_first)
    places = jnp.nonzero(is_first & (number <= num_sampled), size=num_sampled, fill_value=0)[0]
    num_tries = jnp.minimum(1 + jnp.sum(number < num_sampled), len(draws)).astype(jnp.float32)
    return Candidates(draws[places], jnp.arange(num_sampled) < number[-1], num_tries)


def sampled_softmax(
    params: Any, outputs: Float[Array, "n steps width"], targets: Int[Array, "n steps"], candidates: Candidates
) -> Float[Array, "n steps"]:
    """Returns the loss to train with: the cross-entropy of each target among the candidates and itself.

    Every logit is reduced by the logarithm of how often its class is expected among the candidates; a candidate that is
    the target is left out. So the logits are trained to be those of a softmax over all classes, but the loss of a rare
    target is less than there.

    **Arguments:** `params`: `{"weight": [classes, width], "bias": [classes]}`.
    """
    right, others = _scores(params, outputs, targets, candidates)
    right -= log_expected_count(targets, len(params["bias"]), candidates.num_tries)
    return jnp.logaddexp(right, others) - right


def estimated_softmax(
    params: Any, outputs: Float[Array, "n steps width"], targets: Int[Array, "n steps"], candidates: Candidates
) -> Float[Array, "n steps"]:
    """Returns an estimate of the cross-entropy over all classes, to test with.

    Each candidate but the target stands for as many classes as it takes to expect one of them among the candidates:
    on average they make the sum over all classes, whose logarithm is then a little too small. With all classes as
    candidates this is the cross-entropy itself.

    **Arguments:** as those of `sampled_softmax`.
    """
    right, others = _scores(params, outputs, targets, candidates)
    return jnp.logaddexp(right, others) - right


def log_expected_count(classes: Int[Array, "..."], num_classes: int, num_tries: Any) -> Float[Array, "..."]:
    """Returns the logarithm of how often each class is expected among different ones that so many draws gave."""
    probability = jnp.log1p(1 / (classes + 1.0)) / math.log(num_classes + 1)
    return jnp.log(-jnp.expm1(num_tries * jnp.log1p(-probability)))


def _scores(params: Any, outputs: jax.Array, targets: jax.Array, candidates: Candidates) -> tuple[jax.Array, jax.Array]:
    """Returns the logits of the targets, and the logarithm of the weighted sum over the candidates besides."""
    weight, bias = params["weight"], params["bias"]
    ids, drawn, num_tries = candidates
    right = jnp.sum(outputs * weight[targets], axis=-1) + bias[targets]
    logits = jnp.einsum("ntw,kw->ntk", outputs, weight[ids]) + bias[ids]
    logits -= log_expected_count(ids, len(bias), num_tries)
    stands_for_none = ~drawn | (ids == targets[..., None])
    others = jax.nn.logsumexp(jnp.where(stands_for_none, jnp.finfo(logits.dtype).min, logits), axis=-1)
    return right, others


def _log_uniform(key: jax.Array, num_classes: int, num_draws: int) -> jax.Array:
    """Draws classes with repeats: `c + 1` is the whole part of `2**t`, `t` uniform up to `log2(num_classes + 1)`.

    The whole part of `t` and the rest are drawn apart: together they would have 24 bits, too few to tell a million
    classes from one another.
    """
    octave_key, place_key = jax.random.split(key)
    limit = math.log2(num_classes + 1)
    octave = jnp.floor(jax.random.uniform(octave_key, (num_draws,)) * limit).astype(jnp.int32)
    octave = jnp.minimum(octave, math.ceil(limit) - 1)
    highest = jnp.where(octave == math.ceil(limit) - 1, limit - (math.ceil(limit) - 1), 1.0)
    place = jnp.exp2(jax.random.uniform(place_key, (num_draws,)) * highest)
    return jnp.clip(jnp.ldexp(place, octave).astype(jnp.int32) - 1, 0, num_classes - 1)


@functools.cache
def _max_tries(num_classes: int, num_sampled: int) -> int:
    """Returns a number of draws that hardly ever gives fewer different classes than that."""
    probability = np.log1p(1 / np.arange(1.0, num_classes + 1)) / np.log(num_classes + 1)
    wanted = num_sampled + 6 * math.sqrt(num_sampled)  # the standard deviation is less than the root
    wanted = min(wanted, (num_sampled + num_classes) / 2)
    tries = num_sampled
    while -np.expm1(tries * np.log1p(-probability)).sum() < wanted:
        tries *= 2
    return tries


def _dropped(values: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    if key is None or rate == 0:
        return values
    return jnp.where(jax.random.bernoulli(key, 1 - rate, values.shape), values / (1 - rate), 0)
