"""A server of S3, Google Cloud Storage or Azure on loopback that notes requests, and answers otherwise if told so."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from obstore.store import AzureStore, GCSStore, S3Store
from werkzeug.test import Client

from tests.support.azure_storage import ACCOUNT, KEY, AzureStorage
from tests.support.google_storage import S3_KEY, TOKEN, GoogleStorage

_JOIN_SECONDS = 10.0
_POLL_SECONDS = 0.02  # until the server sees that it is to end


class Request(NamedTuple):
    """What the server is asked."""

    method: str
    path: str
    query: str

    @property
    def removes(self) -> bool:
        """Whether it removes objects: several a request in S3, one in Google Cloud Storage."""
        return self.query == "delete" or (self.method == "DELETE" and not self.query)


@dataclass
class BucketServer:
    """The server, with an empty bucket `bucket`.

    `scheme`: `s3`, `gs` or `az`. These may be changed: `answer`, a status, None for what is right; `page_keys`, how
    many objects a list holds before it is to be continued, None for as many as the server likes.
    """

    scheme: str = "s3"
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    answer: Callable[[Request], int | None] = lambda request: None
    page_keys: int | None = None
    azure: AzureStorage | None = None

    @property
    def bucket(self) -> str:
        """The URL of the bucket."""
        return f"{self.scheme}://bucket"

    @property
    def client(self) -> dict[str, Any]:
        """What a `Bucket` or a `Remote` takes to find it."""
        if self.scheme == "gs":
            return {"base_url": self.url, "bearer_token": TOKEN}
        if self.scheme == "az":
            return {"endpoint": self.url, "account_name": ACCOUNT, "account_key": KEY}
        return {"endpoint": self.url, "region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}

    @property
    def environ(self) -> dict[str, str]:
        """The same, as variables of the environment."""
        if self.scheme == "gs":
            return {"GOOGLE_BASE_URL": self.url, "GOOGLE_BEARER_TOKEN": TOKEN}
        if self.scheme == "az":
            return {f"AZURE_STORAGE_{name.upper()}": value for name, value in self.client.items()}
        return {f"AWS_{name.upper()}": value for name, value in self.client.items()}

    @property
    def store(self) -> S3Store | GCSStore | AzureStore:
        """The bucket, to look into from outside."""
        made = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[self.scheme]
        return made("bucket", client_options={"allow_http": True}, **self.client)

    def delete(self, name: str) -> None:
        """Removes an object."""
        if self.azure is None:
            self.store.delete(name)
        else:
            self.azure.delete(name)  # obstore asks Azure for many at once, in a form of its own

    def uploads(self) -> list[str]:
        """Returns the names of the objects that were asked for to be stored, parts not counted."""
        return [each.path.rpartition("/")[2] for each in self.requests if each.method == "PUT" and not each.query]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # that come at once; what finds no place comes again after a second


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@functools.cache
def _moto() -> Any:
    """What answers as S3 does; it is made once, and emptied for each server."""
    return DomainDispatcherApplication(create_backend_app)


@contextlib.contextmanager
def serving_bucket(scheme: str = "s3") -> Generator[BucketServer]:
    """Runs a server."""
    s3 = _moto()
    told = BucketServer(scheme, azure=AzureStorage() if scheme == "az" else None)
    right = GoogleStorage(s3) if scheme == "gs" else told.azure or s3

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""))
        told.requests.append(request)
        status = told.answer(request)
        if status is None:
            if told.page_keys and "list-type" in request.query:
                environ["QUERY_STRING"] += f"&max-keys={told.page_keys}"
            if told.page_keys and "comp=list" in request.query:
                environ["QUERY_STRING"] += f"&maxresults={told.page_keys}"
            return right(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{status} as told", [("Content-Length", "0")])
        return []

    client = Client(s3)
    for reply in (client.post("/moto-api/reset"), client.put("/bucket", headers={"Authorization": S3_KEY})):
        assert reply.status_code == 200
    server = make_server("127.0.0.1", 0, app, _Server, _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield told
    finally:
        server.shutdown()
        thread.join(_JOIN_SECONDS)
        server.server_close()


def without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine one that has no credentials, neither in the environment nor as a machine of a cloud."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:9/metadata/identity/oauth2/token")
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:9")
