"""Workers of which one is slower: how many steps they take in a while, each by itself and all at one pace."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax as bx
from benchmarks.harness import Report
from braidax.comm import Communicator
from braidax.gang import LocalGang
from braidax.parallel import Meeting, open_meeting

ALONE, ASYNC, SYNC = "one worker", "asynchronous", "synchronous"
_WORKERS, _SLOWER = 4, 3
_WIDTH, _BATCH, _WORDS = 64, 64, 100_000


def paces_case(report: Report, *, seconds: float, step_seconds: float, rounds: int) -> None:
    """Measures steps a second of all workers: one alone, and four of which one is three times slower.

    **Arguments:** `seconds`: of one measurement. `step_seconds`: in which a step does nothing, as one whose work is an
    accelerator's; the slow worker's is three times as long.
    """
    case = f"{_WORKERS} workers, one {_SLOWER} times slower, steps of {1e3 * step_seconds:.0f} ms"
    paces = {ALONE: (1, None), ASYNC: (_WORKERS, None), SYNC: (_WORKERS, 0)}
    figures: dict[str, list[float]] = {name: [] for name in paces}
    with LocalGang(2) as servers, LocalGang(_WORKERS) as gang:
        for _ in range(rounds):
            for name, (workers, staleness) in paces.items():
                with open_meeting(servers, workers=workers) as meeting:
                    given = [meeting.of_worker(number) for number in range(workers)]
                    waits = [step_seconds * (_SLOWER if number == _WORKERS - 1 else 1) for number in range(workers)]
                    own, ranks = [*zip(given, waits, strict=True)], [*range(workers)]
                    called = gang.submit(_train, staleness, seconds, max(waits), per_rank=own, ranks=ranks)
                    figures[name].append(sum(called.result()))
    for name, some in figures.items():
        report.add(case, name, "all steps", "1/s", some)
    together = [found / alone for found, alone in zip(figures[ASYNC], figures[ALONE], strict=True)]
    report.at_least("async", together, 0.95 * (_WORKERS - 1 + 1 / _SLOWER))


def _train(
    comm: Communicator, staleness: int | None, seconds: float, slowest: float, own: tuple[Meeting, float]
) -> float:
    """Trains for a while. **Arguments:** `slowest`: seconds of a step of the slowest worker. `own`: this one, and its
    seconds of a step. **Returns:** steps a second."""
    meeting, wait = own
    num_steps = int(seconds / slowest)
    step: Any = bx.parallelize(
        _loss,
        optax.adagrad(0.1),
        jax.make_mesh((1,), ("data",)),
        {"data": bx.ParameterServers(staleness=staleness)},
        init=_init,
        batch={"ids": jax.ShapeDtypeStruct((_BATCH, 8), jnp.int32)},
        servers=meeting,
    )
    random = np.random.default_rng(comm.rank)
    with step:
        state = step.init(jax.random.key(0))
        for _ in range(3):  # in which programs are compiled
            state, _ = step.update(state, _batch(random))
        state = step.meet(state)
        begun = time.perf_counter()
        steps = int(seconds / wait) if staleness is None else num_steps  # together they take as many
        for _ in range(steps):
            state, _ = step.update(state, _batch(random), before_apply=lambda: time.sleep(wait))
        step.finish()
        return steps / (time.perf_counter() - begun)


def _batch(random: np.random.Generator) -> Any:
    return {"ids": (random.zipf(1.2, (_BATCH, 8)) % _WORDS).astype(np.int32)}


def _init(key: jax.Array) -> Any:
    return {"words": jax.random.normal(key, (_WORDS, _WIDTH)), "kernel": jnp.ones((_WIDTH,))}


def _loss(params: Any, batch: Any) -> Any:
    read = jnp.take(params["words"], batch["ids"], axis=0).mean(1)
    return jnp.square(jnp.tanh(read @ params["kernel"]) - 1).mean()
