"""The door to object stores: which store a URL means, and what its errors say."""

import json
from pathlib import Path
from typing import Any

import pytest

from braidax.errors import ArgumentError
from braidax.objects import Opener, address, first_line, lacks_bucket, lacks_credentials, status_of
from tests.support.bucket_server import serving_bucket, without_credentials
from tests.support.google_storage import TOKEN


@pytest.mark.parametrize(
    ("url", "root", "path"),
    [
        ("s3://bucket/a/b c%20.bin", "s3://bucket", "a/b c%20.bin"),
        ("gs://bucket", "gs://bucket", ""),
        ("https://host:1/a%20b", "https://host:1", "a b"),
        ("https://host/a?signature=x", "https://host/a?signature=x", ""),
    ],
)
def test_a_url_is_a_store_and_a_path_in_it(url: str, root: str, path: str) -> None:
    assert address(url) == (root, path)


def test_errors_are_told_in_a_line_without_signatures() -> None:
    error = RuntimeError("HTTP status: 503 at https://host/a?signature=secret (twice)\nmore")
    assert status_of(error) == 503
    assert status_of(RuntimeError("no answer")) is None
    assert first_line(error) == "HTTP status: 503 at https://host/a (twice)"


def test_a_name_of_an_object_is_no_reason() -> None:
    for name in ("latest/meta-data.json", "computeMetadata/v1", "NoSuchBucket"):
        error = RuntimeError(f"Object at location {name} not found: status code: 404 Not Found: <Code>NoSuchKey</Code>")
        assert not lacks_credentials(error)
        assert not lacks_bucket(error)


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("s3://bucket", r"obstore's S3Store cannot be made of client={'nothing': 1} .*, such as endpoint, region, "),
        (
            "gs://bucket",
            r"obstore's GCSStore cannot be made of client={'nothing': 1} .*, such as base_url, bearer_token",
        ),
        ("http://host", r"obstore's HTTPStore cannot be made of client={'nothing': 1} .*, such as client_options$"),
    ],
)
def test_what_the_client_does_not_take_is_refused(root: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"{root}: {words}"):
        opened({"nothing": 1}, root)


def opened(client: dict[str, Any], root: str) -> Any:
    return Opener(client, retries=1, timeout_seconds=5.0, purpose="a test").open(root)


@pytest.mark.parametrize(
    ("scheme", "place"),
    [
        ("s3", {"endpoint": "PLACE"}),
        ("s3", {"config": {"aws_endpoint_url": "PLACE"}}),
        ("gs", {"base_url": "PLACE"}),
        ("gs", {"config": {"GOOGLE_BASE_URL": "PLACE"}}),
    ],
)
def test_a_server_without_tls_is_one_that_is_given(
    monkeypatch: pytest.MonkeyPatch, scheme: str, place: dict[str, Any]
) -> None:
    without_credentials(monkeypatch)
    with serving_bucket(scheme) as server:
        server.store.put("a", b"content")
        told = json.loads(json.dumps(place).replace("PLACE", server.url))
        secret = {name: value for name, value in server.client.items() if name not in ("base_url", "endpoint")}
        assert bytes(opened(secret | told, server.bucket).get("a").bytes()) == b"content"


def test_the_address_of_google_may_stand_in_a_file_of_credentials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_credentials(monkeypatch)
    with serving_bucket("gs") as server:
        server.store.put("a", b"content")
        key = {"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": True}
        (tmp_path / "key.json").write_text(json.dumps({**key, "gcs_base_url": server.url}))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
        assert bytes(opened({}, server.bucket).get("a").bytes()) == b"content"
