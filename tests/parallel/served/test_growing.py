"""Steps whose tables grow: training is that with the whole table, which may be one that nobody could make."""

import functools
import os
import signal
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
from braidax.comm import Communicator
from braidax.errors import ArgumentError, CallFailed
from braidax.gang import LocalGang
from braidax.parallel.given.initial import trace_init
from braidax.parallel.given.loss import Loss
from braidax.parallel.plan.plan import Plan
from braidax.parallel.rows import row_adagrad
from braidax.parallel.served.files import publishing
from braidax.parallel.served.files.form import Header, listed, opened
from braidax.program import rows_alone
from tests.support.parallel.hybrid import as_plain, init, make_batch, pooled
from tests.support.parallel.models import assert_close, copied, make_mesh, single_device, specs

ADAGRAD = optax.adagrad(0.3)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.3))
HUGE = 2**31 - 1
SLOW = pytest.mark.slow
SEEN = bx.Seen(capacity=1000)


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[2]


def make_step(gang: LocalGang, seen: bx.Seen | None, optimizer: Any = ADAGRAD, **options: Any) -> Any:
    copies, staleness, disk = options.pop("copies", 1), options.pop("staleness", 0), options.pop("disk", None)
    served = bx.Served(seen=seen, copies=copies, staleness=staleness, disk=disk)
    strategies = {"data": bx.Hybrid(tables=served, row_optimizers=options.pop("row_optimizers", {}))}
    options = {"init": init, "batch": specs(make_batch()), **options}
    mesh = make_mesh("8 explicit")
    return bx.parallelize(options.pop("loss", pooled), optimizer, mesh, strategies, servers=gang, **options)


def train(step: Any, seeds: Any, state: Any = None, ahead: int = 0) -> tuple[Any, list[float]]:
    state, losses = step.init(jax.random.key(3)) if state is None else state, list[float]()
    batches = [jax.device_put(make_batch(seed), step.batch_shardings) for seed in seeds]
    for at, batch in enumerate(batches):
        for coming in batches[at + 1 : at + 1 + ahead]:
            step.prepare(coming)
        state, metrics = step.update(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@functools.cache
def first_of(seed: int) -> Any:
    """Returns what all variables begin with."""
    return jax.jit(init)(jax.random.split(jax.random.key(seed))[0])


def assert_equal_rows(step: Any, tables: dict[str, np.ndarray]) -> None:
    first = first_of(3)
    for name, whole in tables.items():
        ids, rows = step.seen_rows(name)
        assert (np.diff(ids) > 0).all()
        np.testing.assert_array_equal(rows, whole[ids])
        others = np.setdiff1d(np.arange(len(whole)), ids)
        np.testing.assert_array_equal(whole[others], np.asarray(first[name])[others])


@pytest.mark.parametrize(
    ("case", "num_servers"),
    [
        ("clipped", 2),
        *(
            pytest.param(*one, marks=SLOW)
            for one in [("clipped", 3), ("adagrad", 1), ("adagrad", 2), ("own", 1), ("own", 3)]
        ),
    ],
)
def test_training_is_that_with_all_rows(gangs: dict[int, LocalGang], case: str, num_servers: int) -> None:
    """Bit by bit that of servers with all rows, and as close to one device as these are."""
    optimizer = {"adagrad": ADAGRAD, "clipped": CLIPPED, "own": optax.adam(1e-2)}[case]
    own = {"row_optimizers": {name: row_adagrad(0.1) for name in ("params/table", "params/other")}}
    options = own if case == "own" else {}
    with make_step(gangs[num_servers], None, optimizer, **options) as step:
        state, expected = train(step, range(6))
        tables = {name: step.table(name) for name in ("table", "other")}
        dense = None if case == "own" else step.to_dense(state)
    with make_step(gangs[num_servers], SEEN, optimizer, **options) as step:
        assert "as seen" in str(step.plan)
        assert Plan.from_json(step.plan.to_json()) == step.plan
        state, losses = train(step, range(6), ahead=2)
        assert losses == expected
        assert_equal_rows(step, tables)
        evaluated = float(step.evaluate(state, make_batch(90))["loss"])
    if dense is None:  # no dense optimizer moves rows as these do
        return
    first = first_of(3)
    begun = bx.State(0, first, jax.jit(optimizer.init)(first), {}, dense.key)
    batches = [make_batch(seed) for seed in range(6)]
    on_one, _, (*_, told) = single_device(as_plain(pooled), optimizer, begun, batches, then=make_batch(90))
    assert_close(copied(dense.params), copied(on_one), atol=1e-5)
    np.testing.assert_allclose(evaluated, told["loss"], rtol=2e-5)


def test_a_table_that_nobody_could_make(gang: LocalGang) -> None:
    """Of 2^31 - 1 rows; on one device with those rows alone that batches read."""
    width = 8

    def init(key: jax.Array, num_rows: int = HUGE) -> Any:
        words, kernel = jax.random.split(key)
        return {
            "words": 0.1 * jax.random.normal(words, (num_rows, width)).at[0].set(0),
            "kernel": jax.random.normal(kernel, (width,)),
        }

    def loss(params: Any, batch: Any) -> Any:
        read = jnp.take(params["words"], batch["ids"], axis=0).mean(1)
        return jnp.square(jnp.tanh(read @ params["kernel"]) - batch["target"]).mean()

    numbers = np.random.default_rng(0)
    every = np.unique([0, HUGE - 1, *numbers.integers(0, HUGE, 40)]).astype(np.int32)
    batches = [
        {"ids": numbers.choice(every, (16, 3)), "target": numbers.normal(size=16).astype(np.float32)} for _ in range(5)
    ]
    with make_step(gang, SEEN, ADAGRAD, init=init, loss=loss, batch=specs(batches[0])) as step:
        state, metrics = step.init(jax.random.key(5)), dict[str, Any]()
        for batch in batches:
            state, metrics = step.update(state, batch)
        ids, rows = step.seen_rows("words")
    assert set(ids.tolist()) == {one for batch in batches for one in batch["ids"].ravel().tolist()}
    born = trace_init(init, Loss(loss))
    alone = rows_alone(born, 1).compute
    assert alone is not None
    first = {
        "words": alone(jax.random.key(5), every),
        "kernel": jnp.asarray(init(jax.random.split(jax.random.key(5))[0], 10)["kernel"]),
    }
    begun = bx.State(0, first, ADAGRAD.init(first), {}, state.key)
    few = [{**batch, "ids": np.searchsorted(every, batch["ids"]).astype(np.int32)} for batch in batches]
    plain = as_plain(lambda params, batch, key: (loss(params, batch), {}))
    expected, _, told = single_device(plain, ADAGRAD, begun, few)
    np.testing.assert_allclose(rows, expected["words"][np.searchsorted(every, ids)], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], told[-1]["loss"], rtol=1e-5)


