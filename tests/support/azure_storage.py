"""Azure's Blob Storage in memory: as much of it as obstore speaks when it reads and puts blobs.

What obstore does not send to Azure is an error, so that a test cannot pass by what another store alone has.
"""

import base64
import hashlib
import threading
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

ACCOUNT, KEY = "account", base64.b64encode(b"key").decode()
_QUERIES = {"restype", "comp", "prefix", "delimiter", "marker", "maxresults"}
_PAGE = 5000

Reply = tuple[HTTPStatus, dict[str, str], bytes]


class AzureStorage:
    """A WSGI application with an empty container `bucket`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blobs: dict[str, tuple[bytes, str]] = {}  # by name: data, and when they were written

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            status, headers, data = self._answer(environ, body)
        headers = {**headers, "Content-Length": str(len(data)), "x-ms-version": "2023-11-03"}
        start_response(f"{status.value} {status.phrase}", list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [data]

    def delete(self, name: str) -> None:
        """Removes a blob."""
        with self._lock:
            del self._blobs[name]

    def _answer(self, environ: dict[str, Any], body: bytes) -> Reply:
        method, query = environ["REQUEST_METHOD"], parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        container, _, name = environ["PATH_INFO"].removeprefix("/").partition("/")
        if not environ.get("HTTP_AUTHORIZATION", "").startswith(f"SharedKey {ACCOUNT}:"):
            return _refusal(HTTPStatus.FORBIDDEN, "AuthenticationFailed")
        if "HTTP_X_MS_VERSION" not in environ or set(query) - _QUERIES:
            return _refusal(HTTPStatus.BAD_REQUEST, "UnsupportedQueryParameter")
        if container != "bucket":
            return _refusal(HTTPStatus.NOT_FOUND, "ContainerNotFound")
        if "comp" in query:
            return self._list({key: values[0] for key, values in query.items()})
        if method == "PUT":
            self._blobs[name] = body, formatdate(usegmt=True)
            return HTTPStatus.CREATED, {"ETag": _etag(body), "Last-Modified": formatdate(usegmt=True)}, b""
        if name not in self._blobs:
            return _refusal(HTTPStatus.NOT_FOUND, "BlobNotFound")
        return self._read(environ, *self._blobs[name])

    def _read(self, environ: dict[str, Any], data: bytes, written: str) -> Reply:
        headers = {"ETag": _etag(data), "Last-Modified": written, "x-ms-blob-type": "BlockBlob"}
        if environ.get("HTTP_IF_MATCH", headers["ETag"]) != headers["ETag"]:
            return _refusal(HTTPStatus.PRECONDITION_FAILED, "ConditionNotMet")
        wanted = environ.get("HTTP_RANGE") or environ.get("HTTP_X_MS_RANGE")
        if wanted is None:
            return HTTPStatus.OK, headers, data
        low, _, high = wanted.removeprefix("bytes=").partition("-")
        if int(low) >= len(data):
            return _refusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange")
        part = data[int(low) : int(high or len(data)) + 1]
        headers["Content-Range"] = f"bytes {low}-{int(low) + len(part) - 1}/{len(data)}"
        return HTTPStatus.PARTIAL_CONTENT, headers, part

    def _list(self, query: dict[str, str]) -> Reply:
        prefix, delimiter, marker = (query.get(key, "") for key in ("prefix", "delimiter", "marker"))
        found = dict[str, str]()
        for name, (data, written) in sorted(self._blobs.items()):
            if not name.startswith(prefix):
                continue
            folder, split, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if split:
                found[prefix + folder + split] = (
                    f"<BlobPrefix><Name>{escape(prefix + folder + split)}</Name></BlobPrefix>"
                )
                continue
            facts = {"Last-Modified": written, "Content-Length": len(data), "Content-Type": "application/octet-stream"}
            facts |= {"Etag": _etag(data).strip('"')}
            properties = "".join(f"<{key}>{value}</{key}>" for key, value in facts.items())
            found[name] = f"<Blob><Name>{escape(name)}</Name><Properties>{properties}</Properties></Blob>"
        names = [name for name in sorted(found) if name >= marker]
        page = int(query.get("maxresults", _PAGE))
        following = f"<NextMarker>{escape(names[page])}</NextMarker>" if len(names) > page else "<NextMarker/>"
        text = "".join(found[name] for name in names[:page])
        listed = f"<?xml version='1.0' encoding='utf-8'?><EnumerationResults><Blobs>{text}</Blobs>{following}"
        return HTTPStatus.OK, {"Content-Type": "application/xml"}, f"{listed}</EnumerationResults>".encode()


def _etag(data: bytes) -> str:
    return f'"0x{hashlib.md5(data).hexdigest()[:15].upper()}"'


def _refusal(status: HTTPStatus, code: str) -> Reply:
    text = f"<?xml version='1.0' encoding='utf-8'?><Error><Code>{code}</Code><Message>It is so.</Message></Error>"
    return status, {"Content-Type": "application/xml", "x-ms-error-code": code}, text.encode()
