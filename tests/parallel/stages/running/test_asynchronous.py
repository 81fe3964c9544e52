"""Schedules that do not flush: each gradient at the weights that the definition says, each update where it belongs."""

from collections.abc import Callable
from dataclasses import replace
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
from braidax.parallel.stages.schedules import Kind, Operation, Schedule, double_buffered, pipedream, versions
from tests.support.parallel.models import recorded_events, refused, specs
from tests.support.parallel.stages.running.cases import Case, looped, mlp
from tests.support.parallel.stages.running.steps import init_of
from tests.support.program.cutting.models import draw

COUNT = 8
ADAMW = optax.adamw(1e-2, weight_decay=0.1)

Lag = Callable[[int, int, int], int]
"""The version with which a stage, of so many, computes a microbatch, as the papers define it."""

LAGS: dict[str, Lag] = {
    "PipeDream": lambda stage, count, each: max(each - (count - 1 - stage), 0),
    "PipeDream, vertical sync": lambda stage, count, each: max(each - (count - 1), 0),
    "2BW": lambda stage, count, each: max(each // count - 1, 0),
}


def layers(count: int = 4, width: int = 4, samples: int = 16) -> Case:
    """Layers with dropout, a variable that counts, a metric of samples; one leaf is read by nobody."""

    def loss(params: Any, batch: Any, key: Any, variables: Any) -> Any:
        x = batch["x"]
        for at in range(count):
            x = jnp.tanh(x @ params[f"w{at}"] + params[f"b{at}"])
        x = x * jax.random.bernoulli(key, 0.9, x.shape)
        wrong = (x.sum(-1) - batch["y"]) ** 2
        return wrong.mean(), {"wrong": wrong, "variables": {"seen": variables["seen"] + 1}}

    params = {f"w{at}": draw(width, width, seed=at) + jnp.eye(width) for at in range(count)}
    params |= {f"b{at}": draw(width, seed=20 + at) for at in range(count)} | {"unread": draw(3)}
    batch = {"x": draw(samples, width, seed=50), "y": draw(samples, seed=51)}
    return Case(loss, params, {"seen": jnp.zeros((), jnp.int32)}, batch)


def make(
    case: Case, schedule: str | Schedule, stages: int = 2, *, optimizer: Any = ADAMW, inner: Any = None, **options: Any
) -> Any:
    """A step of so many stages; with a strategy, `inner`, of two devices each."""
    names, shape = (("pipe", "data"), (stages, 2)) if inner else (("pipe",), (stages,))
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])
    strategies = {"pipe": bx.Pipeline(schedule, clock="counted")} | ({"data": inner} if inner else {})
    options = {"microbatches": COUNT, **options}
    return bx.parallelize(
        case.loss, optimizer, mesh, strategies, init=init_of(case), batch=specs(case.batch), **options
    )


def owners(step: Any, params: Any) -> list[Any]:
    """Of each stage, which elements of the parameters are its."""
    found: list[Any] = []
    for stage in step.plan.pipeline.stages:
        masks = jax.tree.map(lambda leaf: np.zeros(leaf.shape, bool), params)
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): mask for path, mask in _leaves(masks)}
        for part in stage.variables:
            assert part.owned
            named[part.path.removeprefix("params/")][slice(*part.rows) if part.rows else ...] = True
        found.append(masks)
    assert all(np.all(sum(map(np.int32, leaf)) == 1) for leaf in zip(*map(jax.tree.leaves, found), strict=True))
    return found


def _leaves(tree: Any) -> Any:
    return jax.tree_util.tree_leaves_with_path(tree)


