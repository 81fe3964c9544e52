"""Where a data set lies: a file, a folder, a pattern, a list of files, or URLs of them; and what is found there."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from braidax.data.storage.files import Files
from braidax.data.storage.local import LocalFiles
from braidax.data.storage.objects import SCHEMES, Object, Stores, is_url, place_of
from braidax.data.storage.options import Remote
from braidax.data.storage.remote import RemoteFiles
from braidax.errors import ArgumentError, FormatError

Where = str | os.PathLike[str]

_WILD = re.compile(r"[*?\[]")
_WILD_HTTP = re.compile(r"\*")  # a question mark begins the query there


def open_files(where: Where | Sequence[Where], *, remote: Remote | None = None) -> Files:
    """Opens the files of a data set.

    **Arguments:** `where`: as `list_files` takes it. `remote`: how URLs are read.

    **Returns:** the files, in the order of `list_files`; they are closed when nobody uses them any more.

    **Raises:** `FormatError` as `list_files`, and for a file that cannot be opened or read in parts; `MissingExtra` for
    a URL without the extra `remote`.
    """
    options = remote or Remote()
    stores, found = _found(where, options)
    if stores is None:
        return LocalFiles([name for name in found if isinstance(name, str)])
    objects = [item for item in found if isinstance(item, Object)]
    return RemoteFiles(stores.exact(objects) if objects else stores.open([str(url) for url in found]), remote=options)


def open_tree(where: str, *, remote: Remote | None = None) -> Files:
    """Opens all files below a local folder or the URL of one, hidden ones too; links to folders are not followed.

    **Arguments:** `where`: the folder. `remote`: how URLs are read.

    **Raises:** as `open_files`.
    """
    if not is_url(where):
        # A `Path` would drop the "./" of `where`, which names are known to begin with.
        return LocalFiles(sorted(os.path.join(folder, name) for folder, _, names in os.walk(where) for name in names))  # noqa: PTH118
    options = remote or Remote()
    stores = Stores(options)
    found, _ = stores.below(where.rstrip("/") + "/", is_deep=True)
    return RemoteFiles(stores.exact(found), remote=options)


def list_files(where: Where | Sequence[Where], *, remote: Remote | None = None) -> list[str]:
    """Lists the files of a data set.

    **Arguments:** `where`: a local file; a folder, for the files in it, sorted by name, without hidden ones; a pattern
    with `*`, `?`, `[…]` and `**`; a list of files; or the same as URLs: `s3://`, `gs://`, `az://`, `hf://`, and of
    single files `http://` and `https://`. Of a URL with folders `key=value` the files in all of its folders. `remote`:
    how URLs are read.

    **Returns:** their paths or URLs.

    **Raises:** `FormatError` for what does not exist, holds no files, or cannot be listed.
    """
    _, found = _found(where, remote or Remote())
    return [item.url if isinstance(item, Object) else item for item in found]


def _found(where: Where | Sequence[Where], remote: Remote) -> tuple[Stores | None, list[str] | list[Object]]:
    """Returns the stores, for URLs, and what was found: paths, URLs, or objects where these are known already."""
    if isinstance(where, str | os.PathLike):
        if isinstance(where, str) and is_url(where):
            stores = Stores(remote)
            return stores, _remote(where, stores)
        return None, _local(os.fspath(where))
    names = [os.fspath(item) for item in where]
    urls = [name for name in names if is_url(name)]
    if not names:
        raise ArgumentError("where=[] names no file; expected the paths or URLs of at least one")
    if urls and len(urls) < len(names):
        local = next(name for name in names if not is_url(name))
        raise ArgumentError(
            f"where= names URLs, such as {urls[0]}, and local files, such as {local}; open each kind by itself"
        )
    return (Stores(remote) if urls else None), names


def _local(where: str) -> list[str]:
    path, scheme = Path(where), re.match(r"([A-Za-z][A-Za-z0-9+.\-]*)://", where)
    if scheme:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise FormatError(f"{where}: cannot be read from {scheme[1]}://; expected one of {known}")
    if path.is_dir():
        found = sorted(str(item) for item in path.iterdir() if item.is_file() and not item.name.startswith("."))
        if not found:
            raise FormatError(f"{where}: is a folder without files; expected the files of a data set in it")
    elif path.exists():
        return [where]
    elif _WILD.search(where):
        found = sorted(name for name in glob.glob(where, recursive=True) if Path(name).is_file())  # noqa: PTH207
        if not found:
            raise FormatError(f"{where}: no file fits this pattern; check it, and the folder")
    else:
        raise FormatError(f"{where}: does not exist; check the path")
    return found


def _remote(url: str, stores: Stores) -> list[str] | list[Object]:
    wild = (_WILD_HTTP if url.startswith("http") else _WILD).search(url)
    if wild:
        pattern = re.compile(_expression(url))
        found, _ = stores.below(url[: url.rindex("/", 0, wild.start()) + 1], is_deep="/" in url[wild.start() :])
        fitting = [item for item in found if pattern.fullmatch(item.url) and _is_seen(item.url)]
        if not fitting:
            raise FormatError(f"{url}: none of {len(found)} objects fits this pattern; check it")
        return fitting
    if not url.endswith("/") and (place_of(url)[1] or (url.startswith("http") and url.count("/") > 2)):
        try:
            return stores.open([url])
        except FormatError as error:
            if url.startswith("http") or "(404)" not in str(error):
                raise
            found = _children(f"{url}/", stores)
            if not found:
                raise
            return found
    found = _children(url if url.endswith("/") else f"{url}/", stores)
    if not found:
        raise FormatError(f"{url}: there are no objects; check the bucket and the prefix")
    return found


def _children(folder: str, stores: Stores) -> list[Object]:
    found, folders = stores.below(folder, is_deep=False)
    if any("=" in name and name[0] not in "._" for name in folders):
        found, _ = stores.below(folder, is_deep=True)
        return [item for item in found if not re.search(r"/[._]", item.url[len(folder) - 1 :])]
    return [item for item in found if _is_seen(item.url)]


def _is_seen(url: str) -> bool:
    return not url.rpartition("/")[2].startswith(".") or url.endswith((".zarray", ".zgroup"))


def _expression(pattern: str) -> str:
    """Returns a regular expression for a pattern; `**` may span folders."""
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return "".join(
        meanings.get(part) or (part.replace("[!", "[^", 1) if number % 2 else re.escape(part))
        for number, part in enumerate(parts)
    )
