"""Rows that are copied to other servers while training goes on: `step.prepare_resize`."""

import logging
import re
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from braidax.errors import ArgumentError, BraidaxError
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from braidax.parallel.served.layouts.resizing import Resizing
from braidax.parallel.served.on_servers.copying import copied_again
from tests.support.parallel.models import copied
from tests.support.parallel.served.losing import assert_equal
from tests.support.parallel.served.models import ROWS, WIDTH, zipf_batches
from tests.support.parallel.served.resizing import (
    CASES,
    OPTIMIZERS,
    make_step,
    trained,
    trained_while_one_is_killed,
    undisturbed,
)

SLOW = pytest.mark.slow
FAST = ("adagrad",)  # below rows of Adam lag behind


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[4]


@pytest.fixture(scope="module")
def expected(gang: LocalGang) -> Any:
    return undisturbed(gang)


def copied_ahead(step: Any) -> None:
    """Returns when all rows were copied that updates may move again."""
    if (ahead := step._servers._resizing._ahead) is not None:
        ahead.copied.result(60)


@pytest.mark.parametrize("case", [name if name in FAST else pytest.param(name, marks=SLOW) for name in CASES])
def test_updates_behind_a_copy_are_not_lost(gang: LocalGang, case: str, expected: Any, tmp_path: Path) -> None:
    """Rows are copied, moved by three updates, and then there; fewer servers, too, and behind another wish."""
    options = {**CASES[case], **({"disk": str(tmp_path)} if case == "disk" else {})}
    optimizer, late = OPTIMIZERS.get(case, OPTIMIZERS["adagrad"]), case == "late"
    with make_step(gang, optimizer, **options) as step:
        if case not in ("adagrad", "two copies", "disk"):
            expected = trained(step, ahead=1 if late else 2)
        begins, ends = {1: 4, 5: 4, 6: 3}, {4: 4, 9: 3}

        def change(number: int) -> None:
            if number in begins:
                step.prepare_resize(begins[number])
                copied_ahead(step)
            if number in ends:
                step.resize(ends[number])

        found = trained(step, change, ahead=1 if late else 2)
        assert step._servers.num_servers == 3
    if case == "clipped":
        jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=1e-6), found, expected)
    else:
        assert_equal(found, expected)


def test_only_what_has_changed_is_copied_in_the_pause(gang: LocalGang, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of one batch: what goes to others is half of them; all others were there before."""
    batch = zipf_batches(1)[0]
    with make_step(gang, OPTIMIZERS["adagrad"]) as step, caplog.at_level(logging.WARNING, "braidax"):
        state = step.init(jax.random.key(0))
        step.prepare_resize(4)
        copied_ahead(step)
        state, _ = step.update(state, place(batch, step.batch_shardings))
        step.finish()
        table = step.table("table")
        step.resize(4)
        np.testing.assert_array_equal(step.table("table"), table)
    moved = {int(one) for one in np.unique(batch["ids"]) if one % 4 >= 2}
    row = 2 * 4 * WIDTH + 8
    told = [re.search(r"([\d,]+) bytes were", line) for line in caplog.messages]
    assert [None if one is None else one[1] for one in told] == [
        f"{ROWS // 2 * row:,}",
        f"{(ROWS // 2 + len(moved)) * row:,}",
    ]


@pytest.mark.parametrize("case", [pytest.param("adagrad", marks=SLOW), "adam"])
def test_rows_that_are_put_or_brought_up_behind_a_copy(gang: LocalGang, case: str) -> None:
    """Reading a table brings rows of Adam up where they lie; a state that is gone on with puts others there."""
    with make_step(gang, OPTIMIZERS[case]) as step:
        placed = [place(batch, step.batch_shardings) for batch in zipf_batches(6)]

        def run(ahead: bool) -> Any:
            state = step.init(jax.random.key(0))
            state, _ = step.update(state, placed[0])
            dense = step.to_dense(state)
            if ahead:
                step.prepare_resize(4)
                copied_ahead(step)
            state, _ = step.update(state, placed[1])
            tables = [step.table("table")]
            if ahead:
                step.resize(4)
            tables.append(step.table("table"))
            if ahead:
                step.prepare_resize(2)
                copied_ahead(step)
            state = step.from_dense(dense)
            state, metrics = step.update(state, placed[2])
            if ahead:
                step.resize(2)
            return float(metrics["loss"]), [*tables, step.table("table")], copied(step.to_dense(state))

        assert_equal(run(True), run(False))


def test_what_is_begun_and_not_wanted(gang: LocalGang, expected: Any) -> None:
    """Another number lets go of it, and so do as many as there are, and closing."""
    with make_step(gang, OPTIMIZERS["adagrad"]) as step:

        def change(number: int) -> None:
            if number in (1, 3, 5, 7):
                step.prepare_resize({1: 4, 3: 3, 5: 2, 7: 4}[number])
            if number == 8:
                step.resize(3)
            if number == 10:
                step.prepare_resize(4)

        assert_equal(trained(step, change), expected)
        with pytest.raises(ArgumentError, match="num_servers=5: expected 1 to 4"):
            step.prepare_resize(5)


def test_a_copy_that_fails_is_made_anew(
    gang: LocalGang, expected: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = Resizing._told

    def broken(self: Resizing, rank: int, question: list[Any]) -> Any:
        if threading.current_thread().name.startswith("braidax-resizing") and rank == 3 and not caplog.messages:
            raise BraidaxError("no")
        return told(self, rank, question)

    monkeypatch.setattr(Resizing, "_told", broken)
    with make_step(gang, OPTIMIZERS["adagrad"]) as step, caplog.at_level(logging.WARNING, "braidax"):

        def change(number: int) -> None:
            if number == 2:
                step.prepare_resize(4)
            if number == 4:
                step.resize(4)

        assert_equal(trained(step, change), expected)
        assert step._servers.num_servers == 4
    assert "what was copied ahead for 4 servers is copied anew: no" in caplog.messages


@SLOW
@pytest.mark.parametrize("seed", range(30))
def test_a_server_that_is_lost_while_rows_are_copied(seed: int, expected: Any) -> None:
    """With copies, before, during and behind it, whichever it is."""
    with LocalGang(5) as gang:
        assert_equal(trained_while_one_is_killed(gang, seed, (2, 4), {5: 4, 6: 3}, begins={2: 4}), expected)


@pytest.mark.parametrize("told", [{"to": 2}, {"to": -1}, {"most": 0}])
def test_rows_that_cannot_be_asked_for(told: dict[str, int], unchecked: None) -> None:
    asked = {"to": 0, "among": 2, "since": 0, "start": 0, "most": 1, **told}
    with pytest.raises(ArgumentError, match="rows at most were asked for that go to part"):
        copied_again(None, asked)  # pyright: ignore[reportArgumentType]  # it is not looked at
