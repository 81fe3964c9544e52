"""Casts and slices of what crosses the border of a worker are done where fewer bytes cross, and not a bit changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.gang import LocalGang
from braidax.program.excerpts import Excerpt
from tests.support.parallel.workers.teams import (
    BATCH,
    OPTIMIZERS,
    WIDTH,
    WORDS,
    assert_close,
    batches,
    init,
    make_step,
    on_one_device,
    one_device,
    own_part,
    spec,
    team,
)

NUM_STEPS, HALF = 4, jnp.bfloat16
EXACT: dict[str, Any] = {"compiler_options": {"xla_allow_excess_precision": False}}  # rounds where the program does


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[2]


def half(params: Any, batch: Any) -> Any:
    """Computes in bfloat16, and reads a corner of a matrix alone."""
    read = jnp.take(params["words"], batch["ids"], axis=0).astype(HALF).mean(1)
    told = jnp.tanh(read[:, :5] @ params["deep"]["weight"][:5].astype(HALF)) @ params["deep"]["kernel"].astype(HALF)
    return jnp.square(told.astype(jnp.float32) + params["bias"] - batch["target"]).mean()


def excerpts(step: Any) -> tuple[dict[str, Excerpt], dict[str, Excerpt]]:
    """Returns what servers were told that is read, and given, by name."""
    read, given = dict[str, Excerpt](), dict[str, Excerpt]()
    for form in step._servers._dense:
        read |= dict(zip(form.names, form.excerpts.read, strict=True))
        given |= {form.names[at]: one for at, one in zip(form.moved, form.excerpts.given, strict=True)}
    return read, given


def test_what_crosses(gang: LocalGang) -> None:
    weight, kernel = Excerpt("bfloat16", (0, 0), (5, WIDTH)), Excerpt("bfloat16", (0,), (WIDTH,))
    bias = Excerpt("float32", (), ())

    def work(number: int, seat: Any) -> Any:
        with make_step(seat, fn=half) as step:
            state = step.init(jax.random.key(0))
            pulled = step._pull(None, "training")[1].whole
            told = {name: (str(one.dtype), one.shape) for name, one in pulled.items()}
            assert told["deep/weight"] == ("bfloat16", (5, WIDTH))
            whole = step._pull(None)[1].whole
            assert whole["deep/weight"].dtype == np.float32
            assert step._servers._travelling.read_as == {"words": "bfloat16"}
            del state
            return excerpts(step)

    read, given = team(gang, 1, work)[0]
    assert read == given == {"deep/weight": weight, "deep/kernel": kernel, "bias": bias}


@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), (1, 3)])
def test_training_is_as_on_one_device(gang: LocalGang, workers: int, microbatches: int) -> None:
    data = batches(NUM_STEPS)
    losses, params = on_one_device("sgd", data, microbatches=workers * microbatches, fn=half, **EXACT)

    def work(number: int, seat: Any) -> Any:
        made: Any = {"fn": half, "optimizer": "sgd", "size": BATCH // workers, "microbatches": microbatches, **EXACT}
        with make_step(seat, **made) as step:
            state, found = step.init(jax.random.key(0)), list[float]()
            given = excerpts(step)[1]["deep/weight"]
            assert given.dtype == ("bfloat16" if microbatches == 1 else "float32")  # it is a sum of microbatches
            for batch in data:
                state, metrics = step.update(state, own_part(batch, number, workers))
                found.append(float(metrics["loss"]))
            evaluated = step.evaluate(state, own_part(data[0], number, workers))
            return found, step.params(), float(evaluated["loss"])

    found = team(gang, workers, work)
    np.testing.assert_allclose(np.mean([one for one, *_ in found], axis=0), losses, rtol=1e-6)
    for _, moved, _ in found:
        assert_close(moved, params, exactly=workers == microbatches == 1)
    evaluated = jax.jit(half)(params, own_part(data[0], 0, workers))
    np.testing.assert_allclose(found[0][2], evaluated, rtol=1e-2)


def test_other_gradients_are_refused(gang: LocalGang) -> None:
    """Servers know what crosses, and say what else has come."""

    def work(number: int, seat: Any) -> None:
        with make_step(seat, fn=half, size=spec(BATCH)["target"].shape[0]) as step:
            step.init(jax.random.key(0))
            with pytest.raises(Exception, match=r"gradients of \[.*\] are .*, expected .*bfloat16\[5, 8\]"):
                step._servers.push(
                    {},
                    {},
                    {},
                    0,
                    {"bias": np.float32(0), "": np.float32(0)}
                    | {"deep/weight": np.zeros((WIDTH, WIDTH), np.float32), "deep/kernel": np.zeros(WIDTH, np.float32)},
                )

    team(gang, 1, work)


def test_rows_cross_as_the_loss_reads_them(gang: LocalGang) -> None:
    """Of `Hybrid`, too: what is trained is what one device trains."""
    data = batches(NUM_STEPS)
    losses, params = on_one_device("sgd", data, fn=half, **EXACT)
    made: Any = {"init": init, "batch": spec(BATCH), "servers": gang, **EXACT}
    strategies = {"data": bx.Hybrid(tables="servers")}
    step: Any = bx.parallelize(half, OPTIMIZERS["sgd"], one_device(), strategies, **made)
    with step:
        assert step._servers._travelling.read_as == {"words": "bfloat16"}
        state, found = step.init(jax.random.key(0)), list[float]()
        for batch in data:
            state, metrics = step.update(state, batch)
            found.append(float(metrics["loss"]))
        assert found == losses
        np.testing.assert_array_equal(step.table("words"), params["words"])
        assert step.table("words").shape == (WORDS, WIDTH)
