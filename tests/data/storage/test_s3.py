"""S3: an S3 server on loopback, read with credentials from the environment."""

import contextlib
import random
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from braidax.data.storage import Ranges, Remote, list_files, open_files
from braidax.errors import FormatError

DATA = {f"train/part-{number}.bin": random.Random(number).randbytes(50_000) for number in range(3)}
OTHERS = {"train/.hidden": b"x", "train/deeper/part-9.bin": b"y" * 10, "other.txt": b"text", "train/a b+c%.txt": b"odd"}
CLIENT = {"access_key_id": "key", "secret_access_key": "secret"}
KEY = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20300101/us-east-1/s3/aws4_request"}


@contextlib.contextmanager
def serving(objects: Mapping[str, bytes]) -> Iterator[str]:
    """Runs a server with these objects in the bucket `bucket`; gives its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        create = urllib.request.Request(f"{url}/bucket", method="PUT", headers=KEY)
        with urllib.request.urlopen(create, timeout=10) as reply:
            reply.read()
        for name, data in objects.items():
            store(url).put(name, data)
        yield url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serving({**DATA, **OTHERS}) as url:
        yield url


def store(endpoint: str) -> S3Store:
    return S3Store("bucket", endpoint=endpoint, region="us-east-1", client_options={"allow_http": True}, **CLIENT)


@pytest.fixture
def environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("s3://bucket/train/part-1.bin", ["train/part-1.bin"]),
        ("s3://bucket/train/", ["train/a b+c%.txt", *DATA]),
        ("s3://bucket/train", ["train/a b+c%.txt", *DATA]),
        ("s3://bucket/train/part-*.bin", list(DATA)),
        ("s3://bucket/train/part-[!02].bin", ["train/part-1.bin"]),
        ("s3://bucket/**/part-?.bin", ["train/deeper/part-9.bin", *DATA]),
        ("s3://bucket/t*/part-?.bin", list(DATA)),
        ("s3://bucket", ["other.txt"]),
    ],
)
def test_objects_are_found(where: str, names: list[str]) -> None:
    assert list_files(where) == [f"s3://bucket/{name}" for name in names]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("cache_bytes", [0, 1 << 26])
def test_ranges_are_read(tmp_path: Path, cache_bytes: int) -> None:
    files = open_files("s3://bucket/train/part-*.bin", remote=Remote(cache_dir=tmp_path, cache_bytes=cache_bytes))
    rng = np.random.default_rng(0)
    file, offset = rng.integers(0, 3, 200), rng.integers(0, 49_000, 200)
    length = rng.integers(0, 1000, 200)
    right = [list(DATA.values())[f][o : o + n] for f, o, n in zip(file, offset, length, strict=True)]
    for _ in range(2):
        assert [bytes(part) for part in files.read(Ranges(file, offset, length))] == right
    assert list(files.sizes) == [50_000] * 3
    with files.open(1) as stream:
        assert stream.read() == DATA["train/part-1.bin"]


@pytest.mark.usefixtures("environment")
def test_an_odd_name_is_read() -> None:
    files = open_files(["s3://bucket/train/a b+c%.txt"], remote=Remote(cache_bytes=0))
    one = np.array([0])
    assert bytes(files.read(Ranges(one, one, one + 3))[0]) == b"odd"


@pytest.mark.usefixtures("environment")
def test_an_object_that_was_written_anew_is_an_error(endpoint: str) -> None:
    store(endpoint).put("changing", b"first")
    files = open_files("s3://bucket/changing", remote=Remote(cache_bytes=0))
    store(endpoint).put("changing", b"other")
    one = np.array([0])
    with pytest.raises(FormatError, match="s3://bucket/changing: changed while it was open"):
        files.read(Ranges(one, one, one + 5))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("s3://bucket/nothing", r"s3://bucket/nothing: there is no such object \(404\)"),
        ("s3://bucket/nothing/", "s3://bucket/nothing/: there are no objects"),
        ("s3://bucket/*.none", "none of 2 objects fits this pattern"),
        ("s3://no-bucket/x/", "s3://no-bucket/x/: "),
    ],
)
@pytest.mark.usefixtures("environment")
def test_what_is_missing_is_named(where: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        open_files(where)


def test_endpoint_and_credentials_may_be_given(endpoint: str) -> None:
    client = {"endpoint": endpoint, "region": "us-east-1", **CLIENT}
    assert list_files("s3://bucket/train/part-*", remote=Remote(client=client)) == [
        f"s3://bucket/{name}" for name in DATA
    ]
