"""A checkpoint of stages is that of the model: a run goes on in any other cut, with any schedule, or in none."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import CheckpointError
from tests.support.parallel.models import copied, specs
from tests.support.parallel.stages.running.cases import Case, looped
from tests.support.parallel.stages.running.steps import init_of
from tests.support.program.cutting.models import draw

CASE = looped(6, width=5)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))
PADDED = bx.FullySharded({"params/layers/w": bx.Gathered(1), "params/head": bx.Gathered(0)}, min_bytes=0)


def make(strategies: Any, shape: tuple[int, ...], *, case: Case = CASE, optimizer: Any = CLIPPED) -> Any:
    axes = [*strategies, "data"][: len(shape)]
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: int(np.prod(shape))])
    strategies = {name: strategies.get(name, bx.DataParallel()) for name in axes}
    return bx.parallelize(
        case.loss, optimizer, mesh, strategies, init=init_of(case), batch=specs(case.batch), microbatches=4
    )


def stages(schedule: str) -> dict[str, Any]:
    return {"stage": bx.Pipeline(schedule, clock="counted")}


def save(folder: Path, state: Any) -> Any:
    """Saves a state. **Returns:** the bytes of its arrays."""
    with Checkpointer(folder, Every(1)) as saver:
        saver.save((state, 5))
    (file,) = folder.glob("*/arrays-00000.safetensors")
    return file.read_bytes()


def restored(folder: Path, like: Any) -> Any:
    with Checkpointer(folder, Every(1)) as saver:
        state, number = saver.restore((like, 0))
    assert number == 5
    return state


ROWS = {"1F1B": [4, 2], "ZB-V": [2, 1, 2, 1]}
STEPS = {
    "none": lambda: make({"data": bx.DataParallel()}, (1,)),
    "1F1B": lambda: make(stages("1F1B"), (2,)),
    "ZB-V": lambda: make(stages("ZB-V"), (2, 2)),
    "sharded": lambda: make({"data": PADDED}, (4,)),
}


@pytest.mark.parametrize(
    ("made", "trained"),
    [
        (("none", "1F1B", "sharded"), ("none", "1F1B", "none")),
        pytest.param((*STEPS,), ("none", *STEPS, "1F1B", "none"), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_a_run_goes_on_in_any_cut_or_none_bit_for_bit(
    tmp_path: Path, made: tuple[str, ...], trained: tuple[str, ...]
) -> None:
    steps = {name: STEPS[name]() for name in made}
    none = steps["none"]
    state, expected = none.init(jax.random.key(3)), none.init(jax.random.key(3))
    for number, name in enumerate(trained):
        folder = tmp_path / str(number)
        before = save(folder, state)
        for other, step in steps.items():
            same = restored(folder, step.state_specs)
            assert jax.tree.map(lambda leaf: leaf.sharding, same) == step.state_shardings
            if other in ROWS:
                assert [piece.shape for piece in same.params["layers"]["w"]] == [(n, 5, 5) for n in ROWS[other]]
            assert save(tmp_path / f"{number}-{other}", same) == before  # the very file, whoever wrote it
        state, _ = steps[name].update(restored(folder, steps[name].state_specs), CASE.batch)
        expected, _ = none.update(expected, CASE.batch)
    assert steps["sharded"].state_specs.params["layers"]["w"].shape == (6, 8, 5)
    content = load_file(next((tmp_path / "0-1F1B").glob("*/arrays-00000.safetensors")))
    assert content["0/params/layers/w"].shape == content["0/opt_state/1/0/mu/layers/w"].shape == (6, 5, 5)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(copied(state)), jax.tree.leaves(copied(expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


def test_tables_by_rows_come_from_stages_and_go_to_them_by_way_of_whole_ones(tmp_path: Path) -> None:
    def loss(params: Any, batch: Any, variables: Any) -> Any:
        x = params["table"][batch["ids"]].mean(1)
        x, _ = jax.lax.scan(lambda x, weights: (jnp.tanh(x @ weights), None), x, params["layers"])
        return ((x.sum(-1) - batch["y"]) ** 2).mean(), {"variables": variables}

    params = {"table": draw(37, 4, seed=1), "layers": draw(4, 4, 4, seed=2)}
    batch = {"ids": jnp.arange(24).reshape(8, 3) % 5, "y": draw(8, seed=3)}
    case = Case(loss, params, {}, batch)
    adam = optax.adam(1e-2)
    two = make(stages("1F1B"), (2,), case=case, optimizer=adam)
    hybrid = make({"data": bx.Hybrid({"params/table": bx.Rows()})}, (2,), case=case, optimizer=adam)
    whole = make({"data": bx.DataParallel()}, (1,), case=case, optimizer=adam)
    before = save(tmp_path / "whole", whole.init(jax.random.key(3)))
    save(tmp_path / "stages", restored(tmp_path / "whole", two.state_specs))
    by_rows = restored(tmp_path / "stages", hybrid.state_specs)
    assert by_rows.params["table"].shape == (19, 2, 4)
    save(tmp_path / "rows", by_rows)
    with pytest.raises(CheckpointError) as caught:
        restored(tmp_path / "rows", two.state_specs)
    assert str(caught.value) == (
        f"{tmp_path}/rows/step-00000000: the plan has changed since it was saved: params/table was by rows and is "
        "whole now (batch size, mesh and strategies decide that), and there is no way from there into stages: restore "
        "it with a step of DataParallel(), save that, and restore this"
    )
    assert save(tmp_path / "again", restored(tmp_path / "rows", whole.state_specs)) == before
    assert save(tmp_path / "back", restored(tmp_path / "again", two.state_specs)) == before


def test_another_model_or_optimizer_does_not_match(tmp_path: Path) -> None:
    step = make(stages("1F1B"), (2,))
    save(tmp_path, make({"data": bx.DataParallel()}, (1,), optimizer=optax.sgd(1e-2)).init(jax.random.key(0)))
    with pytest.raises(CheckpointError) as caught:
        restored(tmp_path, step.state_specs)
    assert "does not match `like` in 7 of 13 leaves" in str(caught.value)
    assert "leaf '0/opt_state/1/0/mu/layers/w' (float32[6, 5, 5]) is in `like`, but not in the ch" in str(caught.value)
    larger = make(stages("1F1B"), (2,), case=looped(8, width=5), optimizer=optax.sgd(1e-2))
    with pytest.raises(CheckpointError) as caught:
        restored(tmp_path, larger.state_specs)
    assert "does not match `like` in 2 of 6 leaves" in str(caught.value)
    assert "leaf '0/params/layers/w' is float32[6, 5, 5] in the checkpoint, but float32[8, 5, 5]" in str(caught.value)
