"""Objects in S3, Google Cloud Storage, Azure and the Hub, and on HTTP servers, through obstore: ranges of them.

Nothing of an object that was written anew is ever returned. Where a server heeds `If-Match`, each request carries the
ETag that the object had when it was opened; elsewhere each reply is compared with it.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from braidax.data.storage.options import Remote
from braidax.errors import DataError, FormatError, ReadError
from braidax.objects import Opener, address, first_line, lacks_bucket, lacks_credentials, status_of

if TYPE_CHECKING:
    from braidax.data.storage.hugging_face import Repository

SCHEMES = ("s3", "gs", "az", "hf", "http", "https")
_NUM_PROBES = 32  # objects that are looked at concurrently
_MAX_EXACT = 16  # objects of one data set that get a store, and so connections, of their own
_NO_ETAG = '"braidax: no object has this ETag"'
_TRANSIENT = (408, 425, 429)  # of the statuses below 500
_REMEDY = (
    "check them (for s3:// AWS_ACCESS_KEY_ID and its kin, for gs:// GOOGLE_APPLICATION_CREDENTIALS, for az:// "
    "AZURE_STORAGE_ACCOUNT_NAME and its kin, for hf:// HF_TOKEN, for https:// the signature in the URL), or pass "
    "others as Remote(client={…})"
)
_PURPOSE = "reading s3://, gs://, az://, hf://, http:// and https:// URLs"


def is_url(where: object) -> bool:
    """Says whether something is the URL of an object, or of several."""
    return isinstance(where, str) and where.partition("://")[0] in SCHEMES and "://" in where


def place_of(url: str) -> tuple[str, str]:
    """Returns the store of a URL, and the path in it. **Raises:** `FormatError` for one that names none."""
    if not _is_hugging_face(url):
        return address(url)
    from braidax.data.storage.hugging_face import repository_address

    return repository_address(url)


def _is_hugging_face(url: str) -> bool:
    return url.startswith("hf://")


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
        self._opener = Opener(
            remote.client, retries=remote.retries, timeout_seconds=remote.timeout_seconds, purpose=_PURPOSE
        )
        self._timeout_seconds = remote.timeout_seconds
        self._stores: dict[str, Any] = {}
        self._repositories: dict[str, Repository] = {}  # of Hugging Face

    def open(self, urls: Sequence[str]) -> list[Object]:
        """Looks at objects: their sizes, ETags, and whether ranges of them can be read.

        **Raises:** `FormatError` for one that is missing, forbidden, or whose server does not serve ranges.
        """
        for url in urls:
            self._store(url)
        return self.exact(self._look_at(urls))

    def below(self, folder: str, *, is_deep: bool) -> tuple[list[Object], list[str]]:
        """Returns the objects in a folder, sorted by name, and the names of its folders; not of HTTP servers.

        **Arguments:** `folder`: a URL that ends with a slash. `is_deep`: whether the objects in folders of it count;
        then no folders are named.

        **Raises:** `FormatError` if they cannot be listed.
        """
        store, prefix = self._store(folder)
        if folder.startswith("http"):
            raise FormatError(
                f"{folder}: an HTTP server cannot be asked which files it has; pass a list of their URLs, or read them "
                "through s3://, gs://, az:// or hf://"
            )
        if _is_hugging_face(folder):
            return self._below_repository(folder, prefix, is_deep=is_deep)
        place = prefix.rstrip("/") or None
        folders: list[str] = []
        try:
            if is_deep:
                metas = [meta for chunk in store.list(place, chunk_size=1000) for meta in chunk]
            else:
                listing = store.list_with_delimiter(place)
                metas = listing["objects"]
                folders = [path.rstrip("/").rpartition("/")[2] for path in listing["common_prefixes"]]
        except Exception as error:
            raise failure(error, folder).error from error
        root = folder[: len(folder) - len(prefix)]
        found = [self._object(root + meta["path"], meta, store) for meta in metas if meta["path"].startswith(prefix)]
        return sorted(found, key=lambda item: item.url), folders

    def _below_repository(self, folder: str, prefix: str, *, is_deep: bool) -> tuple[list[Object], list[str]]:
        """Does so for a folder of the Hub. Its lists tell no ETags: objects have none until `exact` looks at them."""
        from braidax.data.storage.hugging_face import not_told

        root, _ = place_of(folder)
        try:
            sizes, folders = self._repositories[root].below(prefix.rstrip("/"), is_deep=is_deep)
        except Exception as error:
            raise not_told(folder, error) from error
        store = self._stores[root]
        found = [Object(f"{root}/{path}", size, "", "", path, store) for path, size in sorted(sizes.items())]
        return found, [path.rpartition("/")[2] for path in folders]

    def exact(self, objects: Sequence[Object]) -> list[Object]:
        """Gives objects that were listed stores of their own, as `open` does, unless they are many."""
        if any(_is_hugging_face(item.url) and not item.stamp for item in objects):
            return self._look_at([item.url for item in objects])
        if not objects or len(objects) > _MAX_EXACT:
            return list(objects)
        with ThreadPoolExecutor(len(objects)) as threads:
            return list(threads.map(self._exact, objects))

    def _store(self, url: str) -> tuple[Any, str]:
        root, path = place_of(url)
        if root not in self._stores:
            if _is_hugging_face(url):
                from braidax.data.storage.hugging_face import find_repository

                repository = find_repository(root, timeout_seconds=self._timeout_seconds)
                self._repositories[root] = repository
                self._stores[root] = self._opener.open(repository.url, repository.headers)
            else:
                self._stores[root] = self._opener.open(root)
        return self._stores[root], path

    def _look_at(self, urls: Sequence[str]) -> list[Object]:
        with ThreadPoolExecutor(max(1, min(_NUM_PROBES, len(urls)))) as threads:
            return list(threads.map(self._open, urls))

    def _open(self, url: str) -> Object:
        store, path = self._store(url)
        try:
            try:
                reply = store.get(path, options={"range": (0, 1)})
                meta: Mapping[str, Any] = reply.meta
                if len(reply.bytes()) != 1:
                    raise FormatError(f"{url}: the server answered a request for 1 byte with none; is it one at all?")
            except self._opener.exceptions.GenericError as error:
                if status_of(error) != 416:  # an empty object has no first byte
                    raise
                meta = store.head(path)
        except DataError:
            raise
        except Exception as error:
            raise failure(error, url).error from error
        return self._object(url, meta, store)

    def _object(self, url: str, meta: Mapping[str, Any], store: Any) -> Object:
        return Object(url, meta["size"], _etag(meta), _modified(meta), place_of(url)[1], store)

    def _exact(self, item: Object) -> Object:
        if not item.size or not item.has_strong_etag or _is_hugging_face(item.url):  # a commit stays as it is
            return item
        try:
            item.store.get(item.path, options={"range": (0, 1), "if_match": _NO_ETAG})
        except self._opener.exceptions.PreconditionError:
            pass
        except Exception:  # noqa: BLE001 (what the server makes of it says nothing about the object)
            return item
        else:
            return item
        exact = self._opener.open(address(item.url)[0], {"If-Match": item.etag})
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
    text, status = str(error), status_of(error)
    name = type(error).__name__
    exhausted = "max_retries" in text or (status is not None and status < 500 and status not in _TRANSIENT)
    if lacks_credentials(error):
        none = "there are no credentials in the environment, and this machine has none of its own"
        return Failure(FormatError(f"{url}: {none}; {_REMEDY}"), not exhausted)
    if status in (401, 403) or name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Failure(
            FormatError(
                f"{url}: the server answered {status or 'that it is forbidden'}: these credentials may not read it; "
                f"{_REMEDY}"
            ),
            False,
        )
    if lacks_bucket(error):
        return Failure(FormatError(f"{url}: there is no such bucket (404); correct the URL, or make it"), False)
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
    if "invalid path" in text:
        return Failure(
            FormatError(
                f"{url}: an object there has a name that leads out of its folder ({first_line(error)}); rename it, or "
                "pass a list of URLs"
            ),
            False,
        )
    tries = re.search(r"after (\d+) retries", text)
    what = f"the server answered {status}" if status else first_line(error)
    more = f" {int(tries[1]) + 1} times" if tries and status else ""
    return Failure(ReadError(f"{url}: cannot be read: {what}{more}; check the server and the network"), not exhausted)


def _changed(url: str, how: str) -> FormatError:
    return FormatError(f"{url}: changed while it was open: {how}; open it again")


def _etag(meta: Mapping[str, Any]) -> str:
    etag = meta["e_tag"] or ""
    return etag if not etag or etag.endswith('"') else f'"{etag}"'  # some lists leave the quotes out


def _modified(meta: Mapping[str, Any]) -> str:
    when = meta["last_modified"]
    return when.isoformat(timespec="seconds") if when.timestamp() > 0 else ""  # 1970 stands for nothing
