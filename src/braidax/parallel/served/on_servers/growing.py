"""What a server answers about tables that grow."""

from collections.abc import Callable
from typing import Any

from braidax.errors import ArgumentError
from braidax.parallel.served.wire import Message, packed

from .seen_shard import SeenShard

_HALF_RESTORED = "a checkpoint was not restored to its end"


def growing_answers(
    shard_of: Callable[[Any], Any],
    num_updates: Callable[[], int],
    fail: Callable[[str], None],
    begin: Callable[[int], None],
) -> dict[str, Callable[[int, Message], Any]]:
    """Returns what answers, by kinds of requests.

    **Arguments:** `shard_of`: a server's part of a table, by its name. `num_updates`: were taken. `fail`: refuses what
    reads tables from then on, as told. `begin`: ends that, and waits for the update behind so many others.
    """

    def growing(message: Message) -> SeenShard:
        shard = shard_of(message.fields["table"])
        if not isinstance(shard, SeenShard):
            raise ArgumentError(f"{shard.form.name} has all its rows: expected a table that grows as seen")
        return shard

    def listed(rank: int, message: Message) -> Any:
        """Reads rows that are there, or counts of ids, by id."""
        shard, fields = growing(message), message.fields
        arrays = shard.listed(fields["which"], *(int(fields[one]) for one in ("start", "stop", "most", "since")))
        shared = {f"shared/{at}": one for at, one in enumerate(shard.shared)}
        return packed("listed", {"step": num_updates(), "begun": shard.begun}, {**arrays, **shared, "key": shard.key})

    def restart(rank: int, message: Message) -> Any:
        """Forgets what is there, for a checkpoint; nothing else is answered until `resume`."""
        shard, arrays = growing(message), message.arrays
        fail(_HALF_RESTORED)
        shared = [arrays[f"shared/{at}"] for at in range(shard.form.num_shared)]
        shard.restart(arrays["key"], shared, int(message.fields["step"]))
        return packed("restarted")

    def put(rank: int, message: Message) -> Any:
        """Undoes `list`."""
        growing(message).put_listed(message.fields["which"], message.arrays)
        return packed("put")

    def resume(rank: int, message: Message) -> Any:
        """Goes on from what was put."""
        begin(int(message.fields["step"]))
        return packed("resumed")

    return {"list": listed, "restart": restart, "put": put, "resume": resume}
