"""Text, bytes and lists of tables in rows of one length: what a loop over the samples gives, without a loop."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import jax
import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

import braidax as bx
import braidax.data as sources
from braidax.data.formats.tables.arrow import arrow_source
from braidax.data.leaves import Flat, flat_of
from braidax.data.source import Source, stamp_of
from braidax.data.storage import LocalFiles
from braidax.data.storage.files import compiled
from braidax.data.storage.mapped import Fetched
from braidax.errors import ArgumentError, RecordError
from tests.support.data.formats.example import example
from tests.support.data.formats.tfrecord import write as write_tfrecord
from tests.support.data.varying import Varying, window

BYTE = np.dtype(np.uint8)
TEXTS = ["", "a dog", "naïve 猫 🙂 text", "猫" * 9, "0123456789", "01234567", "é", "a" * 90, "\0 \n", "🙂🙂🙂", "ß" * 7]
ORDER = [3, 0, 10, 7, 7, 2, 8, 1, 9, 6, 5, 4]
WIDTHS = (1, 8, 10, 64)


def head(text: str | bytes | None, width: int) -> bytes:
    """Returns what a row of a width has of a text, in the plainest way."""
    if not isinstance(text, str):
        return (text or b"")[:width]
    return text.encode()[:width].decode(errors="ignore").encode()


def check(source: Source, texts: Sequence[str | bytes | None], order: Sequence[int] = ORDER) -> None:
    """Compares rows of several widths with the plainest way to make them."""
    for width in WIDTHS:
        made = sources.padded(source, width, leaf="text", pad=0x2A)
        assert made.sample_spec["text"] == jax.ShapeDtypeStruct((width,), np.uint8)
        assert made.sample_spec["num_text"] == jax.ShapeDtypeStruct((), np.int32)
        found = window(made, *order)
        heads = [head(texts[index], width) for index in order]
        assert [bytes(row) for row in found["text"]] == [piece.ljust(width, b"*") for piece in heads]
        assert found["num_text"].tolist() == [len(piece) for piece in heads]


# Tables


def stream(folder: Path, table: pa.Table, *, compression: str | None = None) -> Source:
    """Writes two files of several batches each."""
    middle = len(table) // 2
    for number, part in enumerate([table.slice(0, middle), table.slice(middle)]):
        options = ipc.IpcWriteOptions(compression=compression)
        with ipc.new_file(str(folder / f"{number}.arrow"), table.schema, options=options) as writer:
            writer.write_table(part, max_chunksize=3)
    return bx.open(folder)


def feather(folder: Path, table: pa.Table) -> Source:
    return stream(folder, table, compression="zstd")


def parquet(folder: Path, table: pa.Table) -> Source:
    for number in range(2):
        pq.write_table(table.slice(6 * number, 6), folder / f"{number}.parquet", row_group_size=4)
    return bx.open(folder)


def small_parquet(folder: Path, table: pa.Table) -> Source:
    """A table that is larger than its cache."""
    pq.write_table(table, folder / "a.parquet", row_group_size=3)
    return bx.open(folder / "a.parquet", cache_bytes=1500)


def hugging_face(folder: Path, table: pa.Table) -> Source:
    dataset = datasets.Dataset(pa.concat_tables([table.slice(5), table.slice(0, 5)]))
    dataset.select([*range(len(table) - 5, len(table)), *range(len(table) - 5)]).save_to_disk(str(folder / "hf"))
    return bx.open(folder / "hf")


def fetched(folder: Path, table: pa.Table) -> Source:
    """A file that is not mapped."""
    with ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    memory = Fetched(LocalFiles([folder / "a.arrow"]))
    return arrow_source(memory, columns=None, cache_bytes=1 << 20, facts={"format": "Arrow"})


def partitioned(folder: Path, table: pa.Table) -> Source:
    (folder / "kind=naïve").mkdir()
    with ipc.new_file(str(folder / "kind=naïve" / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    return bx.open(folder)


WRITERS = [stream, feather, parquet, small_parquet, hugging_face, fetched, partitioned]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary()], ids=str)
def test_columns_of_every_table(tmp_path: Path, write: Callable[..., Source], kind: pa.DataType) -> None:
    texts = TEXTS if kind == pa.string() else [text.encode() + b"\xff" for text in TEXTS]
    column = pa.array([*texts[:2], *texts], kind)[2:]  # sliced: its offsets do not begin with 0
    source = write(tmp_path, pa.table({"text": column, "id": np.arange(len(TEXTS))}))
    flat = flat_of(source, "text")
    assert flat == Flat("text" if kind == pa.string() else "bytes", BYTE)
    assert flat_of(source, "id") is None
    assert flat_of(source, "other") is None
    check(source, texts)
    assert window(sources.padded(source, 4, leaf="text"), *ORDER)["id"].tolist() == ORDER


@pytest.mark.parametrize(
    "kind",
    [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()), pa.binary(), pa.binary_view()],
    ids=str,
)
def test_columns_of_every_type(tmp_path: Path, kind: pa.DataType) -> None:
    is_bytes = "binary" in str(kind)
    texts = [text.encode() if is_bytes else text for text in TEXTS]
    plain = pa.chunked_array([pa.array(texts[:4]), pa.array(texts[4:])])
    column = plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain.cast(kind)
    source = stream(tmp_path, pa.table({"text": column}))
    assert flat_of(source, "text") is not None
    check(source, texts)


@pytest.mark.parametrize("write", [stream, feather, parquet, fetched])
def test_a_null_is_empty_where_a_mask_says_so(tmp_path: Path, write: Callable[..., Source]) -> None:
    texts = [None if place % 3 == 1 else text for place, text in enumerate(TEXTS)]
    source = write(tmp_path, pa.table({"text": pa.array(texts)}))
    check(source, texts)
    found = window(sources.padded(source, 4, leaf="text"), *ORDER)
    assert found["text.is_valid"].tolist() == [texts[index] is not None for index in ORDER]


def test_a_null_that_nothing_told_of_is_refused(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a"] * 2000 + [None])})
    pq.write_table(table, tmp_path / "a.parquet", write_statistics=False)
    source = sources.padded(bx.open(tmp_path / "a.parquet"), 4, leaf="text")
    assert set(source.sample_spec) == {"text", "num_text"}
    with pytest.raises(RecordError, match=r"a\.parquet, record 2000: column 'text' is null, expected a value"):
        window(source, 5, 2000)


def test_of_sources_that_choose_and_join(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    opened = stream(first, pa.table({"text": TEXTS, "id": np.arange(len(TEXTS))}))
    other = parquet(second, pa.table({"text": TEXTS[::-1], "id": np.arange(len(TEXTS))}))
    kept = sources.filter(opened, lambda sample: len(sample["text"]) > 5)
    chosen = [text for text in TEXTS if len(text) > 5]
    for source, texts in [
        (kept, chosen),
        (opened[2:9:2], TEXTS[2:9:2]),
        (sources.select(opened, "text"), TEXTS),
        (sources.select(other[3:], ["text"]), TEXTS[::-1][3:]),
        (sources.concat([opened, other]), TEXTS + TEXTS[::-1]),
        (sources.concat([opened[:3], opened[5:]]), TEXTS[:3] + TEXTS[5:]),
    ]:
        assert flat_of(source, "text") == Flat("text", BYTE)
        check(source, texts, order=[*range(len(texts))[::-2], *range(len(texts))])
    lines = tmp_path / "a.txt"
    lines.write_text("one\nthree\n")
    check(sources.concat([sources.select(opened, "text"), bx.open(lines)]), [*TEXTS, "one", "three"], order=[12, 3, 11])
    mixed = sources.concat([opened, Varying({"text": TEXTS})])  # of which one hands over objects
    assert flat_of(mixed, "text") is None
    check(mixed, TEXTS * 2, order=[12, 3, 11])


def test_text_that_is_no_utf_8_names_its_record(tmp_path: Path) -> None:
    wrong = pa.array([b"fine", b"\xffx", b"0123\xff"]).view(pa.binary())
    table = pa.table({"text": pa.StringArray.from_buffers(3, *wrong.buffers()[1:])})
    for name, write in {"arrow": stream, "zstd": feather}.items():
        (tmp_path / name).mkdir()
        source = sources.padded(write(tmp_path / name, table), 4, leaf="text")
        assert bytes(window(source, 2)["text"][0]) == b"0123"  # what is cut off is not looked at
        with pytest.raises(RecordError, match=r"1.arrow, record 0: column 'text' holds text that is no UTF-8 \(.*0xff"):
            window(source, 0, 1)


# Lists of numbers


@pytest.mark.parametrize("write", [stream, parquet])
def test_several_leaves_are_padded_one_after_the_other(tmp_path: Path, write: Callable[..., Source]) -> None:
    lists = [list(range(row)) for row in range(len(TEXTS))]
    opened = write(tmp_path, pa.table({"text": TEXTS, "bag": pa.array(lists, pa.list_(pa.int64()))}))
    source = sources.padded(opened, 3, leaf="bag")
    assert flat_of(source, "text") == Flat("text", BYTE)
    check(source, TEXTS)
    found = window(sources.padded(source, 9, leaf="text"), *ORDER)
    assert found["bag"].tolist() == [[*lists[index], 0, 0, 0][:3] for index in ORDER]
    assert found["num_bag"].tolist() == [min(3, index) for index in ORDER]


def test_rows_of_a_leaf_beside_objects_of_another(tmp_path: Path) -> None:
    records = [example({"text": [text.encode()], "bag": [*range(row + 1)]}) for row, text in enumerate(TEXTS)]
    opened = bx.open(write_tfrecord(tmp_path / "a.tfrecord", records))
    assert flat_of(opened, "bag") is None
    source = sources.padded(opened, 3, leaf="bag")
    check(source, [text.encode() for text in TEXTS])
    assert window(sources.padded(source, 9, leaf="text"), 1, 4)["bag"].tolist() == [[0, 1, 0], [0, 1, 2]]


@pytest.mark.parametrize("write", [stream, feather, parquet])
def test_lists_of_numbers(tmp_path: Path, write: Callable[..., Source]) -> None:
    rng = np.random.default_rng(0)
    lists = [rng.integers(-9, 99, size).tolist() for size in (3, 0, 7, 1, 12, 5)]
    pairs = [[[row, item] for item in range(size)] for row, size in enumerate((1, 0, 4, 2, 6, 3))]
    table = pa.table(
        {
            "long": pa.array(lists, pa.list_(pa.int64())),
            "flags": pa.array([[one > 50 for one in row] for row in lists], pa.large_list(pa.bool_())),
            "pairs": pa.array(pairs, pa.list_(pa.list_(pa.float32(), 2))),
        }
    )
    source = write(tmp_path, table)
    order = [4, 0, 0, 5, 1]
    for leaf, values, pad, loaded in [
        ("long", lists, -7, "int32"), ("flags", [[one > 50 for one in row] for row in lists], 1, "bool"),
        ("pairs", pairs, 0.5, "float32"),
    ]:  # fmt: skip
        assert flat_of(source, leaf) is not None
        made = sources.padded(sources.select(source, leaf), 5, leaf=leaf, pad=pad)
        found, shape = window(made, *order), (2,) if leaf == "pairs" else ()
        for row, index in enumerate(order):
            expected = np.full((5, *shape), pad, loaded)
            expected[: len(values[index])] = np.array(values[index], loaded).reshape(-1, *shape)[:5]
            np.testing.assert_array_equal(found[leaf][row], expected)
            assert found[leaf].dtype == np.dtype(loaded)
            assert found[f"num_{leaf}"][row] == min(5, len(values[index]))


def test_a_number_that_does_not_fit_names_its_file(tmp_path: Path) -> None:
    source = stream(tmp_path, pa.table({"bag": pa.array([[1], [1, 2], [3, 2**40], [2]], pa.list_(pa.int64()))}))
    assert window(sources.padded(source, 1, leaf="bag"), 0, 2)["bag"].tolist() == [[1], [3]]
    with pytest.raises(RecordError, match=r"1.arrow, record 0: .*'bag' holds 1099511627776 .* does not fit in int32"):
        window(sources.padded(source, 2, leaf="bag"), 0, 2)
    with pytest.raises(ArgumentError, match="pad=1099511627776 does not fit in int32, the dtype of leaf 'bag'"):
        sources.padded(source, 2, leaf="bag", pad=2**40)


# Records


def test_lines_of_text(tmp_path: Path) -> None:
    path, texts = tmp_path / "a.txt", [text.replace("\n", " ") for text in TEXTS]
    path.write_text("\r\n".join(texts), newline="")
    check(bx.open(path), texts)
    assert flat_of(bx.open(path), "text") == Flat("text", BYTE)
    path.write_bytes(b"fine\n0123\xff\n\xff\n")
    source = sources.padded(bx.open(path), 4, leaf="text")
    assert window(source, 1, 0)["text"].tobytes() == b"0123fine"
    with pytest.raises(RecordError, match=r"a.txt, record 2 \(at byte 11\): is no UTF-8 text \(.*0xff at 0"):
        window(source, 1, 2)


def test_columns_of_csv(tmp_path: Path) -> None:
    """Windows are parsed by pyarrow where they are large, else by Python."""
    path, texts = tmp_path / "a.csv", [*TEXTS[1:8], *TEXTS[9:], 'a "b", c', "", "two\nlines"] * 30
    cells = [text.replace('"', '""') for text in texts]
    path.write_text("\n".join(["text,id,other", *(f'"{cell}",{row},é{row}' for row, cell in enumerate(cells))]))
    source = bx.open(path)
    assert flat_of(source, "text") == flat_of(source, "other") == Flat("text", BYTE)
    assert flat_of(source, "id") is None
    for order in ([*range(300)], [7, 299, 0, 7]):
        check(source, texts, order=order)
        found = window(sources.padded(source, 5, leaf="other"), *order)
        assert found["other"].tolist() == [[*f"é{index}".encode().ljust(5, b"\0")] for index in order]
        assert found["text"].tolist() == [texts[index] for index in order]


@pytest.mark.parametrize("kind", ["bytes", "text"])
def test_features_of_tfrecord(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [{"text": [text.encode()], "id": [row]} for row, text in enumerate(TEXTS)]
    records = [example(one) for one in packed]
    records[2] = example({"text": [b"twice"], "id": [0]}) + records[2]  # as no writer writes it: the last one counts
    path = write_tfrecord(tmp_path / "a.tfrecord", [*records, example({"text": [b"0123\xff"], "id": [11]})])
    columns = {"text": str, "id": "int32"} if kind == "text" else None
    texts: list[Any] = TEXTS if kind == "text" else [text.encode() for text in TEXTS]
    for way in (compiled, lambda: None):
        monkeypatch.setattr("braidax.data.formats.records.example_decoder.compiled", way)
        source = bx.open(path, columns=columns)[:11]
        assert flat_of(source, "text") == Flat(kind, BYTE)
        check(source, texts)
        head_of_last = window(sources.padded(bx.open(path, columns=columns), 4, leaf="text"), 11)
        assert head_of_last["text"].tobytes() == b"0123"  # what is cut off is not looked at
        last = sources.padded(bx.open(path, columns=columns), 6, leaf="text")
        if kind == "text":
            with pytest.raises(
                RecordError, match=r"record 11 .*: feature 'text' is no UTF-8 text .*0xff in position 4"
            ):
                window(last, 0, 11)
        else:
            assert window(last, 11)["text"].tobytes() == b"0123\xff\0"


# Sources that hand over objects


def test_objects_become_rows_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "naïve 猫"}\n{"text": ""}\n{"text": "\\ud83d\\ude42"}\n')
    check(bx.open(path), ["naïve 猫", "", "🙂"], order=[2, 0, 1])
    for values in (TEXTS, [text.encode() for text in TEXTS]):
        source = Varying({"text": values})
        assert flat_of(source, "text") is None
        check(source, values, order=[*ORDER[:-1], 10])


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (b"x", "record 20: leaf 'text' is a bytes, expected str as in the first records; convert it with transform="),
        ("\ud800", "record 20: leaf 'text' is no text that UTF-8 can hold ('utf-8' codec can't encode"),
    ],
)
def test_an_object_of_another_kind(value: Any, fact: str) -> None:
    source = sources.padded(Varying({"text": ["x"] * 20 + [value]}), 3, leaf="text")
    with pytest.raises(RecordError) as caught:
        window(source, 0, 20)
    assert fact in str(caught.value)


def test_arguments_are_checked(tmp_path: Path) -> None:
    source = stream(tmp_path, pa.table({"text": TEXTS, "id": np.arange(len(TEXTS))}))
    with pytest.raises(ArgumentError, match="pad=256 does not fit in uint8, the dtype of leaf 'text'"):
        sources.padded(source, 3, leaf="text", pad=256)
    with pytest.raises(
        ArgumentError, match=r"padded: leaf='id' is no leaf of varying size: .*expected one of \['text'"
    ):
        sources.padded(source, 3, leaf="id")
    with pytest.raises(ArgumentError, match="length=0: expected at least 1"):
        sources.padded(source, 0, leaf="text")


# What loads them


def test_a_loader_and_torch_get_the_same(tmp_path: Path) -> None:
    source = sources.padded(stream(tmp_path, pa.table({"text": TEXTS})), 16, leaf="text")
    expected = {bytes(row) for row in window(source, *range(len(TEXTS)))["text"]}
    assert len(expected) == len(TEXTS)
    batches = list(bx.DataLoader(pickle.loads(pickle.dumps(source)), batch_size=len(TEXTS), epochs=1, seed=1))
    assert {bytes(row) for row in np.asarray(batches[0]["text"])} == expected
    from braidax.torch import DataLoader

    batch = next(iter(DataLoader(source, batch_size=len(TEXTS), shuffle=True)))
    assert {bytes(row) for row in batch["text"].numpy()} == expected
    assert source.describe()["padded"] == "text to 16 bytes"
    opened = bx.open(tmp_path)
    kinds = ((16, 0), (8, 0), (8, 1))
    stamps = [stamp_of(sources.padded(opened, length, leaf="text", pad=pad)) for length, pad in kinds]
    assert stamps[0] == stamp_of(source)
    assert len({*stamps}) == 3
