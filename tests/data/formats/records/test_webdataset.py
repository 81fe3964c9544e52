import io
import itertools
import os
import pickle
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import braidax.data as sources
from braidax.data.formats.records.records import RecordSource
from braidax.data.formats.records.tar import Window, members
from braidax.data.formats.records.webdataset import open_webdataset, scan
from braidax.data.source import VARYING, is_varying
from braidax.data.storage import LocalFiles, Remote, open_files
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.formats.reading import read
from tests.support.data.formats.webdataset import npy, numbered, sample, shard
from tests.support.data.storage.faulty_server import serving

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def opened(*paths: Path, **options: Any) -> RecordSource:
    return open_webdataset(LocalFiles(paths), **options)


@pytest.mark.parametrize("kind", FORMATS)
def test_samples_of_several_shards_in_any_order(tmp_path: Path, kind: str) -> None:
    paths = [
        shard(tmp_path / f"{number}.tar", numbered(range(20 * number, 20 * number + 20)), FORMATS[kind])
        for number in range(3)
    ]
    source = opened(*paths)
    assert len(source) == 60
    order = [*np.random.default_rng(0).permutation(60).tolist(), 7, 7]
    out = read(source, order)
    assert set(out) == {"jpg", "cls", "json", "npy", "seg.png"}
    assert out["jpg"].tolist() == [sample(n)["jpg"] for n in order]
    assert out["cls"].tolist() == [n % 10 for n in order]
    assert out["json"].tolist() == [sample(n)["json"].decode() for n in order]
    assert out["seg.png"].tolist() == [b"png" * n for n in order]
    np.testing.assert_array_equal(out["npy"], np.arange(6).reshape(2, 3) + np.array(order)[:, None, None])
    assert out["cls"].dtype == out["npy"].dtype == np.int32
    assert {leaf for leaf, spec in source.sample_spec.items() if is_varying(spec)} == {"jpg", "json", "seg.png"}
    assert source.sample_spec["npy"].shape == (2, 3)
    facts = source.describe()
    assert facts["format"] == "WebDataset (tar)"
    assert facts["fields"] == "jpg, cls, json, npy, seg.png"
    assert facts["samples"] == "60"


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_names_longer_than_a_header(tmp_path: Path, kind: str) -> None:
    folder = "/".join(["d" * 90] * 4) + "/"
    contents = numbered(range(5), folder) + numbered(range(5, 8)) + numbered(range(8, 12), "ö" * 80 + "/")
    source = opened(shard(tmp_path / "a.tar", contents, FORMATS[kind]), columns=["__key__", "cls"])
    out = read(source, [4, 0, 6, 11])
    assert out["__key__"].tolist() == [f"{folder}000004", f"{folder}000000", "000006", "ö" * 80 + "/000011"]
    assert out["cls"].tolist() == [4, 0, 6, 1]


def test_names_split_between_name_and_prefix(tmp_path: Path) -> None:
    folder = "/".join(["d" * 50] * 4) + "/"
    source = opened(shard(tmp_path / "a.tar", numbered(range(2), folder), tarfile.USTAR_FORMAT), columns=["__key__"])
    assert read(source)["__key__"].tolist() == [f"{folder}000000", f"{folder}000001"]


def test_what_is_no_sample_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", pax_headers={"comment": "of the whole archive"}) as archive:
        for number in range(3):
            folder = tarfile.TarInfo(f"folder{number}.d")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            for name, data in (("a/README", b"x"), ("a/.hidden.txt", b"x"), ("__meta__.v1__", b"x")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            for extension in ("TXT", "cls"):
                member = tarfile.TarInfo(f"a/{number}.{extension}")
                member.size = 1
                archive.addfile(member, io.BytesIO(str(number).encode()))
                link = tarfile.TarInfo(f"a/{number}.link")
                link.type, link.linkname = tarfile.SYMTYPE, "l" * 150
                archive.addfile(link)
    out = read(opened(path))
    assert set(out) == {"txt", "cls"}
    assert out["txt"].tolist() == ["0", "1", "2"]
    assert out["cls"].tolist() == [0, 1, 2]


def test_fields_are_chosen_and_named(tmp_path: Path) -> None:
    contents = [("0.jpg", b"j"), ("0.cls", b"3"), ("0.json", b"{}"), ("1.png", b"p"), ("1.cls", b" 4\n")]
    source = opened(shard(tmp_path / "a.tar", contents), columns={"image": "jpg;png", "label": "cls"})
    out = read(source)
    assert out["image"].tolist() == [b"j", b"p"]
    assert out["label"].tolist() == [3, 4]
    assert source.describe()["fields"] == "jpg;png, cls"
    assert source.describe()["fields not loaded"] == "json"
    assert set(read(opened(tmp_path / "a.tar"))) == {"cls"}
    assert list(read(opened(tmp_path / "a.tar", columns=[".JPG;png"]))) == [".JPG"]
    message = r"columns=\['mp4'\]: expected fields of .*a.tar \(1 shard.*have 4: jpg, cls, json, png and no mp4"
    with pytest.raises(ArgumentError, match=message):
        opened(tmp_path / "a.tar", columns=["mp4"])
    with pytest.raises(ArgumentError, match=r"columns='jpg': expected a list of extensions"):
        opened(tmp_path / "a.tar", columns="jpg")


def test_a_sample_that_lacks_a_field(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("a/0.txt", b"t"), ("a/0.cls", b"3"), ("a/1.txt", b"u")])
    assert opened(path).describe()["fields"] == "txt"
    assert opened(path).describe()["fields not loaded"] == "cls"
    source = opened(path, columns=["txt", "cls"])
    message = f"{path}, record 1 (at byte 2,048): sample 'a/1' has no field cls, only 1: txt; pack it anew, or choose"
    with pytest.raises(RecordError, match=re.escape(message)):
        read(source)
    assert read(source, [0])["cls"].tolist() == [3]
    path = shard(tmp_path / "b.tar", [("0.jpg", b""), ("1.png", b"")])
    with pytest.raises(FormatError, match=r"b.tar \(1 shard.*: its samples share no field; they have 2: jpg, png:"):
        opened(path)


