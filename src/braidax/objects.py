"""The door to object stores: S3, Google Cloud Storage, Azure and HTTP servers, through obstore."""

import datetime
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from braidax.errors import ArgumentError, import_extra

_TRY_FRACTION = 1 / 3  # of the time limit, for one try: one that hangs leaves time for others
_RETRY_FRACTION = 0.4  # of it: no try begins later, so that what went wrong is known before time is up
_NO_HEADERS: Mapping[str, str] = {}
_STORES = {  # by scheme: obstore's class, and what it takes most often
    "s3": ("S3Store", "endpoint, region"),
    "gs": ("GCSStore", "base_url, bearer_token"),
    "az": ("AzureStore", "account_name, account_key, endpoint"),
}
_ENDPOINTS = {  # the names of the address of a server: first as an option, all others as variables, too
    "s3": ("endpoint", "aws_endpoint", "endpoint_url", "aws_endpoint_url", "aws_endpoint_url_s3"),
    "az": ("endpoint", "azure_endpoint", "azure_storage_endpoint"),
}
_METADATA = (  # where a machine in a cloud is asked for its own credentials
    "latest/api/token",
    "latest/meta-data/iam/",
    "computeMetadata/v1/instance/",
    "metadata/identity/oauth2/",
)


def address(url: str) -> tuple[str, str]:
    """Returns the store of a URL and the path in it; a URL with a query, such as a signature, is a store of its own."""
    scheme, _, rest = url.partition("://")
    if scheme in _STORES:
        bucket, _, key = rest.partition("/")
        return f"{scheme}://{bucket}", key
    parts = urlsplit(url)
    if parts.query:
        return url, ""
    return f"{scheme}://{parts.netloc}", unquote(parts.path).removeprefix("/")


class Opener:
    """Opens stores.

    **Arguments:** `client`: what obstore's `S3Store`, `GCSStore`, `AzureStore` or `HTTPStore` takes; what is not there
    it finds in the environment. `retries`: of a request that fails. `timeout_seconds`: the limit of a request, retries
    included. `purpose`: what needs it, for the error where obstore is missing.

    **Raises:** `MissingExtra`.
    """

    def __init__(self, client: Mapping[str, Any], *, retries: int, timeout_seconds: float, purpose: str) -> None:
        self.exceptions: Any = import_extra("obstore", "remote", purpose=purpose).exceptions
        self._classes = import_extra("obstore.store", "remote", purpose=purpose)
        self._client = client
        self._retries = retries
        self._timeout_seconds = timeout_seconds

    def open(self, root: str, headers: Mapping[str, str] = _NO_HEADERS) -> Any:
        """Returns the store of a bucket or host, without a request.

        **Arguments:** `root`: such as `s3://bucket`. `headers`: of every request.

        **Raises:** `ArgumentError` when `client` is not what obstore takes.
        """
        limit = self._timeout_seconds
        given = dict(self._client)
        client_options: dict[str, Any] = {"timeout": f"{max(1, round(limit * _TRY_FRACTION * 1000))}ms"}
        if _is_plain(root, given):
            client_options["allow_http"] = True
        client_options |= given.pop("client_options", None) or {}
        client_options["default_headers"] = {**(client_options.get("default_headers") or {}), **headers}
        retry_config = given.pop("retry_config", None) or {
            "max_retries": self._retries,
            "retry_timeout": datetime.timedelta(seconds=limit * _RETRY_FRACTION),
            "backoff": {
                "init_backoff": datetime.timedelta(milliseconds=50),
                "max_backoff": datetime.timedelta(seconds=5),
                "base": 2,
            },
        }
        scheme, _, place = root.partition("://")
        name, takes = _STORES.get(scheme, ("HTTPStore", ""))
        try:
            return getattr(self._classes, name)(
                place if takes else root, client_options=client_options, retry_config=retry_config, **given
            )
        except Exception as error:
            takes = f"{takes}, config, client_options, credential_provider" if takes else "client_options"
            raise ArgumentError(
                f"{root}: obstore's {name} cannot be made of client={dict(self._client)} "
                f"({first_line(error)}); pass what it takes, such as {takes}"
            ) from error


def status_of(error: BaseException) -> int | None:
    """Returns what an HTTP server answered, None where it did not."""
    found = re.search(r"status(?: code)?: (\d{3})\b", str(error))
    return int(found[1]) if found else None


def lacks_credentials(error: BaseException) -> bool:
    """Says whether no credentials were given, so that the machine was asked for its own, in vain."""
    return any(mark in str(error) for mark in _METADATA)


def lacks_bucket(error: BaseException) -> bool:
    """Says whether the bucket does not exist."""
    return any(f"<Code>{code}</Code>" in str(error) for code in ("NoSuchBucket", "ContainerNotFound"))


def first_line(error: BaseException) -> str:
    """Returns the first line of what obstore says, without signatures, which belong in no log."""
    return re.sub(r"\?[^\s)]+", "", (str(error).splitlines() or [type(error).__name__])[0])


def _is_plain(root: str, given: Mapping[str, Any]) -> bool:
    """Says whether connections without TLS are allowed: where the address of the server begins with `http://`.

    For `gs://` they always are, as obstore has it: that address may also stand in a file of credentials. Where it is
    given nowhere, it is Google's own, with TLS.
    """
    if root.startswith("gs://"):
        return True
    names = _ENDPOINTS.get(root.partition("://")[0], ())
    config = {**dict(given.get("config") or {}), **given}
    ends = [str(value) for name, value in config.items() if str(name).lower() in names]
    ends += [os.environ.get(name.upper(), "") for name in names[1:]]
    return any(end.startswith("http://") for end in [root, *ends])
