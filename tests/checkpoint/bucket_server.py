"""An S3 server on loopback that notes what it is asked, and answers otherwise if told so."""

import contextlib
import threading
import urllib.request
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

KEY = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20300101/us-east-1/s3/aws4_request"}
_JOIN_SECONDS = 10.0
_POLL_SECONDS = 0.02  # until the server sees that it is to end


class Request(NamedTuple):
    """What the server is asked."""

    method: str
    path: str
    query: str


@dataclass
class BucketServer:
    """The server, with an empty bucket `bucket`; `answer` may be changed: a status, None for what is right."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    answer: Callable[[Request], int | None] = lambda request: None

    @property
    def client(self) -> dict[str, Any]:
        """What an `Archive` takes to find it."""
        return {"endpoint": self.url, "region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}

    def uploads(self) -> list[str]:
        """Returns the names of the objects that were asked for to be stored, parts not counted."""
        return [each.path.rpartition("/")[2] for each in self.requests if each.method == "PUT" and not each.query]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def serving_bucket() -> Generator[BucketServer]:
    """Runs a server."""
    right: Any = DomainDispatcherApplication(create_backend_app)
    told = BucketServer()

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""))
        told.requests.append(request)
        status = told.answer(request)
        if status is None:
            return right(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{status} as told", [("Content-Length", "0")])
        return []

    server = make_server("127.0.0.1", 0, app, _Server, _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_port}"
    try:
        for path in ("moto-api/reset", "bucket"):
            method = "POST" if path.startswith("moto") else "PUT"
            with urllib.request.urlopen(
                urllib.request.Request(f"{told.url}/{path}", method=method, headers=KEY), timeout=_JOIN_SECONDS
            ) as reply:
                reply.read()
        told.requests.clear()
        yield told
    finally:
        server.shutdown()
        thread.join(_JOIN_SECONDS)
        server.server_close()
