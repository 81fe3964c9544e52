"""What a compiled program sends: its collectives, and which of them have matrix products scheduled under them."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from .hlo import Computation, Instruction, Module, elements, num_bytes

Kind = Literal[
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
    "send",
]

_KINDS: tuple[Kind, ...] = get_args(Kind)
_WRAPPED = ("async-start", "call-start", "fusion-start", "custom-call-start")
_PASSED_ON = ("get-tuple-element", "bitcast", "copy", "tuple", "opt-barrier")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]<=|mesh\[([^\]]*)\].*?\{('[^}]*)\}|(\{\}))")
_AXES = re.compile(r"'([^']*)'=(\d+)")
_OVER = re.compile(r"'([^']*)'(?::\(\d+\)(\d+))?")  # a part of an axis tells its size
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CHAIN = re.compile(r'(?:channel_id=|chain_id="?)(\d+)')


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    **Fields:** `kind`. `result_bytes`: of its result on a device. `group_size`: how many devices take part together.
    `times`: how often a run of the program runs it, `in_unknown_loop`: where loops of which nobody knows how often they
    turn are counted once. `is_async`: whether other work may be done until it ends. `is_covered`: whether matrices are
    multiplied meanwhile. `op_name`: where in the traced program it comes from.
    """

    kind: Kind
    result_bytes: int
    group_size: int
    times: int
    in_unknown_loop: bool
    is_async: bool = False
    is_covered: bool = False
    op_name: str = field(default="", compare=False)

    @property
    def sent_bytes(self) -> float:
        """What a device sends for it once: along a ring, or to everybody."""
        others, count = self.group_size - 1, self.group_size
        factor = {
            "all-reduce": 2 * others / count,
            "reduce-scatter": float(others),
            "all-gather": others / count,
            "all-to-all": others / count,
        }
        return self.result_bytes * factor.get(self.kind, 1.0)


def collectives_of(text: str) -> tuple[Collective, ...]:
    """Reads the collectives of a compiled program, each with the number of times that it takes place.

    Of a program for CPU all are synchronous. For GPUs and TPUs the order of the text is that of the schedule.

    **Arguments:** `text`: `compiled.as_text()`, whose entry has `num_partitions` devices.

    **Raises:** `ValueError` where the text has no entry, or groups of devices in a form that is not known.
    """
    module = Module(text)
    return tuple(_within(module, module.entry))


def total_sent(collectives: Iterable[Collective]) -> Mapping[str, float]:
    """Returns the bytes that a device sends in a run, by kind. What is in loops of unknown length is left out."""
    total: dict[str, float] = {}
    for one in collectives:
        if not one.in_unknown_loop:
            total[one.kind] = total.get(one.kind, 0.0) + one.times * one.sent_bytes
    return total


def exposed_part(collectives: Iterable[Collective]) -> float:
    """Returns which part of all bytes is sent while no matrices are multiplied; 0 where nothing is sent."""
    found = [*collectives]
    total = sum(total_sent(found).values())
    return sum(total_sent(one for one in found if not one.is_covered).values()) / total if total else 0.0


class _Begun(NamedTuple):
    """A collective where it begins. **Fields:** `shape`: of its result. `told`: the instruction that tells groups."""

    kind: Kind
    shape: str
    told: Instruction
    is_async: bool


def _within(module: Module, computation: Computation) -> Iterator[Collective]:
    for at, one in enumerate(computation.instructions):
        if _goes_on(module, one):
            continue
        if begun := _begun(module, one):
            yield _collective(module, computation, at, begun)
        else:
            is_loop = one.opcode == "while"
            turns = module.turns(one, computation) if is_loop else 1
            for called in module.called(one):
                for inner in _within(module, called):
                    yield replace(
                        inner,
                        times=inner.times * (turns or 1),
                        in_unknown_loop=inner.in_unknown_loop or turns is None,
                    )


def _collective(module: Module, computation: Computation, at: int, begun: _Begun) -> Collective:
    group_size = _group_size(begun.told.attributes, module.num_devices)
    size = num_bytes(begun.shape)
    if begun.kind == "reduce-scatter" and begun.told.opcode == "all-reduce":
        size //= group_size  # the slice of it is taken in the same fusion
    between = _between(module, computation, at) if begun.is_async else None
    covered = between is not None and any(module.multiplies(one) for one in between)
    told = _OP_NAME.search(begun.told.attributes) or _OP_NAME.search(computation.instructions[at].attributes)
    return Collective(begun.kind, size, group_size, 1, False, begun.is_async, covered, told[1] if told else "")


def _begun(module: Module, one: Instruction) -> _Begun | None:
    """Returns the collective that an instruction begins, or does alone; None where it does neither."""
    for kind in _KINDS:
        if one.opcode == kind:
            shape = elements(one.shape)[0] if kind == "send" else one.shape
            return _Begun(kind, shape, one, kind == "send")
        if one.opcode == f"{kind}-start":
            shape = one.shape if kind == "all-reduce" else elements(one.shape)[1]
            return _Begun(kind, shape, one, '"is_sync":true' not in one.attributes)
    inner = _inner(module, one) if one.opcode in (*_WRAPPED, "fusion") else None
    if inner is None:
        return None
    kind: Kind = inner.opcode  # pyright: ignore[reportAssignmentType]
    if one.opcode in _WRAPPED or _piece(module, one) == "Start":
        return _Begun(kind, inner.shape, inner, True)
    runs = [x.opcode for within in module.called(one) for x in within.instructions]
    return _Begun(
        "reduce-scatter" if kind == "all-reduce" and "dynamic-slice" in runs else kind, inner.shape, inner, False
    )