def test_an_update_without_room_moves_nothing(gang: LocalGang) -> None:
    """Also not on a server that has room, nor what is dense; the state goes on with another batch."""
    with make_step(gang, bx.Seen(capacity=1000)) as step:
        state, expected = train(step, [0, 1, 0])
        tables = {name: step.seen_rows(name) for name in ("table", "other")}
    room = max(len(tables[name][0][tables[name][0] % 2 == part]) for name in tables for part in (0, 1))
    with make_step(gang, bx.Seen(capacity=2 * room)) as step:
        state, losses = train(step, [0, 1])
        assert losses == expected[:2]
        with pytest.raises(CallFailed, match=rf"grows as seen, with capacity={2 * room}, and server . of 2 has"):
            step.update(state, make_batch(7) | {"length": np.full(16, make_batch(0)["ids"].shape[1], np.int32)})
        state, losses = train(step, [0], state)
        assert losses == expected[2:]
        for name, (ids, rows) in tables.items():
            found = step.seen_rows(name)
            np.testing.assert_array_equal(found[0], ids)
            np.testing.assert_array_equal(found[1], rows)


def own_pid(comm: Communicator) -> int:
    """Returns the process of the rank."""
    return os.getpid()


@pytest.mark.usefixtures("mended")
def test_a_server_is_lost_and_its_copies_go_on(gang: LocalGang) -> None:
    with make_step(gang, SEEN) as step:
        _, expected = train(step, range(6))
        tables = {name: step.seen_rows(name) for name in ("table", "other")}
    pids = gang.run(own_pid)
    with make_step(gang, SEEN, copies=2) as step:
        go_on(step, pids[1], expected, tables)


def go_on(step: Any, pid: int, expected: list[float], tables: dict[str, Any]) -> None:
    state, losses = train(step, range(3))
    os.kill(pid, signal.SIGKILL)
    _, more = train(step, range(3, 6), state)
    assert losses + more == expected
    for name, (ids, rows) in tables.items():
        found = step.seen_rows(name)
        np.testing.assert_array_equal(found[0], ids)
        np.testing.assert_array_equal(found[1], rows)


def test_what_servers_cannot_tell_is_refused(gang: LocalGang) -> None:
    def normed(key: jax.Array) -> Any:
        made = init(key)
        return {**made, "table": made["table"] / jnp.std(made["table"])}

    with pytest.raises(ArgumentError, match=r"table, float32\[.*\], has rows that init makes from others: .*whole"):
        make_step(gang, SEEN, init=normed)