def trained(step: Any, case: Case, optimizer: Any, lag: Lag, *, each: int = 1, calls: int = 2) -> tuple[Any, Any]:
    """Takes steps, and checks them against gradients of one device at stale weights. **Returns:** state, metrics."""
    masks = owners(step, case.params)
    gradients = jax.jit(jax.value_and_grad(case.loss, has_aux=True))
    seen_of = jax.jit(lambda stale: jax.tree.map(lambda *leaves: sum(leaves), *map(_masked, masks, stale)))

    @jax.jit
    def moved(params: Any, opt_state: Any, total: Any) -> Any:
        moves, opt_state = optimizer.update(jax.tree.map(lambda leaf: leaf / each, total), opt_state, params)
        return optax.apply_updates(params, moves), opt_state

    state, metrics = step.init(jax.random.key(3)), dict[str, Any]()
    newest, variables, key = step.whole_params(state), case.variables, state.key
    opt_state = optimizer.init(newest)
    for call in range(calls):
        state, metrics = step.update(state, case.batch)
        history, losses, total = [newest], list[Any](), jax.tree.map(jnp.zeros_like, newest)
        for number in range(COUNT):
            seen = seen_of([history[lag(stage, len(masks), number)] for stage in range(len(masks))])
            batch = {name: leaf[number::COUNT] for name, leaf in case.batch.items()}
            own = jax.random.fold_in(jax.random.fold_in(key, call), number)
            (loss, others), found = gradients(seen, batch, own, variables)
            variables, total = others["variables"], jax.tree.map(jnp.add, total, found)
            losses.append(loss)
            if (number + 1) % each == 0:
                newest, opt_state = moved(newest, opt_state, total)
                history.append(newest)
                total = jax.tree.map(jnp.zeros_like, total)
        np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-6)
    for (path, got), want in zip(_leaves(step.whole_params(state)), jax.tree.leaves(newest), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6, err_msg=str(path))
    jax.tree.map(np.testing.assert_array_equal, state.variables, variables)
    counts = [int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == jnp.int32]
    assert counts == [COUNT // each * calls] * len(counts)
    assert int(state.step) == calls
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == step.state_shardings
    return state, metrics


def _masked(masks: Any, params: Any) -> Any:
    return jax.tree.map(lambda mask, leaf: jnp.where(mask, leaf, 0), masks, params)


@pytest.mark.parametrize(
    ("schedule", "stages", "optimizer"),
    [
        ("PipeDream", 2, optax.adamw(optax.linear_schedule(1e-2, 1e-3, 12), weight_decay=0.1)),
        pytest.param("PipeDream", 3, optax.sgd(0.1), marks=pytest.mark.slow),
        pytest.param("PipeDream", 4, ADAMW, marks=pytest.mark.slow),
        pytest.param("PipeDream, vertical sync", 2, ADAMW, marks=pytest.mark.slow),
        pytest.param("PipeDream, vertical sync", 3, optax.sgd(0.1), marks=pytest.mark.slow),  # below it is run
        pytest.param("PipeDream, vertical sync", 4, optax.sgd(0.1), marks=pytest.mark.slow),
        pytest.param("2BW", 2, optax.sgd(0.1, momentum=0.9), marks=pytest.mark.slow),
        pytest.param("2BW", 4, ADAMW, marks=pytest.mark.slow),
    ],
)
def test_each_gradient_is_taken_at_the_weights_of_the_definition(schedule: str, stages: int, optimizer: Any) -> None:
    case = layers()
    step = make(case, schedule, stages, optimizer=optimizer)
    each = stages if schedule == "2BW" else 1
    _, metrics = trained(step, case, optimizer, LAGS[schedule], each=each)
    assert metrics["wrong"].shape == (16,)


@pytest.mark.parametrize(
    ("schedule", "inner"),
    [
        pytest.param("PipeDream", None, marks=pytest.mark.slow),
        pytest.param("PipeDream", bx.DataParallel(), marks=pytest.mark.slow),
        pytest.param("PipeDream, vertical sync", bx.FullySharded(min_bytes=0), marks=pytest.mark.slow),
        pytest.param("2BW", bx.FullySharded(min_bytes=0), marks=pytest.mark.slow),
    ],
)
def test_layers_of_a_loop_are_updated_by_the_stage_that_has_them(schedule: str, inner: Any) -> None:
    case = looped(width=6)
    step = make(case, schedule, optimizer=ADAMW, inner=inner)
    state, _ = trained(step, case, ADAMW, LAGS[schedule], each=2 if schedule == "2BW" else 1)
    assert [piece.shape[0] for piece in state.params["layers"]["w"]] == [3, 1]


def halved(schedule: Schedule) -> Schedule:
    """Each gradient of weights comes behind the next forward pass, which sees weights without it."""
    lists: list[tuple[Operation, ...]] = []
    for operations in schedule.lists:
        own, late = list[Operation](), list[Operation]()
        for one in operations:
            if one.kind is Kind.BACKWARD:
                own += [*late, replace(one, kind=Kind.INPUT)]
                late = [replace(one, kind=Kind.WEIGHT)]
            elif one.kind is Kind.UPDATE:
                late.append(one)
            else:
                own.append(one)
        lists.append((*own, *late))
    return schedule.with_lists(tuple(lists))


@pytest.mark.slow
def test_both_halves_of_a_gradient_take_the_same_weights() -> None:
    case = layers()
    schedule = halved(pipedream(2, COUNT))
    assert " ".join(map(str, schedule.lists[1][:8])) == "1F0 1I0 1F1 1W0 1U0 1I1 1F2 1W1"
    step = make(case, schedule, optimizer=optax.sgd(0.1))
    trained(step, case, optax.sgd(0.1), lambda stage, count, each: max(each - (count - stage), 0))


def test_versions_live_as_long_as_they_are_needed_and_the_old_state_gives_its_memory() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch
        for weights in params:
            x = jnp.tanh(x @ weights)
        return x.mean()

    width, most, order = 132, dict[int, int](), list[bool]()  # so large that a variable is no part of a buffer

    def count(operation: Operation, outputs: Any) -> None:
        device = jax.devices()[operation.stage]
        own = [one for one in jax.live_arrays() if one.shape == (width, width) and one.committed]
        held = sum(one.devices() == {device} for one in own)
        most[operation.stage] = max(most.get(operation.stage, 0), held)

    case = Case(loss, [draw(width, width, seed=at) for at in range(3)], {}, draw(16, width))
    mesh = jax.make_mesh((3,), ("pipe",), devices=jax.devices()[:3])
    for schedule in (pipedream(3, COUNT), pipedream(3, COUNT, vertical_sync=True), double_buffered(3, 9)):
        step: Any = bx.parallelize(
            loss, optax.sgd(0.1), mesh, {"pipe": bx.Pipeline(schedule, clock="counted")}, init=lambda key: case.params,
            batch=jax.ShapeDtypeStruct((2 * schedule.num_microbatches, width), jnp.float32),
            microbatches=schedule.num_microbatches,
        )  # fmt: skip
        batch = jnp.ones((2 * schedule.num_microbatches, width))
        state, _ = step.update(step.init(jax.random.key(0)), batch)
        most.clear()
        order.clear()

        def before(params: Any = state.params) -> None:
            order.append(any(leaf.is_deleted() for leaf in params))

        step._work.run.observe = count
        new, _ = step.update(state, batch, before_apply=before)
        step._work.run.observe = None
        assert order == [False]
        assert all(leaf.is_deleted() for leaf in state.params)
        assert not any(leaf.is_deleted() for leaf in new.params)
        sums = 1
        assert [most[stage] - sums for stage in range(3)] == [*versions(schedule).num_kept], schedule.name
        del state, new, step, before


def test_nothing_is_compiled_again_and_what_is_measured_stays_what_it_is() -> None:
    case = layers()
    step = make(case, "PipeDream", optimizer=optax.adam(1e-2))
    state, _ = step.update(step.init(jax.random.key(0)), case.batch)
    with recorded_events() as events:
        state, _ = step.update(state, jax.tree.map(np.array, case.batch))
    assert not [event for event in events if "backend_compile" in event or "trace" in event]
    before = step.whole_params(state)
    measured = step.measure(state, case.batch)
    assert [sum(one.operation.kind is Kind.UPDATE for one in own) for own in measured.timed] == [COUNT, COUNT]
    jax.tree.map(np.testing.assert_array_equal, step.whole_params(state), before)
    assert "U" in step.plan.timeline(measured=measured).split("measured: ")[1]
    step.update(state, case.batch)


def test_the_plan_tells_the_staleness_and_is_followed(tmp_path: Path) -> None:
    case = layers()
    step = make(case, "PipeDream, vertical sync", 3)
    text = " ".join(str(step.plan).split())
    assert "schedule PipeDream, vertical sync: " in text
    told = (
        "staleness gradients are applied late, by up to so many updates: 2 on stage 0, 2 on stage 1, 2 on stage 2; "
        "each stage makes 8 a batch, and holds 3, 3, 3 versions of its weights. It is not training on one device."
    )
    assert told in text
    flushing = make(case, "1F1B", 3)
    assert "staleness" not in str(flushing.plan)
    read = [[part.path[7:] for part in stage.variables] for stage in step.plan.pipeline.stages]
    sizes = [sum(case.params[name].nbytes for name in own if name != "unread") for own in read]
    more = [
        one.costs.held_bytes - other.costs.held_bytes
        for one, other in zip(step.plan.pipeline.stages, flushing.plan.pipeline.stages, strict=True)
    ]
    assert more == [2 * size for size in sizes]
    again = make(case, "PipeDream, vertical sync", 3, plan=type(step.plan).from_json(step.plan.to_json()))
    assert again.schedule == step.schedule
    assert again.schedule.weights == "vertical"
    assert len(step.plan.timeline(tmp_path / "page.html").splitlines()) == 9


@pytest.mark.slow  # test_checkpoints.py has states of schedules that flush, in other stages and in none
def test_a_state_is_saved_and_goes_on_in_the_same_stages_in_others_and_in_none(tmp_path: Path) -> None:
    case = looped()
    step = make(case, "PipeDream", optimizer=optax.adam(1e-2))
    state, _ = step.update(step.init(jax.random.key(3)), case.batch)
    whole = step.whole_params(state)
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save(state)
        saver.wait()
        expected, _ = step.update(state, case.batch)
        got, _ = step.update(saver.restore(step.state_specs), case.batch)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(_plain(one), _plain(other))
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        none: Any = bx.parallelize(
            case.loss, optax.adam(1e-2), mesh, {"data": bx.DataParallel()}, init=init_of(case),
            batch=specs(case.batch), microbatches=COUNT,
        )  # fmt: skip
        for other in (none, make(case, "2BW", optimizer=optax.adam(1e-2))):
            restored = saver.restore(other.state_specs)
            params = restored.params if other is none else other.whole_params(restored)
            jax.tree.map(np.testing.assert_array_equal, params, whole)
            assert int(restored.opt_state[0].count) == COUNT
            other.update(restored, case.batch)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LAGS)
