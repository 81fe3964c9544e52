"""A server alone: what it answers, what it refuses, and that what it refuses changes nothing."""

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

from braidax.errors import ArgumentError, CommError
from braidax.parallel.served.batches.batch_rows import BatchRows
from braidax.parallel.served.on_servers.server import TableServer
from braidax.parallel.served.on_servers.told import described
from braidax.parallel.served.wire import packed, unpacked
from tests.support.parallel.served.server import OPTIMIZERS, ROWS, WIDTH, ask, form_of, made, push, rows_of


def test_each_server_has_its_rows_as_init_makes_them() -> None:
    whole = np.asarray(jax.random.normal(jax.random.key(4), (ROWS, WIDTH)))
    for rank in range(3):
        np.testing.assert_array_equal(rows_of(made(rank, 3)), whole[rank::3])
    np.testing.assert_array_equal(rows_of(made(11, 20)), whole[:0])  # more servers than rows


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_move_as_by_the_row_optimizer(optimizer: str) -> None:
    """Also those that rest while others move."""
    server, table = made(optimizer=optimizer), np.asarray(jax.random.normal(jax.random.key(4), (ROWS, WIDTH)))
    dense = {"sgd": optax.sgd(0.5), "adam": optax.adam(0.1)}.get(optimizer)
    expected, state = jax.numpy.asarray(table), None if dense is None else dense.init(table)
    sums = np.full(ROWS, 0.1, np.float32)
    random = np.random.default_rng(0)
    for step, ids in enumerate([[1, 4], [4], [], [0, 1, 10]]):
        gradients = random.normal(size=(len(ids), WIDTH)).astype(np.float32)
        push(server, ids, gradients, step)
        whole = np.zeros((ROWS, WIDTH), np.float32)
        whole[ids] = gradients
        if dense is None:
            sums[ids] += np.square(gradients).mean(1)
            expected = expected - 0.1 * whole / np.sqrt(sums + 1e-7)[:, None]
        else:
            moves, state = dense.update(whole, state, expected)
            expected = expected + moves
    np.testing.assert_allclose(rows_of(server), expected, rtol=1e-5, atol=1e-6)


def test_an_update_is_taken_once() -> None:
    server, before = made(), rows_of(made())
    first = push(server, [2], np.ones((1, WIDTH)), 0)
    again = push(server, [2], np.ones((1, WIDTH)), 0)
    assert first.fields["step"] == again.fields["step"] == 1
    before[2] -= 0.5
    np.testing.assert_array_equal(rows_of(server), before)


def test_an_update_of_several_is_one_of_their_sum() -> None:
    server, before = made(num_workers=2, optimizer="row_adagrad"), rows_of(made())
    assert push(server, [2, 5], np.ones((2, WIDTH)), 0, rank=8).fields["step"] == 0
    assert push(server, [2, 5], np.ones((2, WIDTH)), 0, rank=8).fields["step"] == 0  # once more: it is known
    np.testing.assert_array_equal(rows_of(server), before)
    assert push(server, [5, 7], 2 * np.ones((2, WIDTH)), 0, rank=9).fields["step"] == 1
    for row, gradient in {2: 1.0, 5: 3.0, 7: 2.0}.items():
        before[row] -= 0.1 * gradient / np.sqrt(0.1 + gradient**2 + 1e-7)
    np.testing.assert_allclose(rows_of(server), before, rtol=1e-6)


