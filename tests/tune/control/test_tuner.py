"""The tuner beside a loop: what it turns, keeps, takes back and remembers, on steps whose times are computed."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.checkpoint import Adaptive, Checkpointer, Every
from braidax.data import DataLoader, Knobs
from braidax.errors import ArgumentError
from braidax.loop import fit
from braidax.parallel import DataParallel, parallelize
from braidax.spans import Span
from braidax.tune import Diary, Limits, Tuner


@dataclass
class Course:
    """A loop whose steps take what a rule says, on a clock of its own."""

    loader: DataLoader
    rule: Callable[[int, int], tuple[float, float]]  # threads, prefetch → seconds of a step, of waiting in it
    noise: float = 0.02
    now: float = 0.0
    noises: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, tuner: Tuner, num_steps: int) -> None:
        for _ in range(num_steps):
            seconds, wait = self.rule(self.loader.depth.threads, self.loader.depth.prefetch)
            self.now += seconds * self.noises.uniform(1 - self.noise, 1 + self.noise)
            self.loader.trace.record(Span("wait", "wait", "loop", self.now - wait, wait, 0))
            tuner.stepped()


@pytest.fixture
def loader() -> Iterator[DataLoader]:
    with DataLoader({"x": np.zeros((64, 4), np.float32)}, batch_size=8) as made:
        made.depth.threads, made.depth.prefetch = 3, 2
        yield made


def course(loader: DataLoader, rule: Callable[[int, int], tuple[float, float]], **options: Any) -> tuple[Course, Tuner]:
    made = Course(loader, rule)
    return made, Tuner(clock=lambda: made.now, **options)


def told(tuner: Tuner) -> list[tuple[str, float | None, float | None, str]]:
    return [(entry.knob, entry.before, entry.after, entry.verdict) for entry in tuner.diary]


def test_threads_that_are_waited_for_are_added_until_more_do_not_help(loader: DataLoader) -> None:
    def reads(threads: int, prefetch: int) -> tuple[float, float]:
        seconds = max(0.020, 0.120 / min(threads, 6))
        return seconds, seconds - 0.010

    loop, tuner = course(loader, reads)
    with tuner.owning(loader):
        loop.run(tuner, 1000)
    assert loader.depth.threads == 6
    assert told(tuner)[:2] == [("loader.threads", 3, 4, "kept"), ("loader.threads", 4, 6, "kept")]
    assert ("loader.threads", 6, 8, "reverted") in told(tuner)
    assert loader.depth.prefetch == 2


def test_threads_that_take_cores_from_the_step_are_taken_away(loader: DataLoader) -> None:
    loop, tuner = course(loader, lambda threads, prefetch: (0.030 + 0.003 * threads, 0.0))
    with tuner.owning(loader):
        loop.run(tuner, 1000)
    assert loader.depth.threads == 1
    assert told(tuner)[:2] == [("loader.threads", 3, 2, "kept"), ("loader.threads", 2, 1, "kept")]


def test_what_makes_no_difference_is_reverted_and_rests_longer_each_time(loader: DataLoader) -> None:
    loop, tuner = course(loader, lambda threads, prefetch: (0.020, 0.0))
    with tuner.owning(loader):
        loop.run(tuner, 4000)
    assert (loader.depth.threads, loader.depth.prefetch) == (3, 2)
    assert {verdict for *_, verdict in told(tuner)} == {"reverted"}
    steps = [entry.step for entry in tuner.diary if entry.knob == "loader.threads"]
    rests = np.diff(steps)
    assert len(rests) >= 2
    assert np.all(rests[1:] > 1.5 * rests[:-1])


def test_a_move_that_is_hopeless_is_taken_back_after_one_window(loader: DataLoader) -> None:
    num_slow = 0

    def rule(threads: int, prefetch: int) -> tuple[float, float]:
        nonlocal num_slow
        num_slow += threads < 3
        return (0.020 if threads >= 3 else 0.060), 0.0

    loop, tuner = course(loader, rule)
    with tuner.owning(loader):
        loop.run(tuner, 100)
    assert told(tuner)[0] == ("loader.threads", 3, 2, "reverted")
    assert num_slow == 12  # four that settle, and one window


def test_a_run_that_changes_is_looked_at_again(loader: DataLoader) -> None:
    rates = {"slow": False}

    def rule(threads: int, prefetch: int) -> tuple[float, float]:
        wanted = 0.120 if rates["slow"] else 0.040
        seconds = max(0.020, wanted / threads)
        return seconds, seconds - 0.010

    loop, tuner = course(loader, rule)
    with tuner.owning(loader):
        loop.run(tuner, 1500)
        assert loader.depth.threads == 3
        before = len(tuner.diary)
        rates["slow"] = True
        loop.run(tuner, 600)
    assert loader.depth.threads == 6
    assert list(tuner.diary)[before].verdict == "looked again"


def test_an_evaluation_is_no_step(loader: DataLoader) -> None:
    loop, tuner = course(loader, lambda threads, prefetch: (0.020, 0.0))
    with tuner.owning(loader):
        for _ in range(40):
            loop.run(tuner, 10)
            loop.now += 30.0
            tuner.pause()
    assert "looked again" not in {verdict for *_, verdict in told(tuner)}
    assert all("0.0 %" not in entry.why or "±" in entry.why for entry in tuner.diary)
    assert {verdict for *_, verdict in told(tuner)} <= {"reverted"}


def test_numbers_that_are_given_stay() -> None:
    with DataLoader({"x": np.zeros((64, 4), np.float32)}, batch_size=8, knobs=Knobs(threads=5, prefetch=3)) as loader:
        loop, tuner = course(loader, lambda threads, prefetch: (0.030, 0.020))
        with tuner.owning(loader):
            loop.run(tuner, 500)
        assert len(tuner.diary) == 0
        assert loader.knobs == Knobs(threads=5, prefetch=3)


def test_what_is_being_tried_is_taken_back_at_the_end(loader: DataLoader) -> None:
    loop, tuner = course(loader, lambda threads, prefetch: (0.020, 0.0))
    with tuner.owning(loader):
        assert loader.depth.paused
        while loader.depth.threads == 3:
            loop.run(tuner, 1)
        assert loader.depth.threads == 2
    assert loader.depth.threads == 3
    assert not loader.depth.paused
    with pytest.raises(ArgumentError, match="owns no loop: call stepped inside"):
        tuner.stepped()


def test_a_tuner_owns_one_loop_at_a_time(loader: DataLoader) -> None:
    tuner = Tuner()
    owned = pytest.raises(ArgumentError, match="owns the knobs of a loop already")
    with tuner.owning(loader), owned, tuner.owning(loader):
        pass


def test_a_later_session_goes_on_with_what_the_diary_says(loader: DataLoader, tmp_path: Path) -> None:
    def rule(threads: int, prefetch: int) -> tuple[float, float]:
        seconds = max(0.020, 0.120 / min(threads, 6))
        return seconds, seconds - 0.010

    diary = tmp_path / "runs" / "tuning.jsonl"
    loop, tuner = course(loader, rule, diary=diary)
    with tuner.owning(loader):
        loop.run(tuner, 1000)
    before = list(tuner.diary)
    loader.depth.threads = 3
    tuner = Tuner(diary=diary)
    with tuner.owning(loader):
        assert loader.depth.threads == 6
    assert list(tuner.diary)[:-1] == before
    assert told(tuner)[-1] == ("loader.threads", 3, 6, "taken over")
    assert str(list(tuner.diary)[-1]) == "step 0: loader.threads 3 → 6: taken over: an earlier session left it so"


def test_a_diary_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "tuning.jsonl"
    lines = (
        '{"braidax": "tuning", "version": 1}\n'
        '{"step": 80, "knob": "loader.threads", "before": 3, "after": 4, "verdict": "kept", "why": "faster"}\n'
        '{"step": 90, "knob": "loader.threads", "before": 4, "after": "8", "verdict": "kept", "why": "no number"}\n'
        '{"step": 160, "knob": "loader.thr'
    )
    path.write_text(lines)
    diary = Diary(path)
    assert diary.settings == {"loader.threads": 4}
    assert path.read_text() == lines + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss,step\n1,2\n", r"begins with b'loss,step': expected the diary of a tuner, version 1; it stays as it is"),
        ('{"braidax": "tuning", "version": 7}\n', r"is of version 7: expected the diary of a tuner, version 1"),
    ],
)
def test_another_file_is_no_diary(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        Diary(path)
    assert path.read_text() == text


def test_a_diary_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"cannot be written \(File exists\): expected a file in a folder"):
        Diary(tmp_path / "file" / "tuning.jsonl")


@pytest.mark.usefixtures("unchecked")
def test_words_stand_for_limits() -> None:
    unchecked_tuner: Any = Tuner
    assert Tuner("speed").limits == Limits(overhead=0.01)
    assert Tuner("safe").limits == Limits(overhead=0.1, max_lost_seconds=60.0)
    assert Tuner().limits == Limits(overhead=0.035)
    with pytest.raises(ArgumentError, match=r"priority='fast': expected 'speed', 'balanced', 'safe', or Limits"):
        unchecked_tuner("fast")
    with pytest.raises(ArgumentError, match=r"memory_bytes=0: expected a positive number of bytes"):
        Limits(memory_bytes=0)
    with pytest.raises(ArgumentError, match=r"overhead=0: expected a share > 0"):
        Limits(overhead=0)


def test_memory_that_one_batch_exceeds_is_refused(loader: DataLoader) -> None:
    tuner = Tuner(Limits(memory_bytes=127))
    refused = pytest.raises(
        ArgumentError, match=r"memory_bytes=127 cannot be kept: one batch of 8 samples takes 128 bytes"
    )
    with refused, tuner.owning(loader):
        pass
    with Tuner(Limits(memory_bytes=1024)).owning(loader):
        assert loader.knobs.max_bytes == 1024


@dataclass
class Times:
    step: float = 0.020
    cost: float = 0.014
    now: float = 0.0


def saving(saver: Checkpointer, tuner: Tuner, times: Times, num_steps: int) -> None:
    """Runs steps of `times.step` seconds with a real checkpointer, whose spacing is told the same clock."""
    tree = {"x": jnp.zeros(3)}
    for _ in range(num_steps):
        times.now += times.step
        saver.update(tree)
        if saver.is_under_way:
            saver.wait()
            assert saver._pending is not None
            saver._pending.committed.result(timeout=60)
            times.now += times.cost
        tuner.stepped()


@dataclass(frozen=True)
class AdaptiveOn(Adaptive):
    """An `Adaptive` interval on a clock of the test."""

    times: Times = field(default_factory=Times)

    def start(self, num_updates: int, *, announcements: Any = None, clock: Any = None) -> Any:
        return super().start(num_updates, announcements=announcements, clock=lambda: self.times.now)


def test_checkpoints_are_as_far_apart_as_their_cost_asks_for(loader: DataLoader, tmp_path: Path) -> None:
    times = Times()
    tuner = Tuner(Limits(overhead=0.01), clock=lambda: times.now)
    with Checkpointer(tmp_path, AdaptiveOn(0.5, times=times)) as saver:
        with tuner.owning(loader, saver):
            saving(saver, tuner, times, 1200)
            assert saver.spacing.paused
            assert 60 <= saver.spacing.num_updates <= 90  # 14 ms are 1 % of 70 steps
            entry = [entry for entry in tuner.diary if entry.knob == "saver.spacing.num_updates"][-1]
            assert (entry.after, entry.verdict) == (saver.spacing.num_updates, "set")
            assert entry.why.startswith(f"a checkpoint every {entry.after} updates (overhead)")
        assert not saver.spacing.paused


def test_a_trial_in_which_checkpoints_move_is_taken_back(loader: DataLoader, tmp_path: Path) -> None:
    times = Times()
    tuner = Tuner(Limits(overhead=0.5), clock=lambda: times.now)
    with Checkpointer(tmp_path, AdaptiveOn(0.5, times=times)) as saver, tuner.owning(loader, saver):
        while loader.depth.threads == 3:
            saving(saver, tuner, times, 1)
        before = len(tuner.diary)
        times.cost = 0.5
        while len(tuner.diary) == before:
            saving(saver, tuner, times, 1)
        moved, reverted = list(tuner.diary)[before:]
        assert (moved.knob, moved.verdict) == ("saver.spacing.num_updates", "set")
        assert (reverted.knob, reverted.verdict) == ("loader.threads", "reverted")
        assert reverted.why == "checkpoints have moved meanwhile"
        assert loader.depth.threads == 3


def test_checkpoints_at_regular_updates_stay(loader: DataLoader, tmp_path: Path) -> None:
    times = Times()
    tuner = Tuner("speed", clock=lambda: times.now)
    with Checkpointer(tmp_path, Every(10)) as saver, tuner.owning(loader, saver):
        saving(saver, tuner, times, 200)
        assert saver.spacing.num_updates == 10
        assert not saver.spacing.paused


def test_a_fit_is_tuned_and_computes_the_same(tmp_path: Path) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    samples = {"x": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    batch = {"x": jax.ShapeDtypeStruct((8, 4), np.float32)}

    def init(key: Any) -> Any:
        return {"w": jnp.ones(4)}

    step = parallelize(loss, optax.sgd(0.1), mesh, {"data": DataParallel()}, init=init, batch=batch)
    found: list[Any] = []
    for tuner in (None, Tuner("safe", diary=tmp_path / "tuning.jsonl")):
        with DataLoader(samples, mesh, step.batch_shardings, batch_size=8, epochs=10) as loader:
            found.append(fit(step, step.init(jax.random.key(0)), loader, tuner=tuner))
            assert not loader.depth.paused
    np.testing.assert_array_equal(found[0].params["w"], found[1].params["w"])
    assert (tmp_path / "tuning.jsonl").read_text().startswith('{"braidax": "tuning", "version": 1}\n')
