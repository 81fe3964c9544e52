"""How much compressed data may become: a file of a few bytes can ask for more memory than a machine has."""

import os

from braidax.errors import ArgumentError, FormatError

LIMIT = "BRAIDAX_MAX_BYTES"

_DEFAULT_BYTES = 1 << 30
_DEFAULT_RATIO = 100  # text is compressed to a tenth, seldom to a hundredth


def max_bytes(stored_bytes: int) -> int:
    """Returns how many bytes compressed data may become: 1 GiB or 100 times their own, or `$BRAIDAX_MAX_BYTES`.

    **Arguments:** `stored_bytes`: of them as they are compressed.

    **Raises:** `ArgumentError` for an environment variable that is no number of bytes.
    """
    given = os.environ.get(LIMIT)
    if given is None:
        return max(_DEFAULT_BYTES, _DEFAULT_RATIO * stored_bytes)
    if not given.strip().isdecimal():
        raise ArgumentError(f"{LIMIT}={given!r}: expected a number of bytes, such as {_DEFAULT_BYTES}")
    return int(given)


def refuse_larger(name: str, num_bytes: int, stored_bytes: int) -> None:
    """Raises `FormatError` for compressed data that become more than they may.

    **Arguments:** `name`: of the file. `num_bytes`: what they become. `stored_bytes`: as of `max_bytes`.
    """
    limit = max_bytes(stored_bytes)
    if num_bytes > limit:
        raise FormatError(
            f"{name}: {stored_bytes:,} compressed bytes become {num_bytes:,} or more; expected at most {limit:,}: the "
            f"file is damaged or a bomb; if it is neither, set the environment variable {LIMIT} to more"
        )


def needs_much_memory(name: str, stored_bytes: int) -> FormatError:
    """Returns the error of compressed data for which to decompress takes more memory than data may become.

    **Arguments:** `name`: of the file. `stored_bytes`: as of `max_bytes`.
    """
    return FormatError(
        f"{name}: to decompress its {stored_bytes:,} bytes takes more than {max_bytes(stored_bytes):,} bytes of "
        f"memory: the file is damaged or a bomb; if it is neither, set the environment variable {LIMIT} to more, or "
        "compress it with a smaller dictionary"
    )