def test_arrays_of_several_shapes(tmp_path: Path) -> None:
    arrays = [np.arange(3), np.arange(5), np.asfortranarray(np.arange(4).reshape(2, 2))]
    path = shard(tmp_path / "a.tar", [(f"{n}.ids.npy", npy(array)) for n, array in enumerate(arrays)])
    out = read(opened(path))["ids.npy"]
    assert [value.tolist() for value in out] == [array.tolist() for array in arrays]
    assert {value.dtype for value in out} == {np.dtype(np.int32)}


def test_an_array_of_another_shape_that_was_not_looked_at(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [(f"{n}.npy", npy(np.arange(3 + (n == 1)))) for n in range(40)])
    source = opened(path)
    assert source.sample_spec["npy"].shape == (3,)
    message = r"record 1 .*: leaf 'npy' is int64\[4\], expected int32\[3\] .*: columns=\{'npy': braidax.data.VARYING\}"
    with pytest.raises(RecordError, match=message):
        read(source)
    out = read(opened(path, columns={"npy": VARYING}), [0, 1])["npy"]
    assert [value.tolist() for value in out] == [[0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("name", "good", "bad", "message"),
    [
        ("cls", b"1", b"cat", "b'cat' is no integer"),
        ("cls", b"1", b"3000000000", "3000000000 does not fit in int32"),
        ("txt", b"a", b"\xff\xfe", "the text is not UTF-8"),
        ("npy", npy(np.arange(2)), npy(np.arange(2))[:-3], "holds no array as np.save writes it"),
        ("npy", npy(np.arange(2)), b"\x93NUM", "holds no array as np.save writes it"),
        ("npy", npy(np.arange(2)), npy(np.array([None, 1])), r"holds no array .*Python objects"),
        (
            "npy",
            npy(np.arange(2)),
            npy(np.array([1, 1 << 40])),
            "leaf 'npy' holds 1099511627776 .* does not fit in int",
        ),
    ],
)
def test_a_field_that_does_not_decode(tmp_path: Path, name: str, good: bytes, bad: bytes, message: str) -> None:
    path = shard(tmp_path / "a.tar", [(f"0.{name}", good), (f"1.{name}", bad), (f"2.{name}", good)])
    source = opened(path)
    read(source, [0, 2])
    with pytest.raises(RecordError, match=rf"{path}.*, record 1.*{message}"):
        read(source, [2, 1])


@pytest.mark.parametrize("bad", [0, 2])
def test_a_bad_record_does_not_keep_a_shard_from_opening(tmp_path: Path, bad: int) -> None:
    path = shard(tmp_path / "a.tar", [(f"{n}.npy", b"x" if n == bad else npy(np.arange(2) + n)) for n in range(3)])
    source = opened(path)
    assert read(source, [1])["npy"].tolist() == [[1, 2]]
    with pytest.raises(RecordError, match=rf"record {bad} .*holds no array"):
        read(source)
    with pytest.raises(RecordError, match=r"field 'npy' holds no array"):
        opened(shard(tmp_path / "b.tar", [("0.npy", b"x")]))


def test_two_members_of_one_name(tmp_path: Path) -> None:
    source = opened(shard(tmp_path / "a.tar", [("0.txt", b"t"), ("1.txt", b"u"), ("1.txt", b"v")]))
    assert read(source, [0])["txt"].tolist() == ["t"]
    with pytest.raises(RecordError, match=r"record 1 .*: sample '1' has two members '1.txt'"):
        read(source)


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    contents = [("a.txt", b"0"), ("b.txt", b"1" * 600), ("b.cls", b"2"), (f"{'c' * 120}.txt", b"3")]
    whole = shard(tmp_path / "a.tar", contents).read_bytes()
    end = len(whole.rstrip(b"\0")) + 512 & ~511  # where the end mark begins
    path = tmp_path / "b.tar"
    for size in [*range(1, end, 97), *range(512, end, 512), end, end + 511]:
        path.write_bytes(whole[:size])
        last = "none" if size < 1024 + 512 else "a" if size < 5120 else "b"
        with pytest.raises(
            FormatError, match=rf"b.tar: damaged at byte {size:,}: it ends (there, without|inside)"
        ) as error:
            opened(path)
        assert f"the last whole sample is '{last}'" in str(error.value), size
    path.write_bytes(whole[: end + 512])
    assert len(opened(path)) == 3


def test_a_damaged_header(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", numbered(range(3)))
    data = bytearray(path.read_bytes())
    start = data.index(b"000001.npy")
    data[start + 124 : start + 126] = b"77"
    path.write_bytes(data)
    message = (
        rf"a.tar: damaged at byte {start:,}: no header of a tar is there \(its checksum .*last whole sample is '000000'"
    )
    with pytest.raises(FormatError, match=message):
        opened(path)


@pytest.mark.parametrize(("mode", "command"), [("w:gz", "gunzip"), ("w:bz2", "bunzip2"), ("w:xz", "unxz")])
def test_compressed_tars_are_refused(tmp_path: Path, mode: Any, command: str) -> None:
    with tarfile.open(tmp_path / "a.tar", mode) as archive:
        archive.addfile(tarfile.TarInfo("0.txt"))
    with pytest.raises(FormatError, match=rf"a.tar: a compressed tar, .*decompress it once \({command}\)"):
        opened(tmp_path / "a.tar")


def test_tars_joined_with_cat(tmp_path: Path) -> None:
    one = shard(tmp_path / "a.tar", numbered(range(2))).read_bytes()
    (tmp_path / "b.tar").write_bytes(one + one)
    with pytest.raises(FormatError, match=r"b.tar: there is data behind the end mark of the tar.*tar -A"):
        opened(tmp_path / "b.tar")
    (tmp_path / "b.tar").write_bytes(one + bytes(3 << 20))
    assert len(opened(tmp_path / "b.tar")) == 2


def test_no_samples(tmp_path: Path) -> None:
    with pytest.raises(
        FormatError, match=r"a.tar: holds 0 samples in 1 shard\(s\); expected members with an extension"
    ):
        opened(shard(tmp_path / "a.tar", [("README", b"x")]))


def test_sparse_files_are_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("0.bin")
    member.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with pytest.raises(FormatError, match=r"a.tar: damaged at byte 0: a sparse file is stored there"):
        opened(tmp_path / "a.tar")


class Pipe(io.RawIOBase):
    """A file that cannot seek and returns a few bytes at a time, as a socket does."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(min(size, 1000))
        self.num_bytes += len(data)
        return data


def test_a_stream_is_scanned_as_a_file_is(tmp_path: Path, unchecked: None) -> None:
    contents = [(f"{n:03}.bin", bytes([n]) * size) for n, size in enumerate((0, 1, 511, 512, 513, 70_000, 40_000, 5))]
    data = shard(tmp_path / "a.tar", contents).read_bytes()
    found = [np.concatenate(rows) for rows in zip(*scan(Pipe(data), "a"), strict=True)]
    expected = [np.concatenate(rows) for rows in zip(*scan(io.BytesIO(data), "a"), strict=True)]
    np.testing.assert_array_equal(found, expected)
    for (offset, length), (_, content) in zip(np.array(found).T.tolist(), contents, strict=True):
        assert data[offset + 512 : offset + length] == content
    with pytest.raises(FormatError, match=r"damaged at byte 60,000: it ends there.*last whole sample is '004'"):
        list(scan(Pipe(data[:60_000]), "a"))


def test_large_members_are_not_read_by_the_scan(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [(f"{n}.bin", bytes(1 << 20)) for n in range(8)])
    reads = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            reads.append(len(data))
            return data

    with Counted(path) as file:
        offsets, _ = next(scan(file, "a"))
    assert len(offsets) == 8
    assert sum(reads) < 400_000
    reads.clear()
    with Counted(path) as file:
        np.testing.assert_array_equal(next(scan(file, "s3://bucket/a"))[0], offsets)
    assert sum(reads) >= 8 << 20


def test_members_larger_than_8_gib_have_binary_sizes() -> None:
    member = tarfile.TarInfo("0.bin")
    member.size = (1 << 33) + 5
    archive = {0: member.tobuf(tarfile.GNU_FORMAT), (1 << 33) + 1024: bytes(512)}
    walked = list(members(lambda offset, _: archive[offset], length=None, damaged=lambda *_: FormatError("")))
    assert [(found.name, found.size) for found in walked] == [("0.bin", (1 << 33) + 5)]


def test_pax_records_override_name_and_size() -> None:
    member = tarfile.TarInfo("0.bin")
    member.size = (1 << 33) + 5
    header = member.tobuf(tarfile.PAX_FORMAT)
    assert len(header) == 3 * 512
    archive = {0: header, (1 << 33) + 1024 + 1024: bytes(512)}

    def fetch(offset: int, length: int) -> bytes:
        return header[offset : offset + length] if offset < len(header) else archive[offset]

    walked = list(members(fetch, length=None, damaged=lambda *_: FormatError("")))
    assert [(found.start, found.offset, found.size) for found in walked] == [(0, 1536, (1 << 33) + 5)]


def test_a_header_that_became_another(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", numbered(range(3)))
    times = path.stat()
    source = opened(path, cache=tmp_path / "cache")
    data = bytearray(path.read_bytes())
    start = data.index(b"000001.seg.png")
    data[start + 124 : start + 136] = b"00000077777\0"
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(RecordError, match=r"record 1 .*: damaged .*'000001.seg.png' has other bytes than when"):
        read(source, [1])
    data[start + 124 : start + 136] = b"-0000007777\0"
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(RecordError, match=r"record 1 .*: damaged .*a size of -4095 bytes"):
        read(source, [1])


def test_a_source_can_be_sent_to_another_process(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", numbered(range(3)))
    data = pickle.dumps(opened(path))
    np.testing.assert_array_equal(read(pickle.loads(data))["npy"][:, 0, 0], [0, 1, 2])
    path.write_bytes(path.read_bytes() + bytes(512))
    with pytest.raises(FormatError, match=r"a.tar: changed since it was opened in another process; open the data set"):
        pickle.loads(data)


def test_many_samples_come_in_chunks(tmp_path: Path, unchecked: None) -> None:
    block = shard(tmp_path / "a.tar", [("0.txt", b"0")]).read_bytes()[:1024]
    pieces = []
    for number in range(9000):
        member = tarfile.TarInfo(f"{number}.txt")
        member.size = 1
        pieces.append(member.tobuf() + block[512:])
    sizes = [len(offsets) for offsets, _ in scan(io.BytesIO(b"".join(pieces) + bytes(1024)), "a")]
    assert sizes == [4096, 4096, 808]


def test_window_equals_slices(unchecked: None) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes()
    for make, gap in ((io.BytesIO, 0), (io.BytesIO, 5000), (Pipe, 0)):
        window = Window(make(data), read_bytes=gap)
        offset = 0
        for step, length in itertools.product((0, 3, 700, 20_000), (1, 512, 9000)):
            offset += step
            assert window.read(offset, length) == data[offset : offset + length]


def test_shards_on_a_server(tmp_path: Path) -> None:
    objects = {
        f"data/{number}.tar": shard(tmp_path / "a.tar", numbered(range(9 * number, 9 * number + 9))).read_bytes()
        for number in range(2)
    }
    with serving(objects) as server:
        files = open_files([f"{server.url}/{name}" for name in objects], remote=Remote(cache_bytes=0))
        out = read(open_webdataset(files, cache=tmp_path / "cache"), [17, 0, 9])
        assert out["cls"].tolist() == [7, 0, 9]
        assert out["jpg"].tolist() == [sample(n)["jpg"] for n in (17, 0, 9)]
        server.objects["data/0.tar"] = server.objects["data/0.tar"][:4000]
        files = open_files([f"{server.url}/{name}" for name in objects], remote=Remote(cache_bytes=0))
        with pytest.raises(FormatError, match=r"data/0.tar: damaged at byte 4,000: it ends there"):
            open_webdataset(files, cache=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["v7", "ustar", "gnu", "pax"])
def test_every_kind_of_tar_is_known(tmp_path: Path, kind: str) -> None:
    """Those of Version 7 have no mark but their checksum, and directories that end in a slash."""
    (tmp_path / "cifar-in").mkdir()  # no download of CIFAR
    for number in range(3):
        (tmp_path / "cifar-in" / f"cifar-{number}.txt").write_text(f"text {number}")
    subprocess.run(["tar", f"--format={kind}", "-cf", "a.tar", "cifar-in"], cwd=tmp_path, check=True)
    source = sources.open(tmp_path / "a.tar")
    assert source.describe()["format"].startswith("WebDataset")
    assert sorted(read(source)["txt"].tolist()) == ["text 0", "text 1", "text 2"]
