"""Values that are computed once."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from braidax.program import trace
from braidax.program.halving import held as module
from braidax.program.halving.held import held
from braidax.program.halving.opened import written_out

LAYERS, WIDTH = 6, 128
X = np.random.default_rng(0).normal(size=(2, 64, WIDTH)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 16
BIAS = np.ones((LAYERS, WIDTH), np.float32)


def chain(weights: Any, bias: Any, x: Any) -> Any:
    for w, b in zip(weights, bias, strict=True):
        x = x + ((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)) @ w + b
    return x


def compiled(closed: Any, *args: Any) -> Any:
    return jax.jit(jaxpr_as_fun(closed)).lower(*args).compile()


def most_operands(program: Any) -> int:
    """Of what the compiler computes in one loop."""
    text = program.as_text()
    fusions = re.findall(r" fusion\(([^)]*)\)", text[text.index("ENTRY") :])
    return max(one.count("%") for one in fusions)


def traced(fn: Any, *args: Any) -> Any:
    return written_out(trace(fn, *args).closed)


def test_a_chain_of_layers_is_added_up_once() -> None:
    """What XLA for CPUs does by itself reads all layers before it in the last one."""
    closed, args = traced(chain, [*WEIGHTS], [*BIAS], X), (*WEIGHTS, *BIAS, X)
    plain, once = compiled(closed, *args), compiled(held(closed), *args)
    assert most_operands(plain) > LAYERS + 2
    assert most_operands(once) <= 5
    assert np.asarray(once(*args)[0]).tobytes() == np.asarray(plain(*args)[0]).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("dims", [(256, 64), (1, 256, 64), (4, 64, 1, 64)])
def test_bits_are_the_same_whatever_the_numbers_are(dims: tuple[int, ...], dtype: Any) -> None:
    """Also of those that one is taken of."""
    x = np.zeros(dims, np.float32)
    x.reshape(-1)[:7] = [np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38, -1.5]
    source = np.full(4096, -1, np.int32).view(dtype)  # NaN
    source[:4] = np.array([0, np.inf, -np.inf, -0.0], np.float32).view(dtype)

    def fn(source: Any, x: Any) -> Any:
        y = x * 2.0
        return y, jnp.exp(y), y + source[0].astype(jnp.float32)

    closed = traced(fn, source, x)
    made = held(closed)
    assert len(made.jaxpr.eqns) > len(closed.jaxpr.eqns)
    found, expected = compiled(made, source, x)(source, x), compiled(closed, source, x)(source, x)
    for one, other in zip(found, expected, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_what_is_read_once_small_or_made_of_two_large_values_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(fn: Any, *args: Any) -> int:
        closed = traced(fn, *args)
        return sum(one.primitive.name == "bitcast_convert_type" for one in held(closed).jaxpr.eqns)

    x, y = X[0], X[1]
    assert count(lambda x: (lambda y: (y, y * x))(x + 1.0), x) == 0  # 32 KiB
    monkeypatch.setattr(module, "_LARGE_BYTES", 0)
    assert count(lambda x: (lambda y: (y, y * x))(x + 1.0), x) == 1
    assert count(lambda x: (x + 1.0, (x + 1.0) * x), x) == 0  # each of the two is read once
    assert count(lambda x, y: (lambda z: (z, z * x))(x + y), x, y) == 0
    assert count(lambda x: (lambda z: (z, z * 2.0))(jnp.exp(x)), x) == 0  # dear: XLA computes it once
    assert count(lambda x: (lambda z: (z, jnp.exp(z)))((x + 1.0).reshape(-1)), x) == 1  # by way of a shape
    assert count(lambda x: (lambda z: (z, z * 2))(x + 1), x.astype(jnp.bfloat16)) == 0  # no number of 32 bits
