"""How many bytes each device sends in a step to keep one table in step with the others, by each way to do so."""

from .exchange import Exchange

ID_BYTES = 4


def all_reduce_bytes(num_rows: int, row_bytes: int, num_shards: int) -> float:
    """A dense gradient around a ring: `2 (N - 1) / N * V * D * b`."""
    return 2 * (num_shards - 1) / num_shards * num_rows * row_bytes


def all_gather_bytes(num_ids: int, row_bytes: int, num_shards: int) -> float:
    """Ids and row gradients of everybody to everybody: `(N - 1) * n * (i + D b)`."""
    return float((num_shards - 1) * num_ids * (ID_BYTES + row_bytes))


def shared_bytes(num_ids: int, row_bytes: int, num_shards: int) -> float:
    """What ids that all devices use cost beside their exchange: `3 (N - 1) / N * n * D b`.

    Each device fetches some of their rows, which all gather, and the gradients of all of them are all-reduced.
    """
    return 3 * (num_shards - 1) / num_shards * num_ids * row_bytes


def exchange_bytes(exchange: Exchange, row_bytes: int) -> tuple[float, ...]:
    """Ids, rows and row gradients to the owners and back, for each hop: `(P - 1) * slots * (i + 2 D b)`.

    **Arguments:** `exchange`: with a single round, which is what it is planned for. `row_bytes`: `D * b`.
    """
    return tuple(float((hop.num_peers - 1) * hop.num_slots * (ID_BYTES + 2 * row_bytes)) for hop in exchange.hops)
