"""Rows and gradients that travel in fewer bits: what arrives, what is kept of what is lost, and what is refused."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.typing import NDArray

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.gang import LocalGang
from braidax.parallel.served.compressed import travelling
from braidax.parallel.served.compressed.travelling import Travelling, packed_rows, unpacked_rows
from braidax.parallel.served.on_servers.server import TableServer
from braidax.parallel.served.on_servers.told import described
from braidax.parallel.served.wire import packed
from tests.support.parallel.models import copied, specs
from tests.support.parallel.served.models import init as zipf_init
from tests.support.parallel.served.models import loss as zipf_loss
from tests.support.parallel.served.models import zipf_batches
from tests.support.parallel.served.server import OPTIMIZERS, ROWS, WIDTH, ask, form_of
from tests.support.parallel.workers.teams import team

NUM_ROWS, DIM, READ = 24, 8, 12
WIRES: list[Any] = ["bfloat16", "int8"]
BY_DAY = [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"]  # which loses more; others below have both
Bits = NDArray[np.float32]


def arrived(rows: Bits, wire: Any) -> Bits:
    """Computes what becomes of rows on their way, one number after the other."""
    if wire == "bfloat16":
        return rows.astype(jnp.bfloat16).astype(np.float32)
    found = np.empty_like(rows)
    for row, out in zip(rows, found, strict=True):
        scale = np.maximum(np.max(np.abs(row)) / np.float32(127), np.finfo(np.float32).tiny)
        out[:] = [np.float32(np.rint(one / scale)) * scale for one in row] if np.isfinite(scale) else np.nan
    return found


def there_and_back(rows: Bits, wire: Any) -> Bits:
    return unpacked_rows(packed_rows(rows, "x", wire), "x", wire, rows, "rows")


# One message


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("scale", [1.0, 1e-41, 1e37])
def test_rows_arrive_within_half_a_step(wire: Any, scale: float) -> None:
    rows = (np.random.default_rng(0).normal(size=(50, 33)) * scale).astype(np.float32)
    found = there_and_back(rows, wire)
    np.testing.assert_array_equal(found, arrived(rows, wire))
    most = np.abs(rows).max(1, keepdims=True)
    step = (
        np.maximum(most / 127, np.finfo(np.float32).tiny) if wire == "int8" else np.maximum(most * 2.0**-7, 2.0**-133)
    )
    assert (np.abs(found - rows) <= 0.5001 * step).all()


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_special_arrives(wire: Any) -> None:
    rows = np.zeros((6, 3), np.float32)
    rows[1], rows[2], rows[3], rows[4] = [1, np.nan, 2], [np.inf, 1, 2], [-np.inf, np.inf, 0], [-3, 3, 0]
    rows[5] = np.finfo(np.float32).max
    found = there_and_back(rows, wire)
    assert not found[0].any()
    assert (~np.isfinite(found[1:4]) | np.isfinite(rows[1:4])).all()
    assert np.isfinite(found[1:4]).any() == (wire == "bfloat16")  # int8 has a scale a row, which says it of all
    np.testing.assert_array_equal(found[4], rows[4])
    assert (found[5] > 3e38).all()
    assert packed_rows(rows[:0], "x", wire)["x"].shape == (0, 3)


@pytest.mark.parametrize("wire", WIRES)
def test_a_row_does_not_depend_on_others(wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    rows[7, 2] = np.nan
    whole = packed_rows(rows, "x", wire)
    monkeypatch.setattr(travelling, "_CACHED_BYTES", 60)
    order = np.random.default_rng(1).permutation(40)
    for name, array in packed_rows(rows[order], "x", wire).items():
        assert array.tobytes() == whole[name][order].tobytes()


@pytest.mark.parametrize(("wire", "bytes_of_row"), [(None, 4 * 64), ("bfloat16", 2 * 64), ("int8", 64 + 4)])
def test_messages_are_as_short_as_promised(wire: Any, bytes_of_row: int) -> None:
    rows = np.ones((1000, 64), np.float32)
    found = packed_rows(rows, "x", wire)
    assert sum(array.nbytes for array in found.values()) == 1000 * bytes_of_row
    assert sum(len(memoryview(part).cast("B")) for part in packed("rows", {}, found)) <= 1000 * bytes_of_row + 100
    assert wire is not None or found["x"] is rows


# A server


def made(wire: Any) -> TableServer:
    server, (fields, programs) = TableServer(0, 1), described({"table": form_of(OPTIMIZERS["sgd"])})
    ask(server, "make", {"tables": fields, "wire": wire}, programs)
    ask(server, "bear", {}, {"key": np.asarray(jax.random.key_data(jax.random.key(4)))})
    return server


def rows_of(server: TableServer) -> Bits:
    return np.array(ask(server, "read", {"table": "table", "start": 0, "stop": ROWS}).arrays["values"])


CODES, SCALES = np.ones((2, WIDTH), np.int8), np.ones(2, np.float32)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "as they are": ("int8", {"": np.ones((2, WIDTH), np.float32)}, "are float32[2, 3], expected int8[2, 3]"),
    "bfloat16": ("bfloat16", {"": CODES}, "gradients of table are int8[2, 3], expected bfloat16[2, 3]"),
    "packed": (None, {"": CODES, "/scales": SCALES}, "gradients of table are int8[2, 3], expected float32[2, 3]"),
    "width": ("int8", {"": CODES[:, :2], "/scales": SCALES}, "are int8[2, 2], expected int8[2, 3]"),
    "no scales": ("int8", {"": CODES}, "scales of gradients of table are missing, expected float32[2]"),
    "a scale": ("int8", {"": CODES, "/scales": SCALES[:1]}, "scales of gradients of table are float32[1], expected"),
    "scales": ("int8", {"": CODES, "/scales": SCALES.astype(np.float64)}, "table are float64[2], expected float32[2]"),
    "none at all": ("int8", {}, "gradients of table are missing, expected int8[2, 3]"),
    "below 0": ("int8", {"": CODES, "/scales": -SCALES}, "table have -1.0: expected finite numbers above 0"),
    "inf": ("int8", {"": CODES, "/scales": np.full(2, np.inf, np.float32)}, "table have inf: expected finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", ["push", "stage"])
def test_what_was_not_agreed_on_is_refused_and_changes_nothing(case: str, kind: str) -> None:
    wire, arrays, words = REFUSED[case]
    server, before = made(wire), rows_of(made(wire))
    given = {"0/ids": np.array([1, 4]), **{f"0/gradients{name}": array for name, array in arrays.items()}}
    fields = {"tables": ["table"], "num_numbers": [0], "staged": False, "step": 0}
    with pytest.raises(ArgumentError, match=re.escape(words)):
        ask(server, kind, fields, given)
    np.testing.assert_array_equal(rows_of(server), before)
    packs = packed_rows(np.eye(2, WIDTH, dtype=np.float32), "0/gradients", wire)
    assert ask(server, "push", fields, {"0/ids": np.array([1, 4]), **packs}).fields["step"] == 1  # it goes on
    before[[1, 4]] -= 0.5 * np.eye(2, WIDTH)
    np.testing.assert_allclose(rows_of(server), before, rtol=1e-6)


def test_rows_do_not_travel_as_nobody_knows() -> None:
    server, before = made("int8"), rows_of(made("int8"))
    with pytest.raises(
        ArgumentError, match=r"^rows would travel as .int4.: expected one of .None, .bfloat16., .int8.."
    ):
        ask(server, "make", {"tables": [], "wire": "int4"})
    with pytest.raises(ArgumentError, match=r"^rows would travel as .int8.: expected one of .'bfloat16', 'float16'."):
        ask(server, "make", {"tables": [], "wire": None, "read_as": {"table": "int8"}})
    np.testing.assert_array_equal(rows_of(server), before)


# Training: a loss whose gradients are what a batch says, so that all can be computed to the bit


def init(key: jax.Array) -> Any:
    return {"table": jax.random.normal(key, (NUM_ROWS, DIM)), "kernel": jnp.ones(())}


def loss(params: Any, batch: Any) -> jax.Array:
    return (params["table"][batch["ids"]] * batch["gradients"]).sum() + 0.25 * params["kernel"]


def make_batches(count: int, size: int = READ) -> list[Any]:
    """Rows come in few batches each, and their numbers differ by a factor of a thousand."""
    random = np.random.default_rng(0)
    return [
        {
            "ids": random.permutation(NUM_ROWS)[:size].astype(np.int32),
            "gradients": (random.normal(size=(size, DIM)) * np.geomspace(1, 1e-3, DIM)).astype(np.float32),
        }
        for _ in range(count)
    ]


def make_step(gang: Any, wire: Any, *, optimizer: Any = None, copies: int = 1, **options: Any) -> Any:
    placed = bx.Served(wire=wire, copies=copies)
    given: Any = {
        "mesh": jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]),
        "strategies": {"data": bx.Hybrid(tables=placed, overrides={"params/table": placed})},
        "init": init,
        "batch": specs(make_batches(1)[0]),
        **options,
    }
    return bx.parallelize(loss, optax.sgd(0.5) if optimizer is None else optimizer, servers=gang, **given)


class Oracle:
    """What servers have, and what each process keeps of what its gradients have lost."""

    def __init__(self, table: Bits, wire: Any, workers: int = 1) -> None:
        self.table, self.wire = table.copy(), wire
        self.lost = [np.zeros_like(table) for _ in range(workers)]

    def sent(self, worker: int, batch: Any) -> Bits:
        wanted, ids = batch["gradients"] + self.lost[worker][batch["ids"]], batch["ids"]
        found = arrived(wanted, self.wire)
        self.lost[worker][ids] = np.where(np.isfinite(wanted - found), wanted - found, 0)
        return found

    def loss(self, batch: Any) -> float:
        return float((arrived(self.table[batch["ids"]], self.wire) * batch["gradients"]).sum())


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[2]


@pytest.mark.parametrize("num_servers", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2)), 3])
def test_rows_move_by_what_arrives_to_the_bit(gangs: dict[int, LocalGang], num_servers: int) -> None:
    for wire in WIRES:
        with make_step(gangs[num_servers], wire, copies=min(2, num_servers)) as step:
            state = step.init(jax.random.key(0))
            expected = Oracle(step.table("table"), wire)
            for number, batch in enumerate(make_batches(8)):
                if number == 5:  # a dense state has nothing of what was lost
                    state, expected.lost[0][:] = step.from_dense(step.to_dense(state)), 0
                told = expected.loss(batch) + 0.25 * (1 - 0.125 * number)
                state, metrics = step.update(state, batch)
                np.testing.assert_allclose(metrics["loss"], told, rtol=1e-5, atol=1e-5)
                expected.table[batch["ids"]] -= np.float32(0.5) * expected.sent(0, batch)
                np.testing.assert_array_equal(step.table("table"), expected.table)


@pytest.mark.parametrize(
    ("wire", "staleness"),
    [
        ("int8", 0),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("bfloat16", None), ("bfloat16", 0), ("int8", None))),
    ],
)
def test_each_worker_keeps_what_its_own_gradients_lose(gang: LocalGang, wire: Any, staleness: int | None) -> None:
    workers = 2 if staleness == 0 else 1
    data = make_batches(12)

    def work(number: int, seat: Any) -> Any:
        strategies = {
            "data": bx.ParameterServers(
                staleness=staleness, wire=wire, overrides={"params/table": bx.Served(wire=wire)}
            )
        }
        with make_step(seat, wire, strategies=strategies) as step:
            state = step.init(jax.random.key(0))
            first = step.params()["table"]
            for batch in data[number::workers]:
                state, _ = step.update(state, batch)
            step.finish()
            return first, step.params()["table"]

    (first, found), *_ = team(gang, workers, work)
    expected = Oracle(first, wire, workers)
    for at in range(0, len(data), workers):
        total = np.zeros_like(first)
        for number in range(workers):
            total[data[at + number]["ids"]] += expected.sent(number, data[at + number])
        expected.table -= np.float32(0.5) * (total / np.float32(workers))
    np.testing.assert_array_equal(found, expected.table)


@pytest.mark.parametrize("wire", BY_DAY)
def test_sums_of_updates_are_those_of_gradients(gang: LocalGang, wire: Any) -> None:
    """And would not be, if what is lost were forgotten."""
    constant = np.geomspace(1, 1e-3, DIM).astype(np.float32)  # most of its small numbers are less than half a step
    batch = {"ids": np.arange(READ, dtype=np.int32), "gradients": np.tile(constant, (READ, 1))}
    off: dict[bool, Bits] = {}
    with make_step(gang, wire) as step:
        for forgets in (False, True):
            state = step.init(jax.random.key(0))
            first = step.table("table")
            for _ in range(64):
                if forgets:
                    step.finish()
                    step._servers.forget()
                state, _ = step.update(state, batch)
            moved = (first - step.table("table"))[:READ]
            off[forgets] = np.abs(moved - 0.5 * 64 * constant)
    half_a_step = 0.5 / 127 if wire == "int8" else 2.0**-8
    assert off[False].max() <= 0.5 * 1.01 * half_a_step + 1e-4  # what the last one has lost, and 64 roundings of rows
    assert off[True].max() > 3 * off[False].max()


@pytest.mark.parametrize("wire", WIRES)
def test_sums_over_gradients_are_of_what_was_sent(gang: LocalGang, wire: Any) -> None:
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5))
    with make_step(gang, wire, optimizer=clipped, metrics=("grad_norm",)) as step:
        state = step.init(jax.random.key(0))
        expected = Oracle(step.table("table"), wire)
        for batch in make_batches(4):
            state, metrics = step.update(state, batch)
            sent = expected.sent(0, batch)
            norm = np.sqrt(np.square(sent, dtype=np.float64).sum() + 0.25**2)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
            expected.table[batch["ids"]] -= 0.5 * (sent * 0.5 / norm).astype(np.float32)
            np.testing.assert_allclose(step.table("table"), expected.table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_finite_spoils_its_row_alone(gang: LocalGang, wire: Any) -> None:
    first, second = make_batches(2)
    first["gradients"][3, 2], first["gradients"][5, 0] = np.nan, np.inf
    with make_step(gang, wire) as step:
        state = step.init(jax.random.key(0))
        for batch in (first, second):
            state, _ = step.update(state, batch)
        spoilt = ~np.isfinite(step.table("table")).all(1)
    assert {*np.flatnonzero(spoilt)} == {int(first["ids"][3]), int(first["ids"][5])}


def trained(gang: LocalGang, wire: Any, each_ahead: Sequence[int]) -> list[tuple[Any, float]]:
    """Returns of each run parameters, and the mean loss that they have on what was trained."""
    batches, placed = zipf_batches(60), bx.Served(wire=wire)
    strategies: Any = {"data": bx.Hybrid(tables=placed, overrides={"params/table": placed})}
    options: dict[str, Any] = {"init": zipf_init, "batch": specs(batches[0]), "servers": gang}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    made: Any = bx.parallelize(zipf_loss, optax.adagrad(0.1), mesh, strategies, **options)
    with made as step:
        given = [jax.device_put(batch, step.batch_shardings) for batch in batches]
        return [run(step, given, ahead) for ahead in each_ahead]


def run(step: Any, given: list[Any], ahead: int) -> tuple[Any, float]:
    state = step.init(jax.random.key(0))
    for coming in given[:ahead]:
        step.prepare(coming)
    for number, batch in enumerate(given):
        for coming in given[number + ahead : number + ahead + 1] if ahead else ():
            step.prepare(coming)
        state, _ = step.update(state, batch)
    losses = [float(step.evaluate(state, batch)["loss"]) for batch in given[::6]]
    return copied(step.to_dense(state).params), float(np.mean(losses))


@pytest.mark.parametrize("wire", BY_DAY)
def test_training_converges_all_the_same(gang: LocalGang, wire: Any) -> None:
    """And rows that were pulled ahead change no bit."""
    ((params, loss),) = trained(gang, None, [0])
    found, ahead = trained(gang, wire, [0, 2])
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(ahead), strict=True):
        np.testing.assert_array_equal(one, other)
    assert 0 < abs(found[1] - loss) < 0.01 * loss
    assert 0 < np.abs(found[0]["table"] - params["table"]).max() < 0.05


@pytest.mark.parametrize(
    ("wire", "share"), [pytest.param("bfloat16", 0.5, marks=pytest.mark.slow), ("int8", 0.25 + 4 / (4 * DIM))]
)
def test_a_step_sends_so_many_bytes(gang: LocalGang, wire: Any, share: float) -> None:
    """Of rows, in requests and answers of training; ids and what else is told stay."""
    seen: dict[Any, int] = {}
    for one in (None, wire):
        with make_step(gang, one) as step:
            state = step.init(jax.random.key(0))
            spy = _Spy(step._servers._asking._world)
            step._servers._asking._world = spy
            for batch in make_batches(3):
                state, _ = step.update(state, batch)
            step.finish()
            step._servers._asking._world = spy.world
            seen[one] = spy.num_bytes
    rows = 3 * 2 * READ * DIM * 4  # pulled and pushed
    saved = round((1 - share) * rows)
    assert 0 <= saved - (seen[None] - seen[wire]) <= 100 * 2 * 3 * 2  # heads of messages name scales


class _Spy:
    """Counts the bytes of questions and answers."""

    def __init__(self, world: Any) -> None:
        self.world, self.num_bytes = world, 0

    def ask(self, server: int, question: list[Any]) -> Any:
        answer = self.world.ask(server, question)
        self.num_bytes += sum(memoryview(part).nbytes for part in [*question, *answer])
        return answer


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_travel_is_refused(gang: LocalGang) -> None:
    with pytest.raises(ArgumentError, match=r"^wire='int4': expected .bfloat16., .int8., or None"):
        bx.Served(wire="int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match=r"^wire='int4'"):
        bx.ParameterServers(wire="int4")  # pyright: ignore[reportArgumentType]

    def half(key: jax.Array) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(key))

    words = r"^wire='int8' of Served, and params/table is bfloat16: expected tables of float32"
    with pytest.raises(ArgumentError, match=words):
        make_step(gang, "int8", init=half)


def test_an_answer_of_another_form_is_refused(gang: LocalGang, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_step(gang, "int8") as step:
        state = step.init(jax.random.key(0))
        monkeypatch.setattr(step._servers, "_travelling", Travelling("bfloat16"))
        with pytest.raises(
            ArgumentError, match=r"^rows of table that server 0 has sent are int8\[\d+, 8\], expected b"
        ):
            step.update(state, make_batches(1)[0])


def test_plans_say_how_rows_travel() -> None:
    assert str(bx.Served(wire="int8", staleness=1)) == "served, 1 late, as int8"
    assert bx.ParameterServers(wire="int8").by_rows().tables == bx.Served(wire="int8")
