import json
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import braidax.data.formats.records.fields as fields
from braidax.data.formats.records.jsonl import open_jsonl
from braidax.data.formats.records.records import RecordSource
from braidax.data.source import VARYING, is_varying
from braidax.data.storage import LocalFiles
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.formats.reading import read


def opened(folder: Path, *records: Any, **options: Any) -> RecordSource:
    path = folder / "a.jsonl"
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return open_jsonl(LocalFiles([path]), **options)


def test_fields_of_every_kind(tmp_path: Path) -> None:
    record = {"n": 3, "x": 0.5, "flag": True, "text": "grün\n", "pair": [1, 2], "ids": [1], "grid": [[1.5, 2], [3, 4]]}
    other = {"text": "日本", "n": -4, "x": 2, "flag": False, "pair": [3, 4], "ids": [], "grid": [[0, 0], [0, 1]]}
    source = opened(tmp_path, record, "", other)
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in source.sample_spec.items()} == {
        "n": ((), "int32"),
        "x": ((), "float32"),
        "flag": ((), "bool"),
        "text": ((), "object"),
        "pair": ((2,), "int32"),
        "ids": ((), "object"),
        "grid": ((2, 2), "float32"),
    }
    window = read(source, [1, 0, 1])
    assert window["n"].tolist() == [-4, 3, -4]
    assert window["x"].tolist() == [2.0, 0.5, 2.0]
    assert window["flag"].tolist() == [False, True, False]
    assert window["text"].tolist() == ["日本", "grün\n", "日本"]
    assert window["pair"].tolist() == [[3, 4], [1, 2], [3, 4]]
    assert [(ids.tolist(), ids.dtype) for ids in window["ids"]] == [([], np.int32), ([1], np.int32), ([], np.int32)]
    assert window["grid"].tolist() == [[[0, 0], [0, 1]], [[1.5, 2], [3, 4]], [[0, 0], [0, 1]]]
    assert source.describe()["format"] == "JSON Lines"


def test_columns_are_chosen_in_their_order(tmp_path: Path) -> None:
    source = opened(tmp_path, {"a": 1, "b": {"deep": 1}, "c d": "x"}, {"c d": "y", "a": 2}, columns=["c d", "a"])
    assert list(source.sample_spec) == ["c d", "a"]
    window = read(source)
    assert (window["c d"].tolist(), window["a"].tolist()) == (["x", "y"], [1, 2])
    again = read(pickle.loads(pickle.dumps(source)))
    assert (again["c d"].tolist(), again["a"].tolist()) == (["x", "y"], [1, 2])


def test_columns_are_declared(tmp_path: Path) -> None:
    declared = {
        "x": "float16",
        "n": np.uint8,
        "ids": VARYING,
        "some": jax.ShapeDtypeStruct((None,), np.dtype("float32")),
        "grid": jax.ShapeDtypeStruct((1, 2), np.dtype("int16")),
    }
    record = {"x": 1, "n": 255, "ids": [1, 2], "some": [1, 2], "grid": [[1, 2]]}
    source = opened(tmp_path, record, columns=declared)
    window = read(source)
    assert (window["x"].dtype, window["x"].tolist()) == (np.float16, [1.0])
    assert (window["n"].dtype, window["n"].tolist()) == (np.uint8, [255])
    assert (window["ids"][0].dtype, window["ids"][0].tolist()) == (np.int32, [1, 2])
    assert (window["some"][0].dtype, window["some"][0].tolist()) == (np.float32, [1, 2])
    assert (window["grid"].dtype, window["grid"].tolist()) == (np.int16, [[[1, 2]]])
    assert is_varying(source.sample_spec["ids"])
    assert is_varying(source.sample_spec["some"])


