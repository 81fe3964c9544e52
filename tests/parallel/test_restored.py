"""Tables by rows in checkpoints: restored to another number of shards, and to single-device form."""

import copy
import functools
import gc
import logging
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every, restore_safetensors
from braidax.comm import Communicator
from braidax.errors import ArgumentError, CheckpointError
from braidax.parallel.rows import row_adagrad
from braidax.parallel.state import Origin
from tests.support.checkpoint.told import told
from tests.support.data.jax_gang import jax_gang
from tests.support.parallel.hybrid import HYBRID, make_batch, make_step, placed, pooled
from tests.support.parallel.models import assert_close, copied, specs


@pytest.mark.slow  # below a table by rows goes on over other numbers of devices, and whole
def test_a_checkpoint_goes_on_over_another_number_of_devices_and_whole(tmp_path: Path) -> None:
    optimizer = optax.sgd(3e-2, momentum=0.9)
    eight = make_step(pooled, optimizer)
    state = eight.init(jax.random.key(3))
    for seed in range(2):
        state, _ = eight.update(state, make_batch(seed))
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save(state)

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    two = make_step(pooled, optimizer, mesh)
    assert placed(two)["params/table"] == {"rows"}
    with Checkpointer(tmp_path, Every(1)) as saver:
        restored = saver.restore(two.init(jax.random.key(4)))
    assert restored.params["table"].shape[1] == 2
    assert_close(copied(two.to_dense(restored)), copied(eight.to_dense(state)), atol=0)

    dense = make_step(pooled, optimizer, mesh, strategies={"data": bx.DataParallel()})
    whole, _ = dense.update(two.to_dense(restored), make_batch(2))
    for step, going_on in ((eight, state), (two, restored)):
        going_on, _ = step.update(going_on, make_batch(2))
        assert_close(copied(step.to_dense(going_on)), copied(whole), atol=2e-5)


WHOLE = {"data": bx.DataParallel()}
ADAM = optax.adam(optax.linear_schedule(5e-2, 1e-2, 9))
MOMENTUM = optax.sgd(5e-2, momentum=0.9)  # which compiles to less
ADAGRAD = optax.adagrad(0.3)
PLACED = {"HYBRID": HYBRID, "WHOLE": WHOLE}


class Cursor(NamedTuple):
    seed: int
    epoch: int
    position: int


def bag(params: Any, batch: Any) -> Any:
    return ((params["table"][batch["ids"]].mean(1) @ params["kernel"] - batch["target"]) ** 2).mean()


