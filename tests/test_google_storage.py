"""The server that stands for Google's in tests: it takes what obstore sends to Google, and nothing else."""

from collections.abc import Iterable
from typing import Any

import pytest
from werkzeug.test import Client

from tests.support.google_storage import S3_KEY, STRANGER, TOKEN, GoogleStorage

BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Backend:
    """Stands for the server behind: finds everything right, and keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self.asked.append(environ)
        start_response("200 OK", [("Content-Length", "2"), ("x-amz-request-id", "1"), ("ETag", '"a"')])
        return [b"ok"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", "/bucket/a", {}, 403, "AccessDenied"),
        ("GET", "/bucket/a", {"Authorization": ""}, 401, "AuthenticationRequired"),
        ("GET", "/bucket/a", {"Authorization": "Bearer other"}, 401, "AuthenticationRequired"),
        ("PUT", "/bucket/a", {"Authorization": S3_KEY}, 401, "AuthenticationRequired"),
        ("GET", "/bucket?list-type=2", {"Authorization": f"Bearer {STRANGER}"}, 403, "AccessDenied"),
        ("PUT", "/bucket/a", {**BEARER, "x-amz-acl": "private"}, 400, "InvalidArgument"),
        ("PUT", "/bucket/a", {**BEARER, "x-goog-copy-source": "bucket/b"}, 400, "InvalidArgument"),
        ("POST", "/bucket?delete", BEARER, 400, "InvalidArgument"),
        ("DELETE", "/bucket/a", BEARER, 404, "NoSuchKey"),
        ("PUT", "/bucket/a", {**BEARER, "x-goog-if-generation-match": "1"}, 412, "PreconditionFailed"),
    ],
)
def test_what_google_refuses_is_refused(
    method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    backend = Backend()
    reply = Client(GoogleStorage(backend)).open(path, method=method, headers=headers, data=b"body")
    assert (reply.status_code, backend.asked) == (status, [])
    assert f"<Error><Code>{code}</Code><Message>" in reply.text


def test_what_is_right_is_asked_of_the_other_server() -> None:
    backend = Backend()
    reply = Client(GoogleStorage(backend)).put("/bucket/a", headers={**BEARER, "x-goog-if-generation-match": "0"})
    assert (reply.status_code, reply.text, reply.headers["ETag"]) == (200, "ok", '"a"')
    assert "x-amz-request-id" not in reply.headers
    (asked,) = backend.asked
    assert asked["HTTP_AUTHORIZATION"] == S3_KEY
    assert not any(name.startswith("HTTP_X_GOOG") for name in asked)


def test_each_version_has_a_generation() -> None:
    client = Client(GoogleStorage(Backend()))
    first = client.put("/bucket/a", headers=BEARER).headers["x-goog-generation"]
    assert client.get("/bucket/a", headers=BEARER).headers["x-goog-generation"] == first
    assert "x-goog-generation" not in client.get("/bucket?list-type=2", headers=BEARER).headers
    client.put("/bucket/a?partNumber=1&uploadId=x", headers=BEARER)
    assert client.get("/bucket/a", headers=BEARER).headers["x-goog-generation"] == first
    second = client.post("/bucket/a?uploadId=x", headers=BEARER).headers["x-goog-generation"]
    assert int(second) > int(first)
    for given, status in ((first, 412), ("0", 412), (second, 200)):
        reply = client.put("/bucket/a", headers={**BEARER, "x-goog-if-generation-match": given})
        assert reply.status_code == status
    assert client.delete("/bucket/a", headers=BEARER).status_code == 200
    assert "x-goog-generation" not in client.get("/bucket/a", headers=BEARER).headers
    assert client.delete("/bucket/a", headers=BEARER).status_code == 404
