"""What the architectures of Parallax would send for the variables of a plan: all-reduce, parameter servers, hybrid."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from braidax.parallel.plan.placements import Replicated, Rows, Served
from braidax.parallel.plan.planned.variable import PlannedAxis, PlannedVariable
from braidax.parallel.plan.strategy import in_words
from braidax.parallel.plan.text import paragraph, table

from .machine import in_time, scaled

ASSUMED_BYTES_PER_SECOND = 1.25e9
"""Of a link, each way, where no machine's figures are given: 10 Gbit/s."""
ASSUMED_WORKERS = 8
"""Where a plan knows of one only."""
SERVED_ID_BYTES = 8  # in a request: once to pull a row, and once to push its gradient
_SCALE_BYTES = 4  # of a row that travels as int8
_COMPARED = ("Hybrid", "ParameterServers")


class Workers(NamedTuple):
    """Who trains.

    **Fields:** `num`: of workers, each with a link of its own, and of servers. `devices`: that one has. `called`: what
    one is. `is_known`: or assumed.
    """

    num: int
    devices: int
    called: str
    is_known: bool


class Traffic(NamedTuple):
    """What goes over links in a step, by one architecture.

    **Fields:** bytes that a worker `sent` and `received`, and that the `busiest` server sends or receives, whichever is
    more.
    """

    architecture: str
    sent: float
    received: float
    busiest: float = 0.0

    @property
    def most(self) -> float:
        """The bytes of one way of the link that has most."""
        return max(self.sent, self.received, self.busiest)


ALL_REDUCE, SERVERS = "all-reduce of everything", "parameter servers"
HYBRID_SERVED, HYBRID_ROWS = "hybrid, tables on servers", "hybrid, rows on devices"


def compared(variables: Sequence[PlannedVariable], axes: Sequence[PlannedAxis], batch_axes: Sequence[str]) -> list[str]:
    """Returns lines that compare architectures, where a plan has chosen among them: a table, and which is least.

    Nothing is said of variables that are split along an axis otherwise, which no architecture here has, and of tables
    whose rows nobody has counted.
    """
    split = [one for v in variables for one in v.placements if not isinstance(one, Replicated | Rows | Served)]
    unknown = any(_is_table(one) and one.costs.num_rows is None for one in variables)
    is_asked = any((axis.strategy or "").split("(")[0] in _COMPARED for axis in axes)
    if split or unknown or not (is_asked or any(map(_is_table, variables))):
        return []
    workers, rates = workers_of(axes, batch_axes), [axis.bytes_per_second for axis in axes if axis.name in batch_axes]
    rate = min((one for one in rates if one is not None), default=ASSUMED_BYTES_PER_SECOND)
    found = traffic(variables, workers)
    bound = "≤ " if any(_is_table(one) and one.costs.alpha is None for one in variables) else ""
    rows: list[tuple[str, ...]] = [("architecture", f"a {workers.called} sends", "receives", "a server", "time")]
    for one in found:
        mark = "" if one.architecture == ALL_REDUCE else bound
        sizes = [f"{mark}{in_words(size)}" for size in (one.sent, one.received)]
        server = f"{mark}{in_words(one.busiest)}" if one.busiest else ""
        rows.append((one.architecture, *sizes, server, mark + in_time(one.most / rate)))
    assumed = "" if workers.is_known else ", which is assumed"
    assumed_rate = "" if any(rates) else ", which is assumed"
    told = (
        f"{workers.num} {workers.called}s and as many servers{assumed}; each has a link of {scaled(rate, 'B/s')} each "
        f"way{assumed_rate}"
    )
    return [
        *paragraph("architectures", told, indent=15),
        *table(rows, right=[1, 2, 3, 4]),
        *paragraph("least", _why(variables, found, workers, bound), indent=15),
    ]


def workers_of(axes: Sequence[PlannedAxis], batch_axes: Sequence[str]) -> Workers:
    """Returns who trains by a plan: its devices; with `ParameterServers` workers, each with all devices of the mesh."""
    count = math.prod(axis.size for axis in axes if axis.name in batch_axes)
    if any((axis.strategy or "").startswith("ParameterServers(") for axis in axes):
        return Workers(ASSUMED_WORKERS, count, "worker", is_known=False)
    return Workers(count if count > 1 else ASSUMED_WORKERS, 1, "device", is_known=count > 1)