def test_training_comes_as_far_as_that_of_one_device(schedule: str) -> None:
    """Against one device that takes as many updates, of the same samples each."""
    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(64, 8)).astype(np.float32)}
    batch["y"] = np.tanh(batch["x"] @ random.normal(size=(8, 8)) / 3).sum(-1).astype(np.float32)

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for weights in params:
            x = jnp.tanh(x @ weights)
        return ((x.sum(-1) - batch["y"]) ** 2).mean()

    case = Case(loss, [draw(8, 8, seed=at) / 3 + jnp.eye(8) for at in range(3)], {}, batch)
    each = 3 if schedule == "2BW" else 1
    mesh, count = jax.make_mesh((3,), ("pipe",), devices=jax.devices()[:3]), 8 if each == 1 else 6
    batch = {name: leaf[: 8 * count] for name, leaf in batch.items()}
    step = bx.parallelize(
        loss, optax.sgd(0.02), mesh, {"pipe": bx.Pipeline(schedule, clock="counted")}, init=lambda key: case.params,
        batch=specs(batch), microbatches=count,
    )  # fmt: skip
    state, losses = step.init(jax.random.key(0)), list[float]()
    for _ in range(40):
        state, metrics = step.update(state, batch)
        losses.append(float(metrics["loss"]))

    @jax.jit
    def synchronous(params: Any) -> Any:
        def epoch(params: Any, _: Any) -> Any:
            found: list[Any] = []
            for update in range(count // each):
                own = np.arange(8 * count) % count // each == update
                value, gradients = jax.value_and_grad(loss)(params, {name: leaf[own] for name, leaf in batch.items()})
                params = jax.tree.map(lambda one, two: one - 0.02 * two, params, gradients)
                found.append(value)
            return params, jnp.stack(found).mean()

        return jax.lax.scan(epoch, params, None, 40)[1]

    expected = synchronous(case.params)
    assert losses[-1] < losses[0] / 10
    np.testing.assert_allclose(losses[-1], expected[-1], rtol=0.1)
    assert losses[1] != pytest.approx(float(expected[1]), rel=1e-4)


def reducing() -> Any:
    return optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())


