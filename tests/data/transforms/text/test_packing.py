"""Packing: every token once, in rows that do not overflow, planned once and found again."""

import logging
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from tokenizers import Tokenizer, models, pre_tokenizers

import braidax as bx
from braidax.data.loader import DataLoader
from braidax.data.storage import progress
from braidax.data.transforms.mixture import mix
from braidax.data.transforms.text import measuring, packing
from braidax.data.transforms.text.packing import packed
from braidax.data.transforms.text.packing_plan import Plan, plan_in_memory
from braidax.data.transforms.text.text import tokenized
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.varying import Varying, documents, window

Lengths = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 60)), min_size=1, max_size=60).filter(any)


def plan(lengths: Any, length: int) -> Plan:
    return plan_in_memory(np.array(lengths, np.int64), length, lambda num_documents: None)


def source(lengths: Any, **options: Any) -> Varying:
    return Varying({"tokens": documents(lengths)}, **options)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Rows


@given(lengths=Lengths, length=st.integers(1, 20))
@example(lengths=[20, 40, 41, 0, 19], length=20)
@example(lengths=[1], length=1)
def test_every_token_is_in_one_row_exactly(lengths: list[int], length: int) -> None:
    rows = packed(source(lengths), length)
    got = window(rows, *range(len(rows)))
    assert {name: (leaf.shape[1:], leaf.dtype.name) for name, leaf in got.items()} == dict.fromkeys(
        ("tokens", "segment_ids", "positions"), ((length,), "int32")
    )
    found: list[list[int]] = []
    for tokens, segments, positions in zip(got["tokens"], got["segment_ids"], got["positions"], strict=True):
        used = int((segments > 0).sum())
        assert used > 0
        assert not tokens[used:].any()
        assert not segments[used:].any()
        assert not positions[used:].any()
        assert set(np.diff(segments[:used])) <= {0, 1}
        assert segments[0] == 1
        for segment in range(1, segments.max() + 1):
            where = np.flatnonzero(segments == segment)
            np.testing.assert_array_equal(positions[where], np.arange(len(where)))
            found.append(tokens[where].tolist())
    pieces = [text[start : start + length] for text in documents(lengths) for start in range(0, len(text), length)]
    assert sorted(found) == [piece.tolist() for piece in pieces]


@given(lengths=Lengths, length=st.integers(1, 20), picks=st.lists(st.integers(0, 999), max_size=9))
def test_any_window_gives_the_same_rows(lengths: list[int], length: int, picks: list[int]) -> None:
    rows = packed(source(lengths), length)
    serial = window(rows, *range(len(rows)))
    picks = [pick % len(rows) for pick in picks]
    jax.tree.map(np.testing.assert_array_equal, window(rows, *picks), jax.tree.map(lambda leaf: leaf[picks], serial))
    again = packed(source(lengths), length)
    jax.tree.map(np.testing.assert_array_equal, window(again, *range(len(again))), serial)


def test_the_rows_stay_the_same_in_later_versions() -> None:
    """Documents 0 5 2 3 6 1 7 4 is their random order; 8+1 7 5 4 3 2 1 is how they fall."""
    got = window(packed(source([3, 5, 2, 9, 1, 4, 0, 7]), 8, pad=-1), *range(4))
    assert got["tokens"].tolist() == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [21, 22, 23, 24, 9, 10, 20, -1],
        [11, 12, 13, 14, 15, 16, 17, 18],
        [19, 25, 26, 27, 28, 29, 30, 31],
    ]


def test_best_fit() -> None:
    """Decreasing 7 6 5 4 3 2 into rows of 9: 7+2, 6+3, 5+4; first fit of the order given would need more."""
    facts = plan([2, 3, 4, 5, 6, 7], 9)
    rows = facts.rows(np.arange(len(facts)))
    sizes = [sorted(part.tolist()) for part in np.split(rows.size, np.cumsum(rows.counts)[:-1])]
    assert sorted(sizes) == [[2, 7], [3, 6], [4, 5]]
    # Of two rows with room, the one with less of it: 2 goes to 7, not to 6.
    rows = plan([7, 6, 2], 9).rows(np.arange(2))
    assert sorted(sorted(part.tolist()) for part in np.split(rows.size, np.cumsum(rows.counts)[:-1])) == [[2, 7], [6]]


