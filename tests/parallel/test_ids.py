"""The ids of real batches, as a step would see them, without a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.errors import ArgumentError, SpecError
from braidax.parallel.rows.ids import ids_program, measure_touched, see_ids, trace_reads
from braidax.parallel.rows.touched import count_touched
from tests.support.parallel.hybrid import LOSSES, ROWS, chained, init, make_batch, pooled, sampled, scanned
from tests.support.parallel.models import make_mesh

BATCHES = [make_batch(seed) for seed in range(3)]


def column(array: Any) -> np.ndarray:
    return np.asarray(array, np.int32).reshape(len(array), -1)


def test_touched_of_a_bag_and_a_column() -> None:
    found = measure_touched(pooled, init=init, batches=BATCHES, num_parts=8)
    assert found.unknown == {}
    assert set(found.tables) == {"params/table", "params/other"}
    table = found.tables["params/table"]
    assert table == count_touched([[batch["ids"]] for batch in BATCHES], num_rows=ROWS, num_parts=8)
    assert table.num_ids == 10
    assert table.alpha == np.mean([len(np.unique(batch["ids"])) for batch in BATCHES]) / ROWS
    columns = [[column(3 * batch["ids"][:, 1])] for batch in BATCHES]
    assert found.tables["params/other"] == count_touched(columns, num_rows=5 * ROWS, num_parts=8)


def test_a_scan_reads_the_same_samples() -> None:
    found = measure_touched(scanned, init=init, batches=BATCHES, num_parts=4)
    assert found.tables["params/table"] == count_touched(
        [[batch["ids"]] for batch in BATCHES], num_rows=ROWS, num_parts=4
    )


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ids_drawn_at_random_are_those_of_the_step(microbatches: int) -> None:
    key = jax.random.split(jax.random.key(5))[1]

    def lookups(step: int) -> list[np.ndarray]:
        """Of `other`: samples of each microbatch side by side; drawn classes, anew for each."""
        keys = [jax.random.fold_in(key, step)]
        if microbatches == 2:
            keys = [jax.random.fold_in(keys[0], number) for number in range(2)]
        classes = [jax.random.randint(one, (21,), 0, 5 * ROWS) for one in keys]
        true = BATCHES[step]["ids"][:, 2].reshape(-1, microbatches)
        return [true, np.stack(classes, axis=1).astype(np.int32)]

    key_of_run, traced = jax.random.key(5), trace_reads(sampled, init, BATCHES, microbatches=microbatches)
    seen = see_ids(traced, BATCHES, microbatches=microbatches, key=key_of_run).tables["params/other"]
    for step in range(3):
        for ids, expected in zip(seen.steps[step], lookups(step), strict=True):
            np.testing.assert_array_equal(ids, expected)
    found = measure_touched(
        sampled, init=init, batches=BATCHES, num_parts=8, microbatches=microbatches, key=key_of_run
    ).tables["params/other"]
    assert found == seen.touched(8)
    assert found.num_ids == (2 + 3 if microbatches == 1 else 2 * (1 + 3))


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_of_the_model_is_computed(loss: str) -> None:
    traced = trace_reads(LOSSES[loss], init, BATCHES)
    whole = str(traced.program.closed)
    assert "dot_general" in whole
    assert "tanh" in whole
    _, program = ids_program(traced.program, list(traced.reads.sparse.values()))
    text = str(program.closed)
    for operation in ("dot_general", "tanh", "gather[", "reduce_sum"):
        assert operation not in text
    assert program.in_specs[0] == ()
    assert all(spec.dtype == np.int32 for spec in program.out_specs)


def test_ids_that_parameters_decide_are_unknown() -> None:
    found = measure_touched(chained, init=init, batches=BATCHES, num_parts=8)
    assert set(found.tables) == {"params/table"}
    assert set(found.unknown) == {"params/other"}
    assert found.unknown["params/other"].startswith("its ids are computed from parameters or by callbacks with effects")
    nothing = measure_touched(lambda params, batch: params["kernel"].sum(), init=init, batches=BATCHES, num_parts=8)
    assert nothing == ({}, {})


@pytest.mark.parametrize("mesh", ["4x2 explicit", pytest.param("8 auto", marks=pytest.mark.slow)])
def test_global_arrays_tell_the_same(mesh: str) -> None:
    split = NamedSharding(make_mesh(mesh), P("data"))
    placed = [jax.device_put(batch, split) for batch in BATCHES]
    on_mesh = measure_touched(sampled, init=init, batches=placed, num_parts=8)
    assert on_mesh == measure_touched(sampled, init=init, batches=BATCHES, num_parts=8)


def test_ids_may_depend_on_variables() -> None:
    def shifted(params: Any, batch: Any, variables: Any) -> Any:
        rows = params["table"][(batch["ids"] + variables["shift"]) % ROWS]
        return rows.sum(), {"variables": {"shift": variables["shift"] + 1}}

    def begin(key: jax.Array) -> Any:
        return init(key), {"shift": jnp.int32(4)}

    found = measure_touched(shifted, init=begin, batches=BATCHES, num_parts=8)
    expected = [[(batch["ids"] + 4) % ROWS] for batch in BATCHES]
    assert found.tables["params/table"] == count_touched(expected, num_rows=ROWS, num_parts=8)
    in_pieces = measure_touched(shifted, init=begin, batches=BATCHES, num_parts=8, microbatches=2)
    assert list(in_pieces.unknown) == ["params/table"]


def test_ids_that_are_not_there_do_not_count() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.take(params["table"], batch["ids"] * 40, axis=0, mode="fill", fill_value=0).sum()

    found = measure_touched(loss, init=init, batches=BATCHES[:1], num_parts=8).tables["params/table"]
    wanted = BATCHES[0]["ids"] * 40
    inside = np.where(wanted < ROWS, wanted, -1).astype(np.int32)
    assert found == count_touched([[inside]], num_rows=ROWS, num_parts=8)
    assert found.num_ids == 10
    assert found.max_unique < 10


def test_batches_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="batches is empty"):
        measure_touched(pooled, init=init, batches=[], num_parts=8)
    shorter = jax.tree.map(lambda leaf: leaf[:8], BATCHES[1])
    with pytest.raises(ArgumentError, match=r"batches\[1\]/ids is int32\[8, 5\], expected int32\[16, 5\], as in"):
        measure_touched(pooled, init=init, batches=[BATCHES[0], shorter], num_parts=8)
    with pytest.raises(SpecError, match="16 samples, which do not divide into microbatches=3"):
        measure_touched(pooled, init=init, batches=BATCHES, num_parts=8, microbatches=3)


def test_an_old_key() -> None:
    traced = trace_reads(sampled, init, BATCHES)
    with pytest.raises(ArgumentError, match=r"make it with jax.random.key\(seed\)"):
        see_ids(traced, BATCHES, key=jnp.zeros(2, jnp.uint32))