REFUSED: dict[str, tuple[Callable[[], Case], Callable[[Case], Any], str]] = {
    "tied": (
        lambda: mlp(4),
        lambda case: make(case, "PipeDream"),
        "params/tied is read by stages 0 and 1, and by schedule 'PipeDream' stages update at different moments",
    ),
    "norm": (
        layers,
        lambda case: make(case, "2BW", optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))),
        r"optimizer takes what several stages have \(.* takes values of places \[0, 1\]\), and by schedule '2BW' st",
    ),
    "if finite": (
        layers,
        lambda case: make(case, "PipeDream", optimizer=optax.apply_if_finite(optax.sgd(0.1), 2)),
        "optimizer takes what several stages have",
    ),
    "loss": (
        layers,
        lambda case: make(case, "PipeDream", optimizer=reducing()),
        "optimizer takes the loss, and by schedule 'PipeDream' stages update at different moments",
    ),
    "metric": (
        layers,
        lambda case: make(case, "PipeDream", metrics=("grad_norm",)),
        "metrics has 'grad_norm', and by schedule 'PipeDream' stages update at different moments",
    ),
    "updates": (
        layers,
        lambda case: make(case, "2BW", 3),
        "microbatches_per_update=3 does not divide num_microbatches=8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_without_a_flush_is_refused(name: str) -> None:
    model, call, words = REFUSED[name]
    case = model()
    with refused(ArgumentError, words):
        call(case)


@pytest.mark.slow
def test_a_norm_of_what_a_single_stage_has_and_a_variable_that_stays_are_right() -> None:
    case = layers()
    labels = {name: "clipped" if name == "w0" else "still" if name == "w3" else "plain" for name in case.params}
    optimizers: Any = {
        "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), "still": optax.set_to_zero(),
        "plain": optax.adam(1e-2),
    }  # fmt: skip
    optimizer = optax.multi_transform(optimizers, labels)
    step = make(case, "PipeDream", optimizer=optimizer)
    trained(step, case, optimizer, LAGS["PipeDream"])
