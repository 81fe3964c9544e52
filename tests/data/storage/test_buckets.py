"""Buckets of S3, Google Cloud Storage and Azure: servers on loopback, read with credentials from the environment."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from braidax.data.storage import Ranges, Remote, list_files, open_files
from braidax.errors import FormatError
from tests.support.bucket_server import BucketServer, serving_bucket, without_credentials
from tests.support.google_storage import STRANGER

DATA = {f"train/part-{number}.bin": random.Random(number).randbytes(50_000) for number in range(3)}
OTHERS = {"train/.hidden": b"x", "train/deeper/part-9.bin": b"y" * 10, "other.txt": b"text", "train/a b+c%.txt": b"odd"}
UNCACHED = Remote(cache_bytes=0)
NOUGHT = np.array([0])


@pytest.fixture(scope="module", params=["s3", "gs", "az"])
def filled(request: pytest.FixtureRequest) -> Iterator[BucketServer]:
    with serving_bucket(request.param) as running:
        for name, data in {**DATA, **OTHERS}.items():
            running.store.put(name, data)
        yield running


@pytest.fixture
def server(filled: BucketServer, monkeypatch: pytest.MonkeyPatch) -> BucketServer:
    for name, value in filled.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(filled, "answer", lambda request: None)
    monkeypatch.setattr(filled, "page_keys", None)
    filled.requests.clear()
    return filled


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("/train/part-1.bin", ["train/part-1.bin"]),
        ("/train/", ["train/a b+c%.txt", *DATA]),
        ("/train", ["train/a b+c%.txt", *DATA]),
        ("/train/part-*.bin", list(DATA)),
        ("/train/part-[!02].bin", ["train/part-1.bin"]),
        ("/**/part-?.bin", ["train/deeper/part-9.bin", *DATA]),
        ("/t*/part-?.bin", list(DATA)),
        ("", ["other.txt"]),
    ],
)
@pytest.mark.parametrize("page_keys", [None, 2])
def test_objects_are_found(server: BucketServer, where: str, names: list[str], page_keys: int | None) -> None:
    server.page_keys = page_keys
    assert list_files(f"{server.bucket}{where}") == [f"{server.bucket}/{name}" for name in names]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 26])
def test_ranges_are_read(server: BucketServer, tmp_path: Path, cache_bytes: int) -> None:
    files = open_files(f"{server.bucket}/train/part-*.bin", remote=Remote(cache_dir=tmp_path, cache_bytes=cache_bytes))
    rng = np.random.default_rng(0)
    file, offset = rng.integers(0, 3, 200), rng.integers(0, 49_000, 200)
    length = rng.integers(0, 1000, 200)
    right = [list(DATA.values())[f][o : o + n] for f, o, n in zip(file, offset, length, strict=True)]
    for _ in range(2):
        assert [bytes(part) for part in files.read(Ranges(file, offset, length))] == right
    assert list(files.sizes) == [50_000] * 3
    with files.open(1) as stream:
        assert stream.read() == DATA["train/part-1.bin"]


def test_an_odd_name_is_read(server: BucketServer) -> None:
    files = open_files([f"{server.bucket}/train/a b+c%.txt"], remote=UNCACHED)
    assert bytes(files.read(Ranges(NOUGHT, NOUGHT, NOUGHT + 3))[0]) == b"odd"


@pytest.mark.parametrize("num_others", [0, 16])
def test_an_object_that_was_written_anew_is_an_error(server: BucketServer, num_others: int) -> None:
    """Of up to 16 objects each request demands the ETag by a header of its store, of more by one of its own."""
    server.store.put("changing", b"first")
    files = open_files([f"{server.bucket}/changing", *[f"{server.bucket}/other.txt"] * num_others], remote=UNCACHED)
    assert bytes(files.read(Ranges(NOUGHT, NOUGHT, NOUGHT + 5))[0]) == b"first"
    server.store.put("changing", b"other")
    with pytest.raises(FormatError, match=rf"{server.bucket}/changing: changed while it was open: .*\(412\)"):
        files.read(Ranges(NOUGHT, NOUGHT, NOUGHT + 5))
    server.delete("changing")
    with pytest.raises(FormatError, match=rf"{server.bucket}/changing: there is no such object \(404\)"):
        files.read(Ranges(NOUGHT, NOUGHT, NOUGHT + 5))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("bucket/nothing", r"bucket/nothing: there is no such object \(404\)"),
        ("bucket/nothing/", "bucket/nothing/: there are no objects"),
        ("bucket/train/*.none", "none of 5 objects fits this pattern"),
        ("no-bucket/x/", r"no-bucket/x/: there is no such bucket \(404\); correct the URL"),
        ("no-bucket/*.bin", r"no-bucket/: there is no such bucket \(404\); correct the URL"),
        ("no-bucket/x", r"no-bucket/x/?: there is no such bucket \(404\); correct the URL"),
    ],
)
def test_what_is_missing_is_named(server: BucketServer, where: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        open_files(f"{server.scheme}://{where}")


@pytest.mark.parametrize("where", ["/train/part-1.bin", "/train/", "/train/*.bin"])
def test_what_is_forbidden_is_named(server: BucketServer, where: str) -> None:
    server.answer = lambda request: 403
    words = f"{server.bucket}/train/.*: the server answered 403: these credentials may not read it; check them"
    with pytest.raises(FormatError, match=words):
        open_files(f"{server.bucket}{where}")


def test_a_server_that_recovers_is_waited_for(server: BucketServer) -> None:
    failures = iter([503, 429, 503])
    server.answer = lambda request: next(failures, None)
    files = open_files(f"{server.bucket}/other.txt", remote=UNCACHED)
    assert next(failures, None) is None
    failures = iter([503, 500])
    assert bytes(files.read(Ranges(NOUGHT, NOUGHT, NOUGHT + 4))[0]) == b"text"
    assert next(failures, None) is None


def test_endpoint_and_credentials_may_be_given(filled: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    without_credentials(monkeypatch)
    assert list_files(f"{filled.bucket}/train/part-*", remote=Remote(client=filled.client)) == [
        f"{filled.bucket}/{name}" for name in DATA
    ]


@pytest.mark.parametrize("where", ["/train/part-1.bin", "/train/"])
def test_a_machine_without_credentials_is_told_so(
    filled: BucketServer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    without_credentials(monkeypatch)
    place = {
        name: value
        for name, value in filled.client.items()
        if name in ("base_url", "endpoint", "region", "account_name")
    }
    words = f"{filled.bucket}{where}: there are no credentials in the environment, and this machine has none of its own"
    with pytest.raises(FormatError, match=words):
        open_files(f"{filled.bucket}{where}", remote=Remote(client=place, retries=1))


@pytest.mark.parametrize(
    ("client", "status"),
    [
        ({"bearer_token": "expired"}, 401),
        ({"bearer_token": STRANGER}, 403),
        ({"skip_signature": True}, 403),
    ],
)
def test_a_token_that_may_not_is_an_error(
    monkeypatch: pytest.MonkeyPatch, client: dict[str, str | bool], status: int
) -> None:
    without_credentials(monkeypatch)
    with serving_bucket("gs") as server:
        server.store.put("x", b"x")
        remote = Remote(client={"base_url": server.url, **client})
        for where in ("x", "y", "folder/"):
            words = f"gs://bucket/{where}: the server answered {status}: these credentials may not read it"
            with pytest.raises(FormatError, match=words):
                open_files(f"gs://bucket/{where}", remote=remote)
