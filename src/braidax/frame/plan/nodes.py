"""Plans of Polars as graphs of nodes, read from and written to Polars' own binary form.

Polars writes a `LazyFrame` as MessagePack: an arena of nodes that refer to one another by index, and one of tables in
memory. Its JSON form would do, too, but it changes floats in their last digit and cannot say infinity.
"""

import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle

from braidax.errors import ArgumentError
from braidax.frame.polars import Raw, Schema, msgpack, pl

_VERSIONS = {"b2af60200b56e429cab31266a9391bc2b595c97c3d15312db0b29bb1dad0935c": "2.1"}  # of plans that are known
_MARK = b"DSL_VERSION"
_HEADER_BYTES = len(_MARK) + 4 + 64
_IN_MEMORY = ("on_columns",)  # fields that refer to tables, not to nodes
_LISTS = {"Union": ("inputs",), "HConcat": ("inputs",), "PipeWithSchema": ("input",)}  # fields with several inputs
_SUPPLIED = "braidax-supplied:"
_BY_NAME, _BY_VALUE = 0, 1
_PICKLE_BEGINS = 3

Fields = dict[str, Any]


class Input:
    """Stands in the fields of a node for one of its inputs; no dataclass, which would be written by itself.

    **Fields:** `index`: among `Node.inputs`. `is_inside`: whether Polars writes the whole input there, not its place.
    """

    __slots__ = ("index", "is_inside")

    def __init__(self, index: int, *, is_inside: bool = False) -> None:
        self.index, self.is_inside = index, is_inside

    def __repr__(self) -> str:
        return f"Input({self.index}, is_inside={self.is_inside})"


class InMemory:
    """Stands in the fields of a node for a table in memory. **Fields:** `data`: as Polars writes it."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"InMemory({msgpack.encode(self.data).hex()})"


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of a plan; nodes are compared by identity, and equal ones are the same.

    **Fields:** `kind`: as Polars calls it (`Filter`, `Join`, …). `fields`: as Polars writes them, with an `Input` for
    each input. `inputs`: the nodes it reads.
    """

    kind: str
    fields: Fields
    inputs: tuple["Node", ...] = ()

    def on(self, *inputs: "Node") -> "Node":
        """Returns the same operation on other inputs."""
        return Node(self.kind, self.fields, inputs)

    def but(self, **fields: Any) -> "Node":
        """Returns the same operation with other fields."""
        return Node(self.kind, {**self.fields, **fields}, self.inputs)


@dataclass(frozen=True)
class Supplied:
    """A table that a plan reads by name, and that every rank has a partition of."""

    name: str
    schema: Schema


def supplied(name: str, schema: Schema) -> Node:
    """Returns a leaf: the table that ranks know by this name."""
    return Node("Supplied", {"table": Supplied(name, schema)})


def label_of(name: str) -> str:
    """Returns the label by which a scan in a user's plan is known as a supplied table."""
    return _SUPPLIED + name


def read(lazy: object) -> tuple[Node, dict[str, "pl.DataFrame"]]:
    """Reads a plan.

    **Returns:** its last node, and the tables in memory that it holds, by the names of their leaves.

    **Raises:** `ArgumentError` for what is no `LazyFrame`, and for plans of a Polars that is not known.
    """
    if not isinstance(lazy, pl.LazyFrame):
        raise ArgumentError(f"lazy_frame is a {type(lazy).__qualname__}: expected a polars.LazyFrame, as df.lazy() is")
    return _read(lazy.serialize())


def read_bytes(data: bytes) -> Node:
    """Reads a plan without tables in memory. **Raises:** `ArgumentError` for plans of a Polars that is not known."""
    return _read(data)[0]


def _read(data: bytes) -> tuple[Node, dict[str, "pl.DataFrame"]]:
    return _Reader(msgpack.decode(memoryview(data)[_check_version(data) :])).run()


def write(node: Node, leaf: Callable[[Supplied], Fields]) -> bytes:
    """Returns a plan as `polars.LazyFrame.deserialize` reads it.

    **Arguments:** `leaf`: returns what is written for a supplied table.
    """
    plans: list[Any] = [{"value": None, "version": 0}]
    frames: list[Any] = [{"value": None, "version": 0}]
    places: dict[int, int] = {}

    def value_of(node: Node) -> Any:
        if node.kind == "Supplied":
            return leaf(node.fields["table"])
        hook = partial(_written, inputs=node.inputs, place=place, whole=value_of, frames=frames)
        return {node.kind: Raw(msgpack.encode(node.fields, enc_hook=hook))}

    def place(node: Node) -> Any:
        if id(node) not in places:
            plans.append({"value": value_of(node), "version": 1})
            places[id(node)] = len(plans) - 1
        return {"idx": places[id(node)], "version": 1}

    root = place(node)
    body = {"root": root, "dataframes": frames, "dsl_plans": plans}
    return pl.LazyFrame().serialize()[:_HEADER_BYTES] + msgpack.encode(body)


def topological(root: Node) -> list[Node]:
    """Returns all nodes of a plan, each behind its inputs."""
    seen: set[int] = set()
    order: list[Node] = []

    def visit(node: Node) -> None:
        if id(node) not in seen:
            seen.add(id(node))
            for source in node.inputs:
                visit(source)
            order.append(node)

    visit(root)
    return order


