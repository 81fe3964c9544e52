"""Objects in S3, in Google Cloud Storage and on HTTP servers, through obstore: what is there, and ranges of it.

Nothing of an object that was written anew is ever returned. Where a server heeds `If-Match`, each request carries the
ETag that the object had when it was opened; elsewhere each reply is compared with it.
"""

import asyncio
import datetime
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from braidax.data.storage.options import Remote
from braidax.errors import ArgumentError, DataError, FormatError, RecordError, import_extra

_SCHEMES = ("s3", "gs", "http", "https")
_NUM_PROBES = 32  # objects that are looked at concurrently
_MAX_EXACT = 16  # objects of one data set that get a store, and so connections, of their own
_TRY_FRACTION = 1 / 3  # of the time limit, for one try: one that hangs leaves time for others
_RETRY_FRACTION = 0.4  # of it: no try begins later, so that what went wrong is known before time is up
_NO_ETAG = '"braidax: no object has this ETag"'
_TRANSIENT = (408, 425, 429)  # of the statuses below 500
_PURPOSE = "reading s3://, gs://, http:// and https:// URLs"


def is_url(where: object) -> bool:
    """Says whether something is the URL of an object, or of several."""
    return isinstance(where, str) and where.partition("://")[0] in _SCHEMES and "://" in where


@dataclass(frozen=True)
class Object:
    """One object as it was when it was opened.

    `store`, `path`: of obstore. `exact`: a store whose every request demands the ETag, if there is one.
    """

    url: str
    size: int
    etag: str
    modified: str
    path: str
    store: Any
    exact: Any = None

    @property
    def name(self) -> str:
        """The URL without its query, which may hold a signature: for people and for errors."""
        return self.url.partition("?")[0]

    @property
    def has_strong_etag(self) -> bool:
        """Whether the ETag tells each version of the object from every other, byte for byte."""
        return bool(self.etag) and not self.etag.startswith("W/")

    @property
    def stamp(self) -> str:
        """The ETag, or else the time of modification, or else nothing."""
        return self.etag or self.modified


class Failure(NamedTuple):
    """What went wrong with a request, and whether trying again may help."""

    error: DataError
    is_transient: bool


