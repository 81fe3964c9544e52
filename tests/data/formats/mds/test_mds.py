import gzip
import json
import pickle
import re
import struct
import sys
import threading
import tracemalloc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import numpy as np
import pytest

from braidax.data.formats.mds import mds
from braidax.data.formats.mds.mds import open_mds
from braidax.data.source import is_varying
from braidax.data.storage import LocalFiles, Ranges
from braidax.errors import ArgumentError, FormatError, MissingExtra, RecordError
from tests.support.data.formats.mds import compress, write_mds
from tests.support.data.formats.reading import read
from tests.support.data.storage.faulty_server import serving

ENCODINGS = {
    "flag": "uint8", "half": "float16", "wide": "int64", "n": "int", "x": "ndarray:float32:2,3", "text": "str",
    "raw": "bytes", "json": "json", "digits": "str_int", "float": "str_float", "exact": "str_decimal",
    "ragged": "ndarray:int16", "free": "ndarray", "photo": "jpeg",
}  # fmt: skip


def dynamic(array: Any, *, with_dtype: bool) -> bytes:
    """An array with its shape, as `NDArray.encode` writes it; shapes below 256 in one byte, others in two."""
    value = np.asarray(array)
    codes = {"int16": 17, "float64": 66, "uint8": 8, "int64": 65}
    wide = max(value.shape) > 255
    shape = np.array(value.shape, "<u2" if wide else "u1").tobytes()
    return bytes([codes[value.dtype.name]] * with_dtype + [value.ndim << 2 | wide]) + shape + value.tobytes()


def sample(n: int) -> dict[str, bytes]:
    return {
        "flag": np.uint8(n).tobytes(),
        "half": np.float16(n / 2).tobytes(),
        "wide": np.int64(-n).tobytes(),
        "n": np.int64(n * 1000).tobytes(),
        "x": (np.arange(6, dtype=np.float32) + n).tobytes(),
        "text": ("é" * n).encode(),
        "raw": b"\0\xff" * n,
        "json": json.dumps({"n": n}).encode(),
        "digits": str(7 * n).encode(),
        "float": str(n / 4).encode(),
        "exact": b"0.1000",
        "ragged": dynamic(np.arange(n + 1, dtype=np.int16), with_dtype=False),
        "free": dynamic(np.full((2, 300 * (n % 2) + 1), n / 8), with_dtype=True),
        "photo": b"\xff\xd8" + bytes([n]),
    }


def check(out: Mapping[str, Any], order: list[int]) -> None:
    numbers = np.array(order)
    assert out["flag"].tolist() == order
    assert out["half"].tolist() == (numbers / 2).tolist()
    assert out["wide"].tolist() == (-numbers).tolist()
    assert out["n"].tolist() == (numbers * 1000).tolist()
    np.testing.assert_array_equal(out["x"], np.arange(6).reshape(2, 3) + numbers[:, None, None])
    assert out["text"].tolist() == ["é" * n for n in order]
    assert out["raw"].tolist() == [b"\0\xff" * n for n in order]
    assert out["json"].tolist() == [json.dumps({"n": n}) for n in order]
    assert out["digits"].tolist() == (7 * numbers).tolist()
    assert out["float"].tolist() == (numbers / 4).tolist()
    assert out["exact"].tolist() == ["0.1000"] * len(order)
    assert [value.tolist() for value in out["ragged"]] == [list(range(n + 1)) for n in order]
    for n, value in zip(order, out["free"], strict=True):
        np.testing.assert_array_equal(value, np.full((2, 300 * (n % 2) + 1), n / 8, np.float32))
    assert out["photo"].tolist() == [b"\xff\xd8" + bytes([n]) for n in order]


def test_every_encoding_over_several_shards_in_any_order(tmp_path: Path) -> None:
    source = open_mds(write_mds(tmp_path / "a", ENCODINGS, [sample(n) for n in range(50)], per_shard=7))
    assert len(source) == 50
    order = [*np.random.default_rng(0).permutation(50).tolist(), 3, 3]
    out = read(source, order)
    check(out, order)
    kinds = [out[name].dtype.name for name in ("flag", "half", "wide", "n", "x", "float")]
    assert kinds == ["uint8", "float16", "int32", "int32", "float32", "float32"]
    assert out["free"][0].dtype == np.float32
    assert {name for name, spec in source.sample_spec.items() if is_varying(spec)} == {
        "text", "raw", "json", "exact", "ragged", "free", "photo",
    }  # fmt: skip
    facts = source.describe()
    assert facts["format"] == "MosaicML MDS"
    assert facts["samples"] == "50"
    assert facts["index"] == "in the shards, 232 bytes, read when first needed"