def begin(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return {"table": jax.random.normal(first, (37, 4)), "kernel": jax.random.normal(second, (4,))}


def some(seed: int, size: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 37, (size, 3)).astype(np.int32)
    return {"ids": ids, "target": random.normal(size=size).astype(np.float32)}


@functools.cache
def shared(optimizer: Any, placed: str) -> bx.Step:
    """A step that several tests train by: it keeps no state."""
    return small(optimizer, PLACED[placed])


def small(optimizer: Any, strategies: Any, *, num_devices: int = 2, batch: Any = None) -> bx.Step:
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    batch = specs(some(0) if batch is None else batch)
    return bx.parallelize(bag, optimizer, mesh, strategies, init=begin, batch=batch)


def same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for got, expected in zip(jax.tree.leaves(copied(one)), jax.tree.leaves(copied(other)), strict=True):
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def trained(step: bx.Step, seeds: range, state: bx.State | None = None) -> bx.State:
    state = step.init(jax.random.key(3)) if state is None else state
    for seed in seeds:
        state, _ = step.update(state, some(seed))
    return state


def save(root: Path, state: bx.State) -> None:
    with Checkpointer(root, Every(1)) as saver:
        saver.save((state, Cursor(1, 2, 3)))


def restored(root: Path, step: bx.Step, **options: Any) -> Any:
    with Checkpointer(root, Every(1)) as saver:
        return saver.restore((step.init(jax.random.key(4)), Cursor(0, 0, 0)), **options)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ("HYBRID", "WHOLE", "params/table was by rows and is whole now"),
        ("WHOLE", "HYBRID", "params/table was whole and is by rows now"),
    ],
)
def test_a_run_goes_on_by_another_plan_bit_for_bit(
    tmp_path: Path, before: str, now: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = (shared(ADAM, name) for name in (before, now))
    state = trained(old, range(3))
    save(tmp_path, state)
    with caplog.at_level(logging.INFO, logger="braidax"):
        got, cursor = restored(tmp_path, new)
    told = f"the plan has changed since it was saved: {words} (batch size, mesh and strategies decide that); it is rest"
    assert told in caplog.text
    assert cursor == Cursor(1, 2, 3)
    same_bits(new.to_dense(got), old.to_dense(state))
    same_bits(got, new.adopt(state, old))
    # It trains on, and what it saves restores as always.
    got = trained(new, range(3, 4), got)
    save(tmp_path / "on", got)
    same_bits(restored(tmp_path / "on", new)[0], got)


def test_there_and_back_is_the_same_state(tmp_path: Path) -> None:
    hybrid, whole = (shared(ADAGRAD, each) for each in PLACED)
    state = trained(hybrid, range(3))
    save(tmp_path / "1", state)
    save(tmp_path / "2", restored(tmp_path / "1", whole)[0])
    got, _ = restored(tmp_path / "2", hybrid)
    same_bits(hybrid.to_dense(got), hybrid.to_dense(state))
    same_bits(hybrid.to_dense(trained(hybrid, range(3, 5), got)), hybrid.to_dense(trained(hybrid, range(3, 5), state)))


def test_a_larger_batch_on_fewer_devices(tmp_path: Path) -> None:
    little, large = shared(ADAM, "HYBRID"), some(1, 256)
    state = trained(little, range(2))
    save(tmp_path, state)
    step = small(ADAM, HYBRID, num_devices=1, batch=large)
    assert (placed(little)["params/table"], placed(step)["params/table"]) == ({"rows"}, {"replicated"})
    got, _ = restored(tmp_path, step)
    same_bits(step.to_dense(got), little.to_dense(state))
    step.update(got, large)


def test_a_part_is_restored_with_nothing_put_off(tmp_path: Path) -> None:
    hybrid, whole = (shared(ADAM, each) for each in PLACED)
    state = trained(hybrid, range(4))
    save(tmp_path, state)
    settled = hybrid.settled(state)
    assert not np.array_equal(state.params["table"], settled.params["table"])
    for step in (hybrid, whole):
        like = step.init(jax.random.key(4))
        got, cursor = restored(tmp_path, step, only=("0/params/*", "1/epoch"))
        same_bits(got.params, step.adopt(state, hybrid).params)
        same_bits(got.opt_state, like.opt_state)
        assert (int(got.step), cursor) == (0, Cursor(0, 2, 0))
    same_bits(restored(tmp_path, hybrid, only="*")[0], state)


def test_without_a_way_one_line_says_what_has_changed(tmp_path: Path) -> None:
    own = small(ADAGRAD, {"data": bx.Hybrid(row_optimizers={"params/table": row_adagrad(0.1)})})
    whole = shared(ADAGRAD, "WHOLE")
    save(tmp_path / "whole", trained(whole, range(1)))
    with pytest.raises(CheckpointError) as caught:
        restored(tmp_path / "whole", own)
    assert str(caught.value) == (
        f"{tmp_path}/whole/step-00000000: the plan has changed since it was saved: params/table was whole and is by "
        "rows now (batch size, mesh and strategies decide that), and there is no way from there: row_optimizers moves "
        "['table'] in a way that is no dense optimizer's, so that single-device training has no such state: save and "
        "restore this step's own"
    )
    # What else has changed is still told leaf by leaf.
    adam = shared(ADAM, "HYBRID")
    save(tmp_path / "adam", trained(adam, range(1)))
    with pytest.raises(CheckpointError, match=r"is whole now .*, and more has: .*(\n.*)*leaf '0/opt_state/"):
        restored(tmp_path / "adam", whole)


def test_a_state_is_like_any_other_whoever_made_it() -> None:
    step = small(ADAGRAD, WHOLE)
    state = step.init(jax.random.key(0))
    other = replace(state, origin=Origin())
    assert jax.tree.structure(state) == jax.tree.structure(other)
    assert state.saved_as({"params/table": 37}, {}) is not None
    assert other.saved_as({"params/table": None}, {}) is None
    assert other.saved_as({"params/table": 37}, {}) == (
        "the plan has changed since it was saved: params/table was by rows and is whole now (batch size, mesh and "
        "strategies decide that); restore into what `init` of the step gives, which knows the way from there"
    )
    shapes = jax.tree.map(np.shape, state)
    assert pickle.loads(pickle.dumps(shapes)) == copy.deepcopy(shapes) == shapes
    made = weakref.ref(step)
    del step
    gc.collect()
    assert made() is None  # a state does not keep its step
    assert isinstance(state.saved_as({"params/table": 37}, {}), str)


PADDED = {name: bx.Gathered(0) for name in ("params/kernel", "params/up")}
FULLY = {
    "group": bx.DataParallel(),
    "data": bx.Hybrid({"params/table": bx.Rows()}, dense=bx.FullySharded(PADDED, min_bytes=0)),
}


@functools.cache
def over(num_devices: int, *, groups: int = 1) -> bx.Step:
    """A table of 37 rows by rows, and two dims of 9 that few counts of devices divide, sharded within each group."""

    def loss(params: Any, batch: Any) -> Any:
        x = params["table"][batch["ids"]].mean(1) @ params["up"].T
        return ((jnp.tanh(x) @ params["kernel"] - batch["target"]) ** 2).mean()

    def init(key: jax.Array) -> Any:
        shapes = {"table": (37, 4), "up": (9, 4), "kernel": (9,)}
        keys = jax.random.split(key, len(shapes))
        return {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    mesh = jax.make_mesh((groups, num_devices // groups), ("group", "data"), devices=jax.devices()[:num_devices])
    return bx.parallelize(loss, MOMENTUM, mesh, FULLY, init=init, batch=specs(some(0, 24)))


@pytest.mark.parametrize("counts", [(6, 8), pytest.param((4, 1, 6, 8), marks=pytest.mark.slow)])
def test_what_is_padded_goes_on_over_any_number_of_devices(tmp_path: Path, counts: tuple[int, ...]) -> None:
    steps = {count: over(count, groups=3 if count == 6 else 1) for count in counts}
    state = steps[8].init(jax.random.key(3))
    for seed in range(2):
        state, _ = steps[8].update(state, some(seed, 24))
    assert (state.params["kernel"].shape, state.params["table"].shape) == ((16,), (5, 8, 4))
    save(tmp_path / "8", state)
    file = load_file(next((tmp_path / "8").glob("*/arrays-00000.safetensors")))
    np.testing.assert_array_equal(file["0/params/kernel"], np.asarray(state.params["kernel"])[:9])
    assert [array.shape for name, array in file.items() if name.endswith("up")] == [(9, 4)] * 2
    now, before = state, "8"
    for count in counts:
        with Checkpointer(tmp_path / before, Every(1)) as saver:
            now, _ = saver.restore((steps[count].state_specs, Cursor(0, 0, 0)))
        assert now.params["kernel"].sharding == steps[count].state_shardings.params["kernel"]
        same_bits(steps[count].to_dense(now), steps[8].to_dense(state))
        before = f"{before}-{count}"
        save(tmp_path / before, now)
    same_bits(now, state)
    with Checkpointer(tmp_path / "-".join(map(str, (8, *counts[:-1]))), Every(1)) as saver:
        now, _ = saver.restore((steps[6].state_specs, Cursor(0, 0, 0)))
    now, state = (step.update(each, some(2, 24))[0] for step, each in ((steps[6], now), (steps[8], state)))
    assert_close(copied(steps[6].to_dense(now)), copied(steps[8].to_dense(state)), atol=1e-5)


def test_a_run_begins_with_the_parameters_of_a_file(tmp_path: Path) -> None:
    """By rows and padded; the optimizer begins with them, too, and nothing is held twice."""
    keeps = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))
    padded = {"data": bx.FullySharded({"params/*": bx.Gathered(0)}, min_bytes=0)}
    for step, is_kept in ((over(8), False), (small(keeps, padded), True)):
        begun = step.to_dense(step.init(jax.random.key(3)))
        params = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, begun.params)
        save_file({f"model.{name}": leaf for name, leaf in params.items()}, tmp_path / "model.safetensors")

        def named(path: str) -> str:
            return path.replace("params/", "model.")

        read = restore_safetensors(tmp_path / "model.safetensors", step.state_specs, only="params/*", name=named).params
        state = step.init(jax.random.key(3), read)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(read))
        found = step.to_dense(state)
        same_bits(found.params, params)
        same_bits(found.opt_state, params if is_kept else begun.opt_state)
        same_bits((found.key, found.step), (begun.key, begun.step))
        with pytest.raises(
            ArgumentError, match=r"params/\w+ is float32\[.*: pass parameters as `params` of step.state_s"
        ):
            step.init(jax.random.key(3), params)
    assert state.params["table"].shape == (38, 4)


