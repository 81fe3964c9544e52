"""What servers are told of tables when they are made."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.plan.placements import Seen
from braidax.parallel.served.files.disk_rows import OnDisk, disk_bytes, shares
from braidax.parallel.served.programs import KeptForm, Programs, TableForm


def described(forms: Mapping[str, TableForm]) -> tuple[list[dict[str, Any]], dict[str, NDArray[np.uint8]]]:
    """Returns forms as a request to make them has them: fields, and programs by number."""
    fields: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[np.uint8]] = {}
    for number, form in enumerate(forms.values()):
        kept = [[one.name, list(one.shape), one.dtype] for one in form.kept]
        plain = {one: getattr(form, one) for one in ("name", "num_shared", "adagrad")}
        plain["seen"] = None if form.seen is None else dataclasses.asdict(form.seen)
        plain |= {"shape": list(form.shape), "dtype": form.dtype, "joins": list(form.joins), "kept": kept}
        fields.append(plain)
        for name, program in form.programs._asdict().items():
            arrays[f"{number}/{name}"] = np.frombuffer(program, np.uint8)
    return fields, arrays


def forms_from(tables: Sequence[Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]]) -> Iterator[TableForm]:
    """Undoes `described`."""
    for number, fields in enumerate(tables):
        programs = Programs(*(arrays[f"{number}/{one}"].tobytes() for one in Programs._fields))
        kept = tuple(KeptForm(name, tuple(shape), dtype) for name, shape, dtype in fields["kept"])
        seen = None if fields["seen"] is None else Seen(**fields["seen"])
        spec = jax.ShapeDtypeStruct(tuple(fields["shape"]), jax.numpy.dtype(fields["dtype"]))
        adagrad = None if fields["adagrad"] is None else (float(fields["adagrad"][0]), float(fields["adagrad"][1]))
        joins = tuple(fields["joins"])
        yield TableForm(fields["name"], spec, kept, int(fields["num_shared"]), joins, programs, adagrad, seen)


def disks_of(told: Any, forms: Sequence[TableForm], part: int, parts: int) -> list[OnDisk | None]:
    """Returns where the rows of tables are, and the memory that each gets. **Arguments:** `told`: a folder and bytes of
    memory for a part of all tables, as a message says; None is memory for all rows. **Raises:** `ArgumentError`."""
    if told is None:
        return [None] * len(forms)
    match told:
        case [str(folder), int(memory_bytes)]:
            sizes = [disk_bytes(form.most_rows(part, parts), form.of_row) for form in forms]
            return [OnDisk(folder, share) for share in shares(memory_bytes, sizes)]
        case _:
            raise ArgumentError(f"disk={told!r}: expected a folder, and the bytes of memory for some of its rows")
