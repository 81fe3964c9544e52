"""What plans say of all-reduces, parameter servers and hybrids: Parallax' formulas, by hand and beside the kernel."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx
from braidax.parallel.plan.costs.architectures import (
    ALL_REDUCE,
    HYBRID_ROWS,
    HYBRID_SERVED,
    SERVERS,
    Traffic,
    Workers,
    compared,
    traffic,
    workers_of,
)
from braidax.parallel.plan.planned.variable import Costs
from braidax.parallel.rows.touched import Touched
from tests.support.parallel.models import make_mesh

EIGHT = Workers(8, 1, "device", is_known=True)


def loss(params: Any, batch: Any) -> Any:
    return (params["table"][batch] @ params["weight"]).mean()


def make_plan(shapes: Any, strategy: Any = None, *, ids: tuple[int, ...], mesh: Any = None) -> bx.Plan:
    def init(key: jax.Array) -> Any:
        return {name: jnp.ones(shape) for name, shape in shapes.items()}

    strategies = {"data": bx.Hybrid() if strategy is None else strategy}
    made = jax.make_mesh((8,), ("data",)) if mesh is None else mesh
    return bx.parallelize(
        loss, optax.sgd(0.1), made, strategies, init=init, batch=jax.ShapeDtypeStruct(ids, jnp.int32)
    ).plan


def told(plan: bx.Plan) -> list[str]:
    """Returns the lines about architectures."""
    lines = str(plan).splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith("architectures")), None)
    return [] if first is None else lines[first : lines.index("", first)]


SPARSE: Any = {"table": (1000, 4), "weight": (4, 7)}
DENSE: Any = {"table": (40, 2), "weight": (2, 1000)}


def test_a_model_nearly_all_of_which_is_sparse() -> None:
    """A device has 4 ids of rows of 16 bytes; 112 bytes are dense."""
    plan = make_plan(SPARSE, ids=(16, 2))
    reduced = 2 * 7 / 8 * 112
    assert traffic(plan.variables, EIGHT) == [
        Traffic(ALL_REDUCE, reduced + 2 * 7 / 8 * 16_000, reduced + 2 * 7 / 8 * 16_000),
        Traffic(SERVERS, 112 + 4 * (16 + 16), 112 + 4 * 16, 8 * 112 + 4 * (16 + 16)),
        Traffic(HYBRID_SERVED, reduced + 4 * (16 + 16), reduced + 4 * 16, 4 * (16 + 16)),
        Traffic(HYBRID_ROWS, reduced + 4 * (4 + 2 * 16), reduced + 4 * (4 + 2 * 16)),
    ]
    head, columns, _, *rows, least, more = told(plan)
    assert (
        head == "architectures  8 devices and as many servers; each has a link of 1.25 GB/s each way, which is assumed"
    )
    assert [[cell.strip() for cell in line.split("  ") if cell] for line in (columns, *rows)] == [
        ["architecture", "a device sends", "receives", "a server", "time"],
        ["all-reduce of everything", "28.2 KB", "28.2 KB", "22.6 µs"],
        ["parameter servers", "≤ 240 bytes", "≤ 176 bytes", "≤ 1.02 KB", "≤ 0.819 µs"],
        ["hybrid, tables on servers", "≤ 324 bytes", "≤ 260 bytes", "≤ 128 bytes", "≤ 0.259 µs"],
        ["hybrid, rows on devices", "≤ 340 bytes", "≤ 340 bytes", "≤ 0.272 µs"],
    ]
    assert " ".join(f"{least} {more}".split()) == (
        "least hybrid, tables on servers: 99.3 % of the variables' bytes are in tables by rows, of which a device "
        "reads at most 0.4 % a step; what is dense is all-reduced: no server sends it to all 8 devices"
    )


def test_a_model_nearly_all_of_which_is_dense() -> None:
    """A device has 2 ids of rows of 8 bytes; 8,000 bytes are dense, in one variable."""
    plan = make_plan(DENSE, ids=(16, 1))
    reduced = 2 * 7 / 8 * 8_000
    assert traffic(plan.variables, EIGHT) == [
        Traffic(ALL_REDUCE, reduced + 2 * 7 / 8 * 320, reduced + 2 * 7 / 8 * 320),
        Traffic(SERVERS, 8_000 + 2 * (8 + 16), 8_000 + 2 * 8, 8 * 8_000 + 2 * (8 + 16)),
        Traffic(HYBRID_SERVED, reduced + 2 * (8 + 16), reduced + 2 * 8, 2 * (8 + 16)),
        Traffic(HYBRID_ROWS, reduced + 2 * (4 + 2 * 8), reduced + 2 * (4 + 2 * 8)),
    ]
    assert " ".join(" ".join(told(plan)[-2:]).split()) == (
        "least hybrid, rows on devices: 3.846 % of the variables' bytes are in tables by rows, of which a device reads "
        "at most 5 % a step; what is dense is all-reduced: no server sends it to all 8 devices"
    )


def variable(path: str, shape: tuple[int, ...], rows: float | None = None, **costs: Any) -> bx.PlannedVariable:
    num_bytes = 4
    for size in shape:
        num_bytes *= size
    placed = bx.Replicated() if rows is None else bx.Rows()
    return bx.PlannedVariable(path, shape, "float32", num_bytes, (placed,), "", costs=Costs(num_rows=rows, **costs))


def axis(strategy: str, size: int, rate: float | None = None) -> bx.PlannedAxis:
    return bx.PlannedAxis("data", size, strategy, rate)


def test_parameter_servers_win_where_what_is_dense_is_spread() -> None:
    """16 variables of 1,000 bytes on 8 servers: each link carries 16,000, and 28,000 of an all-reduce."""
    variables = [variable(str(at), (250,)) for at in range(16)] + [variable("t", (10, 1), 1, sent_bytes=12, alpha=0.1)]
    found = {one.architecture: one.most for one in traffic(variables, EIGHT)}
    assert found[SERVERS] == 8 * 2_000 + 4 + 16
    assert found[HYBRID_ROWS] == 28_000 + 12
    lines = compared(variables, [axis("Hybrid()", 8)], ["data"])
    assert "≤" not in " ".join(lines)  # rows were counted
    assert " ".join(" ".join(lines).split()).endswith(
        "least parameter servers: 0.2494 % of the variables' bytes are in tables by rows, of which a device reads "
        "10 % a step; what is dense crosses a link once each way, and an all-reduce of it twice"
    )


def test_what_is_frozen_is_read_and_has_no_gradient() -> None:
    still = replace(variable("still", (100,)), frozen=True)
    all_reduce, servers = traffic([variable("moved", (10,)), still], EIGHT)
    assert all_reduce == Traffic(ALL_REDUCE, 70, 70)
    assert servers == Traffic(SERVERS, 40, 440, 8 * 400)


def test_rows_in_fewer_bytes() -> None:
    """Of 4 numbers, 8 bytes as bfloat16, and 4 with a scale of 4 as int8."""
    wires: dict[Any, int] = {None: 16, "bfloat16": 8, "int8": 8}
    for wire, num_bytes in wires.items():
        one = replace(variable("t", (1000, 4), 5), placements=(bx.Served(wire=wire),))
        assert traffic([one], EIGHT)[1].received == 5 * num_bytes
        assert traffic([one], EIGHT)[1].sent == 5 * (num_bytes + 16)


def test_what_was_counted_is_no_bound() -> None:
    touched = Touched(1000, 8, 4, 2.5, 4, 1, 18.0)
    plan = make_plan(SPARSE, bx.Hybrid(touched={"params/table": touched}), ids=(16, 2))
    assert plan.variables[0].costs.num_rows == 2.5
    assert traffic(plan.variables, EIGHT)[1].received == 112 + 2.5 * 16
    assert "≤" not in "".join(told(plan))
    assert bx.Plan.from_json(plan.to_json()) == plan


def test_workers_that_a_plan_does_not_know_are_assumed() -> None:
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    lines = told(make_plan(SPARSE, ids=(16, 2), mesh=one))
    assert lines[0].startswith(
        "architectures  8 devices and as many servers, which is assumed; each has a link of 1.25 GB/s"
    )
    workers = workers_of([axis("ParameterServers()", 2)], ["data"])
    assert workers == Workers(8, 2, "worker", is_known=False)
    table = variable("t", (1000, 4), 300, sent_bytes=7)
    assert traffic([table], workers)[1].received == 600 * 16  # of both devices
    assert traffic([replace(table, costs=Costs(num_rows=800, sent_bytes=7))], workers)[1].received == 1000 * 16


def test_time_is_by_the_figures_of_a_machine() -> None:
    machine = bx.Machine(1e12, {"data": bx.Link(1e6)}, {"data": bx.Link(5e5)})
    dense = bx.FullySharded({"*": bx.Replicated()}, machine=machine)
    plan = make_plan(SPARSE, bx.Hybrid(dense=dense), ids=(16, 2))
    assert plan.axes[0].bytes_per_second == 5e5
    lines = told(plan)
    assert lines[0] == "architectures  8 devices and as many servers; each has a link of 500 kB/s each way"
    assert lines[3].split()[-2:] == ["56.4", "ms"]


def test_nothing_is_said_where_nobody_chose() -> None:
    wide: Any = {"table": (1000, 4), "weight": (4, 16)}
    assert not told(make_plan(SPARSE, bx.DataParallel(), ids=(16, 2)))
    assert told(make_plan(wide, ids=(16, 2)))
    assert not told(make_plan(wide, bx.Hybrid(dense=bx.FullySharded(min_bytes=0)), ids=(16, 2)))
    lines = compared([variable("w", (100,))], [axis("Hybrid()", 2)], ["data"])
    assert " ".join(lines[-1].split()) == (
        "least all-reduce of everything: no variable is by rows, so that a hybrid is an all-reduce of everything"
    )
    assert len(lines) == 6


def test_plans_that_were_written_before_say_nothing() -> None:
    tree = json.loads(make_plan(SPARSE, ids=(16, 2)).to_json())
    for entry in tree["variables"]:
        del entry["costs"]["num_rows"]
    for entry in tree["axes"]:
        del entry["bytes_per_second"]
    assert not told(bx.Plan.from_json(json.dumps(tree)))


LM1B: dict[str, tuple[tuple[int, ...], float | None]] = {  # rows as three batches of 2 x 256 x 20 words have them
    "embedding": ((793_470, 128), 3052.7),
    "softmax/weight": ((793_470, 128), 3099.3),
    "softmax/bias": ((793_470, 1), 3099.3),
    "lstm/bias": ((256,), None),
    "lstm/kernel": ((256, 256), None),
    "lstm/projection": ((64, 128), None),
}


def test_formulas_come_close_to_what_a_kernel_has_counted() -> None:
    """benchmarks/README.md, servers: megabytes that the host with most has sent in a step of LM1B, of two processes."""
    variables = [
        variable(path, shape, rows, alpha=None if rows is None else rows / shape[0])
        for path, (shape, rows) in LM1B.items()
    ]
    found = {one.architecture: one.sent / 1e6 for one in traffic(variables, Workers(2, 1, "device", is_known=True))}
    assert found[ALL_REDUCE] == pytest.approx(817, rel=0.005)
    assert found[HYBRID_SERVED] == pytest.approx(3.66, rel=0.02)
    assert found[SERVERS] == pytest.approx(3.59, rel=0.01)


def test_it_fits_a_page() -> None:
    plan = make_plan(SPARSE, ids=(16, 2), mesh=make_mesh("8 auto"))
    assert max(map(len, str(plan).splitlines())) <= 120
