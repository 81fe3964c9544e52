"""Losses that are cut: GPT-2's shape, ResNet-50 and BERT, traced as a step traces them."""

from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.harness import models
from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import gpt
from braidax.program import Program, trace
from braidax.tasks.bert_model import Sizes


def gpt_program(shape: Shape) -> Program:
    """Returns the loss of one microbatch, `(params, variables, key, batch)`."""

    def loss(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        return gpt.scanned(shape)(params, batch), {}

    key = jax.eval_shape(jax.random.key, 0)
    return trace(loss, jax.eval_shape(shape.init, key), {}, key, gpt.spec(shape))


def resnet_program(blocks: Sequence[int], size: int, samples: int) -> Program:
    """Returns that of a residual network; its statistics are those of a microbatch."""
    return _of(models.resnet(tuple(blocks), size, samples))


def bert_program(sizes: Sizes, samples: int) -> Program:
    """Returns that of BERT as a classifier."""
    return _of(models.bert(samples, sizes))


def _of(model: models.Model) -> Program:
    def loss(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        return model.loss(params, batch, key, variables)

    key = jax.eval_shape(jax.random.key, 0)
    return trace(loss, *jax.eval_shape(model.init, key), key, model.spec)
