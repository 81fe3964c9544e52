"""A server of a table in this process, asked as workers ask it."""

import functools
from typing import Any

import jax
import numpy as np
import optax

from braidax.parallel.given.initial import Born
from braidax.parallel.rows import row_adagrad, row_optimizer
from braidax.parallel.served.on_servers.server import TableServer
from braidax.parallel.served.on_servers.told import described
from braidax.parallel.served.programs import TableForm, rules_of_own, table_form
from braidax.parallel.served.wire import packed, unpacked
from braidax.program import trace

ROWS, WIDTH = 11, 3
OPTIMIZERS = {
    "sgd": row_optimizer(optax.sgd(0.5)),
    "adam": row_optimizer(optax.adam(0.1)),
    "row_adagrad": row_adagrad(0.1),
}


@functools.cache
def form_of(optimizer: Any) -> TableForm:
    """Returns the form of a table by an optimizer of rows."""
    born = trace(lambda key: Born({"table": jax.random.normal(key, (ROWS, WIDTH))}, {}, key), jax.random.key(0))
    return table_form("table", jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32), born, rules_of_own(optimizer))


def ask(server: TableServer, kind: str, fields: dict[str, Any], arrays: Any = None, *, rank: int = 9) -> Any:
    """Sends a message, as `rank`. **Returns:** the answer, unpacked."""
    return unpacked(server.handle(rank, packed(kind, {"run": "this", **fields}, arrays)))


def made(rank: int = 0, size: int = 1, *, optimizer: str = "sgd", num_workers: int = 1) -> TableServer:
    """Returns a server that has its part of the table."""
    server, fields_and_programs = (
        TableServer(rank, size, num_workers),
        described({"table": form_of(OPTIMIZERS[optimizer])}),
    )
    fields, programs = fields_and_programs
    ask(server, "make", {"tables": fields}, programs)
    ask(server, "bear", {}, {"key": np.asarray(jax.random.key_data(jax.random.key(4)))})
    return server


def rows_of(server: TableServer) -> np.ndarray:
    """Returns all rows of a server that is the only one."""
    found = ask(server, "read", {"table": "table", "start": 0, "stop": ROWS})
    return found.arrays["values"].copy()


def push(server: TableServer, ids: Any, gradients: Any, step: int, **more: Any) -> Any:
    """Pushes gradients of ids. **Returns:** the answer."""
    fields = {"tables": ["table"], "num_numbers": [0], "staged": False, "step": step}
    arrays = {"0/ids": np.asarray(ids, np.int64), "0/gradients": np.asarray(gradients, np.float32)}
    return ask(server, "push", fields, arrays, **more)
