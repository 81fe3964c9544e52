"""Routes: which row goes where, agreed by one exchange of ids. For use inside a `shard_map` over its axes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .exchange import Exchange, Hop, starts, table_of


class Round(NamedTuple):
    """What travels in one round, as one device sees it; int32.

    **Fields:** `slots`: for each hop, the slot of the send buffer for each number, or beyond it.
    `places`: for each hop, the place among the different numbers received of each slot, or beyond them.
    `rows`: local row of its table for each of the last hop's places, or beyond the table; they ascend, table by table.
    `until`: `[peers of the first hop, tables]`, the largest number that is through after this round.
    `more`: bool `[1]`, whether another round must follow; the same on every device.
    """

    slots: tuple[jax.Array, ...]
    places: tuple[jax.Array, ...]
    rows: jax.Array
    until: jax.Array
    more: jax.Array


class Route(NamedTuple):
    """Where a device's ids go; int32.

    **Fields:** `keys`: of each id, table after table. `ordered`: the different ones of them. `first`: the first round.
    """

    keys: jax.Array
    ordered: jax.Array
    first: Round


def make_route(exchange: Exchange, ids: jax.Array) -> Route:
    """Removes duplicates among a device's ids, and tells the owners.

    **Arguments:** `ids`: int32 `[n]` of this device, table after table; −1 is nothing, all others are in range.
    """
    hop = exchange.hops[0]
    keys = _keys(hop, ids)
    ordered = _different(keys, hop.last_key)
    return Route(keys, ordered, _round(exchange, keys, ordered, jnp.full(hop.origins.shape, -1, jnp.int32)))


def next_round(exchange: Exchange, route: Route, until: jax.Array) -> Round:
    """Exchanges the ids of the round after the one that went `until`."""
    return _round(exchange, route.keys, route.ordered, until)


def swap(hop: Hop, values: jax.Array) -> jax.Array:
    """Gives `values[p]` of `[num_peers, slots, ...]` to peer `p`, and returns what the peers give."""
    if hop.num_peers == 1:
        return values
    return jax.lax.all_to_all(values, hop.axes, 0, 0, tiled=True)


def _round(exchange: Exchange, keys: jax.Array, ordered: jax.Array, after: jax.Array) -> Round:
    first, *rest = exchange.hops
    sent, slot, until = _send(first, keys, ordered, after)
    numbers, place = _receive(first, swap(first, sent))
    slots, places = [slot], [place]
    for hop in rest:
        inner = _keys(hop, numbers)
        nothing_yet = jnp.full(hop.origins.shape, -1, jnp.int32)
        sent, slot, reached = _send(hop, inner, _different(inner, hop.last_key), nothing_yet)
        until = _limit(first, hop, until, reached)
        numbers, place = _receive(hop, swap(hop, sent))
        slots.append(slot)
        places.append(place)
    # An owner must see all gradients of a row in one round, so everybody stops where the fullest peer had to stop.
    until = jax.lax.pmin(until, (*exchange.axes, *exchange.replica_axes))
    slots[0] = jnp.where(_is_through(first, keys, until), slots[0], first.num_peers * first.num_slots)
    more = jnp.any(until < np.asarray(first.spans, np.int32) - 1)
    return Round(tuple(slots), tuple(places), _rows(exchange, numbers, until), until, more[None])


def _keys(hop: Hop, numbers: jax.Array) -> jax.Array:
    """Numbers as keys that ascend by peer, then table, then what the number is there."""
    table = starts(hop.spans)[table_of(hop.num_inputs)]
    key = numbers % hop.num_peers * sum(hop.spans) + table + numbers // hop.num_peers
    return jnp.where(numbers < 0, hop.last_key, key)


def _different(keys: jax.Array, last_key: int) -> jax.Array:
    """The different keys, ascending, filled up with `last_key`. Two sorts without payload are faster than one with."""
    ordered = jnp.sort(keys, stable=False)
    repeats = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])
    return jnp.sort(jnp.where(repeats, last_key, ordered), stable=False)


def _send(hop: Hop, keys: jax.Array, ordered: jax.Array, after: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Fills the slots: returns the numbers to send, the slot of each key, and how far each peer and table got."""
    last = ordered.shape[0] - 1
    begin = jnp.searchsorted(ordered, hop.origins + after + 1).astype(jnp.int32)
    end = jnp.searchsorted(ordered, jnp.asarray(hop.origins + np.asarray(hop.spans, np.int32))).astype(jnp.int32)
    capacities, first_slots = np.asarray(hop.capacities, np.int32), starts(hop.capacities)
    table = table_of(hop.capacities)
    at = begin[:, table] + (np.arange(hop.num_slots, dtype=np.int32) - first_slots[table])
    sent = jnp.where(at < end[:, table], ordered[jnp.minimum(at, last)] - hop.origins[:, table], -1)
    stop = ordered[jnp.clip(begin + capacities - 1, 0, last)] - hop.origins
    until = jnp.where(end - begin > capacities, stop, np.asarray(hop.spans, np.int32) - 1)

    table = table_of(hop.num_inputs)
    peer = jnp.minimum(keys // sum(hop.spans), hop.num_peers - 1)
    place = jnp.searchsorted(ordered, keys).astype(jnp.int32) - begin[peer, table]
    fits = (keys < hop.last_key) & (place >= 0) & (place < capacities[table])
    slot = jnp.where(fits, peer * hop.num_slots + first_slots[table] + place, hop.num_peers * hop.num_slots)
    return sent, slot, until


def _receive(hop: Hop, received: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges what the peers sent: returns the different numbers, table after table, and the place of each slot."""
    first_key = starts([span + 1 for span in hop.spans])
    nothing = first_key + np.asarray(hop.spans, np.int32)
    table = table_of(hop.capacities)
    keys = jnp.where(received >= 0, received + first_key[table], nothing[table]).reshape(-1)
    # Every table has as many keys as slots, those for nothing included: sorted, each fills exactly its own segment.
    ordered = jnp.sort(keys, stable=False)
    repeats = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])
    segment = table_of(hop.num_received)
    different = jnp.sort(jnp.where(repeats, nothing[segment], ordered), stable=False)
    place = jnp.where(received.reshape(-1) >= 0, jnp.searchsorted(different, keys).astype(jnp.int32), keys.shape[0])
    numbers = jnp.where(different < nothing[segment], different - first_key[segment], -1)
    return numbers, place


def _limit(first: Hop, hop: Hop, until: jax.Array, reached: jax.Array) -> jax.Array:
    """Brings how far the second hop got into the numbers of the first."""
    ends = np.asarray(first.spans, np.int32) - 1
    peer = np.arange(hop.num_peers, dtype=np.int32)[:, None]
    whole = reached >= np.asarray(hop.spans, np.int32) - 1
    stop = jnp.where(whole, ends, reached * hop.num_peers + peer).min(0)
    return until.at[jax.lax.axis_index(first.axes)].min(stop)


def _is_through(hop: Hop, keys: jax.Array, until: jax.Array) -> jax.Array:
    table = table_of(hop.num_inputs)
    peer = jnp.minimum(keys // sum(hop.spans), hop.num_peers - 1)
    return keys - jnp.asarray(hop.origins)[peer, table] <= until[peer, table]


def _rows(exchange: Exchange, numbers: jax.Array, until: jax.Array) -> jax.Array:
    """The local rows that are through; what is not, or is nothing, gets a place of its own beyond the table."""
    first, *rest = exchange.hops
    table = table_of(exchange.num_owned)
    stop = until[jax.lax.axis_index(first.axes)]
    number = numbers
    for hop in rest:
        number = number * hop.num_peers + jax.lax.axis_index(hop.axes)
    through = (numbers >= 0) & (number <= stop[table])
    beyond = np.asarray(exchange.local_rows, np.int32)[table] + np.arange(table.size, dtype=np.int32)
    return jnp.where(through, numbers, beyond)
