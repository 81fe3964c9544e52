"""Rows of tables that grow, in fewer bits: what a gradient loses is added to the next one, while the row is there."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import CallFailed
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from braidax.parallel.served.compressed.feedback import Feedback
from braidax.parallel.served.compressed.travelling import unpacked_rows
from tests.support.parallel.models import specs
from tests.support.parallel.served.models import ROWS, init, loss, zipf_batches
from tests.support.parallel.served.seen import ROWS as IDS
from tests.support.parallel.served.seen import WIDTH, Told, form_of, updates


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[3]


def make_step(gang: LocalGang, seen: bx.Seen | None, wire: Any) -> Any:
    strategies = {"data": bx.Hybrid({"params/table": bx.Served(seen=seen, wire=wire, spares=1)})}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    batch, optimizer = specs(zipf_batches(1)[0]), optax.adagrad(0.1)
    return bx.parallelize(loss, optimizer, mesh, strategies, init=init, batch=batch, servers=gang)


@pytest.mark.parametrize("wire", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
def test_training_is_that_with_all_rows(gang: LocalGang, wire: Any) -> None:
    """Bit by bit, also over other servers, and behind an update that was refused: what it has lost does not count."""
    batches, ends = zipf_batches(8), list[Any]()
    room = len(np.unique([one["ids"] for one in batches]))
    too_many = {**batches[0], "ids": np.arange(16, dtype=np.int32) * 2 + 301}
    for seen in (None, bx.Seen(2 * room)):
        with make_step(gang, seen, wire) as step:
            state, losses = step.init(jax.random.key(0)), list[float]()
            for number, batch in enumerate([*batches, *batches[:2]]):
                if number == 6:
                    step.resize(3)
                state, metrics = step.update(state, place(batch, step.batch_shardings))
                losses.append(float(metrics["loss"]))
            ids = np.unique([one["ids"] for one in batches])
            rows = step.table("table")[ids] if seen is None else step.seen_rows("table")[1]
            ends.append([losses, rows])
            if seen is None:
                continue
            np.testing.assert_array_equal(step.seen_rows("table")[0], ids)
    for one, two in zip(*ends, strict=True):
        np.testing.assert_array_equal(one, two)
    own = np.bincount(np.unique([one["ids"] for one in batches[:3]]) % 2, minlength=2).max()
    finals = list[Any]()
    with make_step(gang, bx.Seen(2 * int(own)), wire) as step:
        for is_refused in (False, True):
            state = step.init(jax.random.key(0))
            for number, batch in enumerate([*batches[:3], *batches[:3]]):
                if is_refused and number == 4:
                    mixed = {**batch, "ids": np.concatenate([batch["ids"][:4], too_many["ids"][4:]])}
                    with pytest.raises(CallFailed, match="grows as seen, with capacity="):
                        step.update(state, place(mixed, step.batch_shardings))
                state, _ = step.update(state, place(batch, step.batch_shardings))
            finals.append(step.seen_rows("table")[1])
    np.testing.assert_array_equal(*finals)


@pytest.mark.parametrize(("admit_at", "expire_after"), [(1, None), (2, 3), (3, 6)])
def test_what_is_lost_is_kept_as_long_as_rows_are(admit_at: int, expire_after: int | None) -> None:
    """Against a NumPy array with a place for each row, which is cleared when the row is given up."""
    seen = bx.Seen(IDS, admit_at=admit_at, expire_after=expire_after)
    feedback, told = Feedback({"table": form_of(seen)}, "bfloat16", 2), Told(seen)
    lost, num_given_up = np.zeros((IDS, WIDTH), np.float32), 0
    for step, ids, gradients in updates(60):
        found = feedback.packed({"table": ids}, {"table": gradients}, step)["table"]
        if step % 7 == 3:  # servers refuse it: the next one is as if it had not been
            found = feedback.packed({"table": ids}, {"table": gradients}, step)["table"]
        arrived = unpacked_rows(found, "gradients", "bfloat16", gradients, "gradients")
        np.testing.assert_array_equal(arrived, (lost[ids] + gradients).astype(jax.numpy.bfloat16).astype(np.float32))
        before = {*told.rows}
        told.push(ids, gradients, step)
        dropped = np.array([one not in told.rows for one in ids.tolist()], bool)
        feedback.keep({"table": dropped} if admit_at > 1 else {})
        lost[ids] = np.where(dropped[:, None], 0, lost[ids] + gradients - arrived)
        gone = sorted(before - {*told.rows})
        lost[gone] = 0
        num_given_up += len(gone)
    assert (num_given_up > 5) is (expire_after is not None)
    assert (lost != 0).any()


def test_rows_that_are_not_admitted_leave_nothing(gang: LocalGang) -> None:
    """What their gradients have lost is dropped with these: the step equals NumPy, which keeps nothing of them."""
    batch, seen = zipf_batches(1)[0], bx.Seen(ROWS, admit_at=3)
    with make_step(gang, seen, "bfloat16") as step:
        state = step.init(jax.random.key(0))
        for _ in range(2):
            state, _ = step.update(state, place(batch, step.batch_shardings))
        assert not step._servers._feedback._lost["table"]._entries.num_live(2)
        state, _ = step.update(state, place(batch, step.batch_shardings))
        lost = step._servers._feedback._lost["table"]
        assert lost._entries.num_live(3) == len(np.unique(batch["ids"])) == len(step.seen_rows("table")[0])
        step.init(jax.random.key(0))
        assert not step._servers._feedback._lost["table"]._entries.num_live(0)