def test_what_needs_all_rows_is_refused(gang: LocalGang) -> None:
    with make_step(gang, SEEN) as step:
        state = step.init(jax.random.key(3))
        for name, call in {
            "table": lambda: step.table("table"),
            "to_dense": lambda: step.to_dense(state),
            "from_dense": lambda: step.from_dense(state),
        }.items():
            with pytest.raises(ArgumentError, match=rf"step.{name} reads or writes .* grow as seen: .*step.seen_rows"):
                call()
    with make_step(gang, None) as step, pytest.raises(ArgumentError, match="table='table' does not grow"):
        step.seen_rows("table")


@pytest.mark.parametrize("options", [{"capacity": 0}, {"admit_at": 0}, {"expire_after": 0}, {"capacity": True}])
def test_options(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ArgumentError, match=rf"{name}={options[name]!r} of Seen: expected a whole number, 1 or more"):
        bx.Seen(**{"capacity": 1, **options})


@pytest.mark.parametrize("seen", [pytest.param(SEEN, marks=SLOW), bx.Seen(1000, admit_at=2, expire_after=3)])
def test_training_goes_on_from_a_checkpoint(gangs: dict[int, LocalGang], tmp_path: Path, seen: bx.Seen) -> None:
    """Saved by two servers in memory, restored to the disks of three, and to more room; lists have another length each
    time."""
    with make_step(gangs[2], seen) as step, Checkpointer(tmp_path, Every(2)) as saver:
        state, losses = step.init(jax.random.key(3)), list[float]()
        for seed in range(7):
            state, metrics = step.update(state, make_batch(seed), before_apply=saver.wait)
            saver.update((state, step.tables))
            losses.append(float(metrics["loss"]))
        expected = {name: step.seen_rows(name) for name in ("table", "other")}
    assert len(expected["table"][0]) > 0
    more = replace(seen, capacity=2000)
    with make_step(gangs[3], more, disk=str(tmp_path)) as step, Checkpointer(tmp_path, Every(2)) as saver:
        state, _ = saver.restore((step.state_specs, step.tables))
        assert int(state.step) == 6
        state, metrics = step.update(state, make_batch(6))
        assert float(metrics["loss"]) == losses[6]
        for name, (ids, rows) in expected.items():
            found = step.seen_rows(name)
            np.testing.assert_array_equal(found[0], ids)
            np.testing.assert_array_equal(found[1], rows)


def test_a_checkpoint_with_more_rows_than_have_room(tmp_path: Path, gang: LocalGang) -> None:
    with make_step(gang, SEEN) as step, Checkpointer(tmp_path, Every(1)) as saver:
        state, _ = train(step, range(2))
        saver.save((state, step.tables))
    with make_step(gang, bx.Seen(4)) as step, Checkpointer(tmp_path, Every(1)) as saver:
        with pytest.raises(CallFailed, match="grows as seen, with capacity=4, and server"):
            saver.restore((step.state_specs, step.tables))
        with pytest.raises(CallFailed, match="a checkpoint was not restored to its end"):
            step.seen_rows("table")
        train(step, [], step.init(jax.random.key(3)))
        assert len(step.seen_rows("table")[0]) == 0


@pytest.mark.parametrize("num_servers", [pytest.param(1, marks=SLOW), 3])
def test_files_are_what_is_there(
    gangs: dict[int, LocalGang], num_servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base and deltas, followed or read at once, to the bit: a delta has what was read since, and what was given up."""
    monkeypatch.setattr(publishing, "_BLOCK_BYTES", 256)
    seen = bx.Seen(1000, admit_at=2, expire_after=2)
    with make_step(gangs[num_servers], seen) as step:
        state = step.init(jax.random.key(3))
        step.publish(tmp_path)
        follower, told = bx.Published(tmp_path), [header(tmp_path)]
        for seed in [0, 1, 2, 2, 3, 4, 5, 6, 6, 7]:
            state, _ = step.update(state, make_batch(seed))
            step.publish(tmp_path)
            told.append(header(tmp_path))
            assert follower.refresh() == 1
            for found in (follower, bx.Published(tmp_path)):
                assert not found.tables
                for name in ("table", "other"):
                    ids, rows = step.seen_rows(name)
                    np.testing.assert_array_equal(found.seen[name].ids, ids)
                    assert found.seen[name].rows.tobytes() == rows.tobytes()
        state = step.init(jax.random.key(9))
        step.publish(tmp_path)
        assert header(tmp_path).kind == "base"
        follower.refresh()
        assert len(follower.seen["table"].ids) == 0
        with pytest.raises(ArgumentError, match=r"grow as seen, and are no arrays of all rows: .*Published"):
            bx.read_published(tmp_path)
    assert [one.kind for one in told] == ["base", *["delta"] * 10]
    assert max(rows.num_gone for one in told for rows in one.tables) > 3
    assert max(rows.num_rows for one in told for rows in one.tables) > 3


def header(folder: Path) -> Header:
    """Returns that of the newest file."""
    one = opened(listed(folder)[0][-1])
    one.file.close()
    return one.header
