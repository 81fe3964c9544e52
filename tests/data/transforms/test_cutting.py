"""To look and to cut: indexing, rows, columns, filters, parts; with transforms, mixtures, skipping and cursors."""

import pickle
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import braidax.data as data
from braidax.data.loader import DataLoader
from braidax.data.sampling.order import Cursor
from braidax.data.source import Sliced, Source, prepare, stamp_of
from braidax.errors import ArgumentError, RecordError
from tests.support.data.jax_gang import CountingSliced
from tests.support.data.numbered import Numbers, all_ids
from tests.support.data.varying import Varying


def ids(source: Source) -> list[int]:
    """Returns the numbers of all samples, and looks at the other leaf too."""
    window = data.to_numpy(source)
    if "x" in window:
        np.testing.assert_array_equal(window["x"][:, 0], window["id"].astype(np.float32))
    return window["id"].tolist()


def is_even(sample: Any) -> bool:
    return sample["id"] % 2 == 0


# Looking


def test_a_number_gives_a_sample() -> None:
    source = Numbers(10)
    for index in (3, np.int32(3), -7, np.array(3)):
        sample = source[index]
        assert sample["id"] == 3
        assert type(sample["id"]) is np.int32
        assert sample["x"].tolist() == [3, 3.125, 3.25, 3.375, 3.5, 3.625]


def test_a_slice_gives_a_source_and_reads_nothing() -> None:
    source = Numbers(100, before=lambda indices: pytest.fail("a slice was read"))
    part = source[10:20][::-2]
    assert len(part) == 5
    assert source[:0].sample_spec == source.sample_spec
    source.before = None
    assert ids(part) == [19, 17, 15, 13, 11]
    assert ids(part[1:3]) == [17, 15]
    assert ids(part[[-1, 0, 0]]) == [11, 19, 19]
    assert ids(source[np.array([7, 3], np.uint8)]) == [7, 3]
    assert ids(source[np.arange(100) % 40 == 1]) == [1, 41, 81]
    assert ids(source[95:1000]) == [95, 96, 97, 98, 99]
    assert ids(source[[]]) == []
    assert part[0]["id"] == 19


def test_going_through_a_source_reads_windows() -> None:
    windows: list[int] = []
    source = Numbers(600, before=lambda indices: windows.append(len(indices)))
    assert [int(sample["id"]) for sample in source] == list(range(600))
    assert windows == [256, 256, 88]
    assert list(source[:0]) == []