@pytest.mark.parametrize("codec", ["brotli", "zstd", "snappy", "gzip", "bz2"])
def test_compressed_shards_are_decompressed_once(tmp_path: Path, codec: str) -> None:
    samples = [sample(n) for n in range(20)]
    folder = write_mds(tmp_path / "a", ENCODINGS, samples, per_shard=7, codec=codec, hashes=["sha1"])
    cache = tmp_path / "cache"
    check(read(open_mds(folder, cache=cache)), list(range(20)))
    made = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert sorted(path.suffix for path in made) == [".made"] * 3 + [".mds"] * 3
    check(read(open_mds(folder, cache=cache)), list(range(20)))
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == made


def test_a_compressed_shard_that_was_written_anew_is_decompressed_anew(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        write_mds(tmp_path / text.decode(), {"text": "str"}, [{"text": text}], codec="gzip")
        folder = (tmp_path / text.decode()).rename(tmp_path / "a")
        assert read(open_mds(folder, cache=tmp_path / "cache"))["text"].tolist() == [text.decode()]
        folder.rename(tmp_path / f"old {text.decode()}")


def test_the_cache_folder_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    open_mds(write_mds(tmp_path / "a", {"text": "str"}, [{"text": b"t"}], codec="gzip"))
    assert len(list((tmp_path / "cache" / "derived" / "mds").glob("*.mds"))) == 1
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(FormatError, match=r"the decompressed shard cannot be written .*BRAIDAX_CACHE"):
        open_mds(tmp_path / "a")


def test_raw_shards_beside_compressed_ones_are_used(tmp_path: Path) -> None:
    samples = [{"text": b"t%d" % n} for n in range(4)]
    folder = write_mds(tmp_path / "a", {"text": "str"}, samples, per_shard=2, codec="gzip")
    packed = folder / "shard.00001.mds.gz"
    (folder / "shard.00001.mds").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    source = open_mds(folder, cache=tmp_path / "cache")
    assert read(source)["text"].tolist() == ["t0", "t1", "t2", "t3"]
    assert len(list((tmp_path / "cache").glob("*.mds"))) == 1


def test_damaged_compressed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [{"text": b"t" * 1000}] * 3
    folder = write_mds(tmp_path / "a", {"text": "str"}, samples, codec="zstd", hashes=["md5"])
    packed = folder / "shard.00000.mds.zstd"
    whole = packed.read_bytes()
    packed.write_bytes(whole[:-9])
    with pytest.raises(FormatError, match=r"shard.00000.mds.zstd: .*bytes that are no whole zstd data .*copy it again"):
        open_mds(folder, cache=tmp_path / "cache")
    index = json.loads((folder / "index.json").read_text())
    contents = b"x" * index["shards"][0]["raw_data"]["bytes"]
    packed.write_bytes(compress(contents, "zstd"))
    with pytest.raises(
        FormatError, match=r"shard.00000.mds.zstd: its contents have the md5 \w+, expected \w+ as index"
    ):
        open_mds(folder, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.*"))
    packed.write_bytes(compress(b"x", "gzip"))
    index["shards"][0]["compression"] = "gz:9"
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"shard.00000.mds.zstd: holds 1 bytes, expected \d[\d,]* as index.json says"):
        open_mds(folder, cache=tmp_path / "cache")
    index["shards"][0]["compression"] = "lz4"
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"is compressed with 'lz4'; expected br, bz2, gz, snappy or zstd"):
        open_mds(folder, cache=tmp_path / "cache")


def test_codecs_that_need_arrow_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_mds(tmp_path / "a", {"text": "str"}, [{"text": b"t"}], codec="zstd")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r'shards compressed with zstd need pyarrow; .*"braidax\[arrow\]"'):
        open_mds(folder, cache=tmp_path / "cache")


