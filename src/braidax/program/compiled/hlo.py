"""The text of a compiled program, read: its computations, and their instructions in the order that they run in."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_BEGIN = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|branch_computations|called_computations|(?:true|false)_computation)"
    r"=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)"
)
_NUM_DEVICES = re.compile(r"num_partitions=(\d+)")
_TRIPS = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_INDEX = re.compile(r"index=(\d+)")
_SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]+\d+)(\w*)\[([\d,]*)\]")
_PRODUCTS = ("dot", "convolution", "scaled-dot", "ragged-dot")
_LIBRARIES = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|conv|fmha|dot)', re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    **Fields:** `shape`, `operands` and `attributes` as in the text; `called`: computations that it runs; `literal`: of
    a constant, else "".
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    called: tuple[str, ...]
    literal: str
    is_root: bool

    @property
    def index(self) -> int:
        """Which element a `get-tuple-element` takes."""
        found = _INDEX.search(self.attributes)
        return int(found[1]) if found else 0

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices or convolves, by itself."""
        return self.opcode in _PRODUCTS or (self.opcode == "custom-call" and bool(_LIBRARIES.search(self.attributes)))


@dataclass(frozen=True)
class Computation:
    """Instructions, in the order that they are scheduled in."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def places(self) -> Mapping[str, int]:
        """Which instruction has a name."""
        return {one.name: at for at, one in enumerate(self.instructions)}

    @functools.cached_property
    def root(self) -> Instruction:
        """The one whose result is that of the computation."""
        return next((one for one in self.instructions if one.is_root), self.instructions[-1])

    def named(self, name: str) -> Instruction | None:
        """Returns the instruction of that name; None for one of elsewhere."""
        at = self.places.get(name)
        return None if at is None else self.instructions[at]

    def source(self, name: str) -> Instruction | None:
        """The same, of what copies are made of."""
        one = self.named(name)
        while one is not None and one.opcode in ("copy", "bitcast", "convert"):
            one = self.named(one.operands[0])
        return one


class Module:
    """A compiled program.

    **Arguments:** `text`: what `compiled.as_text()` returns. **Raises:** `ValueError` where it has no entry.
    """

    def __init__(self, text: str) -> None:
        found = _NUM_DEVICES.search(text)
        self.num_devices = int(found[1]) if found else 1
        self.computations: dict[str, Computation] = {}
        entry, name, lines = "", "", list[Instruction]()
        for line in text.splitlines():
            if begin := _BEGIN.match(line):
                name, lines = begin[2], []
                entry = name if begin[1] else entry
            elif line.startswith("}") and name:
                self.computations[name] = Computation(name, tuple(lines))
                name = ""
            elif name and (one := _instruction(line)):
                lines.append(one)
        if not entry:
            raise ValueError(f"a program's text begins {text[:80]!r}, expected one with an ENTRY computation")
        self.entry = self.computations[entry]
        self._products: dict[str, bool] = {}

    def called(self, instruction: Instruction) -> Iterator[Computation]:
        """Yields the computations that an instruction runs."""
        for name in instruction.called:
            yield self.computations[name]

    def multiplies(self, instruction: Instruction) -> bool:
        """Whether matrices are multiplied in an instruction, or in what it runs."""
        return instruction.is_product or any(self._has_product(one) for one in self.called(instruction))

    def body(self, loop: Instruction) -> Computation:
        """What a `while` repeats."""
        return self._role(loop, "body")

    def turns(self, loop: Instruction, around: Computation) -> int | None:
        """Returns how often a `while` turns, as it says or its condition; None where that is known at run time only.

        **Arguments:** `around`: the computation that it is in.
        """
        if found := _TRIPS.search(loop.attributes):
            return int(found[1])
        return _counted(self._role(loop, "condition"), self.body(loop), around.source(loop.operands[0]), around)

    def _role(self, loop: Instruction, role: str) -> Computation:
        found = re.search(rf"\b{role}=%?([\w.\-]+)", loop.attributes)
        if found is None:
            raise ValueError(f"{loop.name} has no {role}, expected one of a while")
        return self.computations[found[1]]

    def _has_product(self, computation: Computation) -> bool:
        if computation.name not in self._products:
            self._products[computation.name] = any(self.multiplies(one) for one in computation.instructions)
        return self._products[computation.name]


def num_bytes(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple, by its shape as in the text."""
    return sum(
        math.ceil(_bits(kind) * math.prod(int(dim) for dim in dims.split(",") if dim) / 8)
        for kind, _, dims in _SHAPE.findall(shape)
    )


def elements(shape: str) -> list[str]:
    """Returns the shapes of the elements of a tuple's shape; that of an array alone."""
    if not shape.startswith("("):
        return [shape]
    found, depth, start = list[str](), 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 or (depth == 1 and letter == ","):
            found.append(shape[start:at].strip())
            start = at + 1
    return found


def _bits(kind: str) -> int:
    if kind in ("token", "opaque"):
        return 0
    return 8 if kind == "pred" else int(re.sub(r"\D", "", kind))


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    rest = re.sub(r"/\*.*?\*/", "", found[3])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, opcode = rest[:end], _OPCODE.match(rest, end)
    if opcode is None:
        return None
    last = _closing(rest, opcode.end() - 1)
    inside, attributes = rest[opcode.end() : last], rest[last + 1 :]
    called = [name.strip("% ") for names in _CALLED.findall(attributes) for name in names.split(",")]
    literal = inside if opcode[1] == "constant" else ""
    operands = () if literal else tuple(_NAME.findall(inside))
    return Instruction(found[2], shape, opcode[1], operands, attributes, tuple(called), literal, bool(found[1]))


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    raise ValueError(f"{text[start : start + 80]!r} has no closing bracket, expected a whole line of HLO")


def _counted(condition: Computation, body: Computation, carried: Instruction | None, around: Computation) -> int | None:
    """How often a loop turns that counts up from a constant to another one. **Arguments:** `carried`: its operand."""
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, last = condition.source(compare.operands[0]), _number(condition, compare.operands[1])
    if counter is None or counter.opcode != "get-tuple-element" or last is None:
        return None
    if carried is None or carried.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    first, after = _number(around, carried.operands[counter.index]), body.source(body.root.operands[counter.index])
    if first is None or after is None or after.opcode != "add":
        return None
    counted, step = body.source(after.operands[0]), _number(body, after.operands[1])
    if counted is None or counted.opcode != "get-tuple-element" or counted.index != counter.index or not step:
        return None
    return max(0, -(-(last - first) // step)) if step > 0 else None


def _number(computation: Computation, name: str) -> int | None:
    one = computation.source(name)
    return int(one.literal) if one is not None and re.fullmatch(r"-?\d+", one.literal) else None
