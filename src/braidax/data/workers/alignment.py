"""Where host memory begins and ends, so that devices can take it as it is."""

ALIGNMENT = 64  # bytes: at such addresses JAX on CPU takes host memory as it is, without a copy


def aligned(num_bytes: int) -> int:
    """Returns the next multiple of `ALIGNMENT`, in bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
