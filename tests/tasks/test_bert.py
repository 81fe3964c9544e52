"""BERT as a classifier: as large as published, blind to the filling, its texts, and that the loss falls."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.errors import ArgumentError, FormatError
from braidax.tasks.bert import bert
from braidax.tasks.bert_model import Bert, Sizes
from braidax.tasks.task import Task
from tests.support.tasks.updates import batch_of, count, losses_of

SMALL = Sizes(50, 16, width=8, num_layers=2, num_heads=2, dropout=0.5)


@pytest.fixture(scope="module")
def task() -> Task:
    return bert(preset="tiny")


def write_reviews(folder: Path, num_texts: int = 3) -> Path:
    for name, word in (("neg", "bad"), ("pos", "good")):
        (folder / name).mkdir(parents=True)
        for number in range(num_texts):
            (folder / name / f"{number}_1.txt").write_text(f"{word.capitalize()} film, {word}!")
    return folder


def test_it_has_as_many_parameters_as_published() -> None:
    model = Bert(2)
    words, num_words = jnp.zeros((1, 512), jnp.int32), jnp.ones(1, jnp.int32)
    params = jax.eval_shape(lambda key: model.init(key, words, num_words, train=False), jax.random.key(0))["params"]
    classifier = params.pop("classifier")
    assert count(params) == 109_482_240
    assert count(classifier) == 2 * 768 + 2
    assert params["layers"]["inner"]["kernel"].shape == (12, 768, 3072)


@pytest.mark.usefixtures("quickly_compiled")
def test_what_is_behind_a_text_changes_nothing_and_what_is_in_it_does() -> None:
    model, words = Bert(3, SMALL), np.arange(12, dtype=np.int32).reshape(1, 12)
    behind, within = words.copy(), words.copy()
    behind[0, 9:] = within[0, 8] = 49
    apply = jax.jit(lambda words: model.apply(params, words, jnp.array([9]), train=False))
    params = jax.jit(lambda key: model.init(key, jnp.asarray(words), jnp.array([9]), train=False))(jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.asarray(leaf) * 20, params)
    logits: Any = apply(words)
    np.testing.assert_array_equal(apply(behind), logits)
    assert np.abs(apply(within) - logits).max() > 1e-3


@pytest.mark.usefixtures("quickly_compiled")
def test_layers_are_computed_again_only_where_asked_with_the_same_result() -> None:
    words, num_words = jnp.arange(24).reshape(2, 12), jnp.array([9, 12])

    def gradient(remat: Any) -> tuple[Any, str]:
        model = Bert(3, dataclasses.replace(SMALL, dropout=0.0), remat)

        def loss(params: Any) -> Any:
            return model.apply(params, words, num_words, train=True).sum()

        params = jax.jit(lambda key: model.init(key, words, num_words, train=False))(jax.random.key(0))
        traced = jax.jit(jax.grad(loss)).trace(params)
        return traced.lower().compile()(params), str(traced.jaxpr)

    (kept, kept_program), (again, again_program) = gradient("nothing"), gradient("layers")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), kept, again)
    assert "remat" in again_program
    assert "remat" not in kept_program


@pytest.mark.usefixtures("quickly_compiled")
def test_a_mask_leaves_samples_out_and_dropout_is_for_training(task: Task) -> None:
    params, batch = jax.jit(task.init)(jax.random.key(0)), batch_of(task.train, 8)
    loss = jax.jit(lambda batch: task.loss(params, batch, None, False))
    few, seen = loss(jax.tree.map(lambda leaf: leaf[:5], batch))
    masked, also = loss({**batch, "mask": jnp.arange(8) < 5})
    assert float(masked) == pytest.approx(float(few), rel=1e-5)
    assert float(also["accuracy"]) == pytest.approx(float(seen["accuracy"]))
    assert float(few) == pytest.approx(np.log(8), rel=0.1)  # eight packages


@pytest.mark.usefixtures("quickly_compiled")
def test_a_few_updates_lower_the_loss(task: Task) -> None:
    batch = jax.tree.map(np.asarray, batch_of(task.train, len(task.train)))
    shuffled = np.random.default_rng(0).permutation(len(task.train))
    some = jax.tree.map(lambda leaf: jnp.asarray(leaf[shuffled[:32]]), batch)
    losses = losses_of(task, [some] * 30)
    assert losses[0] == pytest.approx(np.log(8), rel=0.1)  # eight packages
    assert losses[-1] < losses[0] - 0.3


def test_texts_of_a_folder_become_samples(tmp_path: Path) -> None:
    task = bert(write_reviews(tmp_path, 5), preset="tiny")
    assert (len(task.train), len(task.test)) == (8, 2)
    batch = batch_of(task.train, 8)
    assert batch["label"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert batch["num_words"].tolist() == [6] * 8
    # Eight times each "!", ",", "film", "bad" (twice in four texts) and "good", in the order of the alphabet: 3 to 7.
    assert batch["words"][0, :8].tolist() == [1, 5, 6, 4, 5, 3, 0, 0]
    assert batch["words"][7, :8].tolist() == [1, 7, 6, 4, 7, 3, 0, 0]


def test_the_layout_of_imdb_has_its_own_test(tmp_path: Path) -> None:
    write_reviews(tmp_path / "aclImdb" / "train")
    test = write_reviews(tmp_path / "aclImdb" / "test", 2)
    (test / "pos" / "0_1.txt").write_text("good new " * 40)
    task = bert(tmp_path, preset="tiny")
    assert (len(task.train), len(task.test)) == (6, 4)
    batch = batch_of(task.test, 4)
    assert batch["label"].tolist() == [0, 0, 1, 1]
    assert batch["num_words"].tolist() == [6, 6, 32, 6]  # cut to 32
    assert batch["words"][2, :5].tolist() == [1, 7, 2, 7, 2]  # "new" is unknown to train


def test_wrong_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="preset='huge' is unknown; the presets are full, small, tiny"):
        bert(preset="huge")
    with pytest.raises(FormatError, match=r"neg: holds no .txt file; expected reviews as they lie in aclImdb"):
        bert(tmp_path)
    with pytest.raises(FormatError, match="holds 4 texts, expected at least 5"):
        bert(write_reviews(tmp_path / "few", 2), preset="tiny")
