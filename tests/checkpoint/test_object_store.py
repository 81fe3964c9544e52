"""What an object store does for a bucket, in S3 and in Google Cloud Storage alike."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from braidax.checkpoint.places import object_store
from braidax.checkpoint.places.object_store import Kept, ObjectStore
from braidax.errors import ArgumentError, CheckpointError
from tests.support.bucket_server import BucketServer, Request, serving_bucket, without_credentials
from tests.support.google_storage import STRANGER

LIMIT = 20.0


@pytest.fixture(params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[BucketServer]:
    with serving_bucket(request.param) as running:
        yield running


@pytest.fixture
def google() -> Iterator[BucketServer]:
    with serving_bucket("gs") as running:
        yield running


def opened(server: BucketServer, where: str = "bucket/runs/a", **client: Any) -> ObjectStore:
    return ObjectStore(f"{server.scheme}://{where}", {**server.client, **client}, timeout_seconds=LIMIT)


def kept(step: int) -> Kept:
    return Kept(step, 0, f"step-{step:08}.0123456789abcdef")


def fill(server: BucketServer, num_steps: int) -> None:
    for step in range(1, num_steps + 1):
        for name in ("arrays-00000.safetensors", "arrays-00001.safetensors", "manifest.json"):
            server.store.put(f"runs/a/{kept(step).name}/{name}", f"{name} of {step}".encode())


def objects(server: BucketServer) -> list[str]:
    return [meta["path"] for chunk in server.store.list() for meta in chunk]


def large_file(folder: Path) -> Path:
    path = folder / "arrays-00000.safetensors"
    path.write_bytes(random.Random(0).randbytes(2 * object_store._PART_BYTES + 5))
    return path


def test_a_large_file_goes_and_comes_in_parts(server: BucketServer, tmp_path: Path) -> None:
    path = large_file(tmp_path)
    num_bytes = path.stat().st_size
    opened(server).upload(kept(1), path)
    assert opened(server).files(kept(1)) == {path.name: num_bytes}
    parts = [request.query.partition("&")[0] for request in server.requests if "partNumber" in request.query]
    assert sorted(parts) == ["partNumber=1", "partNumber=2", "partNumber=3"]
    server.requests.clear()
    opened(server).download(kept(1), path.name, num_bytes, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert [request.method for request in server.requests] == ["GET"] * 3


def test_of_a_file_that_is_refused_nothing_stays(server: BucketServer, tmp_path: Path) -> None:
    server.answer = lambda request: 403 if "partNumber=2" in request.query else None
    with pytest.raises(CheckpointError, match=r"step-00000001.*/arrays-00000.safetensors cannot be uploaded: .* 403"):
        opened(server).upload(kept(1), large_file(tmp_path))
    assert objects(server) == []
    (end,) = [request for request in server.requests if request.method == "DELETE"]
    assert end.query.startswith("uploadId=")


def test_a_list_may_come_in_pieces(server: BucketServer) -> None:
    fill(server, 3)
    server.requests.clear()
    server.page_keys = 2
    assert opened(server).checkpoints() == [kept(3), kept(2), kept(1)]
    assert sum("continuation-token" in request.query for request in server.requests) == 4
    opened(server).retain(1, [kept(3).name])
    assert sorted(objects(server)) == [
        f"runs/a/{kept(2).name}/{name}"
        for name in ("arrays-00000.safetensors", "arrays-00001.safetensors", "manifest.json")
    ]


@pytest.mark.parametrize("name", ["manifest.json", "arrays-00000.safetensors"])
def test_what_is_removed_but_not_heard_of_is_no_error(server: BucketServer, name: str) -> None:
    """The first answer is lost: what is asked again finds nothing."""
    fill(server, 2)
    lost: list[Request] = []

    def answer(request: Request) -> int | None:
        if lost or not request.removes or (server.scheme == "gs" and not request.path.endswith(name)):
            return None
        lost.append(request)
        server.store.delete(f"runs/a/{kept(1).name}/{name}")
        return 503

    server.answer = answer
    opened(server).retain(1, ())
    assert len(lost) == 1
    assert {path.split("/")[2] for path in objects(server)} == {kept(2).name}


def test_the_manifest_goes_first(server: BucketServer) -> None:
    fill(server, 2)
    server.requests.clear()
    server.answer = lambda request: 403 if request.removes else None
    with pytest.raises(CheckpointError, match=r"the old checkpoint step-00000001.* cannot be removed: .* 403"):
        opened(server).retain(1, ())
    removed = [request.path for request in server.requests if request.removes]
    assert removed == ["/bucket" if server.scheme == "s3" else f"/bucket/runs/a/{kept(1).name}/manifest.json"]
    assert len(objects(server)) == 6


def test_a_server_that_recovers_is_waited_for(server: BucketServer, tmp_path: Path) -> None:
    path = large_file(tmp_path)
    failures = iter([503, 429, 500, 503])
    server.answer = lambda request: next(failures, None)
    opened(server).upload(kept(1), path)
    assert next(failures, None) is None
    assert opened(server).files(kept(1)) == {path.name: path.stat().st_size}


def test_a_server_that_does_not_recover_is_named(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_RETRIES", 1)
    server.answer = lambda request: 503
    words = f"{server.bucket}/runs/a: its checkpoints cannot be listed: the server answered 503; check the server"
    with pytest.raises(CheckpointError, match=words):
        opened(server).checkpoints()
    assert len(server.requests) == 2


def test_a_bucket_that_is_not_there_is_named(server: BucketServer, tmp_path: Path) -> None:
    elsewhere = opened(server, "no-bucket/x")
    path = tmp_path / "manifest.json"
    path.write_bytes(b"{}")
    words = f"{server.scheme}://no-bucket/x: .*: there is no such bucket; make it, or correct the URL"
    with pytest.raises(CheckpointError, match=f"cannot be listed: {words.partition(': .*: ')[2]}"):
        elsewhere.checkpoints()
    with pytest.raises(CheckpointError, match=words):
        elsewhere.upload(kept(1), path)


def test_an_object_that_is_gone_is_named(server: BucketServer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be fetched: there is no such object \(404\)"):
        opened(server).download(kept(1), "manifest.json", 10, tmp_path / "manifest.json")


def test_a_machine_without_credentials_is_told_so(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_RETRIES", 1)
    without_credentials(monkeypatch)
    where = {name: value for name, value in server.client.items() if name in ("base_url", "endpoint", "region")}
    nobody = ObjectStore(f"{server.bucket}/x", where, timeout_seconds=LIMIT)
    with pytest.raises(CheckpointError, match="there are no credentials in the environment, and this machine has none"):
        nobody.checkpoints()
    assert server.requests == []


@pytest.mark.parametrize(("token", "status"), [("expired", 401), (STRANGER, 403)])
def test_a_token_that_may_not_is_an_error(google: BucketServer, tmp_path: Path, token: str, status: int) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(b"{}")
    stranger = opened(google, bearer_token=token)
    words = f"the server answered {status}: these credentials may not do that; check them .*GOOGLE_APPLICATION_CRED"
    with pytest.raises(CheckpointError, match=f"its checkpoints cannot be listed: {words}"):
        stranger.checkpoints()
    with pytest.raises(CheckpointError, match=f"manifest.json cannot be uploaded: {words}"):
        stranger.upload(kept(1), path)
    with pytest.raises(CheckpointError, match=f"manifest.json cannot be fetched: {words}"):
        stranger.download(kept(1), path.name, 2, tmp_path / "back")
    assert objects(google) == []


def test_what_google_does_not_take_is_refused(google: BucketServer) -> None:
    words = "gs://bucket: obstore's GCSStore cannot be made of .*; pass what it takes, such as base_url, bearer_token, "
    with pytest.raises(ArgumentError, match=words):
        opened(google, endpoint=google.url)
