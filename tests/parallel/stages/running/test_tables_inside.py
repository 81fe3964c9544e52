"""Tables by rows inside of stages: the rows that samples read are exchanged, not the table."""

import functools
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import ArgumentError
from braidax.parallel.rows import row_adagrad
from braidax.parallel.stages.running.feeding import Given
from braidax.parallel.stages.running.home import Home
from tests.support.parallel.models import refused
from tests.support.parallel.stages.running.cases import Case
from tests.support.parallel.stages.running.steps import make, same_updates
from tests.support.program.cutting.models import draw

TABLES = {"params/words": bx.Rows(), "params/tags": bx.Rows()}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))  # compiles to less than Adam
WORDS = 512


@functools.cache
def tabled(samples: int = 32) -> Case:
    """Words that the first stage reads twice, tags that the last one reads, an odd table, one that both read."""

    def loss(params: Any, batch: Any, variables: Any) -> Any:
        ids = batch["ids"]
        x = params["words"][ids].sum(1) + jnp.take(params["words"], ids[:, 0] + 1, axis=0, mode="clip")
        x = x + params["odd"][batch["tag"]] + params["both"][batch["tag"]]
        for at in range(4):
            x = jnp.tanh(x @ params[f"w{at}"])
        x = x * params["tags"][batch["tag"]] + params["both"][batch["tag"]]
        return ((x.sum(-1) - batch["y"]) ** 2).mean(), {"sum": x.sum(), "variables": variables}

    params = {f"w{at}": draw(8, 8, seed=at) / 2 for at in range(4)}
    params |= {"words": draw(WORDS, 8, seed=7), "tags": draw(16, 8, seed=8)}
    params |= {"odd": draw(15, 8, seed=9), "both": draw(16, 8, seed=10)}
    random = np.random.default_rng(0)
    ids = random.integers(0, WORDS, (samples, 3)).astype(np.int32)
    tag = random.integers(0, 15, samples).astype(np.int32)
    return Case(loss, params, {}, {"ids": ids, "tag": tag, "y": np.ones(samples, np.float32)})


def inside(case: Case, strategy: Any, schedule: str = "1F1B", **options: Any) -> Any:
    pipeline = bx.Pipeline(schedule, clock="counted")
    return make(case, {"pipe": pipeline, "data": strategy}, (2, 2), optimizer=CLIPPED, **options)