def _goes_on(module: Module, one: Instruction) -> bool:
    """Whether an instruction goes on with a collective that another one began."""
    return one.opcode.endswith(("-done", "-update")) or _piece(module, one) in ("Step", "Done")


def _piece(module: Module, one: Instruction) -> Literal["Start", "Step", "Done"] | None:
    """Which piece a fusion is of a chain that does one collective among other work; None for no piece of any."""
    inner = _inner(module, one) if one.opcode == "fusion" else None
    if inner is None:
        return None
    told = " ".join(x.attributes for within in module.called(one) for x in within.instructions)
    if '"AsyncCollectiveStart"' in told:
        return "Start"
    if '"AsyncCollectiveDone"' in told:
        return "Done"
    return "Step" if "async_collective_fusion_config" in inner.attributes else None


def _inner(module: Module, one: Instruction) -> Instruction | None:
    """The collective in what an instruction runs."""
    for within in module.called(one):
        for inner in within.instructions:
            if inner.opcode in _KINDS:
                return inner
            if inner.opcode in ("fusion", "call") and (found := _inner(module, inner)):
                return found
    return None


def _between(module: Module, computation: Computation, at: int) -> list[Instruction] | None:
    """Returns what is scheduled between the start of a collective and its end; None where no end is found."""
    start = computation.instructions[at]
    if start.opcode == "fusion":
        return _until_last_piece(module, computation, at)
    return _until_done(module, computation, at + 1, {start.name}, in_next_turn=False)


def _until_last_piece(module: Module, computation: Computation, at: int) -> list[Instruction] | None:
    """The same, for a chain of fusions; its last one may be in the next turn of a loop."""
    chain = _chain(module, computation.instructions[at])
    ends = [
        index
        for index, one in enumerate(computation.instructions)
        if _piece(module, one) == "Done" and _chain(module, one) == chain
    ]
    if behind := [index for index in ends if index > at]:
        return [*computation.instructions[at + 1 : behind[0]]]
    return [*computation.instructions[at + 1 :], *computation.instructions[: ends[0]]] if ends else None


def _chain(module: Module, one: Instruction) -> tuple[str, ...]:
    inner = _inner(module, one)
    return () if inner is None else (inner.opcode, *_CHAIN.findall(inner.attributes))


def _until_done(
    module: Module, computation: Computation, first: int, given: Set[str], *, in_next_turn: bool
) -> list[Instruction] | None:
    """The same, following values. **Arguments:** `given`: names of what was begun, from the instruction `first` on."""
    passed, names = list[Instruction](), {*given}
    for one in computation.instructions[first:]:
        used = [at for at, name in enumerate(one.operands) if name in names]
        if used and one.opcode.endswith("-done"):
            return passed
        if used and one.is_root and one.opcode == "tuple" and not in_next_turn:
            return _joined(passed, _from_carried(module, computation, used[0]))
        if one.opcode == "while" and (carried := _carried(computation, one, names)):
            return _joined(passed, _from_carried(module, module.body(one), carried[0]))
        if used and (one.opcode.endswith("-update") or (one.opcode in _PASSED_ON and len(used) == len(one.operands))):
            names.add(one.name)
        passed.append(one)
    return None


def _joined(first: list[Instruction], second: list[Instruction] | None) -> list[Instruction] | None:
    return None if second is None else [*first, *second]


def _carried(computation: Computation, loop: Instruction, names: Set[str]) -> list[int]:
    """Which elements of what a loop is given are among these."""
    given = computation.named(loop.operands[0])
    return [at for at, name in enumerate(given.operands) if name in names] if given else []


def _from_carried(module: Module, body: Computation, index: int) -> list[Instruction] | None:
    """What a loop does in a turn before that ends which it has carried over."""
    given = {
        one.name
        for one in body.instructions
        if one.opcode == "get-tuple-element" and one.index == index and _is_parameter(body, one.operands[0])
    }
    return _until_done(module, body, 0, given, in_next_turn=True)


def _is_parameter(body: Computation, name: str) -> bool:
    found = body.named(name)
    return found is not None and found.opcode == "parameter"


def _group_size(attributes: str, num_devices: int) -> int:
    found = _GROUPS.search(attributes)
    if found is None:
        if "replica_groups=" in attributes:
            told = attributes[attributes.index("replica_groups=") :][:60]
            raise ValueError(f"{told!r} is no known form, expected {{{{0,1}}}}, [2,4]<=[8] or mesh['a'=8] {{'a'}}")
        return num_devices
    devices, size, mesh, axes, every = found.groups()
    if every:
        return num_devices
    if mesh is not None:
        sizes = dict(_AXES.findall(mesh))
        return math.prod(int(size or sizes[name]) for name, size in _OVER.findall(axes))
    return len(devices.split(",")) if devices else int(size)
