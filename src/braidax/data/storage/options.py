"""The options of remote storage."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidax.errors import ArgumentError

PAGE_BYTES = 1 << 12  # what the cache stores and checks as one


@dataclass(frozen=True, kw_only=True)
class Remote:
    """How objects behind `s3://`, `gs://`, `az://`, `hf://`, `http://` and `https://` are read.

    **Arguments:** `cache_dir`: the folder of the cache on a local disk, shared by all processes; by default `braidax`
    in the user's cache folder. `cache_bytes`: what the cache may hold; 0 for none. `block_bytes`: what is fetched and
    cached is rounded to multiples of it, itself one of 4096; by default 64 KiB where the data set fits in the cache,
    else 4 KiB. `ahead_bytes`: what may be fetched ahead and held in memory until it is read. `retries`: of a request
    that fails, with growing random pauses between. `timeout_seconds`: how long a read may wait, retries included.
    `hedge_seconds`: after how long a request is issued a second time; by default after the 99th percentile of recent
    ones; 0 for at once, `math.inf` for never. `client`: arguments for the client, obstore's `S3Store`, `GCSStore`,
    `AzureStore` or `HTTPStore`: `{"endpoint": …, "region": …, "client_options": {…}, "credential_provider": …}`.
    Without them it finds credentials and endpoints in the environment, as it always does.

    **Raises:** `ArgumentError` for a value that cannot work.
    """

    cache_dir: str | Path | None = None
    cache_bytes: int = 10 << 30
    block_bytes: int | None = None
    ahead_bytes: int = 256 << 20
    retries: int = 8
    timeout_seconds: float = 60.0
    hedge_seconds: float | None = None
    client: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name, least in {"cache_bytes": 0, "ahead_bytes": 0, "retries": 0, "hedge_seconds": 0}.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ArgumentError(f"Remote: {name}={value} is not {least} or more")
        if not self.timeout_seconds > 0:
            raise ArgumentError(f"Remote: timeout_seconds={self.timeout_seconds} is not above 0")
        if self.block_bytes is not None and (self.block_bytes < PAGE_BYTES or self.block_bytes % PAGE_BYTES):
            raise ArgumentError(f"Remote: block_bytes={self.block_bytes} is no multiple of {PAGE_BYTES}")
        if 0 < self.cache_bytes < MIN_CACHE_BYTES:
            raise ArgumentError(
                f"Remote: cache_bytes={self.cache_bytes:,} is less than {MIN_CACHE_BYTES:,}, which a cache needs at "
                "least; raise it, or pass cache_bytes=0 for none"
            )


MIN_CACHE_BYTES = 64 << 20
