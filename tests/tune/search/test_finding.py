"""A search on the devices that are here, and for some that are not."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import braidax as bx
from braidax.errors import ArgumentError
from braidax.parallel import Link, parallelize
from braidax.tune import Cluster, Found, plan
from braidax.tune.search import finding
from braidax.tune.search.candidates import candidates
from braidax.tune.search.ranking import rank
from braidax.tune.search.roles import HYBRID, ONE_EACH, STAGES, Offered
from braidax.tune.search.workload import Workload, workload
from tests.support.parallel.dense.models import MODELS
from tests.support.parallel.models import specs

MODEL = MODELS["mlp"]
GIVEN: dict[str, Any] = {"init": MODEL.init, "batch": specs(MODEL.batch(0))}
FAR = Cluster(4096, 4e14, Link(1e11, 5e-6), between=Link(1e10, 2e-5), devices_per_host=8)


@pytest.fixture(scope="module")
def found() -> Found:
    return plan(MODEL.loss, optax.adam(1e-3), measure=2, devices=jax.devices()[:2], **GIVEN)


def test_the_winner_is_the_fastest_that_was_measured_and_trains(found: Found) -> None:
    timed = [one.seconds for one in found.tried if one.seconds is not None]
    assert timed == sorted(timed)
    assert found.at == found.tried[0].at
    assert found.plan is not None
    mesh = jax.make_mesh(tuple(found.axes.values()), tuple(found.axes))
    step = parallelize(MODEL.loss, optax.adam(1e-3), mesh, found.strategies, plan=found.plan, **GIVEN)
    _, metrics = step.update(step.init(jax.random.key(0)), MODEL.batch(0))
    assert float(metrics["loss"]) > 0


def test_it_prints_a_table(found: Found) -> None:
    lines = str(found).splitlines()
    assert lines[0] == f"{len(found.ranked.many.sizes):,} candidates, of which 0 need too much memory"
    assert lines[1].split()[:2] == ["candidate", "predicted"]
    assert sum("wins" in line for line in lines) == 1


@pytest.mark.parametrize("compiled", [(HYBRID,), pytest.param((HYBRID, ONE_EACH), marks=pytest.mark.slow)])
def test_stages_and_rows_are_candidates_of_a_loss_that_has_a_use_for_them(compiled: tuple[int, ...]) -> None:
    model, optimizer = MODELS["dlrm"], optax.sgd(1e-3)
    given = {"init": model.init, "batch": specs(model.batch(0))}
    alone = finding._made(model.loss, optimizer, given, jax.devices()[:1])  # pyright: ignore[reportPrivateUsage]
    work = workload(alone, model.loss, optimizer, given)
    assert work.offered.most_stages > 2
    assert work.table_bytes > work.row_bytes > 0
    cluster = Cluster(2, 1e9, Link(1e8, 1e-5), memory_bytes=1 << 30)
    ranked = rank(candidates(2, 16, offered=work.offered), work, cluster)
    for role in (HYBRID, ONE_EACH):
        at = next(at for at in ranked.order if role in ranked.many.kinds[at])
        if role not in compiled:  # test_planned_pipeline.py has what stages hold
            continue
        on = cluster, jax.devices()[:2], "here"
        tried = finding._compiled(model.loss, optimizer, given, ranked, at, on)  # pyright: ignore[reportPrivateUsage]
        assert tried.fits, tried.why
        assert tried.step is not None
        assert (tried.step.plan.pipeline is not None) == (role == ONE_EACH)
        assert ranked.predicted.memory_bytes[at] / 3 < (tried.memory_bytes or 0) < 3 * ranked.predicted.memory_bytes[at]


def test_devices_that_are_not_here_are_not_compiled() -> None:
    far = plan(MODEL.loss, optax.adam(1e-3), cluster=FAR, **GIVEN)
    assert (far.tried, far.plan) == ((), None)
    assert bx.tune.Cluster is Cluster
    assert bx.plan is plan


@pytest.mark.usefixtures("aot")
def test_the_best_are_compiled_for_a_machine_that_is_not_here() -> None:
    eight = Cluster(8, 1e12, Link(1e11, 5e-6))
    found = plan(MODEL.loss, optax.adam(1e-3), cluster=eight, target="h100:8", measure=1, **GIVEN)
    (tried,) = found.tried
    assert tried.fits
    whole = [at for at in found.ranked.order if not np.isin(found.ranked.many.kinds[at], STAGES).any()]
    assert tried.at == found.at == whole[0]
    assert tried.step is not None
    assert tried.memory_bytes == tried.step.compile_for("h100:8").peak_bytes > 0  # pyright: ignore[reportAttributeAccessIssue]
    assert (tried.taken, found.plan) == ((), tried.step.plan)
    assert str(found).splitlines()[3].endswith("wins")
    with pytest.raises(ArgumentError, match=r"^measure=1: none of these could be run \(.*too large when compiled\)"):
        plan(
            MODEL.loss,
            optax.adam(1e-3),
            cluster=eight,
            target="h100:8",
            memory_bytes=int(min(found.ranked.predicted.memory_bytes[at] for at in whole)) + 1,
            measure=1,
            **GIVEN,
        )


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (None, "devices= has 4, whose grid has the axes of no candidate"),
        ("here", "target='here': all candidates that fit have stages, or axes"),
    ],
)
def test_meshes_that_a_grid_has_not_are_passed_by(
    monkeypatch: pytest.MonkeyPatch, target: str | None, told: str
) -> None:
    offered = Offered(tables=True, most_stages=2)
    work = Workload(flops=8e9, variable_bytes=800, state_bytes=1600, activation_bytes=6400, most_stages=2)
    ranked = rank(candidates(4, 16, offered=offered), work, Cluster(4, 1e9, Link(1e8, 1e-5)))
    where, make_mesh = finding.Where(None, None, target), jax.make_mesh

    def chosen(has: Callable[[int], bool], most: int = 3) -> list[int]:
        def made(sizes: Any, names: Any, **options: Any) -> Any:
            if not has(len(sizes)):
                raise NotImplementedError
            return make_mesh(sizes, names, **options)

        monkeypatch.setattr(jax, "make_mesh", made)
        return finding._compilable(ranked, where, jax.devices()[:4], most)  # pyright: ignore[reportPrivateUsage]

    of_two = [at for at in ranked.order if len(ranked.many.mesh(at)) == 2]
    whole = [at for at in of_two if not np.isin(ranked.many.kinds[at], STAGES).any()]
    assert 3 < len(whole) < len(of_two) < len(ranked.order)
    wanted = of_two if target is None else whole
    assert chosen(lambda count: count == 2) == wanted[:3]
    assert chosen(lambda count: count == 2, most=10_000) == wanted
    with pytest.raises(ArgumentError, match=f"^{told}"):
        chosen(lambda count: False)


def test_a_target_of_another_size_is_refused() -> None:
    for options, told in (({"cluster": FAR}, "the cluster 4,096"), ({}, "no cluster is given")):
        with pytest.raises(ArgumentError, match=rf"^target='here', which has 8 devices, and {told}: expected cluster="):
            plan(MODEL.loss, optax.adam(1e-3), target="here", **options, **GIVEN)


def test_limits_that_cannot_be_met_name_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"memory_bytes=10: it binds, .* the nearest, .* needs"):
        plan(MODEL.loss, optax.adam(1e-3), cluster=FAR, memory_bytes=10, **GIVEN)


def test_what_nobody_compiles_needs_room_beside_what_is_predicted() -> None:
    best = plan(MODEL.loss, optax.adam(1e-3), cluster=FAR, **GIVEN)
    memory = float(best.ranked.predicted.memory_bytes[best.at])
    for room, wins in ((1.751, True), (1.749, False)):
        found = plan(MODEL.loss, optax.adam(1e-3), cluster=FAR, memory_bytes=int(room * memory), **GIVEN)
        assert (found.ranked.name(found.at) == best.ranked.name(best.at)) == wins
        assert " or may, 75 % more than is predicted: target= would compile them\n" in str(found)


@pytest.mark.parametrize("name", ["measure", "memory_bytes"])
def test_numbers_that_are_none_are_refused(name: str) -> None:
    options: dict[str, Any] = {**GIVEN, name: 0}
    with pytest.raises(ArgumentError, match=f"{name}=0: expected"):
        plan(MODEL.loss, optax.adam(1e-3), **options)
