"""The language model: as large as published, its sampler and its loss by values, its text, and that the loss falls."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.errors import ArgumentError, FormatError
from braidax.program import find_uses, trace
from braidax.tasks.lm1b import lm1b
from braidax.tasks.lm1b_model import (
    Candidates,
    Sizes,
    estimated_softmax,
    init_language_model,
    log_expected_count,
    read_words,
    sample_classes,
    sampled_softmax,
)
from braidax.tasks.task import Task
from tests.support.tasks.updates import batch_of, count, losses_of

NUM_CLASSES, NUM_SAMPLED = 50, 10


def sampled(key: Any, num_sampled: int = NUM_SAMPLED) -> Candidates:
    """Returns classes, drawn by what is compiled anew: tests replace what it calls."""
    return jax.jit(lambda key: sample_classes(key, NUM_CLASSES, num_sampled))(key)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRAIDAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        return lm1b(preset="tiny")


def write_benchmark(folder: Path) -> Path:
    train, test = (f"{name}-monolingual.tokenized.shuffled" for name in ("training", "heldout"))
    for name, text in {
        f"{train}/news.en-00001-of-00100": "The cat saw the cat .\n" * 8,
        f"{train}/news.en-00002-of-00100": "the dog saw the cat .\n" * 3 + "rare .\n",
        f"{test}/news.en.heldout-00000-of-00050": "the dog saw a cat .\n" * 4,
        f"{test}/news.en.heldout-00001-of-00050": "not read .\n" * 90,
    }.items():
        path = folder / "1-billion-word-language-modeling-benchmark-r13output" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_it_has_as_many_parameters_as_published() -> None:
    sizes = Sizes(793_470, 512, 2048, 512, dropout=0.1)
    params = jax.eval_shape(lambda key: init_language_model(key, sizes), jax.random.key(0))
    assert (count(params["lstm"]), count((params["embedding"], params["softmax"]))) == (9_445_376, 813_306_750)


def test_only_rows_of_the_tables_are_read(task: Task) -> None:
    params, key = jax.eval_shape(task.init, jax.random.key(0)), jax.eval_shape(lambda: jax.random.key(0))
    batch = task.train.batch_spec(8)
    program = trace(lambda params, batch, key: task.loss(params, batch, key, True), params, batch, key)
    verdicts = {uses.name: uses.verdict for uses in find_uses(program)}
    sparse = {name for name, verdict in verdicts.items() if verdict == "sparse"}
    assert len(sparse) == 3
    assert all("embedding" in name or "softmax" in name for name in sparse)
    assert set(verdicts.values()) == {"sparse", "dense"}


def test_the_first_of_different_draws_is_log_uniform() -> None:
    keys = jax.random.split(jax.random.key(1), 40_000)
    drawn = jax.jit(jax.vmap(lambda key: sample_classes(key, NUM_CLASSES, 1).ids[0]))(keys)
    expected = np.log1p(1 / np.arange(1.0, NUM_CLASSES + 1)) / np.log(NUM_CLASSES + 1)
    assert expected.sum() == pytest.approx(1)
    frequency = np.bincount(drawn, minlength=NUM_CLASSES) / len(keys)
    np.testing.assert_allclose(frequency, expected, atol=5 * np.sqrt(expected / len(keys)).max(), rtol=0)
    np.testing.assert_allclose(frequency[25:].sum(), expected[25:].sum(), atol=0.008)


def test_the_last_octave_of_classes_is_drawn_as_often_as_it_should_be() -> None:
    many = jax.jit(lambda key: sample_classes(key, 793_470, 8192))(jax.random.key(3))
    ids = np.asarray(many.ids)
    log_counts = jax.jit(lambda classes, tries: log_expected_count(classes, 793_470, tries))
    expected = np.exp(log_counts(np.arange(793_470), many.num_tries))
    assert expected.sum() == pytest.approx(8192, rel=0.02)
    for first, last in ((0, 1000), (1000, 100_000), (100_000, 524_287), (524_287, 793_470)):
        count, mean = ((first <= ids) & (ids < last)).sum(), expected[first:last].sum()
        assert abs(count - mean) < 5 * np.sqrt(mean)


def test_candidates_are_the_first_different_draws_as_numpy_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0).integers(0, 14, 64).astype(np.int32)
    monkeypatch.setattr("braidax.tasks.lm1b_model._log_uniform", lambda key, num_classes, num: jnp.asarray(draws[:num]))
    expected = list(dict.fromkeys(draws.tolist()))[:NUM_SAMPLED]
    tries = next(n for n in range(65) if len(set(draws[:n].tolist())) == NUM_SAMPLED)
    found = sampled(jax.random.key(0))
    assert found.ids.tolist() == expected
    assert found.drawn.all()
    assert float(found.num_tries) == tries


@pytest.mark.usefixtures("quickly_compiled")
def test_classes_that_were_not_found_in_time_stand_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(key: Any, num_classes: int, num_draws: int) -> Any:
        return jnp.arange(num_draws) % 7

    monkeypatch.setattr("braidax.tasks.lm1b_model._log_uniform", few)
    found = jax.tree.map(np.asarray, sampled(jax.random.key(0)))
    assert found.ids[:7].tolist() == list(range(7))
    assert found.drawn.tolist() == [True] * 7 + [False] * 3
    outputs, softmax, targets = draw_softmax()
    padded = jax.jit(sampled_softmax)(softmax, outputs, targets, found)
    exact = jax.jit(sampled_softmax)(
        softmax, outputs, targets, found._replace(ids=found.ids[:7], drawn=found.drawn[:7])
    )
    np.testing.assert_allclose(padded, exact, rtol=1e-6)


def draw_softmax() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(4)
    softmax = {"weight": rng.normal(size=(NUM_CLASSES, 6)), "bias": rng.normal(size=NUM_CLASSES)}
    outputs, targets = rng.normal(size=(3, 4, 6)), rng.integers(0, NUM_CLASSES, (3, 4)).astype(np.int32)
    return jnp.float32(outputs), jax.tree.map(jnp.float32, softmax), jnp.asarray(targets)


def test_the_sampled_softmax_corrects_and_leaves_out_the_target_as_numpy_does() -> None:
    outputs, softmax, targets = draw_softmax()
    candidates = sampled(jax.random.key(5))
    candidates = candidates._replace(ids=candidates.ids.at[3].set(targets[1, 2]))
    losses = jax.jit(sampled_softmax)(softmax, outputs, targets, candidates)
    tries = float(candidates.num_tries)
    probability = np.log((np.arange(NUM_CLASSES) + 2) / (np.arange(NUM_CLASSES) + 1)) / np.log(NUM_CLASSES + 1)
    logits = np.asarray(outputs) @ np.asarray(softmax["weight"]).T + np.asarray(softmax["bias"])
    logits = logits - np.log(1 - (1 - probability) ** tries)
    num_hits = 0
    for place in np.ndindex(3, 4):
        target = int(targets[place])
        others = [int(c) for c in candidates.ids if int(c) != target]
        num_hits += NUM_SAMPLED - len(others)
        scores = np.exp(logits[place][[target, *others]])
        assert float(losses[place]) == pytest.approx(-np.log(scores[0] / scores.sum()), rel=1e-4)
    assert num_hits >= 1


def test_with_all_classes_it_is_the_softmax_over_all() -> None:
    outputs, softmax, targets = draw_softmax()
    everything = sample_classes(jax.random.key(0), NUM_CLASSES, NUM_CLASSES)
    logits = np.asarray(outputs) @ np.asarray(softmax["weight"]).T + np.asarray(softmax["bias"])
    sums = np.log(np.exp(logits).sum(-1))
    expected = sums - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    for losses in (sampled_softmax, estimated_softmax):
        found = jax.jit(losses)(softmax, outputs, targets, everything)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_on_average_a_sample_stands_for_all_classes() -> None:
    outputs, softmax, targets = draw_softmax()

    @jax.jit
    def one_over_share_of_target(key: Any) -> tuple[Any, Any]:
        sums = jax.vmap(lambda key: estimated_softmax(softmax, outputs, targets, sample_classes(key, NUM_CLASSES, 25)))(
            jax.random.split(key, 2000)
        )
        return jnp.exp(sums).mean(0), sums.mean(0)

    everything = sample_classes(jax.random.key(0), NUM_CLASSES, NUM_CLASSES)
    whole = jax.jit(estimated_softmax)(softmax, outputs, targets, everything)
    inverse, loss = one_over_share_of_target(jax.random.key(6))
    np.testing.assert_allclose(inverse, np.exp(whole), rtol=0.03)
    assert (loss < whole).mean() > 0.9


@pytest.mark.usefixtures("quickly_compiled")
def test_the_lstm_is_that_of_the_textbook() -> None:
    params = jax.jit(lambda key: init_language_model(key, Sizes(9, 3, 5, 4, dropout=0.0)))(jax.random.key(7))
    params["lstm"]["bias"] = jax.random.normal(jax.random.key(8), (20,))
    words = jnp.array([[1, 7, 2], [0, 0, 8]])
    table, lstm = np.asarray(params["embedding"]), jax.tree.map(np.asarray, params["lstm"])

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    state, output, expected = np.zeros((2, 5)), np.zeros((2, 4)), list[Any]()
    for step in range(3):
        both = np.concatenate([table[words[:, step]], output], axis=1) @ lstm["kernel"] + lstm["bias"]
        i, g, f, o = np.split(both, 4, axis=1)
        state = sigmoid(f + 1) * state + sigmoid(i) * np.tanh(g)
        output = (sigmoid(o) * np.tanh(state)) @ lstm["projection"]
        expected.append(output)
    outputs = jax.jit(lambda params: read_words(params, words, key=None, dropout=0.5))(params)
    np.testing.assert_allclose(outputs, np.stack(expected, axis=1), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("quickly_compiled")
def test_dropout_drops_only_while_training() -> None:
    @jax.jit
    def outputs(key: Any) -> tuple[Any, Any]:
        params, words = init_language_model(key, Sizes(9, 3, 5, 400, dropout=0.0)), jnp.array([[1, 7, 2]])
        return tuple(read_words(params, words, key=used, dropout=0.25) for used in (key, None))

    dropped, whole = outputs(jax.random.key(0))
    assert float((dropped == 0).mean()) == pytest.approx(0.25, abs=0.05)
    assert not (whole == 0).any()


@pytest.mark.usefixtures("quickly_compiled")
def test_a_mask_leaves_samples_out_of_the_mean(task: Task) -> None:
    params, batch = jax.jit(task.init)(jax.random.key(0)), batch_of(task.train, 8)
    loss = jax.jit(lambda batch: task.loss(params, batch, None, False)[0])
    few, masked = loss(batch_of(task.train, 5)), loss({**batch, "mask": np.arange(8) < 5})
    assert float(masked) == pytest.approx(float(few), rel=1e-6)
    assert float(few) == pytest.approx(np.log(2000), rel=0.03)  # as good as a guess


@pytest.mark.usefixtures("quickly_compiled")
def test_a_few_updates_lower_the_loss(task: Task) -> None:
    losses = losses_of(task, [batch_of(task.train, 32, at) for at in range(0, 640, 32)])
    assert np.mean(losses[-5:]) < losses[0] - 0.8


def test_the_perplexity_belongs_to_the_mean_loss(task: Task) -> None:
    assert task.tell({"loss": math.log(80)}) == "perplexity 80"
    assert task.tell({"loss": 1e6}) == "perplexity 1.014e+304"


def test_samples_are_the_running_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    task = lm1b(write_benchmark(tmp_path / "data"), preset="tiny")
    # Words that occur thrice or more, the most frequent first: cat 19 = 8·2 + 3, the 14 = 8 + 6, "." 12, saw 11, …
    number = {"cat": 2, "the": 3, ".": 4, "saw": 5, "The": 6, "dog": 7}
    sentence = [*(number[word] for word in ("The", "cat", "saw", "the", "cat", ".")), 0]
    np.testing.assert_array_equal(batch_of(task.train, 1)["tokens"][0], sentence * 3)
    assert (len(task.train), len(task.test)) == ((11 * 7 + 3) // 21, 1)
    assert batch_of(task.test, 1)["tokens"][0, :7].tolist() == [3, 7, 5, 1, 2, 4, 0]  # "a" is unknown


def test_words_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    first = lm1b(write_benchmark(tmp_path / "data"), preset="tiny")
    kept = list((tmp_path / "cache" / "derived" / "lm1b").iterdir())
    assert len(kept) == 1
    monkeypatch.setattr("braidax.tasks.lm1b._count", None)
    again = lm1b(tmp_path / "data", preset="tiny")
    np.testing.assert_array_equal(batch_of(again.train, 2)["tokens"], batch_of(first.train, 2)["tokens"])


def test_wrong_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="preset='huge' is unknown; the presets are full, small, tiny"):
        lm1b(preset="huge")
    with pytest.raises(FormatError, match="holds no One Billion Word benchmark; expected the folders training-mono"):
        lm1b(tmp_path)
    with pytest.raises(ArgumentError, match="num_sampled=26: expected between 1 and half of num_classes=50, or all"):
        sample_classes(jax.random.key(0), 50, 26)
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="set the environment variable BRAIDAX_CACHE to a folder that can be written"):
        lm1b(preset="tiny")


def test_gradients_of_the_lstm_alone_are_clipped(task: Task) -> None:
    """Their norm is 10 at most, summed over 20 steps; whatever else there is moves as Adagrad moves it."""
    params = jax.eval_shape(task.init, jax.random.key(0))
    optimizer, adagrad = task.optimizer(7), optax.adagrad(0.2, initial_accumulator_value=1 / 400)
    ones = jax.tree.map(lambda spec: np.ones(spec.shape, np.float32), params)

    def update(optimizer: optax.GradientTransformation, gradients: Any) -> Any:
        return jax.jit(lambda gradients: optimizer.update(gradients, optimizer.init(ones), ones)[0])(gradients)

    for size in (1.0, 1e-6):
        gradients = jax.tree.map(lambda one, size=size: size * one, ones)
        norm = float(optax.tree.norm(gradients["lstm"]))
        part = min(1.0, 0.5 / norm)
        scaled = {**gradients, "lstm": jax.tree.map(lambda one, part=part: one * part, gradients["lstm"])}
        found, expected = update(optimizer, gradients), update(adagrad, scaled)
        assert (norm > 0.5) == (size == 1.0)
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5)