def test_columns_are_chosen_in_order_and_read_by_other_encodings(tmp_path: Path) -> None:
    tokens = np.arange(12).reshape(3, 4)
    samples = [{"tokens": row.tobytes(), "id": b"%d" % n, "other": b"\x80"} for n, row in enumerate(tokens)]
    folder = write_mds(tmp_path / "a", {"tokens": "bytes", "id": "str", "other": "pkl"}, samples)
    with pytest.raises(
        FormatError, match=r"index.json: column 'other' has the encoding 'pkl'; it runs code .*columns="
    ):
        open_mds(folder)
    assert set(read(open_mds(folder, columns=["id"]))) == {"id"}
    source = open_mds(folder, columns={"tokens": "ndarray:int64:4", "id": "str_int"})
    assert source.describe()["columns"] == "tokens, id"
    assert source.sample_spec["tokens"] == jax.ShapeDtypeStruct((4,), np.int32)
    out = read(source, [2, 0])
    np.testing.assert_array_equal(out["tokens"], tokens[[2, 0]])
    assert out["id"].tolist() == [2, 0]
    wrong = open_mds(folder, columns={"tokens": "ndarray:int64:5"})
    with pytest.raises(RecordError, match=r"record 0 .*: column 'tokens' has 32 bytes, expected 40 for the shape"):
        read(wrong)
    for columns in (["x"], [], "id"):
        with pytest.raises(
            ArgumentError, match=r"columns=.*: expected names of columns of .*\['id', 'other', 'tokens'\]"
        ):
            open_mds(folder, columns=columns)
    for encoding in ("ndarray:int64:a", "ndarray:complex64", "ndarray::4"):
        with pytest.raises(ArgumentError, match=r"column 'tokens' has the encoding 'ndarray:.*; expected 'ndarray'"):
            open_mds(folder, columns={"tokens": encoding})
    with pytest.raises(FormatError, match=r"column 'id' has the encoding 'strange'; it is not known"):
        open_mds(folder, columns={"id": "strange"})


def test_images_and_lists_of_images(tmp_path: Path) -> None:
    pixels = np.arange(24, dtype=np.uint8)
    pil = [
        struct.pack("<3I", 4, 2, 3) + b"RGB" + pixels.tobytes(),
        struct.pack("<3I", 6, 4, 1) + b"L" + pixels.tobytes(),
        struct.pack("<3I", 3, 2, 1) + b"I" + pixels.tobytes(),
    ]
    images = [b"one", b"", b"three"]
    sizes = struct.pack("<4I", 3, 3, 0, 5)
    encodings = {"pil": "pil", "array": "jpeg_array", "list": "list[png]"}
    samples = [{"pil": image, "array": sizes + b"onethree", "list": bytes(4) + sizes + b"onethree"} for image in pil]
    out = read(open_mds(write_mds(tmp_path / "a", encodings, samples)))
    np.testing.assert_array_equal(out["pil"][0], pixels.reshape(2, 4, 3))
    np.testing.assert_array_equal(out["pil"][1], pixels.reshape(4, 6))
    np.testing.assert_array_equal(out["pil"][2], pixels.view("<i4").reshape(2, 3))
    assert out["array"][0].tolist() == out["list"][1].tolist() == images


@pytest.mark.parametrize(
    ("encoding", "bad", "message"),
    [
        ("str", b"\xff", "the text is not UTF-8"),
        ("str_int", b"1.5", "b'1.5' is no integer"),
        ("str_float", b"one", "b'one' is no number"),
        ("ndarray", b"\x07\x04\x01\x00", "not what its encoding says .KeyError: 7"),
        ("ndarray:int16", b"\x04\x03\x00\x00", "not what its encoding says .ValueError: cannot reshape"),
        ("ndarray", b"", "the 0 bytes of column 'x' are not what its encoding says .IndexError"),
        ("pil", b"\1", "not what its encoding says .error"),
        ("pil", struct.pack("<3I", 1, 1, 1) + b"1\0", "not what its encoding says .KeyError: '1'"),
        ("jpeg_array", struct.pack("<2I", 1, 9), "not what its encoding says .ValueError: 17 bytes for 1 images"),
        ("int", np.int64(1 << 40).tobytes(), r"leaf 'x' holds 1099511627776 \(int64\), which does not fit in int32"),
    ],
)
def test_a_value_that_does_not_decode(tmp_path: Path, encoding: str, bad: bytes, message: str) -> None:
    good = {
        "str": b"a",
        "str_int": b"1",
        "str_float": b"1",
        "int": bytes(8),
        "pil": struct.pack("<3I", 1, 1, 1) + b"L\0",
    }
    fine = good.get(encoding) or {"ndarray": b"\x08\x04\x01\x00", "ndarray:int16": b"\x04\x01\x00\x00"}.get(
        encoding, bytes(4)
    )
    source = open_mds(write_mds(tmp_path / "a", {"x": encoding}, [{"x": fine}, {"x": bad}, {"x": fine}]))
    read(source, [0, 2])
    with pytest.raises(RecordError, match=rf"record 1.*{message}"):
        read(source)


