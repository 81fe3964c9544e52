"""What a server answers to who reads all that it has, for a checkpoint or to serve it elsewhere."""

from collections.abc import Mapping
from typing import Any

from braidax.parallel.served.wire import packed

from .dense import DensePart
from .shard import Shard


def rows_lying(shard: Shard, step: int, fields: Mapping[str, Any]) -> Any:
    """Reads consecutive rows here, from `start` to `stop`, as they are now, and what is kept of them.

    **Arguments:** `step`: how many updates were taken. `fields`: of the request.
    """
    start, stop = (int(fields[at]) for at in ("start", "stop"))
    part = slice(max(0, start), min(stop, shard.num_rows))
    shard.settle(part)
    values, *leaves, _ = shard.lying(part)
    kept = {f"kept/{at}": leaf for at, leaf in enumerate(leaves)}
    shared = {f"shared/{at}": number for at, number in enumerate(shard.shared)}
    return packed("rows", {"step": step}, {"values": values, **kept, **shared})


def rows_changed(shard: Shard, step: int, fields: Mapping[str, Any]) -> Any:
    """Reads rows that may have changed `since` a step, as they are now, and says which of those here they are: from the
    row `start` on, `most` at most. **Arguments:** as of `rows_lying`."""
    ids, looked = shard.changed(*(int(fields[one]) for one in ("since", "start", "most")))
    told = {"step": step, "begun": shard.begun, "looked": looked}
    return packed("rows", told, {"ids": ids, "values": shard.pull(ids)})


def variables(dense: DensePart, step: int, fields: Mapping[str, Any]) -> Any:
    """Reads the variables that are here whole, and what is kept of them, by path; with `names` what of these is here.

    **Arguments:** as of `rows_lying`.
    """
    found, wanted = dict(zip((one.name for one in dense.form.carry), dense.carry, strict=True)), fields.get("names")
    found = found if wanted is None else {name: found[name] for name in wanted if name in found}
    return packed("dense", {"step": step}, found)