def test_many_windows_are_nearly_full() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 40_000).astype(np.int64)
    made = plan(lengths, 1024)
    rows = made.rows(np.arange(len(made)))
    np.testing.assert_array_equal(np.bincount(rows.document, rows.size, len(lengths)), lengths)
    filled = np.add.reduceat(rows.size, np.cumsum(rows.counts) - rows.counts)
    assert filled.max() <= 1024
    assert filled.mean() > 0.99 * 1024
    assert made.facts == {
        "documents": 40_000,
        "empty": int((lengths == 0).sum()),
        "cut": int((lengths > 1024).sum()),
        "tokens": int(lengths.sum()),
        "pieces": int((-(-lengths // 1024)).sum()),
    }


def test_what_it_says_of_itself() -> None:
    rows = packed(source([3, 5, 0, 20]), 8)
    assert rows.describe() == {
        "format": "varying",
        "samples": "4",
        "packed": "4 documents (1 of them cut, 1 empty) into rows of 8, 87.50% full",
        "plan": "in memory",
    }


@pytest.mark.parametrize(
    ("stored", "loaded"), [("uint16", "int32"), ("int64", "int32"), ("uint32", "uint32"), ("float32", "float32")]
)
def test_dtypes_and_leaves_alongside(stored: str, loaded: str) -> None:
    texts = documents([3, 5, 2, 9], stored)
    weights = [np.stack([text, -text.astype(float)], 1) for text in texts]
    rows = packed(Varying({"words": texts, "weights": weights}), 6, leaf="words", along=("weights",), pad=9)
    assert rows.sample_spec["words"].dtype == loaded
    assert rows.sample_spec["weights"] == jax.ShapeDtypeStruct((6, 2), np.float32)
    got = window(rows, *range(len(rows)))
    inside = got["segment_ids"] > 0
    assert (got["words"][~inside] == 9).all()
    assert (~inside).sum() == 5
    assert (got["weights"][~inside] == 0).all()
    np.testing.assert_array_equal(
        got["weights"][inside], np.stack([got["words"][inside], -1.0 * got["words"][inside]], 1)
    )


# As a source


def test_under_a_loader_and_after_a_restart() -> None:
    rows = packed(source(np.random.default_rng(1).integers(0, 40, 300)), 32)
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def loader() -> DataLoader:
        return DataLoader(rows, mesh, P("data", "model"), batch_size=16, seed=5, epochs=2)

    batches: list[Any] = []
    cursors: list[Any] = []
    first = loader()
    for batch in first:
        batches.append(jax.tree.map(np.asarray, batch))
        cursors.append(first.cursor)
    assert len(batches) == 2 * (len(rows) // 16)
    for done in (1, len(batches) // 2, len(batches) - 1):
        again = loader()
        again.cursor = cursors[done - 1]
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, next(iter(again))), batches[done])


def test_text_is_tokenized_and_packed(tmp_path: Path) -> None:
    texts = Varying({"text": [chr(97 + number) * (number % 7) for number in range(26)]}, stamp="1")
    rows = packed(tokenized(texts, lambda batch: [[ord(letter) for letter in text] for text in batch], end=0), 10)
    got = window(rows, *range(len(rows)))
    assert sum((got["tokens"] == 97 + 12).ravel()) == 5
    assert (got["tokens"][got["segment_ids"] > 0] == 0).sum() == 26


def test_epochs_and_announcements_reach_the_inner_source() -> None:
    inner = source([3, 5, 2, 9])
    rows = packed(inner, 8)
    assert rows.at(0, 3) is rows
    prepared = len(inner.prepared)
    rows.prepare(np.arange(len(rows)))
    assert inner.prepared[prepared:] == [0, 1, 2, 3]


def test_lengths_that_change_from_epoch_to_epoch() -> None:
    with pytest.raises(ArgumentError, match=r"leaf='tokens' is not as long in the next epoch \(record 0 has 4 tokens"):
        packed(source([3, 5], grow=True), 8)
    with pytest.raises(ArgumentError, match="of a mixture pack the parts"):
        packed(mix([(source(range(1, 9)), 1)], length=4), 8)


def test_many_threads_read_what_one_reads() -> None:
    rows = packed(source(range(40)), 48)
    serial = window(rows, *range(len(rows)))
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: window(rows, *range(len(rows))), range(20)):
            jax.tree.map(np.testing.assert_array_equal, got, serial)


# What is kept


class Known(Varying):
    """A source that knows its lengths, and counts how often it is asked."""

    asked = 0

    def lengths(self, leaf: str) -> np.ndarray | None:
        assert leaf == "tokens"
        self.asked += 1
        return np.array([len(text) for text in self.values["tokens"]])


def test_known_lengths_are_not_measured() -> None:
    known = Known({"tokens": documents([3, 5, 2, 9] * 50)})
    rows = packed(known, 8)
    assert known.asked == 1
    assert known.num_read == 16  # looked at for their dtype
    assert np.count_nonzero(window(rows, *range(len(rows)))["segment_ids"]) == 19 * 50


def test_a_plan_is_found_again(own_cache: Path, tmp_path: Path) -> None:
    lengths = list(range(1, 300))
    first = packed(source(lengths, stamp="a"), 64, cache=tmp_path / "plans")
    assert {path.suffix for path in (tmp_path / "plans").iterdir()} == {".lengths", ".plan"}
    assert not own_cache.exists()
    inner = source(lengths, stamp="a")
    second = packed(inner, 64, cache=tmp_path / "plans")
    assert inner.num_read == 16
    assert second.describe()["plan"] == first.describe()["plan"]
    assert str(tmp_path / "plans") in first.describe()["plan"]
    everything = range(len(first))
    jax.tree.map(np.testing.assert_array_equal, window(first, *everything), window(second, *everything))
    plain = packed(source(lengths), 64)
    jax.tree.map(np.testing.assert_array_equal, window(first, *everything), window(plain, *everything))
    other = packed(source(lengths, stamp="a"), 32, cache=tmp_path / "plans")  # measured once for both
    assert len(list((tmp_path / "plans").glob("*.lengths"))) == 1
    assert len(other) > len(first)
    changed = source([*lengths[:-1], 7], stamp="b")
    assert np.count_nonzero(window(packed(changed, 64, cache=tmp_path / "plans"), *range(600))["segment_ids"]) > 0
    assert changed.num_read > 299


def test_without_a_stamp_a_few_documents_are_tried(tmp_path: Path) -> None:
    packed(source([3] * 300), 8, cache=tmp_path)
    same = source([3] * 300)
    packed(same, 8, cache=tmp_path)
    assert same.num_read == 16 + 64
    other = source([3] * 299 + [5])
    rows = packed(other, 8, cache=tmp_path)
    assert np.count_nonzero(window(rows, *range(len(rows)))["segment_ids"]) == 3 * 299 + 5


def test_known_lengths_of_another_number() -> None:
    class Wrong(Known):
        def lengths(self, leaf: str) -> np.ndarray:
            return np.ones(3)

    with pytest.raises(ArgumentError, match=r"source=Wrong: its method lengths gives \[3\] numbers for leaf='tokens'"):
        packed(Wrong({"tokens": documents([3, 5])}), 8)


def test_a_file_under_the_name_of_another_is_not_taken(tmp_path: Path) -> None:
    for lengths in ([3] * 100, [5] * 100):
        packed(source(lengths, stamp=str(lengths)), 16, cache=tmp_path / str(lengths[0]))
    for suffix in ("lengths", "plan"):
        (one,), (other,) = ((tmp_path / name).glob(f"*.{suffix}") for name in "35")
        one.replace(other)
    rows = packed(source([5] * 100, stamp=str([5] * 100)), 16, cache=tmp_path / "5")
    assert np.count_nonzero(window(rows, *range(len(rows)))["segment_ids"]) == 500


def test_a_stamp_keeps_lengths_and_a_large_plan_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(source([3] * 40), 8)
    assert not own_cache.exists()
    packed(source([3] * 40, stamp="a"), 8)
    assert [path.suffix for path in (own_cache / "derived" / "packing").iterdir()] == [".lengths"]
    monkeypatch.setattr(packing, "_WORTH_KEEPING", 40)
    rows = packed(source([3] * 40), 8)
    (kept,) = (own_cache / "derived" / "packing").glob("*.plan")
    assert rows.describe()["plan"] == str(kept)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644


@pytest.mark.parametrize("harm", ["cut", "scribble", "empty"])
def test_a_damaged_file_is_written_anew(tmp_path: Path, harm: str) -> None:
    expected = window(packed(source(range(50), stamp="a"), 16, cache=tmp_path), *range(60))
    for path in tmp_path.iterdir():
        data = path.read_bytes()
        path.write_bytes({"cut": data[8:], "scribble": data[:-40] + b"x" * 40, "empty": b""}[harm])
    again = window(packed(source(range(50), stamp="a"), 16, cache=tmp_path), *range(60))
    jax.tree.map(np.testing.assert_array_equal, again, expected)


def test_a_place_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "braidax"):
        rows = packed(source([3, 5, 2]), 8, cache=tmp_path / "file" / "folder")
    assert rows.describe()["plan"] == "in memory"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "cannot be written" in caplog.text
    assert "pass cache=" in caplog.text


def test_a_plan_travels_to_another_process_by_its_path(tmp_path: Path) -> None:
    rows = packed(source(range(2000), stamp="a"), 64, cache=tmp_path)
    kept: Any = rows._plan
    data = pickle.dumps(kept)
    assert len(data) < 2000
    moved = pickle.loads(data)
    everything = np.arange(len(rows))
    jax.tree.map(np.testing.assert_array_equal, moved.rows(everything), kept.rows(everything))
    in_memory = plan([3, 5], 8)
    assert pickle.loads(pickle.dumps(in_memory)).facts == in_memory.facts
    kept.path.unlink()
    with pytest.raises(FormatError, match="the plan of a packed source is gone"):
        pickle.loads(data)


def test_a_long_measurement_shows_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    packed(source([1] * 300), 8)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_QUIET_SECONDS", -1.0)
    packed(source([1] * 300), 8)
    shown = capsys.readouterr().err
    assert "measuring 'tokens' of documents" in shown
    assert "packing documents" in shown
    assert "300/300" in shown


# What cannot be


def test_documents_that_changed() -> None:
    changing = source([3, 5, 2])
    rows = packed(changing, 8)
    changing.values["tokens"][1] = np.arange(4, dtype=np.int32)
    with pytest.raises(RecordError) as caught:
        window(rows, *range(len(rows)))
    assert "record 1: leaf 'tokens' has 4 tokens, but 5 from token 0 on were planned" in str(caught.value)


def test_leaves_alongside_that_are_not_as_long() -> None:
    uneven = Varying({"tokens": documents([3, 5]), "weights": documents([3, 4])})
    rows = packed(uneven, 8, along=["weights"])
    with pytest.raises(RecordError, match="record 1: leaf 'weights' has 4 items, expected 5, as many as 'tokens'"):
        window(rows, *range(len(rows)))


def test_errors_of_the_source_come_out_of_measuring() -> None:
    class Broken(Varying):
        def read(self, indices: np.ndarray, out: Any) -> None:
            if 200 in indices:
                raise ValueError("disk on fire")
            super().read(indices, out)

    with pytest.raises(RecordError, match="raised ValueError: disk on fire, while it read the records"):
        packed(Broken({"tokens": documents([1] * 600)}), 8)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"length": 0}, "length=0: expected between 1 and 2**31 - 1 tokens in a row"),
        ({"leaf": "id"}, "packed: leaf='id' is no leaf of varying size"),
        ({"along": ["tokens"]}, "along=['tokens']: expected leaves besides leaf='tokens'"),
        ({"along": ["positions"]}, "along=['positions']: expected leaves besides"),
        ({"pad": 2**31}, "pad=2147483648 does not fit in int32, the dtype of leaf 'tokens'"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        packed(source([3, 5]), **{"length": 8, **options})
    assert fact in str(caught.value)


def test_no_tokens_at_all() -> None:
    with pytest.raises(ArgumentError, match="source holds no tokens at all in its 3 documents"):
        packed(source([0, 0, 0]), 8)


def test_a_row_that_is_not_there() -> None:
    rows = packed(source([3, 5]), 8)
    with pytest.raises(RecordError, match="packed source: there is no record 1; it holds 1 samples"):
        window(rows, 1)


def test_lengths_of_tokenized_files_are_measured_once(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{'to be or not ' * (n % 5)}to be" for n in range(300)]
    (tmp_path / "a.csv").write_text("text,other\n" + "".join(f"{line},1\n" for line in lines))
    words = Tokenizer(models.WordLevel({"to": 0, "be": 1, "or": 2, "not": 3}, unk_token="or"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()

    def rows(end: int) -> Any:
        return packed(tokenized(bx.open(tmp_path / "a.csv", columns={"text": str}), words, end=end), 32)

    first = rows(1)
    measured: list[int] = []
    real = measuring._measured

    def count(source: Any, leaf: str, indices: Any) -> Any:
        measured.append(len(indices))
        return real(source, leaf, indices)

    monkeypatch.setattr(measuring, "_measured", count)
    again = rows(1)
    assert measured == []
    everything = range(len(first))
    jax.tree.map(np.testing.assert_array_equal, window(again, *everything), window(first, *everything))
    rows(2)  # of another tokenization
    assert sum(measured) == 300
    (tmp_path / "a.csv").write_text("text,other\n" + "".join(f"{line},2\n" for line in lines[::-1]))
    rows(1)  # of other files
    assert sum(measured) == 600
