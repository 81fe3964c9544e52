"""Knobs of a plan on real loaders, checkpointers and steps: read, set while they run, and built with."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh

import braidax.parallel as parallel
from braidax.checkpoint import Adaptive, Checkpointer, Every
from braidax.data import DataLoader, Knobs
from braidax.errors import ArgumentError
from braidax.parallel import KNOBS, ComputingKnobs, PlannedKnobs
from braidax.tune import (
    apply_knobs,
    checkpointer_options,
    controllers_paused,
    fit_options,
    hot_knobs,
    loader_options,
    parallelize_options,
    read_knobs,
)
from tests.support.data.numbered import Numbers, ids, peeked

BATCH = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (4, 8)), "v": jnp.ones((8, 1))}


def loss(params: Any, batch: Any) -> jax.Array:
    return (jnp.tanh(batch["x"] @ params["w"]) @ params["v"]).mean()


def make(strategies: Any = None, mesh: Mesh | None = None, **options: Any) -> Any:
    mesh = jax.make_mesh((2,), ("data",)) if mesh is None else mesh
    return parallel.parallelize(loss, optax.sgd(0.1), mesh, strategies, init=init, batch=BATCH, **options)


@pytest.fixture
def loader() -> Iterator[DataLoader]:
    with DataLoader(Numbers(64), batch_size=8, epochs=None) as made:
        yield made


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "run", Adaptive()) as made:
        yield made


def test_no_batch_ahead_is_read_set_and_built_with_as_such(loader: DataLoader) -> None:
    loader.knobs = Knobs(prefetch=0)
    assert read_knobs(loader).loading.prefetch == 0
    assert read_knobs(loader, adapted="fixed").loading.prefetch == 0
    knobs = PlannedKnobs().with_values({"loading.prefetch": 0})
    assert loader_options(knobs)["knobs"] == Knobs(prefetch=0)
    loader.knobs = Knobs()
    assert apply_knobs(knobs, loader) == ()
    assert loader.knobs == Knobs(prefetch=0)


def test_what_is_made_by_default_has_the_default_of_every_knob(loader: DataLoader, saver: Checkpointer) -> None:
    step = make({"data": parallel.DataParallel()})
    knobs = read_knobs(loader, saver, step)
    assert knobs.changed() == {}
    assert knobs.machine is not None
    assert knobs.machine == step.plan.knobs.machine
    assert {one.name: one.default for one in KNOBS} == PlannedKnobs().values()


def test_every_hot_knob_is_listed_read_and_set(loader: DataLoader, saver: Checkpointer) -> None:
    values = {
        "loading.threads": 5,
        "loading.prefetch": 4,
        "loading.max_bytes": 1 << 20,
        "loading.read_bytes": 999,
        "loading.hedge_seconds": 0.5,
        "checkpointing.every": 37,
        "checkpointing.snapshot": "at once",
        "checkpointing.limit_bytes_per_second": 1e6,
    }
    live = {one.knob.name: one for one in hot_knobs(loader, saver)}
    assert sorted(live) == sorted(values) == sorted(one.name for one in KNOBS if one.change == "hot")
    for name, value in values.items():
        live[name].write(value)
        assert live[name].read() == value
    stats = loader.stats()
    assert (stats.threads, stats.prefetch, loader.knobs.read_bytes, loader.knobs.hedge_seconds) == (5, 4, 999, 0.5)
    assert (saver.spacing.num_updates, saver.spacing.paused) == (37, True)
    assert (saver.snapshot, saver.limit_bytes_per_second) == ("at once", 1e6)
    assert read_knobs(loader, saver).changed() == values


def test_a_value_out_of_its_range_changes_nothing(loader: DataLoader, saver: Checkpointer) -> None:
    live = {one.knob.name: one for one in hot_knobs(loader, saver)}
    with pytest.raises(
        ArgumentError, match=r"knob loading\.threads=0 is out of its range: expected 1 or more, or None"
    ):
        live["loading.threads"].write(0)
    with pytest.raises(ArgumentError, match=r"knob checkpointing\.every=0 is out of its range: expected 1 or more"):
        live["checkpointing.every"].write(0)
    assert read_knobs(loader, saver).changed() == {}


def test_knobs_are_set_between_batches_and_batches_stay_the_same(loader: DataLoader) -> None:
    loader.knobs = Knobs(prefetch=2)
    expected, read = peeked(loader, 6), list[int]()
    source = loader.source
    assert isinstance(source, Numbers)
    source.before = lambda indices: read.append(len(indices))
    got: list[list[int]] = []
    for batch in loader:
        got.append(ids(batch))
        if len(got) == 2:
            assert max(read) > 1
            sample = 6 * 4 + 4
            assert apply_knobs(read_knobs(loader).with_values({"loading.read_bytes": sample}), loader) == ()
        if len(got) == 4:  # what was in flight was cut before
            read.clear()
        if len(got) == 6:
            break
    assert got == [list(batch) for batch in expected]
    assert {*read} == {1}


def test_numbers_are_fixed_and_given_back_to_what_adapts_them(loader: DataLoader, saver: Checkpointer) -> None:
    loader.depth.threads, loader.depth.prefetch = 7, 5
    assert read_knobs(loader, saver).changed() == {}
    fixed = read_knobs(loader, saver, adapted="fixed")
    assert fixed.changed() == {"loading.threads": 7, "loading.prefetch": 5, "checkpointing.every": 12}
    assert apply_knobs(fixed, loader, saver) == ()
    assert (loader.knobs.threads, loader.knobs.prefetch, saver.spacing.paused) == (7, 5, True)
    assert apply_knobs(PlannedKnobs(), loader, saver) == ()
    assert (loader.knobs.threads, loader.knobs.prefetch, saver.spacing.paused) == (None, None, False)


def test_what_cannot_be_changed_while_it_runs_is_named(loader: DataLoader, tmp_path: Path) -> None:
    wanted = PlannedKnobs().with_values(
        {"loading.workers": "processes", "checkpointing.overhead": 0.1, "computing.coming": "known"}
    )
    step = make({"data": parallel.DataParallel()})
    with Checkpointer(tmp_path / "run", Every(10)) as saver:
        names = apply_knobs(wanted, loader, saver, step)
        assert names == ("loading.workers", "checkpointing.every", "checkpointing.overhead", "computing.coming")
        assert saver.spacing.num_updates == 10
        assert apply_knobs(wanted.with_values({"checkpointing.every": 20}), None, saver) == ("checkpointing.overhead",)
        assert saver.spacing.num_updates == 20
        write = {one.knob.name: one.write for one in hot_knobs(None, saver)}["checkpointing.every"]
        with pytest.raises(
            ArgumentError, match=r"this Checkpointer has Every\(num_updates=10\): make it with Adaptive"
        ):
            write(None)


def test_own_controllers_are_paused_and_go_on_as_they_were(
    loader: DataLoader, saver: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braidax.data.fetching.depth._PERIOD_SECONDS", 0.0)  # it decides after 8 batches
    monkeypatch.setattr("braidax.data.fetching.depth._BUSY", float("inf"))
    loader.depth.prefetch = 2  # that of batches of 64 samples and more
    loader.depth.paused = True
    with controllers_paused(loader, saver):
        assert (loader.depth.paused, saver.spacing.paused) == (True, True)
        saver.spacing.num_updates = 3
        due = [saver.spacing.due(number) for number in range(1, 10)]
        assert [number for number, is_due in enumerate(due, 1) if is_due] == [3, 6, 9]
    assert (loader.depth.paused, saver.spacing.paused) == (True, False)
    loader.depth.paused = False
    with controllers_paused(loader):
        before = loader.depth.threads, loader.depth.prefetch
        for _ in range(64):
            loader.depth.saw(wait_seconds=10.0)
        assert (loader.depth.threads, loader.depth.prefetch) == before
    assert not loader.depth.paused
    for _ in range(8):
        loader.depth.saw(wait_seconds=10.0)
    assert loader.depth.prefetch == before[1] + 2


def test_constructors_make_what_knobs_say(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "loading.threads": 2,
        "loading.prefetch": 3,
        "loading.read_bytes": 4096,
        "checkpointing.overhead": 0.2,
        "checkpointing.max_lost_seconds": 90.0,
    }
    knobs = PlannedKnobs().with_values(values)
    with DataLoader(Numbers(16), batch_size=8, **loader_options(knobs)) as loader:
        assert loader.knobs == Knobs(threads=2, prefetch=3, read_bytes=4096)
        with Checkpointer(tmp_path / "a", **checkpointer_options(knobs)) as saver:
            assert saver.interval == Adaptive(0.2, 90.0)
            assert read_knobs(loader, saver).changed() == values
    every = knobs.with_values({"checkpointing.every": 50})
    with Checkpointer(tmp_path / "b", **checkpointer_options(every)) as saver:
        assert saver.interval == Every(50)
    assert loader_options(knobs.with_values({"loading.workers": "processes"}))["workers"] == "processes"
    assert fit_options(PlannedKnobs(computing=ComputingKnobs(coming="known"))) == {"coming": "known"}


def test_a_step_is_made_again_by_its_plan() -> None:
    step = make({"data": parallel.FullySharded(min_bytes=0)}, microbatches=2)
    again = make(**parallelize_options(parallel.Plan.from_json(step.plan.to_json())))
    assert again.plan == step.plan
    mesh = jax.make_mesh((2,), ("stage",))
    staged = make({"stage": parallel.Pipeline("GPipe", clock="counted")}, mesh, microbatches=4)
    plan = parallel.Plan.from_json(staged.plan.to_json())
    followed = make(mesh=mesh, **parallelize_options(plan))
    assert followed.plan == plan
    assert followed.plan.pipeline.schedule.name == "GPipe"


def test_replaced_knobs_of_a_plan_stay_with_its_step() -> None:
    plan = make({"data": parallel.DataParallel()}).plan
    wanted = plan.knobs.with_values({"loading.threads": 3})
    assert make(plan=replace(plan, knobs=wanted)).plan.knobs == wanted