def test_64_bits_are_kept_where_jax_keeps_them(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        source = opened(tmp_path, {"n": 2**62, "x": 0.1})
        window = read(source)
    assert (window["n"].dtype, window["n"].tolist()) == (np.int64, [2**62])
    assert (window["x"].dtype, window["x"].tolist()) == (np.float64, [0.1])


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ('{"n": 1.5, "t": "", "p": [1, 2]}', "does not decode (Expected `int`, got `float`"),
        ('{"n": null, "t": "", "p": [1, 2]}', "does not decode (Expected `int`, got `null`"),
        ('{"t": "", "p": [1, 2]}', "missing required field `n`"),
        ('{"n": 1, "t": "", "p": [1, 2]', 'b\'{"n": 1, "t": "", "p": [1, 2]\' does not decode'),
        ("[1]", "b'[1]' does not decode (Expected `object`, got `array`)"),
        ('{"n": 3000000000, "t": "", "p": [1, 2]}', "field 'n' holds 3000000000, which does not fit in int32"),
        ('{"n": 99999999999999999999, "t": "", "p": [1, 2]}', "field 'n' is 99999999999999999999, which does not"),
        ('{"n": 1, "t": "", "p": [1, 2, 3]}', "field 'p' has the shape [3], expected [2] as in the records"),
        ('{"n": 1, "t": 7, "p": [1, 2]}', "Expected `str`, got `int`"),
    ],
)
def test_a_record_unlike_the_others_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str, message: str
) -> None:
    monkeypatch.setattr(fields, "NUM_SAMPLED", 2)  # the first and the last
    good = {"n": 1, "t": "x", "p": [1, 2]}
    source = opened(tmp_path, good, later, good)
    assert read(source, [2, 0])["n"].tolist() == [1, 1]
    with pytest.raises(RecordError) as caught:
        read(source, [0, 1, 2])
    assert str(caught.value).startswith(f"{tmp_path / 'a.jsonl'}, record 1 (at byte ")
    assert message in str(caught.value)
    assert "columns=" in str(caught.value)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (({"a": None}, {}), "field 'a' is null or missing in 2 of 2 records looked at"),
        (({"a": {}, "ok": 2}, {"a": None, "ok": None}), "read the others with columns=['ok']"),
        (({"a": None, "a.is_valid": 1}, {"a": 1, "a.is_valid": 1}), "has the name of another field: rename that one"),
        (({"a": {"b": 1}},), "field 'a' holds objects"),
        (({"a": ["x"]},), "field 'a' holds values of several types, or lists of something else than numbers"),
        (({"a": [[1], [1, 2]]},), "field 'a' holds lists of lists of different lengths"),
        (({"a": 1}, {"a": "x"}), "field 'a' holds objects, or text in some records only"),
        (({"a": 1}, {"a": [1]}), "field 'a' holds values of several types"),
        (({"a": 1}, {"a": True}), "field 'a' holds values of several types"),
        (({"a": 1}, {'b"': 1, "a": 2}), "has a quote, a backslash or a control character in its name; expected names"),
        (({"b\\": 1, "a": 2},), "read the others with columns=['a']"),
    ],
)
def test_fields_that_cannot_be_leaves(tmp_path: Path, records: tuple[Any, ...], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        opened(tmp_path, *records)
    assert message in str(caught.value)


def test_a_mask_lies_beside_a_field_that_lacks_values(tmp_path: Path) -> None:
    full = {"n": 3, "x": 0.5, "flag": True, "text": "a", "pair": [1, 2], "ids": [1], "grid": [[1], [2, 3]], "all": 1}
    other = {"n": 4, "x": 1.5, "flag": True, "text": "", "pair": [3, 4], "ids": [2, 3], "all": 2}
    nulls: dict[str, Any] = dict.fromkeys(full)
    inside = {"pair": [5, None], "ids": [None], "all": 3}
    source = opened(
        tmp_path, full, nulls | {"all": 0}, inside, other, columns=[name for name in full if name != "grid"]
    )
    assert list(source.sample_spec) == [
        *(part for name in ("n", "x", "flag", "text", "pair", "ids") for part in (name, f"{name}.is_valid")),
        "all",
    ]
    for again in (source, pickle.loads(pickle.dumps(source))):
        window = read(again, [3, 1, 2, 0])
        for name in ("n", "x", "flag", "text", "pair", "ids"):
            assert window[f"{name}.is_valid"].tolist() == [True, False, False, True]
        assert window["n"].tolist() == [4, 0, 0, 3]
        assert window["n"].dtype == np.int32
        np.testing.assert_array_equal(window["x"], [1.5, np.nan, np.nan, 0.5])
        assert window["flag"].tolist() == [True, False, False, True]
        assert window["text"].tolist() == ["", "", "", "a"]
        assert window["pair"].tolist() == [[3, 4], [0, 0], [0, 0], [1, 2]]
        assert [(ids.tolist(), ids.dtype.name) for ids in window["ids"]] == [
            ([2, 3], "int32"),
            ([], "int32"),
            ([], "int32"),
            ([1], "int32"),
        ]
        assert window["all"].tolist() == [2, 0, 3, 1]


def test_a_mask_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = ({"n": 1, "t": "x"}, {"n": None, "t": "y"}, {"t": "z"}, {"n": 4, "t": "z"})
    monkeypatch.setattr(fields, "NUM_SAMPLED", 2)  # the first and the last, which lack nothing
    source = opened(tmp_path, *records, columns=["n.is_valid", "n"])
    assert list(source.sample_spec) == ["n.is_valid", "n"]
    assert read(source)["n"].tolist() == [1, 0, 0, 4]
    assert read(source)["n.is_valid"].tolist() == [True, False, False, True]
    alone = opened(tmp_path, *records, columns=["n.is_valid"])
    assert list(alone.sample_spec) == ["n.is_valid"]
    assert read(alone)["n.is_valid"].tolist() == [True, False, False, True]
    declared = opened(tmp_path, *records, columns={"n": "float32", "n.is_valid": None})
    np.testing.assert_array_equal(read(declared)["n"], np.array([1, np.nan, np.nan, 4], np.float32))
    source = opened(tmp_path, *records, '{"n": 1.5, "t": ""}', *records, columns=["n.is_valid", "n"])
    with pytest.raises(RecordError, match=r"record 4 \(at byte \d+\): .*Expected `int \| null`, got `float`"):
        read(source)


@pytest.mark.parametrize("later", ['{"n": null, "p": [1]}', '{"p": [1]}', '{"n": 1, "p": [null]}'])
def test_a_null_behind_the_records_looked_at_says_what_to_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    monkeypatch.setattr(fields, "NUM_SAMPLED", 2)
    source = opened(tmp_path, {"n": 1, "p": [1]}, later, {"n": 1, "p": [1]})
    name = "p" if "[null]" in later else "n"
    message = rf"record 1 .*; where '{name}' may be null or missing, ask for '{name}\.is_valid' in columns= too"
    with pytest.raises(RecordError, match=message):
        read(source)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"columns=\['b'\]: expected names of fields .*has \['a'\] and no \['b'\]"):
        opened(tmp_path, {"a": 1}, columns=["b"])
    with pytest.raises(ArgumentError, match=r"columns=\[\]: expected names of fields"):
        opened(tmp_path, {"a": 1}, columns=[])
    with pytest.raises(ArgumentError, match=r"columns=\{'a': 'gloat32'\}: .*; expected a dtype such as 'float32'"):
        opened(tmp_path, {"a": 1}, columns={"a": "gloat32"})


def test_what_is_no_json_lines(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"a\.jsonl, the record at byte 0: is list, expected an object \{…\}"):
        opened(tmp_path, [1, 2])
    with pytest.raises(RecordError, match=r"a\.jsonl, record 1 \(at byte 9\): b'\{' does not decode"):
        read(opened(tmp_path, {"a": 1}, "{"), [1])
    with pytest.raises(FormatError, match=r"a\.jsonl: holds 0 records"):
        opened(tmp_path, "", "")


def test_text_in_a_field_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "x"}\n{"a": "\xff"}\n{"a": "y"}\n')
    source = open_jsonl(LocalFiles([tmp_path / "a.jsonl"]))
    with pytest.raises(RecordError, match=r"record 1 \(at byte 11\): .*does not decode"):
        read(source, [1])
