"""What the compiled step promises: bytes as the formulas say, memory that does not grow with the table."""

import functools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

from braidax.parallel import rows
from tests.support.parallel.rows.training import Case, make_step, quickly, shardings, started

SIZES = {"f32": 4, "s32": 4}
WIDTH = 32
OPTIMIZER = rows.row_optimizer(optax.adagrad(0.1))


@functools.cache
def compiled(case: Case) -> Any:
    """The step with Adagrad."""
    optimizers = [OPTIMIZER] * len(case.num_rows)
    split = shardings(case)[1]
    ids, targets = (
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in each) for each in case.batch(0)
    )
    stored = shardings(case)[0]
    whole = [rows.stored_shape((size, *case.width), case.num_shards) for size in case.num_rows]
    tables = tuple(jax.ShapeDtypeStruct(shape, np.float32, sharding=stored) for shape in whole)
    states = tuple(
        jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=stored if leaf.shape else None),
            jax.eval_shape(OPTIMIZER.init, table),
        )
        for table in tables
    )
    return quickly(make_step(case, optimizers), tables, states, ids, targets)


def sent_bytes(text: str, num_peers: int) -> float:
    """What a device sends to others in all-to-alls among so many devices, outside of loops."""
    total = 0.0
    entry = text[text.index("ENTRY") :]
    for line in entry[: entry.index("\n}")].splitlines():
        if re.search(r" all-to-all(-start)?\(", line):
            groups = re.search(r"replica_groups=(\{\{([\d,]+)\}|\[\d+,(\d+)\])", line)
            assert groups is not None, line
            size = int(groups[3]) if groups[3] else len(groups[2].split(","))
            shapes = re.findall(r"(f32|s32)\[([\d,]+)\]", line.split(" all-to-all")[0])
            held = sum(SIZES[kind] * np.prod([int(n) for n in dims.split(",")]) for kind, dims in shapes)
            total += held * (size - 1) / size if size == num_peers else 0
    return total


def two_tables(num_rows: int) -> Case:
    return Case("8 explicit", ("data",), (num_rows, 3_000), (WIDTH,), ((800,), (80, 2)), slack=1.25)


def test_bytes_on_the_wire_are_those_of_the_formula() -> None:
    case = two_tables(200_000)
    (expected,) = rows.exchange_bytes(case.exchange(), WIDTH * 4)
    measured = sent_bytes(compiled(case).as_text(), 8)
    assert measured == pytest.approx(expected, rel=1e-6)
    assert expected == 7 * (16 + 4) * (4 + 2 * WIDTH * 4)
    assert rows.all_reduce_bytes(20_000, WIDTH * 4, 8) == 2 * 7 / 8 * 20_000 * WIDTH * 4
    assert rows.all_gather_bytes(100, WIDTH * 4, 8) == 7 * 100 * (4 + WIDTH * 4)


def test_bytes_across_the_outer_axis_are_those_of_aggregated_rows() -> None:
    case = Case("4x2 auto", ("data", "model"), (20_000,), (WIDTH,), ((1600,),), slack=1.0, aggregate="inner")
    exchange = case.exchange()
    inner, outer = rows.exchange_bytes(exchange, WIDTH * 4)
    text = compiled(case).as_text()
    assert sent_bytes(text, 2) == pytest.approx(inner, rel=1e-6)
    assert sent_bytes(text, 4) == pytest.approx(outer, rel=1e-6)
    assert inner == 1 * 100 * (4 + 2 * WIDTH * 4)


def test_memory_does_not_grow_with_the_table() -> None:
    memory = {num_rows: compiled(two_tables(num_rows)).memory_analysis() for num_rows in (50_000, 200_000)}
    for num_rows, found in memory.items():
        share = (num_rows // 8 + 3_000 // 8) * WIDTH * 4
        assert found.alias_size_in_bytes >= 2 * share  # tables and accumulators, in place
    small, large = (found.temp_size_in_bytes for found in memory.values())
    assert abs(large - small) < 1024
    assert large < 12 * 120 * WIDTH * 4 * 1.25  # a few buffers for the 120 ids of a device


def test_donated_tables_stay_where_they_are() -> None:
    case = two_tables(50_000)
    tables, states = started(case, [OPTIMIZER] * 2)
    where = [shard.data.unsafe_buffer_pointer() for table in tables for shard in table.addressable_shards]
    new, _, _ = compiled(case)(tables, states, *(tuple(x) for x in jax.device_put(case.batch(0), shardings(case)[1])))
    assert [shard.data.unsafe_buffer_pointer() for table in new for shard in table.addressable_shards] == where
    assert tables[0].is_deleted()
