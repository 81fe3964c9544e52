"""What prints may go; what changes a reference may not."""

from typing import Any

import jax
import numpy as np
from jax.ref import addupdate

from braidax.program import trace
from braidax.program.prune import without_prints


def test_without_prints_what_is_added_to_a_reference_stays() -> None:
    @jax.jit
    def printed(x: Any) -> None:
        jax.debug.print("{}", x)

    @jax.jit
    def changed(x: Any) -> Any:
        kept = jax.new_ref(x)
        printed(x)
        addupdate(kept, ..., np.float32(1))
        return kept[...]

    program = trace(lambda x: changed(x) * 2, np.float32(3))
    quiet = jax.make_jaxpr(lambda x: without_prints(program.closed, [x]))(np.float32(3))
    assert "debug_print" in str(program.closed)
    assert "debug_print" not in str(quiet)
    assert jax.jit(lambda x: without_prints(program.closed, [x]))(np.float32(3)) == [8]