class Interned:
    """Nodes of which equal ones are the same, so that each is computed once."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[bytes, tuple[int, ...]], Node] = {}

    def __call__(self, node: Node) -> Node:
        key = (msgpack.encode([node.kind, node.fields], enc_hook=repr), tuple(map(id, node.inputs)))
        return self._nodes.setdefault(key, node)


class _Reader:
    def __init__(self, body: Mapping[str, Any]) -> None:
        self._root = body["root"]
        self._plans = [slot["value"] for slot in body["dsl_plans"]]
        self._tables = [slot["value"] for slot in body["dataframes"]]
        self._nodes: dict[int, Node] = {}
        self._interned = Interned()
        self._read: dict[str, pl.DataFrame] = {}

    def run(self) -> tuple[Node, dict[str, "pl.DataFrame"]]:
        return self._node(self._root), self._read

    def _node(self, ref: Mapping[str, int]) -> Node:
        index = ref["idx"]
        if index not in self._nodes:
            self._nodes[index] = self._interned(self._new(self._plans[index]))
        return self._nodes[index]

    def _new(self, value: Any) -> Node:
        ((kind, fields),) = value.items() if isinstance(value, dict) else ((value, {}),)
        if kind == "DataFrameScan":
            return self._table(fields["df"]["idx"])
        if kind == "PythonScan":
            label = fields["options"].get("explain_name") or ""
            if label.startswith(_SUPPLIED):
                alone = write(Node(kind, fields), lambda table: {})  # it has no inputs
                schema = pl.LazyFrame.deserialize(io.BytesIO(alone)).collect_schema()
                return supplied(label.removeprefix(_SUPPLIED), schema)
        inputs: list[Node] = []
        lists = {key: self._inside(fields[key], inputs) for key in _LISTS.get(kind, ())}
        others = {key: value for key, value in fields.items() if key not in lists} if lists else fields
        fields = {**self._with_inputs(others, inputs), **lists}
        if kind == "MapFunction" and "OpaquePython" in fields["function"]:
            opaque = fields["function"]["OpaquePython"]
            fields["function"] = {"OpaquePython": {**opaque, "function": _by_value(opaque["function"])}}
        if kind == "Cache":
            return inputs[0]  # a node that is used twice is computed once anyway
        return Node(kind, fields, tuple(inputs))

    def _with_inputs(self, value: Any, inputs: list[Node]) -> Any:
        if isinstance(value, dict):
            if value.keys() == {"idx", "version"}:
                inputs.append(self._node(value))
                return Input(len(inputs) - 1)
            return {
                key: InMemory(self._tables[part["idx"]]) if key in _IN_MEMORY else self._with_inputs(part, inputs)
                for key, part in value.items()
            }
        if isinstance(value, list) and not (value and isinstance(value[0], int)):
            return [self._with_inputs(part, inputs) for part in value]
        return value

    def _inside(self, value: Any, inputs: list[Node]) -> Any:
        """Returns what stands for inputs that are written within a list."""
        found: list[Any] = []
        for part in value:
            if isinstance(part, dict) and part.keys() == {"idx", "version"}:
                found.append(self._with_inputs(part, inputs))
            else:
                inputs.append(self._interned(self._new(part)))
                found.append(Input(len(inputs) - 1, is_inside=True))
        return found

    def _table(self, index: int) -> Node:
        name = f"memory-{index}"
        if name not in self._read:
            frame: Any = pl.read_ipc_stream(io.BytesIO(b"".join(map(bytes, self._tables[index]))))
            self._read[name] = frame
        return self._interned(supplied(name, self._read[name].schema))


def _by_value(function: Sequence[int]) -> Sequence[int]:
    """Returns a user's function as Polars writes it, but one of a script by value: ranks run another script.

    Polars writes how it is pickled, the version of Python, and the pickle; by value it writes only what has no name.
    """
    how, *version = function[:_PICKLE_BEGINS]
    pickled = bytes(function[_PICKLE_BEGINS:])
    if how != _BY_NAME or b"__main__" not in pickled:
        return function
    return [_BY_VALUE, *version, *cloudpickle.dumps(pickle.loads(pickled))]


def leaf_of(lazy: "pl.LazyFrame") -> Fields:
    """Returns what Polars writes for a plan that is one leaf."""
    data = lazy.serialize()
    body = msgpack.decode(memoryview(data)[_check_version(data) :])
    return body["dsl_plans"][body["root"]["idx"]]["value"]


def leaf_that_calls(function: object) -> Fields:
    """Returns what Polars writes for a plan that a Python function gives, which a plan that is read has by pickling."""
    pickled = [_BY_VALUE, *sys.version_info[1:3], *pickle.dumps(function)]
    return {"PipeWithSchema": {"input": [], "callback": pickled}}


def _written(
    value: Any,
    *,
    inputs: Sequence[Node],
    place: Callable[[Node], Any],
    whole: Callable[[Node], Any],
    frames: list[Any],
) -> Any:
    """Returns what Polars writes in place of an input, or of a table in memory."""
    if isinstance(value, Input):
        return (whole if value.is_inside else place)(inputs[value.index])
    if isinstance(value, InMemory):
        frames.append({"value": value.data, "version": 1})
        return {"idx": len(frames) - 1, "version": 1}
    raise TypeError(f"a {type(value).__qualname__} in a plan")


def _check_version(data: bytes) -> int:
    """Returns where the body begins."""
    schema = data[_HEADER_BYTES - 64 : _HEADER_BYTES]
    if not data.startswith(_MARK) or schema.decode("ascii", "replace") not in _VERSIONS:
        raise ArgumentError(
            f"polars is of version {pl.__version__}, whose plans are not known: expected one of "
            f"{', '.join(sorted(set(_VERSIONS.values())))}; install it with: pip install "
            f'"polars=={max(_VERSIONS.values())}.*"'
        )
    return _HEADER_BYTES
