"""Google Cloud Storage's XML API in front of a server for S3: as much of it as obstore speaks, and nothing else.

Both take the same requests for objects, lists and uploads in parts. What differs is done here: tokens instead of
signatures, `x-goog-` instead of `x-amz-`, generations, an error for removing what is not there. What obstore does not
send to Google is an error, so that a test cannot pass by what S3 alone has.
"""

import itertools
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs

TOKEN = "token"
STRANGER = "token of somebody who may do nothing"
S3_KEY = "AWS4-HMAC-SHA256 Credential=key/20300101/us-east-1/s3/aws4_request"
_QUERIES = {"list-type", "prefix", "delimiter", "continuation-token", "start-after", "max-keys"}
_QUERIES |= {"uploads", "uploadId", "partNumber"}
_IF_GENERATION = "HTTP_X_GOOG_IF_GENERATION_MATCH"

App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class Refusal(NamedTuple):
    """An error as Google words it."""

    status: HTTPStatus
    code: str
    message: str


class GoogleStorage:
    """A WSGI application.

    **Arguments:** `s3`: another one, that keeps the objects.
    """

    def __init__(self, s3: App) -> None:
        self._s3 = s3
        self._lock = threading.Lock()
        self._numbers = itertools.count(1_700_000_000_000_000)  # microseconds, at Google
        self._generations: dict[str, int] = {}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._lock:
            refusal = _stranger(environ) or _foreign(environ) or self._unmet(environ)
            if refusal is None:
                return self._passed_on(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code, message = refusal
        text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        headers = [("Content-Type", "application/xml; charset=UTF-8"), ("Content-Length", str(len(text)))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [text.encode()]

    def _unmet(self, environ: dict[str, Any]) -> Refusal | None:
        generation = self._generations.get(environ["PATH_INFO"], 0)
        if environ["REQUEST_METHOD"] == "DELETE" and not environ.get("QUERY_STRING") and not generation:
            return Refusal(HTTPStatus.NOT_FOUND, "NoSuchKey", "The specified key does not exist.")
        if int(environ.get(_IF_GENERATION, generation)) != generation:
            return Refusal(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed", f"The generation is {generation}.")
        return None

    def _passed_on(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        passed = {name: value for name, value in environ.items() if not name.startswith("HTTP_X_GOOG_")}

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            if status.startswith("2"):
                if (method == "PUT" and not query) or (method == "POST" and query.startswith("uploadId=")):
                    self._generations[path] = next(self._numbers)
                elif method == "DELETE" and not query:
                    del self._generations[path]
            headers = [each for each in headers if not each[0].lower().startswith("x-amz-")]
            if path in self._generations:
                headers.append(("x-goog-generation", str(self._generations[path])))
            return start_response(status, headers, *more)

        return self._s3({**passed, "HTTP_AUTHORIZATION": S3_KEY}, start)


def _stranger(environ: dict[str, Any]) -> Refusal | None:
    """Refuses who may not; a header that tells nobody is another error than none."""
    given = environ.get("HTTP_AUTHORIZATION")
    if given == f"Bearer {TOKEN}":
        return None
    if given is None or given == f"Bearer {STRANGER}":
        who = "Anonymous caller" if given is None else "The caller"
        return Refusal(HTTPStatus.FORBIDDEN, "AccessDenied", f"{who} does not have storage.objects access.")
    return Refusal(HTTPStatus.UNAUTHORIZED, "AuthenticationRequired", "Authentication required.")


def _foreign(environ: dict[str, Any]) -> Refusal | None:
    """Refuses what obstore has no reason to send."""
    headers = {name for name in environ if name.startswith(("HTTP_X_AMZ_", "HTTP_X_GOOG_"))} - {_IF_GENERATION}
    queries = set(parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)) - _QUERIES
    if not headers and not queries:
        return None
    return Refusal(HTTPStatus.BAD_REQUEST, "InvalidArgument", f"Not known here: {sorted(headers | queries)}.")
