"""What a server answers about tables that grow."""

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.on_servers.growing.seen_shard import SeenShard
from braidax.parallel.served.on_servers.shard import Shard
from braidax.parallel.served.wire import Message, packed

_HALF_RESTORED = "a checkpoint was not restored to its end"


def state_of(shard: Shard | SeenShard) -> dict[str, NDArray[Any]]:
    """Returns what a copy of a part of a table has besides rows."""
    shared = {str(at): one for at, one in enumerate(shard.shared)}
    return {**shared, **shard.state()} if isinstance(shard, SeenShard) else shared


def follow_state(shard: Shard | SeenShard, state: Mapping[str, NDArray[Any]], step: int) -> None:
    """Undoes `state_of`, where rows are there. **Arguments:** `step`: how many updates were taken."""
    shard.share([state[str(at)] for at in range(shard.form.num_shared)])
    if isinstance(shard, SeenShard):
        shard.follow(state, step)


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

    def count(rank: int, message: Message) -> Any:
        """Counts the ids here of another number of parts."""
        num, end = growing(message).held(message.fields["which"], _of_part(message.fields))
        return packed("counted", {"count": num, "end": end})

    def copy(rank: int, message: Message) -> Any:
        """Reads those of them in some slots."""
        fields = message.fields
        slots = slice(max(0, int(fields["start"])), max(0, int(fields["stop"])))
        return packed("copied", {}, growing(message).taken(fields["which"], _of_part(fields), slots))

    return {"count seen": count, "copy seen": copy, "list": listed, "restart": restart, "put": put, "resume": resume}


def _of_part(fields: Mapping[str, Any]) -> tuple[int, int]:
    part, parts = (int(one) for one in fields["of"])
    if not 0 <= part < parts:
        raise ArgumentError(f"of={[part, parts]}: expected 0 <= part < parts")
    return part, parts