class Stores:
    """The stores of one data set, one a bucket or host.

    **Arguments:** `remote`: the options.
    """

    def __init__(self, remote: Remote) -> None:
        self._obstore = import_extra("obstore", "remote", purpose=_PURPOSE)
        self._classes = import_extra("obstore.store", "remote", purpose=_PURPOSE)
        self._remote = remote
        self._stores: dict[str, Any] = {}

    def open(self, urls: Sequence[str]) -> list[Object]:
        """Looks at objects: their sizes, ETags, and whether ranges of them can be read.

        **Raises:** `FormatError` for one that is missing, forbidden, or whose server does not serve ranges.
        """
        for url in urls:
            self._store(url)
        with ThreadPoolExecutor(max(1, min(_NUM_PROBES, len(urls)))) as threads:
            found = list(threads.map(self._open, urls))
        return self.exact(found)

    def below(self, folder: str, *, is_deep: bool) -> list[Object]:
        """Returns the objects in a folder, sorted by name; `s3://` and `gs://` only.

        **Arguments:** `folder`: a URL that ends with a slash. `is_deep`: whether those in folders of it count.

        **Raises:** `FormatError` if they cannot be listed.
        """
        store, prefix = self._store(folder)
        if folder.startswith("http"):
            raise FormatError(
                f"{folder}: an HTTP server cannot be asked which files it has; pass a list of their URLs, or read them "
                "through s3:// or gs://"
            )
        place = prefix.rstrip("/") or None
        try:
            if is_deep:
                metas = [meta for chunk in store.list(place, chunk_size=1000) for meta in chunk]
            else:
                metas = store.list_with_delimiter(place)["objects"]
        except Exception as error:
            raise failure(error, folder).error from error
        root = folder[: len(folder) - len(prefix)]
        found = [self._object(root + meta["path"], meta, store) for meta in metas if meta["path"].startswith(prefix)]
        return sorted(found, key=lambda item: item.url)

    def exact(self, objects: Sequence[Object]) -> list[Object]:
        """Gives objects that were listed stores of their own, as `open` does, unless they are many."""
        if not objects or len(objects) > _MAX_EXACT:
            return list(objects)
        with ThreadPoolExecutor(len(objects)) as threads:
            return list(threads.map(self._exact, objects))

    def _store(self, url: str) -> tuple[Any, str]:
        root, path = _address(url)
        if root not in self._stores:
            self._stores[root] = self._new_store(root, {})
        return self._stores[root], path

    def _new_store(self, root: str, headers: Mapping[str, str]) -> Any:
        limit = self._remote.timeout_seconds
        given = dict(self._remote.client)
        client_options: dict[str, Any] = {"timeout": f"{max(1, round(limit * _TRY_FRACTION * 1000))}ms"}
        if _is_plain(root, given):
            client_options["allow_http"] = True
        client_options |= given.pop("client_options", None) or {}
        client_options["default_headers"] = {**(client_options.get("default_headers") or {}), **headers}
        retry_config = given.pop("retry_config", None) or {
            "max_retries": self._remote.retries,
            "retry_timeout": datetime.timedelta(seconds=limit * _RETRY_FRACTION),
            "backoff": {
                "init_backoff": datetime.timedelta(milliseconds=50),
                "max_backoff": datetime.timedelta(seconds=5),
                "base": 2,
            },
        }
        scheme, _, place = root.partition("://")
        name, where = {"s3": ("S3Store", place), "gs": ("GCSStore", place)}.get(scheme, ("HTTPStore", root))
        try:
            return getattr(self._classes, name)(
                where, client_options=client_options, retry_config=retry_config, **given
            )
        except Exception as error:
            raise ArgumentError(
                f"{root}: obstore's {name} cannot be made of client={dict(self._remote.client)} "
                f"({_first_line(error)}); pass what it takes, such as endpoint, region, config, client_options, "
                "credential_provider"
            ) from error

    def _open(self, url: str) -> Object:
        store, path = self._store(url)
        try:
            try:
                reply = store.get(path, options={"range": (0, 1)})
                meta: Mapping[str, Any] = reply.meta
                if len(reply.bytes()) != 1:
                    raise FormatError(f"{url}: the server answered a request for 1 byte with none; is it one at all?")
            except self._obstore.exceptions.GenericError as error:
                if _status(error) != 416:  # an empty object has no first byte
                    raise
                meta = store.head(path)
        except DataError:
            raise
        except Exception as error:
            raise failure(error, url).error from error
        return self._object(url, meta, store)

    def _object(self, url: str, meta: Mapping[str, Any], store: Any) -> Object:
        return Object(url, meta["size"], _etag(meta), _modified(meta), _address(url)[1], store)

    def _exact(self, item: Object) -> Object:
        if not item.size or not item.has_strong_etag:
            return item
        try:
            item.store.get(item.path, options={"range": (0, 1), "if_match": _NO_ETAG})
        except self._obstore.exceptions.PreconditionError:
            pass
        except Exception:  # noqa: BLE001 (what the server makes of it says nothing about the object)
            return item
        else:
            return item
        exact = self._new_store(_address(item.url)[0], {"If-Match": item.etag})
        try:
            exact.get(item.path, options={"range": (0, 1)})
        except Exception:  # noqa: BLE001 (likewise)
            return item
        return Object(item.url, item.size, item.etag, item.modified, item.path, item.store, exact)


async def fetch(item: Object, starts: list[int], lengths: list[int]) -> list[memoryview]:
    """Reads ranges of an object concurrently, a request each.

    **Raises:** what obstore raises, or `ShortReply`, or `FormatError` for an object that changed.
    """
    if item.exact is not None:
        replies = await item.exact.get_ranges_async(item.path, starts=starts, lengths=lengths, coalesce=0)
        found = [memoryview(reply) for reply in replies]
    else:
        found = list(await asyncio.gather(*(_fetch_one(item, *span) for span in zip(starts, lengths, strict=True))))
    for start, length, data in zip(starts, lengths, found, strict=True):
        if len(data) != length:
            raise ShortReply(f"{length:,} bytes from byte {start:,} on were asked for, {len(data):,} came")
    return found