@functools.cache
def by_rows() -> Any:
    """A step that several tests train by: it keeps no state."""
    return inside(tabled(), bx.Hybrid(TABLES, dense=bx.DataParallel()))


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZB-H1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dense", [bx.DataParallel(), pytest.param(bx.FullySharded(min_bytes=0), marks=pytest.mark.slow)]
)
def test_rows_are_exchanged_and_train_as_on_one_device(schedule: str, dense: Any) -> None:
    case = tabled()
    is_shared = schedule == "1F1B" and dense == bx.DataParallel()
    step = by_rows() if is_shared else inside(case, bx.Hybrid(TABLES, dense=dense), schedule)
    state = same_updates(case, step, optimizer=CLIPPED)
    for name in ("words", "tags"):
        leaf = state.params[name]
        assert leaf.sharding.spec == jax.P("data")
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {leaf.shape[0] // 2}
    told = {one.path: (str(one.placements[1]), one.why) for one in step.plan.variables}
    assert told["params/words"][0] == told["params/tags"][0] == "rows"
    assert told["params/both"][1].endswith("another stage reads it, too: whole")
    again = inside(case, bx.Hybrid(TABLES, dense=dense), schedule, plan=bx.Plan.from_json(step.plan.to_json()))
    assert again.plan == step.plan


BESIDE: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "first on two places": ((3, 2), {"stages": (2, 1)}, {}),
    "last on two places": ((3, 2), {"stages": (1, 2)}, {}),
    "again": ((2, 2), {"recompute": True}, {}),
    "over two axes": ((2, 2, 2), {}, {"model": bx.Hybrid(TABLES)}),
    "split": ((2, 2, 2), {}, {"model": bx.TensorParallel(min_bytes=0)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_rows_beside_other_ways_to_divide_a_stage(name: str) -> None:
    shape, options, others = BESIDE[name]
    pipeline = bx.Pipeline("ZB-H1", clock="counted", **options)
    strategies = {"pipe": pipeline, "data": bx.Hybrid(TABLES), **others}
    case = tabled(48)
    step = make(case, strategies, shape, optimizer=CLIPPED)
    same_updates(case, step, optimizer=CLIPPED)
    told = {one.path: [*map(str, one.placements)] for one in step.plan.variables}
    assert "rows" in told["params/words"]
    assert "rows" in told["params/tags"]


@pytest.mark.parametrize(
    "strategy", [bx.Hybrid(TABLES), pytest.param(bx.DataParallel(), marks=pytest.mark.slow)], ids=["hybrid", "whole"]
)
def test_a_table_by_rows_is_in_no_collective(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, compiled = list[str](), Home.compile

    def compiling(home: Home, *args: Any, **options: Any) -> Any:
        run = compiled(home, *args, **options)

        def call(*args: Any) -> Any:
            texts.append(run.lower(*args).compile().as_text())
            return run(*args)

        return call

    monkeypatch.setattr(Home, "compile", compiling)
    case = tabled()
    step = inside(case, strategy)
    step._work.gradients(step.init(jax.random.key(0)), [Given(leaf, None) for leaf in jax.tree.leaves(case.batch)])
    lines = [line for text in texts for line in text.splitlines()]
    sent = [line for line in lines if re.search(r" (all-reduce|all-gather|reduce-scatter)(-start)?\(", line)]
    shapes = [re.findall(r"f32\[([\d,]+)\]", line.partition("(%")[0]) for line in sent]
    most = max(math.prod(map(int, shape.split(","))) for found in shapes for shape in found)
    is_whole = strategy == bx.DataParallel()
    assert (most >= WORDS * 8) == is_whole
    assert (most >= WORDS * 8 // 4) == is_whole
    assert any(" all-to-all(" in line for line in lines) != is_whole


def test_tables_are_read_saved_and_cut_otherwise(tmp_path: Path) -> None:
    case, step = tabled(), by_rows()
    other = make(case, {"pipe": bx.Pipeline("GPipe", clock="counted")}, (2,), optimizer=CLIPPED)
    state, expected = step.init(jax.random.key(0)), other.init(jax.random.key(0))
    found, wanted = step.evaluate(state, case.batch), other.evaluate(expected, case.batch)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-6)
    read = step.wrap(lambda params, batch: params["words"][batch["ids"]])(state, case.batch)
    np.testing.assert_array_equal(read, np.asarray(step.whole_params(state)["words"])[case.batch["ids"]])
    state, _ = step.update(state, case.batch)
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save(state)
        saver.wait()
        for one in (other, step):
            restored = one.whole_params(saver.restore(one.state_specs))
            jax.tree.map(np.testing.assert_array_equal, restored, step.whole_params(state))


def test_a_table_that_devices_do_not_divide_stays_whole() -> None:
    step = inside(tabled(), bx.Hybrid({"params/odd": bx.Rows()}))
    told = {one.path: (str(one.placements[1]), one.why) for one in step.plan.variables}
    assert told["params/odd"] == (
        "replicated", "pipe: pipeline: with the stage that reads it; 2 devices do not divide its 15 rows: whole",
    )  # fmt: skip


def test_what_moves_rows_otherwise_is_refused() -> None:
    case = tabled()
    for strategy, given in (
        (bx.Hybrid(row_optimizers={"*": row_adagrad(0.1)}), "row_optimizers"),
        (bx.Hybrid(out_of_range="raise"), 'out_of_range="raise"'),
    ):
        with refused(ArgumentError, rf"strategies\['data'\] has {given}, which stages do not have yet: leave it out"):
            inside(case, strategy)
    with refused(ArgumentError, "asks for the rows of params/w1, and these cannot be exchanged: used whole by dot_"):
        inside(case, bx.Hybrid({"params/w1": bx.Rows()}))
