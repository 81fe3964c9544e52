"""Whether all who train have the same variables, and move them alike: servers have those of the first one."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax import export
from numpy.typing import NDArray

from braidax.comm import Communicator
from braidax.errors import ArgumentError
from braidax.parallel.served.on_servers.dense import DenseForm

Facts = dict[str, str]
"""What is compared of a model, by what it is called."""

_PLACE = re.compile(r'^#loc.*\n|[ ]loc\((?:[^()"]|"[^"]*"|\([^()]*\))*\)', re.MULTILINE)


def check_same_model(
    workers: Communicator | None,
    tables: Sequence[Mapping[str, Any]],
    programs: Mapping[str, NDArray[Any]],
    dense: Sequence[DenseForm],
    options: Mapping[str, Any],
) -> None:
    """Returns when all who train have called it with the same.

    Programs are compared as JAX has written them, and where these differ without the files and lines that they are
    from, which another host may have elsewhere.

    **Arguments:** `workers`: who train; None is one. `tables`, `programs`: as of `described`. `dense`: what each server
    has whole. `options`: of the strategy.

    **Raises:** `ArgumentError`, in all of them, with the first worker that differs from the first of all, and in what.
    """
    if workers is None:
        return
    named = _programs(tables, programs, dense)
    found = _differs(workers, _facts(tables, dense, options))
    if found is None and _differs(workers, {name: _digest(some) for name, some in named.items()}) is not None:
        found = _differs(workers, {name: _digest(map(plain, some)) for name, some in named.items()})
    if found is not None:
        worker, name, own, of_first = found
        told = f"{name} differs" if name in named else f"{name} is {own} there, and {of_first} on worker 0"
        raise ArgumentError(
            f"worker {worker} has another model than worker 0: {told}; expected all workers to give parallelize the "
            f"same model, optimizer and strategies"
        )


def _differs(workers: Communicator, own: Facts) -> tuple[int, str, str, str] | None:
    """Returns the first worker that differs, in what, and both; the same in all workers."""
    every: list[Facts] = [json.loads(bytes(one)) for one in workers.all_gather(json.dumps(own).encode())]
    nothing, first = "missing", every[0]
    for worker, facts in enumerate(every):
        for name in [*first, *(name for name in facts if name not in first)]:
            if (one := facts.get(name, nothing)) != (other := first.get(name, nothing)):
                return worker, name, one, other
    return None


def _facts(tables: Sequence[Mapping[str, Any]], dense: Sequence[DenseForm], options: Mapping[str, Any]) -> Facts:
    found: Facts = {}
    for one in tables:
        found[f"table {one['name']}"] = _form(one["dtype"], one["shape"])
        found[f"what is kept of {one['name']}"] = ", ".join(
            f"{name} {_form(kind, dims)}" for name, dims, kind in one["kept"]
        )
        found[f"how {one['name']} grows"] = repr(one["seen"])
    for part in dense:
        found |= {f"variable {one.name}": _form(one.dtype, one.shape) for one in part.carry}
    return found | {name: repr(value) for name, value in options.items()}


def _form(dtype: Any, shape: Iterable[int]) -> str:
    return f"{dtype}{[*shape]}"


def _programs(
    tables: Sequence[Mapping[str, Any]], programs: Mapping[str, NDArray[Any]], dense: Sequence[DenseForm]
) -> dict[str, list[bytes]]:
    """Returns programs by what they do."""
    found: dict[str, list[bytes]] = {}
    for number, table in enumerate(tables):
        own = [one.tobytes() for name, one in programs.items() if name.split("/")[0] == str(number)]
        found[f"how {table['name']} begins and moves"] = own
    for part in dense:
        found.setdefault("how variables begin and move", []).extend(part.programs)
    return found


def _digest(programs: Iterable[bytes]) -> str:
    every = hashlib.sha256()
    for one in programs:
        every.update(hashlib.sha256(one).digest())
    return every.hexdigest()


def plain(program: bytes) -> bytes:
    """Returns a program as text, without where it is from."""
    text = export.deserialize(bytearray(program)).mlir_module() if program else ""
    return _PLACE.sub("", text).encode()
