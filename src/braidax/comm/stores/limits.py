"""What keys, values and amounts all stores take, so that a job that works with one works with the others."""

from braidax.errors import ArgumentError

MAX_KEY_BYTES = 4096
MAX_VALUE_BYTES = 64 << 20
MAX_AMOUNT = (1 << 31) - 1  # so that a sum stays within 64 bits


def key_bytes(key: str) -> bytes:
    """Returns a key in UTF-8, any text included.

    **Raises:** `ArgumentError` for one that is too long.
    """
    encoded = key.encode("utf-8", "surrogatepass")
    if len(encoded) > MAX_KEY_BYTES:
        raise ArgumentError(f"key={key[:64]!r}… has {len(encoded):,} bytes: expected at most {MAX_KEY_BYTES:,}")
    return encoded


def check_value(key: str, value: bytes) -> None:
    """Raises `ArgumentError` for a value that is too long."""
    if len(value) > MAX_VALUE_BYTES:
        raise ArgumentError(
            f"value= of the key {key!r} has {len(value):,} bytes: expected at most {MAX_VALUE_BYTES:,}; "
            "a store is for what ranks need to find one another: send large data by a Communicator"
        )


def check_amount(amount: int) -> None:
    """Raises `ArgumentError` for an amount that a counter does not take."""
    if abs(amount) > MAX_AMOUNT:
        raise ArgumentError(f"amount={amount}: expected at most {MAX_AMOUNT:,}, or its negative")