def test_a_source_says_what_it_is() -> None:
    assert repr(Numbers(1000)) == "<Numbers: 1,000 samples of id int32[], x float32[6]>"
    assert repr(Numbers(1000)[:7]) == "<ChosenRows: 7 samples of id int32[], x float32[6]>"
    assert Numbers(10)[2:4].describe() == {"samples": "2", "rows": "2 of 10 (2:4:1)"}


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (10, IndexError, "there is no sample 10: the source has 10, from 0 or, backward, from -1 on"),
        (-11, IndexError, "there is no sample -11: the source has 10"),
        ([0, 12], IndexError, "there is no sample 12"),
        ("id", ArgumentError, "index='id': expected a number, a slice, integers or a mask; for one leaf .*select"),
        (1.5, ArgumentError, "index=1.5: expected a number"),
        ([1.5], ArgumentError, r"index is an array of float64\[1\]; expected a number, a slice, integers \[n\], or"),
        (np.zeros(9, bool), ArgumentError, r"an array of bool\[9\]; .* a mask of bools \[10\], as many as there are"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_wrong_index(index: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Numbers(10)[index]


def test_what_reads_like_a_source_is_one() -> None:
    class Own:
        @property
        def sample_spec(self) -> Any:
            return {"id": jax.ShapeDtypeStruct((), np.int32)}

        def __len__(self) -> int:
            return 5

        def read(self, indices: np.ndarray, out: Any) -> None:
            out["id"][...] = indices

        def describe(self) -> dict[str, str]:
            return {"format": "own"}

    source = data.open(Own())
    assert isinstance(source, Source)
    assert ids(source[::2]) == [0, 2, 4]
    assert ids(data.open(source)) == [0, 1, 2, 3, 4]


# Columns


def test_select_reads_nothing_else() -> None:
    spec = {f"leaf{number}": jax.ShapeDtypeStruct((4, 3), np.dtype(np.int16)) for number in range(3)}
    source = CountingSliced(spec, 20)
    part = data.select(source, ["leaf2", "leaf0"])
    assert list(part.sample_spec) == ["leaf0", "leaf2"]
    assert isinstance(part, Sliced)
    assert list(part.cut_dims) == [2, 2]
    window = data.to_numpy(part[5:9])
    np.testing.assert_array_equal(window["leaf2"], source.values("leaf2", range(5, 9)))
    assert source.num_bytes == {"leaf0": 4 * 24, "leaf1": 0, "leaf2": 4 * 24}


def test_select_of_whole_records() -> None:
    source = data.select(Numbers(10), "id")
    assert not isinstance(source, Sliced)
    assert ids(source) == list(range(10))
    assert source[3] == {"id": 3}


@pytest.mark.parametrize("columns", [[], ["id", "id"], "label", ["id", "label"]])
def test_select_of_what_is_not_there(columns: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"columns=.*: samples have \['id', 'x'\]; expected some of their keys, each"
    ):
        data.select(Numbers(10), columns)
    with pytest.raises(ArgumentError, match="samples are no mappings"):
        data.select(data.map(Numbers(10), lambda sample: sample["x"]), "x")


# Filters


@pytest.mark.parametrize("by", ["sample", "window"])
def test_filter_goes_through_the_source_once(by: Any) -> None:
    seen: list[int] = []
    source = Numbers(1000, before=lambda indices: seen.extend(indices.tolist()))
    kept = data.filter(source, lambda given: given["id"] % 3 == 1, by=by)
    assert sorted(seen) == list(range(1000))
    assert len(kept) == 333
    assert len(seen) == 1000
    assert ids(kept) == list(range(1, 1000, 3))
    assert ids(data.filter(kept, is_even)[-2:]) == [994 - 6, 994]


def test_filter_by_columns_reads_these() -> None:
    spec = {f"leaf{number}": jax.ShapeDtypeStruct((), np.dtype(np.int32)) for number in range(2)}
    source = CountingSliced(spec, 20)
    kept = data.filter(source, lambda sample: sample["leaf0"] < 50, columns="leaf0")
    assert source.num_bytes == {"leaf0": 80, "leaf1": 0}
    assert data.to_numpy(kept).keys() == {"leaf0", "leaf1"}
    assert (data.to_numpy(kept)["leaf0"] < 50).all()


def test_a_filter_that_keeps_nothing() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"predicate=.*<lambda> keeps none of the 300 samples; the first is \{'id': '0', .*expected at least one",
    ):
        data.filter(Numbers(300), lambda sample: sample["id"] < 0)


@pytest.mark.usefixtures("unchecked")
def test_a_predicate_that_raises_or_says_nothing() -> None:
    with pytest.raises(RecordError, match=r"predicate=.* raised KeyError: 'label', on record 0; mend the predicate"):
        data.filter(Numbers(10), lambda sample: sample["label"] == 1)
    with pytest.raises(
        RecordError, match=r"predicate=.* returned float32\[6\] for record 0; expected one bool; with by"
    ):
        data.filter(Numbers(10), lambda sample: sample["x"])
    with pytest.raises(RecordError, match=r"returned int32\[10\] for the records 0 to 9; expected bool\[10\], one for"):
        data.filter(Numbers(10), lambda window: window["id"], by="window")
    with pytest.raises(RecordError, match=r"raised ZeroDivisionError: .* on records 0 to 9"):
        data.filter(Numbers(10), lambda window: 1 // 0, by="window")
    with pytest.raises(ArgumentError, match=r"by='row' is not 'sample' or 'window'"):
        data.filter(Numbers(10), is_even, by=cast(Any, "row"))


def test_what_differs_from_epoch_to_epoch_is_not_filtered() -> None:
    noisy = data.mapped(Numbers(10), lambda window, rng: {**window, "x": rng.random((6,))})
    for source in (noisy, data.mix([(Numbers(10), 1), (Numbers(20), 1)])):
        with pytest.raises(
            ArgumentError, match=r"has other samples in each epoch, .*filter the source first, then augm"
        ):
            data.filter(source, is_even)


def test_a_named_filter_is_kept_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    np.savez(tmp_path / "a.npz", id=np.arange(600))
    calls: list[int] = []

    def is_small(sample: Any) -> bool:
        calls.append(1)
        return sample["id"] < 7

    path = tmp_path / "a.npz"
    assert ids(data.filter(data.open(path), is_small, name="small")) == list(range(7))
    assert len(calls) == 600
    again = data.filter(data.open(path), is_small, name="small")
    assert ids(again) == list(range(7))
    assert len(calls) == 600
    assert ids(data.filter(data.open(path), lambda sample: sample["id"] > 597, name="large")) == [598, 599]
    np.savez(path, id=np.arange(600) % 100)
    assert len(data.filter(data.open(path), is_small, name="small")) == 42
    with pytest.raises(ArgumentError, match=r"name='small': nothing tells whether the samples .* leave name out"):
        data.filter(Numbers(10), is_small, name="small")
    assert len(list((tmp_path / "cache" / "derived" / "filters").glob("*.filter"))) == 3


# Parts


def test_concat() -> None:
    source = data.concat([Numbers(5), Numbers(3)[1:], Numbers(4)])
    assert ids(source) == [0, 1, 2, 3, 4, 1, 2, 0, 1, 2, 3]
    assert ids(source[[10, 5, 0, 6]]) == [3, 1, 0, 2]
    assert source.describe()["samples"] == "11"
    with pytest.raises(ArgumentError, match="sources= is empty"):
        data.concat([])
    with pytest.raises(ArgumentError, match=r"leaf 'x' is float32\[6\] in source 0, but missing in source 1"):
        data.concat([Numbers(5), data.select(Numbers(5), "id")])


@pytest.mark.usefixtures("unchecked")
def test_concat_takes_sources() -> None:
    with pytest.raises(ArgumentError, match=r"source 1 is 'a.npz'; expected a source: give braidax.open"):
        data.concat([Numbers(5), cast(Any, "a.npz")])


def test_split_by_fractions_is_golden() -> None:
    train, test = data.split(Numbers(20), 0.9, seed=3)
    assert ids(test) == [18, 12]
    assert sorted(ids(train) + ids(test)) == list(range(20))
    three = data.split(Numbers(20), (0.5, 0.25, 0.1))
    assert [len(part) for part in three] == [10, 5, 2]
    assert len({number for part in three for number in ids(part)}) == 17
    assert [ids(part) for part in data.split(Numbers(5), 0.6, seed=None)] == [[0, 1, 2], [3, 4]]
    assert [ids(part) for part in data.split(Numbers(20), 0.9, seed=3)] == [ids(train), ids(test)]
    assert ids(data.split(Numbers(20), 0.9, seed=4)[1]) != ids(test)
    assert ids(train[3:5]) == ids(train)[3:5]


def test_split_by_ranges() -> None:
    parts = data.split(Numbers(10), [(6, 10), range(0, 6, 2), range(5, 0, -2)])
    assert [ids(part) for part in parts] == [[6, 7, 8, 9], [0, 2, 4], [5, 3, 1]]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            [(0, 6), (5, 10)],
            r"parts= holds range\(0, 6\) and range\(5, 10\), which overlap: both have sample 5; expected",
        ),
        ([range(0, 9, 2), range(1, 9, 3)], "overlap: both have sample 4"),
        ([(0, 6), (6, 11)], r"parts= holds range\(6, 11\); expected at least one sample, and none beyond the 10"),
        ([(3, 3)], "expected at least one sample"),
        ([(-2, 3)], "none beyond"),
        ([(0, 6), 0.5], "parts= holds 0.5; expected fractions alone, or ranges alone"),
        ([], "parts= is empty"),
        (1.5, "parts=1.5: expected fractions above 0 whose sum is at most 1"),
        ((0.9, 0.2), "expected fractions above 0 whose sum is at most 1"),
        (0.01, r"parts=0.01: part 0 would have none of the 10 samples"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_splits(parts: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        data.split(Numbers(10), parts)


def test_take() -> None:
    assert ids(data.take(Numbers(10), 3)) == [0, 1, 2]
    for number in (0, 11):
        with pytest.raises(
            ArgumentError, match=f"num_samples={number}: expected 1 to 10, .*source\\[:n\\] takes n, or"
        ):
            data.take(Numbers(10), number)


# Samples


def test_map_gives_one_sample_at_a_time() -> None:
    source = data.map(
        Numbers(10), lambda sample: {"sum": sample["x"].sum(), "twice": 2 * int(sample["id"]), "two": 2.0}
    )
    assert source.sample_spec == {
        "sum": jax.ShapeDtypeStruct((), np.float32),
        "twice": jax.ShapeDtypeStruct((), np.int32),
        "two": jax.ShapeDtypeStruct((), np.float32),
    }
    assert data.to_numpy(source)["twice"].tolist() == list(range(0, 20, 2))
    assert source[4] == {"sum": np.float32(25.875), "twice": 8, "two": 2.0}


def test_map_draws_for_each_sample_and_epoch() -> None:
    def noisy(sample: Any, rng: np.random.Generator) -> Any:
        return {**sample, "x": rng.normal(size=6).astype(np.float32)}

    source = cast(Any, data.map(Numbers(10), noisy))
    whole, again = data.to_numpy(source)["x"], data.to_numpy(source[[7, 3]])["x"]
    np.testing.assert_array_equal(whole[[7, 3]], again)
    assert len(np.unique(whole)) == 60
    assert not np.array_equal(data.to_numpy(source.at(0, 1))["x"], whole)


def test_map_hands_through_what_varies() -> None:
    source = Varying({"text": ["a", "bb"], "ids": [np.arange(2), np.arange(3)]})
    longer = data.map(source, lambda sample: {**sample, "text": sample["text"] * 2})
    window = data.to_numpy(longer)
    assert window["text"].tolist() == ["aa", "bbbb"]
    assert [ids.tolist() for ids in window["ids"]] == [[0, 1], [0, 1, 2]]


def test_a_function_that_fails_names_the_record() -> None:
    def fails(sample: Any) -> Any:
        return {"x": sample["x"][: 6 - sample["id"] // 7]}

    with pytest.raises(RecordError, match=r"expected float32\[1, 6\], as record 0 gave"):
        data.map(Numbers(10), fails)[8]
    with pytest.raises(RecordError, match=r"several shapes, \(5,\) and \(6,\); expected one, on records \[0, 1, 2"):
        data.to_numpy(data.map(Numbers(10), fails))
    with pytest.raises(RecordError, match=r"ZeroDivisionError: .*, on record 8"):
        data.to_numpy(data.map(Numbers(10), lambda sample: 1 // int(sample["id"] != 8)))


# With all else


def test_filtered_and_split_sources_resume() -> None:
    def loader() -> DataLoader:
        train, _ = data.split(data.filter(Numbers(300), is_even), 0.8, seed=1)
        return DataLoader(train, batch_size=8, seed=5, epochs=2)

    expected = all_ids(loader())
    assert len(expected) == 30
    begun = loader()
    batches = cast(Any, iter(begun))
    got = [np.asarray(next(batches)["id"]).tolist() for _ in range(11)]
    cursor = begun.cursor
    batches.close()
    again = loader()
    again.cursor = Cursor(*cursor)
    assert got + all_ids(again) == expected


def test_a_filter_skips_augments_and_mixes(tmp_path: Path) -> None:
    class Torn(Numbers):
        def read(self, indices: np.ndarray, out: Any) -> None:
            if 6 in indices:
                raise RecordError("record 6 is torn") from None
            super().read(indices, out)

    safe = data.skipping(Torn(20), ledger=tmp_path / "ledger.jsonl")
    kept = data.filter(safe, is_even)
    assert 6 not in ids(kept)
    assert set(range(0, 20, 2)) - {6} <= set(ids(kept))
    mixed = data.mix([(data.mapped(kept, lambda window: window), 1), (Numbers(40)[20:], 3)])
    numbers = ids(mixed)
    assert len([number for number in numbers if number >= 20]) == 3 * len(numbers) // 4 or len(numbers) % 4


def test_what_is_random_inside_stays_so() -> None:
    noisy = cast(Any, data.mapped(Numbers(10), lambda window, rng: {**window, "x": rng.random((6,))}))
    for source in (noisy[2:], data.concat([noisy, noisy]), data.select(noisy, "x"), data.split(noisy, 0.5)[0]):
        moved = cast(Any, source).at(0, 1)
        assert not np.array_equal(data.to_numpy(moved)["x"], data.to_numpy(source)["x"])
        np.testing.assert_array_equal(data.to_numpy(cast(Any, source).at(0, 1))["x"], data.to_numpy(moved)["x"])
    whole = data.to_numpy(noisy.at(3, 1))["x"]
    np.testing.assert_array_equal(data.to_numpy(noisy[2:].at(3, 1))["x"], whole[2:])


def test_parts_of_samples_are_read_through_all_cuts() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    spec = {f"leaf{number}": jax.ShapeDtypeStruct((8, 3), np.dtype(np.int32)) for number in range(2)}
    source = CountingSliced(spec, 40)
    cut = data.select(data.concat([source[:10], data.split(source[10:], [(0, 20), (20, 30)])[1]]), "leaf1")
    assert isinstance(cut, Sliced)
    places = [*range(10), *range(30, 40)]
    loader = DataLoader(cut, mesh, {"leaf1": P("data", "model")}, batch_size=4)
    for indices, batch in zip(loader.peek(5), loader, strict=True):
        np.testing.assert_array_equal(batch["leaf1"], source.values("leaf1", np.array(places)[indices]))
    assert source.num_bytes == {"leaf0": 0, "leaf1": 20 * 8 * 3 * 4}


def test_what_is_announced_reaches_the_source() -> None:
    source = Varying({"text": [str(number) for number in range(20)]})
    prepare(data.select(data.concat([source[10:], source]), "text"), np.array([0, 12]))
    assert source.prepared == [10, 2]


class Announced(CountingSliced):
    """A source of two leaves that can be cut along so many dims, and takes note of what parts it is told of."""

    def __init__(self, num_dims: tuple[int, int]) -> None:
        leaf = jax.ShapeDtypeStruct((4, 3), np.dtype(np.int16))
        super().__init__({"leaf0": leaf, "leaf1": leaf}, 10)
        self.num_dims = num_dims
        self.announced: list[Any] = []

    @property
    def cut_dims(self) -> tuple[int, int]:
        return self.num_dims

    def prepare_slices(self, indices: np.ndarray, boxes: Any) -> None:
        self.announced.append((indices.tolist(), list(boxes)))


def test_parts_that_are_announced_reach_the_source() -> None:
    source = Announced((2, 2))
    prepare(data.select(source[4:], "leaf1"), np.array([3, 0]))
    prepare(data.concat([data.select(source, "leaf0")]), np.array([1]))
    whole = ((0, 4), (0, 3))
    assert source.announced == [([7, 4], [None, whole]), ([1], [whole, None])]


def test_sources_in_one_are_cut_as_far_as_all_can_be() -> None:
    joined = data.concat([Announced((2, 1)), Announced((1, 0))])
    assert isinstance(joined, Sliced)
    assert list(joined.cut_dims) == [1, 0]


def test_stamps_tell_what_was_cut() -> None:
    source = Varying({"text": ["a", "b", "c"]}, stamp="files")
    stamps = {
        stamp_of(one)
        for one in (
            source[:2],
            source[1:],
            source[[0, 2]],
            data.select(source, "text"),
            data.concat([source, source]),
            *data.split(source, 0.5),
            *data.split(source, 0.5, seed=1),
        )
    }
    assert len(stamps) == 9
    assert None not in stamps
    assert stamp_of(data.concat([source])) == "concatenation ['files']"
    assert stamp_of(Numbers(5)[:2]) is None


def test_cuts_go_to_other_processes() -> None:
    source = data.select(data.concat([data.split(Numbers(10), 0.5)[0], data.filter(Numbers(6), is_even)]), "id")
    assert ids(pickle.loads(pickle.dumps(source))) == ids(source)
