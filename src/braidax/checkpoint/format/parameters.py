"""Which leaves of a checkpoint are the parameters, and how each is read in the form that the loss has.

A checkpoint holds arrays whole and without padding, whatever devices and stages had of them. Only tables by rows lie in
it otherwise: padded, and those that servers have beside the tree of the parameters.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from braidax.checkpoint.format.loading import Mismatch
from braidax.checkpoint.format.manifest import Entry
from braidax.checkpoint.format.padding import Conversion, conversion
from braidax.checkpoint.format.reading import Content, Reader
from braidax.checkpoint.snapshot.boxes import Box, whole

LateRows = Literal["refuse", "as saved"]
"""What becomes of tables with rows that the optimizer has not moved yet, as those that no batch touched."""

_NODE = "params"  # as `State` calls it, and the states of Flax
_MAX_NAMED = 20


class Parameter(NamedTuple):
    """A parameter in a checkpoint. **Fields:** `name`: below the node of all. `how`: its rows are to be moved, None
    where they lie as in the table. `shape`: that the loss has.
    """

    name: str
    entry: Entry
    how: Conversion | None
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """As it is given: of PRNG keys that of their data, of a Python number that of NumPy."""
        return np.dtype(self.entry.dtype or self.entry.leaf.kind)

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        """Returns a part of it. **Raises:** `CheckpointError` when it is not what was written."""
        if not self.entry.leaf.dtype:
            return np.asarray(self.entry.number, self.dtype)
        return reader.read(self.entry, box) if self.how is None else reader.read_rows(self.entry, self.how, box)

    def value(self, reader: Reader) -> Any:
        """Returns all of it: an array in host memory, or the Python number that it is. **Raises:** as `read`."""
        return self.read(reader, whole(self.shape)) if self.entry.leaf.dtype else self.entry.number


def parameters_in(content: Content, reader: Reader, at: str | None, late_rows: LateRows) -> list[Parameter]:
    """Returns the parameters of a checkpoint, in the order of its tree.

    **Arguments:** `reader`: of it. `at`: the path of the node that has them, None to find it.

    **Raises:** `Mismatch` when it is not clear which they are, or they are not there as training would have them.
    """
    found = _below(content, at)
    if at is None:
        found |= _on_servers(content)
    if not found:
        shown = ", ".join(map(repr, list(content.entries)[:_MAX_NAMED])) or "no leaves"
        more = ", …" if len(content.entries) > _MAX_NAMED else ""
        raise Mismatch(
            f"{content.folder}: at={at!r}: expected the path of a node that has the parameters, by default one that is "
            f"called {_NODE}, but there is none among {shown}{more}; give its path, such as at='0/model'"
        )
    parameters = [_parameter(name, entry) for name, entry in found.items()]
    if late_rows == "refuse":
        _check_not_late(content, reader, parameters)
    return parameters


def _below(content: Content, at: str | None) -> dict[str, Entry]:
    node = _node_of(content) if at is None else at.strip("/")
    if node is None:
        return {}
    prefix = f"{node}/"
    below = {path.removeprefix(prefix): entry for path, entry in content.entries.items() if path.startswith(prefix)}
    alone = content.entries.get(node)
    return {"": alone} if alone is not None else below


def _node_of(content: Content) -> str | None:
    """Returns the path of the one node that is called as parameters are and has none above it that is."""
    paths = [path.split("/") for path in content.entries]
    nodes = {tuple(parts[: parts.index(_NODE) + 1]) for parts in paths if _NODE in parts}
    least = min(map(len, nodes), default=0)
    found = sorted("/".join(parts) for parts in nodes if len(parts) == least)
    if len(found) > 1:
        raise Mismatch(
            f"{content.folder}: at=None: there are parameters at {', '.join(map(repr, found[:_MAX_NAMED]))}: expected "
            f"one node that is called {_NODE}; say which, such as at={found[0]!r}"
        )
    return found[0] if found else None


def _on_servers(content: Content) -> dict[str, Entry]:
    """Returns the tables that servers have, by the names that they have as parameters."""
    found: dict[str, Entry] = {}
    for above, name in _served_tables(content.entries):
        if f"{above}{name}/rows/ids" in content.entries:
            raise Mismatch(
                f"{content.folder}: table {name!r} grows: saved are the rows that were seen, and others are as `init` "
                f"makes them, which a checkpoint does not know; at={_node_of(content)!r} gives the other parameters, "
                f"and at={f'{above}{name}/rows'!r} the ids and rows that were seen"
            )
        found[name] = content.entries[f"{above}{name}/rows/values"]
    return found


def _served_tables(entries: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
    """Gives the path above each table that servers have, and its name. They stand beside a number, `step`."""
    for path in entries:
        parts = path.removesuffix("/rows/values").split("/")
        if not path.endswith("/rows/values"):
            continue
        for number in reversed(range(len(parts) - 1)):
            beside = entries.get("/".join([*parts[:number], "step"]))
            if parts[number] == "tables" and beside is not None and beside.leaf.kind == "int":
                yield "/".join(parts[: number + 1]) + "/", "/".join(parts[number + 1 :])
                break


def _parameter(name: str, entry: Entry) -> Parameter:
    if entry.padded_rows is None:
        return Parameter(name, entry, None, entry.shape)
    shape = (entry.padded_rows, *entry.shape[2:])
    return Parameter(name, entry, conversion(entry, shape, None), shape)


def _check_not_late(content: Content, reader: Reader, parameters: list[Parameter]) -> None:
    """Checks that the optimizer has moved all rows of tables. **Raises:** `Mismatch` naming those with late rows."""
    told: list[str] = []
    for one in parameters:
        last, clock = _clocks(content.entries, one)
        if last is None or clock is None:
            continue
        seen, now = _parameter("", last).value(reader), _parameter("", clock).value(reader)
        if num_late := int((seen < now).sum()):
            told.append(f"{num_late:,} of {len(seen):,} rows of {one.name!r}")
    if told:
        raise Mismatch(
            f"{content.folder}: {', '.join(told)} lag behind: the optimizer moves all rows at each step, and a row "
            "that no batch touches is brought up when it is next read, by the step alone. Save a settled state, "
            "saver.save((step.settled(state), loader.cursor)), or take step.to_dense(state).params; or have such rows "
            'as they were when last touched: late_rows="as saved", or --late-rows'
        )


def _clocks(entries: Mapping[str, Entry], one: Parameter) -> tuple[Entry | None, Entry | None]:
    """Returns how many steps each row of a table has seen, and how many there were, if rows may lag behind.

    A `State` of `parallelize` has both in its `opt_state`; of servers they are beside the values.
    """
    path = one.entry.leaf.path
    if path.endswith("/rows/values"):
        above = path.removesuffix("values")
        table = next((above for above, name in _served_tables(entries) if name == one.name), "")
        return entries.get(f"{above}kept/last"), entries.get(f"{table.removesuffix('tables/')}step")
    root = path.removesuffix(one.name).removesuffix("/").removesuffix(_NODE)
    kept = f"{root}opt_state/rows/{one.name}"
    clocks = (entries.get(f"{kept}/{name}") for name in ("shared", "shared/0", "shared/clock"))
    return entries.get(f"{kept}/rows/last"), next((clock for clock in clocks if clock is not None), None)