def test_samples_whose_sizes_do_not_fit(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a", {"text": "str"}, [{"text": b"abc"}, {"text": b"def"}])
    path = folder / "shard.00000.mds"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\3\0\0\0def", b"\4\0\0\0def"))
    message = r"shard.00000.mds, record 1 .*: the columns take 8 bytes, but the sample has 7; copy the shard again"
    with pytest.raises(RecordError, match=message):
        read(open_mds(folder))
    table = np.frombuffer(data[4:16], "<u4") + np.array([0, -5, 0])
    path.write_bytes(data[:4] + table.astype("<u4").tobytes() + data[16:])
    with pytest.raises(RecordError, match=r"record 0 .*: 2 bytes are no sample"):
        read(open_mds(folder))


@pytest.mark.parametrize("is_kept", [True, False])
def test_tables_that_are_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    if not is_kept:
        monkeypatch.setattr(mds, "_KEPT_BYTES", 0)
    folder = write_mds(tmp_path / "a", ENCODINGS, [sample(n) for n in range(9)], per_shard=5)
    source = open_mds(folder)
    assert source.describe()["index"].endswith("read when first needed" if is_kept else "looked up in every read")
    check(read(source, [8, 0, 4, 5, 0]), [8, 0, 4, 5, 0])
    path = folder / "shard.00001.mds"
    data = path.read_bytes()
    for place, value in ((4, 1 << 20), (2, 1 << 30)):
        path.write_bytes(data[: 4 * place] + np.uint32(value).tobytes() + data[4 * place + 4 :])
        with pytest.raises(
            FormatError, match=r"shard.00001.mds: its head says offsets that lie outside of it, or go back"
        ):
            read(open_mds(folder))
        check(read(open_mds(folder), [4, 1]), [4, 1])
    path.write_bytes(b"\5" + data[1:])
    if is_kept:
        with pytest.raises(FormatError, match=r"its head says 5 samples, expected 4 as index.json says"):
            read(open_mds(folder))


def test_a_truncated_shard(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a", ENCODINGS, [sample(n) for n in range(9)], per_shard=5)
    path = folder / "shard.00001.mds"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    message = rf"shard.00001.mds: {size - 1:,} bytes, expected {size:,} as .*index.json says; it is truncated"
    with pytest.raises(FormatError, match=message):
        open_mds(folder)
    path.unlink()
    with pytest.raises(FormatError, match=r"shard.00001.mds: cannot be opened"):
        open_mds(folder)


def test_splits(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_mds(tmp_path / "a" / split, {"text": "str"}, [{"text": split.encode()}])
    assert read(open_mds(tmp_path / "a", split="val"))["text"].tolist() == ["val"]
    with pytest.raises(FormatError, match=r"a: has no index.json; expected .*: choose with split= one of train, val"):
        open_mds(tmp_path / "a")
    with pytest.raises(
        FormatError, match=r"test: has no index.json; expected a folder that MDSWriter wrote: check the"
    ):
        open_mds(tmp_path / "a", split="test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, r"lists 1 shards of the formats and versions \[\('mds', 1\), \('mds', 2\)\]; expected"),
        ({"format": "jsonl"}, r"\('jsonl', 2\)"),
        ({"samples": None}, r"shard 0 is not described as MDSWriter does it \(TypeError"),
        ({"column_names": None}, r"shard 0 has the columns None with encodings"),
    ],
)
def test_an_index_that_is_no_index(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_mds(tmp_path / "a", {"text": "str"}, [{"text": b"t"}])
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= change
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=rf"index.json: .*{message}"):
        open_mds(folder)


def test_an_index_that_is_no_json_or_empty(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a", {"text": "str"}, [])
    with pytest.raises(FormatError, match=r"lists 0 shards .*; expected at least one"):
        open_mds(folder)
    (folder / "index.json").write_text("{")
    with pytest.raises(FormatError, match=r"index.json: is no list of shards as MDSWriter writes it \(JSONDecodeError"):
        open_mds(folder)
    write_mds(tmp_path / "b", {"text": "str"}, [{"text": b"t"}])
    index = json.loads((tmp_path / "b" / "index.json").read_text())
    index["shards"].append(index["shards"][0] | {"column_encodings": ["bytes"]})
    (tmp_path / "b" / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"shard 1 has the columns \['text'\] with encodings \['bytes'\], expected"):
        open_mds(tmp_path / "b")


def test_preparing_asks_for_tables_first_and_then_for_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_mds(tmp_path / "a", {"text": "str"}, [{"text": b"t%d" % n} for n in range(9)], per_shard=4)
    asked: list[list[tuple[int, int]]] = []

    def prepare(self: LocalFiles, ranges: Ranges) -> None:
        asked.append(list(zip(ranges.file.tolist(), ranges.length.tolist(), strict=True)))

    monkeypatch.setattr(LocalFiles, "prepare", prepare)
    monkeypatch.setattr(LocalFiles, "is_cold", True)  # else nobody has to be asked ahead
    source = open_mds(folder)
    source.prepare(np.array([8, 0, 1, 99]))
    assert asked == [[(0, 24), (2, 12)]]
    assert read(source, [8, 0])["text"].tolist() == ["t8", "t0"]
    source.prepare(np.array([8, 0, 1]))
    assert asked[1] == [(2, 6), (0, 6), (0, 6)]


def test_many_threads(tmp_path: Path) -> None:
    source = open_mds(write_mds(tmp_path / "a", ENCODINGS, [sample(n) for n in range(60)], per_shard=3))
    start = threading.Barrier(8)

    def go(seed: int) -> None:
        order = np.random.default_rng(seed).integers(0, 60, 100).tolist()
        start.wait(10)
        check(read(source, order), order)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(go, range(8)))


def test_numbers_keep_64_bits_where_jax_does(tmp_path: Path) -> None:
    folder = write_mds(
        tmp_path / "a", {"n": "int", "d": "str_int"}, [{"n": np.int64(1 << 40).tobytes(), "d": b"%d" % (1 << 40)}]
    )
    with jax.enable_x64(True):
        out = read(open_mds(folder))
        assert out["n"].tolist() == out["d"].tolist() == [1 << 40]


def test_a_path_with_the_marks_of_patterns(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a[0]*", {"text": "str"}, [{"text": b"t"}])
    assert read(open_mds(str(folder) + "/"))["text"].tolist() == ["t"]
    assert re.search(r"a\[0\]\*/shard", str(open_mds(folder)._files.names[0]))


def test_a_source_can_be_sent_to_another_process(tmp_path: Path) -> None:
    source = open_mds(write_mds(tmp_path / "a", ENCODINGS, [sample(n) for n in range(6)], per_shard=4))
    check(read(source, [5]), [5])
    again = pickle.loads(cloudpickle.dumps(source))
    check(read(again), list(range(6)))


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_shards_on_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str | None) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    folder = write_mds(tmp_path / "a", ENCODINGS, [sample(n) for n in range(20)], per_shard=7, codec=codec)
    objects = {f"data/val/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with serving(objects) as server:
        check(read(open_mds(f"{server.url}/data", split="val"), [19, 0, 7]), [19, 0, 7])
        with pytest.raises(FormatError, match=r"data/train/index.json"):
            open_mds(f"{server.url}/data", split="train")


@pytest.mark.parametrize("codec", ["gzip", "bz2", "zstd", "brotli", "snappy"])
def test_shards_become_no_more_than_their_index_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    folder = write_mds(tmp_path / "mds", {"n": "uint8"}, [{"n": b"\1"}], codec=codec)
    (packed,) = folder.glob("shard*")
    kept, index = packed.read_bytes(), json.loads((folder / "index.json").read_text())
    packed.write_bytes(compress(bytes(1 << 26), codec))
    tracemalloc.start()
    with pytest.raises(FormatError, match=re.escape(packed.name)):
        open_mds(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 23
    packed.write_bytes(kept)
    index["shards"][0]["raw_data"]["bytes"] += 10
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=re.escape(packed.name)):  # of brotli and Snappy Arrow makes zeros of them
        open_mds(folder)
    index["shards"][0]["raw_data"]["bytes"] = (1 << 32) - 1
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=rf"{packed.name}: .* become 4,294,967,295 or more; expected at most"):
        open_mds(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": -1},
        {"samples": 1 << 40},
        {"samples": float("inf")},
        {"raw_data": {"basename": "shard.00000.mds", "bytes": -5}},
        {"raw_data": {"basename": "shard.00000.mds", "bytes": 50, "hashes": "sha1"}},
        {"compression": 7, "zip_data": 7},
        {"column_names": 7},
        {"column_encodings": [7]},
        {"column_encodings": ["uint8", "uint8"]},
        {"column_sizes": ["1"]},
        {"column_sizes": [-1]},
    ],
)
def test_an_index_of_anything(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_mds(tmp_path / "mds", {"n": "uint8"}, [{"n": b"\1"}])
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0].update(change)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=re.escape(str(folder / "index.json"))):
        open_mds(folder)


def test_a_damaged_shard_is_named_as_it_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    folder = write_mds(tmp_path / "mds", {"n": "str"}, [{"n": b"word"}], codec="gzip")
    (packed,) = folder.glob("shard*")
    raw = bytearray(gzip.decompress(packed.read_bytes()))
    raw[-4] = 0xFF
    packed.write_bytes(gzip.compress(bytes(raw)))
    with pytest.raises(RecordError, match=re.escape(str(packed))):
        read(open_mds(folder))