def test_one_who_pushes_may_be_ahead_where_rows_may_be_late() -> None:
    """Each update is taken when all have pushed it, in the order of steps."""
    server, fields_and_programs = TableServer(0, 1, 2), described({"table": form_of(OPTIMIZERS["sgd"])})
    fields, programs = fields_and_programs
    ask(server, "make", {"tables": fields, "staleness": 1}, programs)
    ask(server, "bear", {}, {"key": np.asarray(jax.random.key_data(jax.random.key(4)))})
    before = rows_of(server)
    assert push(server, [1], np.ones((1, WIDTH)), 0, rank=8).fields["step"] == 0
    assert push(server, [2], np.ones((1, WIDTH)), 1, rank=8).fields["step"] == 0
    with pytest.raises(ArgumentError, match="an update of step 3 was pushed, and the tables on server 0 have seen 0"):
        push(server, [3], np.ones((1, WIDTH)), 3, rank=8)
    assert push(server, [1], np.ones((1, WIDTH)), 0, rank=9).fields["step"] == 1
    before[1] -= 1
    np.testing.assert_allclose(rows_of(server), before, rtol=1e-6)
    assert push(server, [2], np.zeros((1, WIDTH)), 1, rank=9).fields["step"] == 2
    before[2] -= 0.5
    np.testing.assert_allclose(rows_of(server), before, rtol=1e-6)


def test_an_update_that_fails_midway_is_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    server, fields_and_programs = made(), described({"table": form_of(OPTIMIZERS["sgd"])})

    def fail(*_: Any) -> None:
        raise MemoryError("none is left")

    monkeypatch.setattr(server.shards["table"], "push", fail)
    with pytest.raises(MemoryError):
        push(server, [1], np.ones((1, WIDTH)), 0)
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match=r"half of another, as update 0 failed midway: MemoryError.*restore them"):
        push(server, [1], np.ones((1, WIDTH)), 0)
    ask(server, "make", {"tables": fields_and_programs[0]}, fields_and_programs[1])
    ask(server, "bear", {}, {"key": np.asarray(jax.random.key_data(jax.random.key(4)))})
    assert push(server, [1], np.ones((1, WIDTH)), 0).fields["step"] == 1


