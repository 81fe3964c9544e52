"""A table that has the rows that were seen, and what it is to say of them."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax import random

from braidax.parallel import Seen
from braidax.parallel.given.initial import Born
from braidax.parallel.rows import row_optimizer
from braidax.parallel.served.programs import TableForm, growing, rules_of_own, table_form
from braidax.program import Program, trace

ROWS, WIDTH, RATE = 200, 3, 0.5
FIRST = np.asarray(random.normal(random.key(4), (ROWS, WIDTH)))


def form_of(seen: Seen | None, optimizer: Any = None) -> TableForm:
    """Returns the form of a table that grows as `seen` says, or has all rows where it is `None`."""
    form, born = _whole(optimizer)
    return form if seen is None else growing(form, seen, born)


@functools.lru_cache(maxsize=16)
def _whole(optimizer: Any) -> tuple[TableForm, Program]:
    born = trace(lambda key: Born({"table": random.normal(key, (ROWS, WIDTH))}, {}, key), random.key(0))
    rules = rules_of_own(row_optimizer(optax.sgd(RATE)) if optimizer is None else optimizer)
    return table_form("table", jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32), born, rules), born


class Told:
    """What `Seen` says, row by row."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.rows, self.counts = seen, dict[int, tuple[np.ndarray, int]](), dict[int, tuple[int, int]]()

    def push(self, ids: Any, gradients: Any, step: int) -> None:
        for one, gradient in zip(ids.tolist(), gradients, strict=True):
            if one not in self.rows:
                count = self.counts.pop(one, (0, 0))[0] + 1
                if count < self.seen.admit_at:
                    self.counts[one] = (count, step)
                    continue
                self.rows[one] = (FIRST[one], step)
            self.rows[one] = (self.rows[one][0] - np.float32(RATE) * gradient, step)
        if self.seen.expire_after is not None:
            limit = step + 1 - self.seen.expire_after
            self.rows = {one: row for one, row in self.rows.items() if row[1] >= limit}
            self.counts = {one: count for one, count in self.counts.items() if count[1] >= limit}

    def pull(self) -> np.ndarray:
        rows = FIRST.copy()
        for one, (row, _) in self.rows.items():
            rows[one] = row
        return rows


def updates(count: int, seed: int = 0) -> Any:
    """Yields steps, ids and gradients, in which few ids are frequent."""
    numbers = np.random.default_rng(seed)
    for step in range(count):
        ids = np.unique(numbers.zipf(1.3, 12) % ROWS).astype(np.int64)
        yield step, ids, numbers.normal(size=(len(ids), WIDTH)).astype(np.float32)
