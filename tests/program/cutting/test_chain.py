"""Where a loss may be cut, and what its stages are."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from braidax.errors import ArgumentError
from braidax.program import Border, Chain, Stage, trace
from tests.support.program.cutting.models import Case, draw, gpt, layers, residual


def leaves_of(stage: Stage, argument: int = 0) -> dict[str, Any]:
    return {leaf.name: leaf.rows for leaf in stage.leaves if leaf.argument == argument}


def cut_everywhere(case: Case) -> tuple[tuple[Border, ...], tuple[Stage, ...]]:
    chain = Chain(case.traced())
    return chain.borders(), chain.stages(chain.borders())


def test_layers_are_cut_apart_with_their_own_parameters_labels_and_penalties() -> None:
    borders, stages = cut_everywhere(layers())
    assert len(borders) == 5
    assert [leaves_of(stage) for stage in stages] == [{f"b{at}": None, f"w{at}": None} for at in range(6)]
    assert [leaves_of(stage, 1) for stage in stages] == [{"x": None}, {}, {}, {}, {}, {"y": None}]
    sizes = [sorted(one.size for one in stage.incoming) for stage in stages]
    assert sizes[0] == []
    assert all(found[-1] == 32 and found[:-1] == [1] * (len(found) - 1) for found in sizes[1:])  # sums of penalties
    assert [stage.results for stage in stages] == [(), (), (), (), (), (0, 1, 2, 3)]
    assert [border.live_bytes for border in borders] == [4 * sum(found) for found in sizes[1:]]


def test_a_scan_is_cut_between_iterations_and_stages_take_their_rows() -> None:
    borders, _ = cut_everywhere(gpt())
    assert [border.iteration for border in borders[:6]] == [0, 1, 2, 3, 4, 5]
    chain = Chain(gpt().traced())
    stages = chain.stages([borders[4], borders[2]])
    names = ("down", "out", "qkv", "scale", "up")
    found = [{name: rows for name, rows in leaves_of(stage).items() if "/" in name} for stage in stages]
    expected = [(0, 2), (2, 4), (4, 6)]
    assert found == [{f"layers/{name}": rows for name in names} for rows in expected]
    assert [{"table", "places"} & leaves_of(stage).keys() for stage in stages] == [
        {"table", "places"}, set(), {"table"}
    ]  # fmt: skip
    assert [sorted(leaves_of(stage, 3)) for stage in stages] == [["ids"], [], ["ids", "mask"]]
    assert ["scan[" in str(stage.program.closed) for stage in stages] == [True] * 3
    assert ["remat" in str(stage.program.closed) for stage in stages] == [True] * 3
    qkv = [leaf.num_bytes for leaf in stages[1].leaves if leaf.name == "layers/qkv"]
    assert qkv == [2 * 8 * 24 * 4]
    assert [one.shape for one in stages[1].incoming] == [(4, 5, 8), (2,)]
    assert stages[0].outgoing == stages[1].incoming
    assert borders[2].live_bytes == (4 * 5 * 8 + 2) * 2


def test_variables_are_given_by_the_stage_that_has_them() -> None:
    _, stages = cut_everywhere(residual(norm=True))
    names = [sorted(leaves_of(stage, 1)) for stage in stages]
    assert names == [[], ["one_a"], ["one_b"], ["two_a"], ["two_b"], [], []]
    assert [stage.results for stage in stages] == [(), (1,), (2,), (3,), (4,), (), (0,)]
    chain = Chain(gpt().traced())
    assert [stage.results for stage in chain.stages([chain.borders()[3]])] == [(), (0, 1, 2)]


def test_the_loss_is_given_by_the_last_stage_also_where_more_follows() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch @ params["a"])
        value = (x**2).mean()
        return value, (jnp.tanh(x @ params["b"]) @ params["c"]).sum()

    params = {name: draw(3, 3, seed=at) for at, name in enumerate("abc")}
    chain = Chain(trace(loss, params, draw(8, 3)))
    stages = chain.stages(chain.borders())
    assert [stage.results for stage in stages] == [(), (), (0, 1)]
    assert [[one.shape for one in stage.incoming] for stage in stages] == [[], [(8, 3), ()], [(), (8, 3)]]


def test_a_penalty_that_is_needed_before_its_parameters_are_used() -> None:
    def loss(params: Any, batch: Any) -> Any:
        rows, penalty = params["table"][batch["ids"]], jnp.sum(params["table"] ** 2)
        x = jnp.tanh(batch["x"] @ params["a"] + penalty)
        return jnp.tanh(x @ params["b"] + rows @ params["c"]).sum()

    params = {name: draw(3, 3, seed=at) for at, name in enumerate(("table", "a", "b", "c"))}
    batch = {"x": draw(4, 3), "ids": jnp.arange(4) % 3}
    program = trace(loss, params, batch)
    chain = Chain(program)
    incoming: tuple[Any, ...] = ()
    for stage in chain.stages(chain.borders()):
        incoming, results = stage.program(*stage.take(params, batch), incoming)
        if stage.results:
            assert results[0] == program(params, batch)


def test_what_a_stage_takes_of_the_arguments() -> None:
    case = gpt()
    chain = Chain(case.traced())
    stage = chain.stages([chain.borders()[2]])[1]
    params, variables, key, batch = stage.take(*case.args)
    assert params["layers"]["up"].tolist() == case.args[0]["layers"]["up"][2:].tolist()
    assert params["places"] is None
    assert variables["steps"].tolist() == 0
    assert key is case.args[2]
    assert batch["ids"] is case.args[3]["ids"]


def test_wide_places_beside_narrow_ones_are_no_borders() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch
        for at in range(20):
            x = x + jnp.tanh(x @ params["up"][at]) @ params["down"][at]
        return (x**2).sum()

    up, down = ([draw(*shape, seed=at) for at in range(20)] for shape in ((4, 32), (32, 4)))
    program = trace(loss, {"up": up, "down": down}, draw(8, 4))
    assert [border.live_bytes for border in Chain(program).borders()] == [8 * 4 * 4] * 19


def test_of_places_about_as_narrow_the_one_is_taken_that_fewest_arrays_cross() -> None:
    """Each has its price in a message: what a layer begins with is computed by the stage that has it."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch
        for w in params:
            x = x + jnp.tanh((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) @ w)
        return (x**2).sum()

    params = [draw(64, 64, seed=at) for at in range(3)]
    program = trace(loss, params, draw(8, 64))
    chain = Chain(program)
    borders = chain.borders()
    assert [border.live_bytes for border in borders] == [8 * 64 * 4] * 2
    assert [[one.shape for one in stage.incoming] for stage in chain.stages(borders)] == [[], [(8, 64)], [(8, 64)]]


