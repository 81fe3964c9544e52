"""The two forms of `parallelize`, and what it says when they are mixed up."""

from typing import Any

import jax
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError, SpecError
from tests.support.parallel.models import init, make_batch, make_mesh, masked_loss, specs


@pytest.mark.parametrize("missing", ["init", "batch"])
def test_a_missing_argument_is_named(missing: str) -> None:
    given: dict[str, Any] = {"init": init, "batch": specs(make_batch())}
    del given[missing]
    with pytest.raises(ArgumentError, match=f"missing {missing}: bx.parallelize"):
        bx.parallelize(masked_loss, optax.sgd(0.1), make_mesh(), {}, **given)


def test_a_mesh_first_and_more_behind_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"@bx\.parallelize\(mesh, strategies\)"):
        bx.parallelize(make_mesh(), masked_loss, optax.sgd(0.1), {})  # pyright: ignore


def test_strategies_are_checked_when_decorating() -> None:
    with pytest.raises(SpecError, match=r"axis 'rows', and the mesh has \('data', 'model'\).*jax\.make_mesh"):
        bx.parallelize(make_mesh(), {"rows": bx.DataParallel()})


@pytest.mark.parametrize("wrong", [bx.DataParallel, "data", None])
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_strategy_is_named(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"strategies\['data'\] is .*expected a strategy object such as"):
        bx.parallelize(make_mesh(), {"data": wrong})


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (bx.DataParallel(), r"strategies is DataParallel\(\), .*: strategies=\{'data': bx\.DataParallel\(\)\}"),
        (bx.Hybrid(combine_bytes=8), r"strategies=\{'data': bx\.Hybrid\(combine_bytes=8\)\}"),
        (bx.Hybrid, r"strategies=\{'data': bx\.DataParallel\(\)\}"),
        ("data", r"strategies is 'data', expected a dict that says what each mesh axis is for"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_dict_of_strategies_is_named(wrong: Any, remedy: str) -> None:
    with pytest.raises(ArgumentError, match=remedy):
        bx.parallelize(make_mesh(), wrong)
    with pytest.raises(ArgumentError, match=remedy):
        bx.parallelize(masked_loss, optax.sgd(0.1), make_mesh(), strategies=wrong, init=init, batch=specs(make_batch()))


def test_without_strategies_every_device_sees_all_samples() -> None:
    step = bx.parallelize(masked_loss, optax.sgd(0.1), make_mesh(), {}, init=init, batch=specs(make_batch(size=3)))
    assert step.batch_shardings["ids"].is_fully_replicated
    assert int(step.update(step.init(jax.random.key(0)), make_batch(size=3))[0].step) == 1


def test_strategies_and_placements_keep_their_contracts() -> None:
    assert isinstance(bx.DataParallel(), bx.Strategy)
    assert isinstance(bx.Replicated(), bx.Placement)


@pytest.mark.parametrize(("name", "at"), [("optimizer", 1), ("mesh", 2)])
@pytest.mark.usefixtures("unchecked")
def test_an_argument_of_another_kind_is_named(name: str, at: int) -> None:
    arguments: list[Any] = [masked_loss, optax.sgd(0.1), make_mesh(), {}]
    arguments[at] = "wrong"
    with pytest.raises(ArgumentError, match=f"{name} is 'wrong', expected"):
        bx.parallelize(*arguments, init=init, batch=specs(make_batch()))