def test_only_what_has_changed_is_pulled_again() -> None:
    server, ids = made(), np.array([1, 2, 3])
    asked = {"tables": ["table"], "since": -1}
    first = ask(server, "pull", asked, {"table": ids})
    assert first.fields["step"] == 0
    push(server, [2, 9], np.ones((2, WIDTH)), 0)
    later = ask(server, "pull", {**asked, "since": 0}, {"table": ids})
    np.testing.assert_array_equal(later.arrays["table/changed"], [1])
    np.testing.assert_allclose(later.arrays["table"], first.arrays["table"][[1]] - 0.5, rtol=1e-6)
    assert len(ask(server, "pull", {**asked, "since": 1}, {"table": ids}).arrays["table"]) == 0


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "another run": ("pull", {"run": "other"}, {}, "of the run 'other', and server 0 has the tables of 'this'"),
    "unknown kind": ("dance", {}, {}, "was asked to 'dance', expected one of"),
    "unknown table": (
        "pull", {"tables": ["none"], "since": -1}, {}, "table 'none' is not on the servers: expected one of ['table']",
    ),
    "ids out of range": (
        "pull", {"tables": ["table"], "since": -1}, {"table": np.array([0, 11])},
        "ids of table has rows 0 to 11, and server 0 has 11 of table",
    ),
    "ids below zero": (
        "pull", {"tables": ["table"], "since": -1}, {"table": np.array([-1])}, "expected 0 <= row < 11",
    ),
    "ids that are no integers": (
        "pull", {"tables": ["table"], "since": -1}, {"table": np.array([0.5])}, "is float64[1], expected integers [m]",
    ),
    "a dtype": (
        "push", {"tables": ["table"], "num_numbers": [0], "staged": False, "step": 0},
        {"0/ids": np.array([1]), "0/gradients": np.ones((1, WIDTH), np.float16)},
        "gradients of table are float16[1, 3], expected float32[1, 3]",
    ),
    "a width": (
        "push", {"tables": ["table"], "num_numbers": [0], "staged": False, "step": 0},
        {"0/ids": np.array([1]), "0/gradients": np.ones((1, 2), np.float32)},
        "gradients of table are float32[1, 2], expected float32[1, 3]",
    ),
    "an update that comes too early": (
        "push", {"tables": ["table"], "num_numbers": [0], "staged": False, "step": 3}, {},
        "an update of step 3 was pushed, and the tables on server 0 have seen 0 updates",
    ),
    "gradients that were not staged": (
        "push", {"tables": ["table"], "num_numbers": [0], "staged": True, "step": 0}, {},
        "gradients of step 0 were not staged on server 0",
    ),
    "sums before all have staged": (
        "sums", {"step": 0}, {}, "sums of step 0 were asked of server 0, where 0 of 1 have staged",
    ),
    "rows of another form": (
        "load", {"table": "table", "start": 0, "step": 0}, {"values": np.ones((2, 4), np.float32)},
        "2 rows of table were given from 0 on, of the shapes [[2, 4]]; expected rows like [[3]] within 11",
    ),
    "rows beyond the table": (
        "load", {"table": "table", "start": 10, "step": 0}, {"values": np.ones((2, 3), np.float32)}, "within 11",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_and_changes_nothing(case: str) -> None:
    kind, fields, arrays, words = REFUSED[case]
    server, before = made(), rows_of(made())
    with pytest.raises(ArgumentError, match=re.escape(words)):
        ask(server, kind, fields, arrays)
    np.testing.assert_array_equal(rows_of(server), before)
    assert push(server, [0], np.zeros((1, WIDTH)), 0).fields["step"] == 1  # it goes on


@pytest.mark.parametrize(
    "value",
    [
        b"no list", [], [b"{}"], [b'["pull", {}, [["x", "float32", [2]]]]'], [b"\xff"],
        [b'["pull", {}, [["x", "float32", [2]]]]', b"\0" * 7],
        [b'["pull", {}, [["x", "object", [1]]]]', b"\0" * 8],
        [b'["pull", {}, [["x", "float32", [-2]]]]', b""],
        [b'["pull", {}, [["x", "nothing", [2]]]]', b"\0" * 8],
        [b'["pull", {}, [["x"]]]', b""],
        [b'[1, {}, []]'],
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(value: Any) -> None:
    with pytest.raises(CommError, match="a message about served tables is none"):
        TableServer(0, 1).handle(1, value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "float64"])
def test_messages_keep_arrays(dtype: str) -> None:
    given = {"scalar": np.zeros((), jax.numpy.dtype(dtype)), "none": np.zeros((0, 3), jax.numpy.dtype(dtype))}
    given["turned"] = np.arange(6).reshape(2, 3).T.astype(jax.numpy.dtype(dtype))
    kind, fields, arrays = unpacked([memoryview(part) for part in packed("x", {"a": [1, "b"]}, given)])
    assert (kind, fields) == ("x", {"a": [1, "b"]})
    for name, array in given.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)


@pytest.mark.parametrize("num_servers", [1, 2, 5])
def test_rows_of_a_batch_go_to_their_servers_and_back(num_servers: int) -> None:
    random = np.random.default_rng(1)
    parts = {at: random.integers(-2, 9, 7).astype(np.int32) for at in range(3)}
    rows, table = BatchRows(parts, num_servers), random.normal(size=(9, 2))
    found = np.zeros((len(rows.unique), 2))
    for server in range(num_servers):
        ids = rows.asked(server) * num_servers + server
        rows.put(found, server, table[ids])
        np.testing.assert_array_equal(rows.of_server(rows.unique, server), ids)
    np.testing.assert_array_equal(found, table[rows.unique])
    spread = dict(rows.spread(found))
    for part, ids in parts.items():
        there = ids >= 0
        np.testing.assert_array_equal(spread[part][rows.slots[part]][there], table[ids[there]])
    counts = {part: np.zeros((7, 1)) for part in parts}
    for part, ids in parts.items():
        np.add.at(counts[part], rows.slots[part][ids >= 0], 1)
    seen = np.concatenate([ids[ids >= 0] for ids in parts.values()])
    np.testing.assert_array_equal(rows.summed(counts)[:, 0], np.bincount(seen, minlength=9)[rows.unique])


def test_a_batch_without_ids_reads_nothing() -> None:
    rows = BatchRows({0: np.full(4, -1, np.int32)}, 2)
    assert len(rows.unique) == 0
    assert dict(rows.spread(np.zeros((0, 3))))[0].shape == (4, 3)