def traffic(variables: Sequence[PlannedVariable], workers: Workers) -> list[Traffic]:
    """Counts what each architecture sends in a step (Parallax, EuroSys 2019, section 3; there servers share the links
    of workers, here they have their own).

    Of `N` workers and `N` servers, for `w` bytes of a variable whose gradient is whole, and a table of which a worker
    reads `u` rows of `r` bytes, `r'` while they travel to servers:

    - an all-reduce sends `2 w (N - 1) / N` each way; so do tables where everything is all-reduced;
    - parameter servers send a worker `w`, and get as much; of tables `u r'`, and get `u (16 + r')` with ids. The server
      that has a variable sends it to all: the busiest one `N` times what it has when variables are dealt out, the
      largest first, to who has least, and its part of tables;
    - of tables by rows, devices send one another what the plan says of them, about `u (4 + 2 r)`.

    What is frozen has no gradient.
    """
    dense, tables = [one for one in variables if not _is_table(one)], [one for one in variables if _is_table(one)]
    share = 2 * (workers.num - 1) / workers.num
    reduced = share * sum(one.num_bytes for one in dense if not one.frozen)
    whole = share * sum(one.num_bytes for one in tables)
    pulled, pushed, by_rows = 0.0, 0.0, 0.0
    for one in tables:
        rows = rows_of(one, workers)
        row_bytes = _row_bytes_on_wire(one)
        pulled += rows * row_bytes
        pushed += rows * (row_bytes + 2 * SERVED_ID_BYTES)
        by_rows += workers.devices * (one.costs.sent_bytes or 0)
    values = sum(one.num_bytes for one in dense)
    gradients = sum(one.num_bytes for one in dense if not one.frozen)
    largest = _largest_part([one.num_bytes for one in dense], workers.num)
    found = [
        Traffic(ALL_REDUCE, reduced + whole, reduced + whole),
        Traffic(SERVERS, pushed + gradients, pulled + values, workers.num * largest + pushed),
    ]
    if tables:
        found += [
            Traffic(HYBRID_SERVED, reduced + pushed, reduced + pulled, pushed),
            Traffic(HYBRID_ROWS, reduced + by_rows, reduced + by_rows),
        ]
    return found


def rows_of(variable: PlannedVariable, workers: Workers) -> float:
    """Returns how many rows of a table a worker reads in a step, at most or on average."""
    return min(workers.devices * (variable.costs.num_rows or 0), variable.shape[0])


def _is_table(variable: PlannedVariable) -> bool:
    return any(isinstance(one, Rows | Served) for one in variable.placements)


def _row_bytes(variable: PlannedVariable) -> int:
    return variable.num_bytes // max(1, variable.shape[0])


def _row_bytes_on_wire(variable: PlannedVariable) -> int:
    """Returns the bytes of a row on its way to a server, and back."""
    wire = next((one.wire for one in variable.placements if isinstance(one, Served)), None)
    if wire is None:
        return _row_bytes(variable)
    numbers = math.prod(variable.shape[1:])
    return numbers * jnp.dtype(wire).itemsize + (_SCALE_BYTES if wire == "int8" else 0)


def _largest_part(sizes: Sequence[int], count: int) -> int:
    """Returns what the server with most has, where variables are dealt out, the largest first, to who has least."""
    held = [0] * count
    for size in sorted(sizes, reverse=True):
        held[held.index(min(held))] += size
    return max(held)


def _why(variables: Sequence[PlannedVariable], found: Sequence[Traffic], workers: Workers, bound: str) -> str:
    """Says which architecture keeps the busiest link least busy, and why."""
    tables, least = [one for one in variables if _is_table(one)], min(found, key=lambda one: one.most)
    if not tables:
        return f"{least.architecture}: no variable is by rows, so that a hybrid is an all-reduce of everything"
    of_tables, of_all = (sum(one.num_bytes for one in some) for some in (tables, variables))
    read = sum(rows_of(one, workers) * _row_bytes(one) for one in tables)
    at_most = "at most " if bound else ""
    told = (
        f"{least.architecture}: {100 * of_tables / of_all:.4g} % of the variables' bytes are in tables by rows, "
        f"of which a {workers.called} reads {at_most}{100 * read / of_tables:.2g} % a step"
    )
    if least.architecture == SERVERS:
        return f"{told}; what is dense crosses a link once each way, and an all-reduce of it twice"
    if least.architecture in (HYBRID_SERVED, HYBRID_ROWS):
        return f"{told}; what is dense is all-reduced: no server sends it to all {workers.num} {workers.called}s"
    return told