def test_a_file_with_a_part_of_the_parameters_is_restored_into_a_state(tmp_path: Path) -> None:
    step = make_step(pooled, optax.sgd(3e-2))
    begun = step.init(jax.random.key(3))
    name = next(name for name in begun.params if name != "table")
    save_file({name: np.asarray(begun.params[name]) + 1}, tmp_path / "part.safetensors")

    def read(like: Any) -> Any:
        named = {"only": f"params/{name}", "name": lambda path: path.removeprefix("params/")}
        return restore_safetensors(tmp_path / "part.safetensors", like, **named)

    with pytest.raises(
        ArgumentError, match=r"^params/narrow \(and 2 others\) is a jax.Shape.*: restore .* into step.init"
    ):
        step.init(jax.random.key(3), read(step.state_specs).params)
    state = read(begun)
    same_bits(state.params[name], np.asarray(step.init(jax.random.key(3)).params[name]) + 1)
    assert state.params["table"] is begun.params["table"]


def of_two(comm: Communicator, root: Path) -> str:
    """Saves by rows, restores whole and by rows, and saves that, over the devices of two processes."""
    steps = [small(ADAM, each, num_devices=4) for each in (HYBRID, WHOLE)]
    state = trained(steps[0], range(3))
    save(root / "1", steps[0], state)
    whole, cursor = restored(root / "1", steps[1])
    assert cursor == Cursor(1, 2, 3)
    expected = steps[0].to_dense(state)
    for got, wanted in zip(jax.tree.leaves(whole.params), jax.tree.leaves(expected.params), strict=True):
        assert np.asarray(got.addressable_data(0)).tobytes() == np.asarray(wanted.addressable_data(0)).tobytes()
    save(root / "2", steps[1], whole)
    back, _ = restored(root / "2", steps[0])
    back = steps[0].to_dense(back)
    for got, wanted in zip(jax.tree.leaves(back.opt_state), jax.tree.leaves(expected.opt_state), strict=True):
        assert np.asarray(got.addressable_data(0)).tobytes() == np.asarray(wanted.addressable_data(0)).tobytes()
    return str(placed(steps[0])["params/table"])


@pytest.mark.slow
def test_two_processes_go_on_by_another_plan(tmp_path: Path) -> None:
    with jax_gang(2, 2) as gang:
        assert told(gang, of_two, tmp_path) == ["{'rows'}"] * 2
