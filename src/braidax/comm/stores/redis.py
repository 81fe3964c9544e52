"""The store of ranks that reach a Redis server."""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import final
from urllib.parse import parse_qsl, urlencode, urlsplit

from braidax.comm.stores.limits import check_amount, check_value, key_bytes
from braidax.comm.stores.store import Store, backoff, missing, shown_url
from braidax.errors import ArgumentError, CommError, HandshakeError, import_extra

PASSWORD_VARIABLE = "BRAIDAX_REDIS_PASSWORD"

_LIFE_SECONDS = 86400
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.1


@final
class RedisStore(Store):
    """Values in a Redis server (or one that speaks as Redis does), below `braidax/`.

    Each key vanishes a day after it was set, a counter a day after it began, so that jobs leave nothing for ever.

    **Arguments:** `url`: `redis://[[user]:password@]host[:port][/database]`, or `rediss://` for TLS; its query is that
    of redis-py. A password that is not in the URL is taken from the environment variable `BRAIDAX_REDIS_PASSWORD`.
    `timeout_seconds`: how long to wait for a server that is not there yet, and later for answers.

    **Raises:** `CommError` when the server cannot be reached within the limit, `HandshakeError` for a wrong password,
    `ArgumentError` for a URL that says nothing, `MissingExtra`.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 60.0) -> None:
        if not timeout_seconds > 0:
            raise ArgumentError(f"timeout_seconds={timeout_seconds:g}: expected more than 0")
        redis = import_extra("redis", "redis", purpose="RedisStore")
        self._address = _without_password(url)
        self._timeout_seconds = timeout_seconds
        self._errors = redis.exceptions
        try:
            self._client = redis.Redis.from_url(
                url,
                password=os.environ.get(PASSWORD_VARIABLE),  # one in the URL goes first
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),  # an amount must not be added twice
            )
            self._reach(time.monotonic() + timeout_seconds)
        except (ValueError, TypeError) as error:  # the second one for what the query says
            raise ArgumentError(f"url={self._address!r}: {error}; expected redis://host:port") from error

    @property
    def address(self) -> str:
        return self._address

    def set(self, key: str, value: bytes) -> None:
        check_value(key, value)
        with self._own_errors():
            self._client.set(_name(key, b"values"), value, ex=_LIFE_SECONDS)

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        name = _name(key, b"values")
        deadline = time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            with self._own_errors():
                value: bytes | None = self._client.get(name)
            if value is not None:
                return value
            wait = backoff(deadline, pause)
            if wait is None:
                raise missing(key, self.address, timeout_seconds)
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def add(self, key: str, amount: int) -> int:
        check_amount(amount)
        name = _name(key, b"counters")
        with self._own_errors(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.set(name, 0, ex=_LIFE_SECONDS, nx=True)
            pipeline.incrby(name, amount)
            return pipeline.execute()[1]

    def close(self) -> None:
        self._client.close()

    def _reach(self, deadline: float) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                with self._own_errors():
                    self._client.ping()
                return
            except CommError as error:
                wait = backoff(deadline, pause) if isinstance(error.__cause__, self._errors.ConnectionError) else None
                if wait is None or isinstance(error, HandshakeError):
                    self.close()
                    raise
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    @contextmanager
    def _own_errors(self) -> Generator[None]:
        try:
            yield
        except self._errors.AuthenticationError as error:
            raise HandshakeError(
                f"{self.address}: the Redis server refuses the password ({error}); put the right one into the "
                f"environment variable {PASSWORD_VARIABLE}"
            ) from error
        except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
            raise CommError(
                f"{self.address}: unreachable, asked for up to {self._timeout_seconds:g} s ({error}); expected a Redis "
                "server there: is it running, are host and port right, and do firewalls let them through?"
            ) from error
        except self._errors.RedisError as error:
            raise CommError(
                f"{self.address}: the Redis server refused ({error}); expected one that may be written to, with room "
                "left in memory"
            ) from error


def _name(key: str, kind: bytes) -> bytes:
    return b"braidax/" + kind + b"/" + key_bytes(key)


def _without_password(url: str) -> str:
    """Returns a URL that says the same but for the password. Nothing of one that hides it elsewhere is ever shown."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if parts is None or "@" in parts._replace(netloc="").geturl():
        raise ArgumentError(
            f"url={shown_url(url)}: expected redis://host:port, with any of @/?#[] in a password written as %40 and so "
            f"on; better put it into the environment variable {PASSWORD_VARIABLE}"
        )
    user, _, host = parts.netloc.rpartition("@")
    user = user.partition(":")[0]
    query = [(name, value) for name, value in parse_qsl(parts.query) if "password" not in name]
    return parts._replace(netloc=f"{user}@{host}" if user else host, query=urlencode(query)).geturl()