async def _fetch_one(item: Object, start: int, length: int) -> memoryview:
    options: dict[str, Any] = {"range": (start, start + length)}
    if item.has_strong_etag:  # a weak one never matches
        options["if_match"] = item.etag
    reply = await item.store.get_async(item.path, options=options)
    etag, size, modified = _etag(reply.meta), reply.meta["size"], _modified(reply.meta)
    if (etag, size, modified) != (item.etag, item.size, item.modified):
        raise _changed(
            item.name,
            f"ETag {etag or 'none'}, {size:,} bytes, written {modified or 'at some time'}; expected ETag "
            f"{item.etag or 'none'}, {item.size:,} bytes, written {item.modified or 'at some time'}",
        )
    return memoryview(await reply.bytes_async())


class ShortReply(Exception):
    """A reply that is shorter than what was asked for."""


def failure(error: BaseException, url: str) -> Failure:
    """Says what an error of obstore means for an object, in our words."""
    if isinstance(error, DataError):
        return Failure(error, False)
    url = url.partition("?")[0]
    text, status = str(error), _status(error)
    name = type(error).__name__
    if status in (401, 403) or name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Failure(
            FormatError(
                f"{url}: the server answered {status or 'that it is forbidden'}: these credentials may not read it; "
                "check them (for s3:// AWS_ACCESS_KEY_ID and its kin, for gs:// GOOGLE_APPLICATION_CREDENTIALS, for "
                "https:// the signature in the URL), or pass others as Remote(client={…})"
            ),
            False,
        )
    if status == 404 or isinstance(error, FileNotFoundError):
        return Failure(FormatError(f"{url}: there is no such object (404); check the URL, or upload it again"), False)
    if status == 412 or name == "PreconditionError":
        return Failure(_changed(url, "it has another ETag (412)"), False)
    if status == 416:
        return Failure(_changed(url, "it is shorter than it was (416)"), False)
    if "Range request not supported" in text:
        return Failure(
            FormatError(
                f"{url}: the server does not support Range requests: asked for a part, it sends all of the file; copy "
                "it to a disk, or to a server that does"
            ),
            True,
        )
    tries = re.search(r"after (\d+) retries", text)
    what = f"the server answered {status}" if status else _first_line(error)
    more = f" {int(tries[1]) + 1} times" if tries and status else ""
    exhausted = "max_retries" in text or (status is not None and status < 500 and status not in _TRANSIENT)
    return Failure(RecordError(f"{url}: cannot be read: {what}{more}; check the server and the network"), not exhausted)


def _changed(url: str, how: str) -> FormatError:
    return FormatError(f"{url}: changed while it was open: {how}; open it again")


def _etag(meta: Mapping[str, Any]) -> str:
    etag = meta["e_tag"] or ""
    return etag if not etag or etag.endswith('"') else f'"{etag}"'  # some lists leave the quotes out


def _modified(meta: Mapping[str, Any]) -> str:
    when = meta["last_modified"]
    return when.isoformat(timespec="seconds") if when.timestamp() > 0 else ""  # 1970 stands for nothing


def _status(error: BaseException) -> int | None:
    found = re.search(r"status(?: code)?: (\d{3})\b", str(error))
    return int(found[1]) if found else None


def _first_line(error: BaseException) -> str:
    return re.sub(r"\?[^\s)]+", "", (str(error).splitlines() or [type(error).__name__])[0])  # no signature in a log


def _address(url: str) -> tuple[str, str]:
    """Returns the store of a URL and the path in it; a URL with a query, such as a signature, is a store of its own."""
    scheme, _, rest = url.partition("://")
    if scheme in ("s3", "gs"):
        bucket, _, key = rest.partition("/")
        return f"{scheme}://{bucket}", key
    parts = urlsplit(url)
    if parts.query:
        return url, ""
    return f"{scheme}://{parts.netloc}", unquote(parts.path).removeprefix("/")


def _is_plain(root: str, given: Mapping[str, Any]) -> bool:
    names = ("endpoint", "aws_endpoint", "endpoint_url", "aws_endpoint_url", "aws_endpoint_url_s3")
    config = {**dict(given.get("config") or {}), **given}
    ends = [str(value) for name, value in config.items() if str(name).lower() in names]
    ends += [os.environ.get(name.upper(), "") for name in names[1:]] if root.startswith("s3://") else []
    return any(end.startswith("http://") for end in [root, *ends])