def test_named_scopes() -> None:
    case = layers()
    chain = Chain(case.traced())
    stages = chain.stages([chain.at_scope("layer_4"), chain.at_scope("layer_1")])
    assert [sorted(leaves_of(stage)) for stage in stages] == [
        ["b0", "w0"], ["b1", "b2", "b3", "w1", "w2", "w3"], ["b4", "b5", "w4", "w5"]
    ]  # fmt: skip
    nested = Chain(residual().traced())
    assert "two/a" in leaves_of(nested.stages([nested.at_scope("two")])[1])

    def mapped(params: Any, batch: Any) -> Any:
        def one(x: Any) -> Any:
            with jax.named_scope("outer"), jax.named_scope("inner"):
                return jnp.tanh(x @ params["w"])

        return jax.vmap(one)(batch @ params["v"]).sum()

    chain = Chain(trace(mapped, {"w": draw(3, 3), "v": draw(3, 3)}, draw(2, 3)))
    assert [sorted(leaves_of(stage)) for stage in chain.stages([chain.at_scope("outer/inner")])] == [["v"], ["w"]]


def test_scopes_that_are_not_there_are_refused() -> None:
    chain = Chain(layers().traced())
    with pytest.raises(ArgumentError, match=r"cuts has 'layer_9', which is no jax.named_scope outside .* 'layer_0'"):
        chain.at_scope("layer_9")
    with pytest.raises(ArgumentError, match="cuts has 'layer_0', before which the loss does nothing"):
        chain.at_scope("layer_0")


def test_borders_with_nothing_between_are_refused() -> None:
    chain = Chain(layers().traced())
    border = chain.borders()[1]
    with pytest.raises(ArgumentError, match=r"borders leave nothing to stage 1 \(before .*models.py:\d+\)"):
        chain.stages([border, border])


def test_a_loss_that_changes_a_reference_is_refused() -> None:
    def loss(params: Any, batch: Any) -> Any:
        held = jax.new_ref(params["w"])
        held[...] = held[...] * 2
        return (batch @ held[...]).sum()

    with pytest.raises(ArgumentError, match=r"the loss changes a reference .* at .*test_chain.py"):
        Chain(trace(loss, {"w": draw(3, 3)}, draw(2, 3)))
