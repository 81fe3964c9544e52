"""What servers begin with is what `init` makes, whether rows are made by id or all at once."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import random

from braidax.parallel.given.initial import Born
from braidax.parallel.rows import row_optimizer
from braidax.parallel.served.on_servers.shard import Shard
from braidax.parallel.served.programs import TableForm, rules_of_own, table_form
from braidax.program import trace

WIDTH = 5


def form_of(make: Any, num_rows: int) -> TableForm:
    born = trace(lambda key: Born({"a": random.normal(key, (3,)), "table": make(key)}, {}, key), random.key(0))
    rules = rules_of_own(row_optimizer(optax.sgd(0.5)))
    return table_form("table", jax.ShapeDtypeStruct((num_rows, WIDTH), np.float32), born, rules)


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("rows", ["by id", "at once"])
def test_first_rows(rows: str, num_servers: int) -> None:
    num_rows = 20_011

    def make(key: jax.Array) -> jax.Array:
        table = random.normal(key, (num_rows, WIDTH))
        return 0.1 * table if rows == "by id" else table / table.std(0)

    form = form_of(make, num_rows)
    assert bool(form.programs.rows) == (rows == "by id") != bool(form.programs.born)
    expected = np.asarray(jax.jit(make)(random.key(4)))
    for rank in range(num_servers):
        shard = Shard(form, rank, num_servers)
        shard.bear(np.asarray(random.key_data(random.key(4))))
        assert shard.values.tobytes() == expected[rank::num_servers].tobytes()
