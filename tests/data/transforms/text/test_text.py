"""Text: token ids that depend on nothing but their text, and arrays of one length."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from braidax.data.loader import DataLoader
from braidax.data.source import is_varying
from braidax.data.transforms.text.text import padded, tokenized
from braidax.errors import ArgumentError, BraidaxError, FormatError, MissingExtra, RecordError
from tests.support.data.varying import Varying, window

TEXTS = ["the cat sat on the mat", "", "a dog", "the dog sat, and the cat ran " * 4, "naïve 猫 text\n"] * 4
SOURCE = Varying({"text": TEXTS})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def codes(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


def ids(source: Any, *indices: int) -> list[list[int]]:
    found = window(source, *indices)
    np.testing.assert_array_equal(found["id"], indices)
    assert {array.dtype for array in found["tokens"]} <= {np.dtype(np.int32)}
    return [array.tolist() for array in found["tokens"]]


# tokenized


def test_tokens_are_those_of_the_tokenizer(tokenizer: Any) -> None:
    source = tokenized(SOURCE, tokenizer)
    assert set(source.sample_spec) == {"tokens", "id"}
    assert is_varying(source.sample_spec["tokens"])
    assert len(source) == len(TEXTS)
    expected = [tokenizer.encode(text).ids for text in TEXTS]
    assert len(expected[3]) > 10
    assert ids(source, *range(len(TEXTS))) == expected
    assert ids(source, 3, 0, 3) == [expected[3], expected[0], expected[3]]
    assert ids(source) == []
    assert source.describe() == {"format": "varying", "samples": "20", "tokenized": "text by HuggingFace"}


def test_any_way_to_name_a_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    expected = ids(tokenized(SOURCE, tokenizer), *range(5))
    ways = [
        tmp_path / "tokenizer.json",
        str(tmp_path),
        SimpleNamespace(backend_tokenizer=tokenizer),
        lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)],
        lambda texts: [np.array(encoding.ids, np.int64) for encoding in tokenizer.encode_batch(texts)],
        lambda texts: [tuple(encoding.ids) for encoding in tokenizer.encode_batch(texts)],
    ]
    for way in ways:
        assert ids(tokenized(SOURCE, way), *range(5)) == expected


def test_an_end_stands_behind_every_text(tokenizer: Any) -> None:
    plain = ids(tokenized(SOURCE, tokenizer), *range(5))
    assert ids(tokenized(SOURCE, tokenizer, end=7), *range(5)) == [[*found, 7] for found in plain]
    assert ids(tokenized(SOURCE, codes, end=7), 1, 2) == [[7], [*codes(["a dog"])[0], 7]]
    assert ids(tokenized(SOURCE, codes, end=7)) == []


def test_one_length(tokenizer: Any) -> None:
    plain = ids(tokenized(SOURCE, tokenizer, end=1), *range(5))
    source = tokenized(SOURCE, tokenizer, length=12, pad=9, end=1)
    specs = {name: (spec.shape, spec.dtype.name) for name, spec in source.sample_spec.items()}
    assert specs == {"id": ((), "int32"), "tokens": ((12,), "int32"), "num_tokens": ((), "int32")}
    got = window(source, *range(5))
    assert got["tokens"].tolist() == [(found + [9] * 12)[:12] for found in plain]
    assert got["num_tokens"].tolist() == [min(len(found), 12) for found in plain]
    assert {12, 1} < set(got["num_tokens"].tolist())  # cut, and empty but for the end
    assert source.describe()["padded"] == "tokens to 12"


def test_special_tokens_are_kept_when_a_text_is_cut(tokenizer: Any) -> None:
    special = Tokenizer.from_str(tokenizer.to_str())
    special.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    plain = tokenizer.encode(TEXTS[3]).ids
    assert window(tokenized(SOURCE, special, length=6), 3)["tokens"].tolist() == [[0, *plain[:4], 1]]
    assert ids(tokenized(SOURCE, special), 3) == [[0, *plain, 1]]
    with pytest.raises(ArgumentError, match="length=2: this tokenizer adds 2 special tokens to every text"):
        tokenized(SOURCE, special, length=2)


def test_padding_and_truncation_of_the_tokenizer_are_not_used(tokenizer: Any) -> None:
    expected = ids(tokenized(SOURCE, tokenizer), *range(5))
    changed = Tokenizer.from_str(tokenizer.to_str())
    changed.enable_padding()
    changed.enable_truncation(3)
    source = tokenized(SOURCE, changed)
    assert ids(source, *range(5)) == expected
    assert changed.padding is not None  # the user's own is left as it was
    assert changed.truncation["max_length"] == 3
    late = Tokenizer.from_str(tokenizer.to_str())
    source = tokenized(SOURCE, late)
    late.enable_truncation(1)
    assert ids(source, *range(5)) == expected


def test_many_threads_read_what_one_reads(tokenizer: Any) -> None:
    source = tokenized(SOURCE, tokenizer, length=16)
    serial = window(source, *range(20))
    orders = [np.random.default_rng(seed).integers(0, 20, 9).tolist() for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        for order, got in zip(orders, pool.map(lambda order: window(source, *order), orders), strict=True):
            jax.tree.map(np.testing.assert_array_equal, got, jax.tree.map(lambda leaf, at=order: leaf[at], serial))


def test_under_a_loader(tokenizer: Any) -> None:
    source = tokenized(SOURCE, tokenizer, length=8)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    expected = window(source, *range(20))["tokens"]
    for batch in DataLoader(source, mesh, P("data"), batch_size=4, seed=1):
        np.testing.assert_array_equal(np.asarray(batch["tokens"]), expected[np.asarray(batch["id"])])


def test_epochs_and_announcements_reach_the_inner_source() -> None:
    inner = Varying({"text": TEXTS})
    source = tokenized(inner, codes, length=4)
    assert source.at(1, 2) is source  # the inner one is not redrawn
    source.prepare(np.array([3, 1]))
    assert inner.prepared == [3, 1]
    growing = padded(Varying({"x": [np.arange(2), np.arange(1)]}, grow=True), 6, leaf="x", pad=-1)
    assert window(growing.at(0, 2), 0)["x"].tolist() == [[0, 1, 0, 0, -1, -1]]
    assert window(growing, 0)["x"].tolist() == [[0, 1, -1, -1, -1, -1]]


@pytest.mark.parametrize(
    ("encode", "fact"),
    [
        (lambda texts: codes(texts)[:-1], "returned 1 lists of ids for 2 texts; expected as many"),
        (lambda texts: [[0.5] for _ in texts], "record 2: tokenizer= returned list [0.5] for it; expected a list or a"),
        (lambda texts: [[2**31] for _ in texts], "record 2: tokenizer= returned list [2147483648] for it"),
        (lambda texts: [np.zeros((1, 1), int)] * 2, "record 2: tokenizer= returned ndarray array([[0]]) for it"),
        (lambda texts: [[[1], [1, 2]]] * 2, "record 2: tokenizer= returned list [[1], [1, 2]] for it"),
        (lambda texts: [1 // len(text) for text in texts], "raised ZeroDivisionError"),
    ],
)
def test_a_function_that_is_no_tokenizer(encode: Any, fact: str) -> None:
    with pytest.raises(RecordError) as caught:
        window(tokenized(SOURCE, encode), 2, 1)
    assert fact in str(caught.value)
    if "Zero" in fact:
        assert "on record 1; mend the tokenizer or the record" in str(caught.value)


def test_a_failure_of_records_together_and_an_error_of_ours() -> None:
    def together(texts: list[str]) -> list[list[int]]:
        if len(texts) > 1:
            raise ValueError("too many")
        return [[1]]

    with pytest.raises(RecordError, match=r"raised ValueError: too many, on the records \[2, 1\] taken together"):
        window(tokenized(SOURCE, together), 2, 1)

    def ours(texts: list[str]) -> list[list[int]]:
        raise BraidaxError("as it is")

    with pytest.raises(BraidaxError, match=r"^as it is$"):
        window(tokenized(SOURCE, ours), 0)


def test_what_is_no_text() -> None:
    with pytest.raises(RecordError, match=r"record 1: leaf 'text' is bytes b'b'; expected str: decode it"):
        window(tokenized(Varying({"text": ["a", b"b"]}), codes), 0, 1)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"leaf": "words"}, "tokenized: leaf='words' is no leaf of varying size: samples have ['id', 'text']"),
        ({"leaf": "id"}, "leaf='id' is no leaf of varying size: it is ShapeDtypeStruct"),
        ({"length": 0}, "length=0: expected at least 1 token"),
        ({"end": -1}, "end=-1: expected the id of a token"),
        ({"length": 4, "pad": 2**31}, "pad=2147483648 does not fit in int32, the dtype of leaf 'tokens'"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        tokenized(SOURCE, codes, **options)
    assert fact in str(caught.value)


def test_leaves_that_are_there_already() -> None:
    with pytest.raises(ArgumentError, match="tokenized adds the leaf 'tokens', but samples have one already"):
        tokenized(Varying({"text": ["a"], "tokens": [np.arange(3)]}), codes)
    with pytest.raises(ArgumentError, match="padded adds the leaf 'num_x', but samples have one already"):
        padded(Varying({"x": [np.arange(2)], "num_x": [np.arange(2)]}), 3, leaf="x")
    source = tokenized(Varying({"tokens": ["ab"]}), codes, leaf="tokens")  # replaced by itself
    assert ids(source, 0) == [[97, 98]]


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"tokenizer=int: expected a tokenizers.Tokenizer \(0.21 or newer\)"):
        tokenized(SOURCE, 3)
    with pytest.raises(FormatError, match=r"no tokenizer can be loaded from it"):
        tokenized(SOURCE, tmp_path / "missing.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"expected the tokenizer.json that Tokenizer.save wrote"):
        tokenized(SOURCE, tmp_path)


def test_a_tokenizer_with_parts_in_python(tokenizer: Any) -> None:
    class Whole:
        def pre_tokenize(self, text: Any) -> None:
            pass

    custom = Tokenizer(models.BPE())
    custom.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Whole())
    with pytest.raises(
        ArgumentError, match=r"tokenizer=Tokenizer: cannot be copied, as those with parts written in Python"
    ):
        tokenized(SOURCE, custom)


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r'pip install "braidax\[text\]"'):
        tokenized(SOURCE, tmp_path / "tokenizer.json")


# padded


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    length=st.integers(1, 7),
    dtype=st.sampled_from(["int32", "uint16", "int64", "float32", "float64"]),
    shape=st.sampled_from([(), (2,)]),
    indices=st.lists(st.integers(0, 11), max_size=9),
)
def test_padded_is_head_and_filling(
    lengths: list[int], length: int, dtype: str, shape: tuple[int, ...], indices: list[int]
) -> None:
    rng = np.random.default_rng(len(lengths))
    arrays = [rng.integers(0, 100, (size, *shape)).astype(dtype) for size in lengths]
    source = padded(Varying({"x": arrays}), length, leaf="x", pad=5)
    loaded = {"int64": "int32", "float64": "float32"}.get(dtype, dtype)
    assert source.sample_spec["x"] == jax.ShapeDtypeStruct((length, *shape), np.dtype(loaded))
    indices = [index % len(lengths) for index in indices]
    got = window(source, *indices)
    for row, index in enumerate(indices):
        expected = np.full((length, *shape), 5, loaded)
        expected[: lengths[index]] = arrays[index][:length]
        np.testing.assert_array_equal(got["x"][row], expected)
        assert got["num_x"][row] == min(length, lengths[index])


def test_empty_lists_have_no_dtype() -> None:
    source = padded(Varying({"x": [np.array([]), np.array([3, 4])]}), 3, leaf="x")
    assert window(source, 0, 1)["x"].tolist() == [[0, 0, 0], [3, 4, 0]]
    assert source.sample_spec["x"].dtype == np.int32
    matrices = padded(Varying({"x": [np.zeros((1, 2), np.int8), np.array([])]}), 1, leaf="x", pad=7)
    assert window(matrices, 1)["x"].tolist() == [[[7, 7]]]


@pytest.mark.parametrize(
    ("second", "fact"),
    [
        (np.array([0.5]), "record 20: leaf 'x' is float64 [1], expected int64 [any, ] as in the first records"),
        (np.zeros((1, 1), np.int64), "record 20: leaf 'x' is int64 [1, 1], expected int64"),
        ("text", "record 20: leaf 'x' is a str; expected an array of numbers"),
        (np.array(["a"]), "record 20: leaf 'x' is an array of <U1; expected an array of numbers"),
        (np.array([1, 2**40]), "record 20: leaf 'x' holds 1099511627776 (int64), which does not fit in int32"),
    ],
)
def test_a_record_of_another_kind(second: Any, fact: str) -> None:
    source = padded(Varying({"x": [np.array([1, 2])] * 20 + [second]}), 3, leaf="x")
    with pytest.raises(RecordError) as caught:
        window(source, 0, 20)
    assert fact in str(caught.value)


def test_the_first_records_say_what_is_there() -> None:
    with pytest.raises(RecordError, match=r"record 1: leaf 'x' is a str; .*with braidax.data.tokenized"):
        padded(Varying({"x": [np.arange(2), "text"]}), 3, leaf="x")
    with pytest.raises(ArgumentError, match="length=0: expected at least 1"):
        padded(Varying({"x": [np.arange(2)]}), 0, leaf="x")
    with pytest.raises(ArgumentError, match="pad=-1 does not fit in uint16, the dtype of leaf 'x'"):
        padded(Varying({"x": [np.arange(2, dtype=np.uint16)]}), 4, leaf="x", pad=-1)
    with pytest.raises(ArgumentError, match="source has no samples"):
        padded(Varying({"x": []}), 4, leaf="x")
