"""Pulling rows and pushing their gradients along a route. For use inside a `shard_map` over the exchange's axes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .exchange import Exchange, starts
from .route import Round, Route, next_round, swap

Read = Callable[[jax.Array], jax.Array]  # (local rows [m], table after table) -> values [m, D]; 0 beyond the table
Visit = Callable[[Any, jax.Array, jax.Array], Any]  # (carry, local rows [m], gradients [m, D]) -> carry


def pieces(array: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Cuts dim 0 into consecutive pieces."""
    return [array[start : start + size] for start, size in zip(starts(sizes), sizes, strict=True)]


def pull(exchange: Exchange, route: Route, read: Read) -> tuple[Round, jax.Array, jax.Array, jax.Array]:
    """Reads the row of each of a device's ids where it is owned, and fetches those of all rounds but the last.

    **Returns:** the last round, the values `[m, D]` of its rows, `[n, D]`, zero where nothing has come yet, and the
    number of rounds, an int32 scalar. `received` fetches the last.
    """

    read = jax.jit(read)  # so that it is traced once, for its shape too

    def go_on(state: tuple[Any, ...]) -> jax.Array:
        return state[0]

    # A turn reads, and sends if another turn follows: the last round, mostly the only one, is sent behind the loop,
    # where other work may be done meanwhile. What reads is large, and compiled once.
    def turn(state: tuple[Any, ...]) -> tuple[Any, ...]:
        _, num_rounds, current, rows, _ = state
        values, more = read(current.rows), current.more[0]
        rows, following = jax.lax.cond(
            more,
            lambda: (received(exchange, current, values, rows), next_round(exchange, route, current.until)),
            lambda: (rows, current),
        )
        return more, num_rounds + 1, following, rows, values

    values = jax.eval_shape(read, route.first.rows)
    nothing = (jnp.zeros((route.keys.size, *values.shape[1:]), values.dtype), jnp.zeros(values.shape, values.dtype))
    start = (jnp.ones((), bool), jnp.zeros((), jnp.int32), route.first, *nothing)
    _, num_rounds, last, rows, values = jax.lax.while_loop(go_on, turn, start)
    return last, values, rows, num_rounds


def push(exchange: Exchange, current: Round, gradients: jax.Array) -> jax.Array:
    """Sums the gradients of a round at the owners of their rows.

    **Arguments:** `gradients`: `[n, D]`, one for each of the device's ids. **Returns:** `[m, D]`, as `current.rows`.
    """
    for hop, slots, places in zip(exchange.hops, current.slots, current.places, strict=True):
        num_slots = hop.num_peers * hop.num_slots
        sent = jnp.zeros((num_slots, gradients.shape[1]), gradients.dtype).at[slots].add(gradients, mode="drop")
        received = swap(hop, sent.reshape(hop.num_peers, hop.num_slots, -1)).reshape(num_slots, -1)
        gradients = jnp.zeros_like(received).at[places].add(received, mode="drop")
    return gradients


def joined(axes: tuple[str, ...], rows: jax.Array, sums: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Brings together which rows devices along axes have touched, and sums the gradients of those that several have.

    **Arguments:** `rows`: local rows `[m]`, each once, or beyond the table. `num_rows`: of the table's part.

    **Returns:** rows `[R * m]`, alike on all of them, ascending, or beyond; and the sums.
    """
    rows, sums = (jax.lax.all_gather(one, axes, tiled=True) for one in (rows, sums))
    exists = rows < num_rows
    order = jnp.argsort(jnp.where(exists, rows, num_rows), stable=True)
    rows, sums = rows[order], jnp.where(exists[order, None], sums[order], 0)
    first = jnp.concatenate([jnp.ones(1, bool), rows[1:] != rows[:-1]]) & exists[order]
    place = jnp.cumsum(first) - 1
    total = jnp.zeros_like(sums).at[jnp.where(exists[order], place, rows.size)].add(sums, mode="drop")
    beyond = num_rows + jnp.arange(rows.size, dtype=rows.dtype)
    return beyond.at[jnp.where(first, place, rows.size)].set(rows, mode="drop"), total


def fold(exchange: Exchange, route: Route, first: jax.Array, gradients: jax.Array, visit: Visit, carry: Any) -> Any:
    """Shows the owner every touched row with its whole gradient, once, however many rounds that takes.

    **Arguments:** `first`: what `push` gave for the first round. `gradients`: `[n, D]`, for rounds that may follow.
    `visit`: takes and returns the carry. **Returns:** the last carry.
    """

    def go_on(state: tuple[Any, ...]) -> jax.Array:
        return state[0]

    def turn(state: tuple[Any, ...]) -> tuple[Any, ...]:
        _, current, sums, carry = state
        more, carry = current.more[0], visit(carry, current.rows, sums)

        def following() -> tuple[Round, jax.Array]:
            after = next_round(exchange, route, current.until)
            return after, push(exchange, after, gradients)

        current, sums = jax.lax.cond(more, following, lambda: (current, sums))
        return more, current, sums, carry

    return jax.lax.while_loop(go_on, turn, (jnp.ones((), bool), route.first, first, carry))[-1]


def received(exchange: Exchange, current: Round, values: jax.Array, rows: jax.Array) -> jax.Array:
    """Sends the values of a round's rows to those that use them, and puts what comes in its place among `rows`."""
    for hop, slots, places in reversed(list(zip(exchange.hops, current.slots, current.places, strict=True))):
        sent = values.at[places].get(mode="fill", fill_value=0)
        received = swap(hop, sent.reshape(hop.num_peers, hop.num_slots, -1))
        values = received.reshape(np.prod(received.shape[:2]), -1).at[slots].get(mode="fill", fill_value=0)
    return jnp.where((current.slots[0] < sum(exchange.hops[0].num_received))[:, None], values, rows)
