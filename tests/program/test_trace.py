"""Tracing keeps the meaning and forgets the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.errors import ArgumentError, StateError
from braidax.program import Program, call_watched, compile_on, specs_of, trace


def test_a_program_takes_and_gives_what_the_function_does() -> None:
    def fn(tree: Any, scale: Any) -> Any:
        return {"out": tree["a"] * scale, "both": (tree["b"], 3.0)}

    program = trace(fn, {"a": np.arange(3.0, dtype=np.float32), "b": jnp.int32(2)}, 2.0)
    assert isinstance(program, Program)
    assert program.out_specs["out"].shape == (3,)
    out = program({"a": jnp.ones(3), "b": jnp.int32(5)}, jnp.float32(4.0))
    np.testing.assert_array_equal(out["out"], [4, 4, 4])
    assert (int(out["both"][0]), float(out["both"][1])) == (5, 3.0)
    gradient = jax.grad(lambda tree: program(tree, jnp.float32(4.0))["out"].sum(), allow_int=True)(
        {"a": jnp.ones(3), "b": jnp.int32(5)}
    )
    np.testing.assert_array_equal(gradient["a"], [4, 4, 4])


def test_a_program_refuses_what_it_was_not_traced_with() -> None:
    program = trace(lambda x: x + 1, jnp.ones(3))
    with pytest.raises(ArgumentError, match=r"arguments/0 is float32\[4\], expected float32\[3\]"):
        program(jnp.ones(4))


@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2])
def test_the_mesh_of_the_caller_is_not_seen(kind: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        seen.append(jax.sharding.get_abstract_mesh().empty)
        return x * 2

    with jax.set_mesh(mesh):
        trace(fn, jnp.ones(8))
    assert seen == [True]


def test_specs_have_the_dtypes_that_jax_will_hold() -> None:
    specs = specs_of({"wide": np.zeros(2), "long": np.zeros(2, np.int64), "number": 1, "key": jax.random.key(0)})
    assert {name: str(spec.dtype) for name, spec in specs.items()} == {
        "wide": "float32", "long": "int32", "number": "int32", "key": "key<fry>",
    }  # fmt: skip
    assert (specs["number"].weak_type, specs["wide"].weak_type) == (True, False)


def test_a_change_in_place_is_an_error_unless_it_may_be_returned() -> None:
    def change(tree: Any) -> Any:
        tree["x"] = tree["x"] + 1
        return tree

    tree: Any = {"x": 1}
    with pytest.raises(StateError, match="state/x was changed in place by change"):
        call_watched(lambda: change(tree), "change", {"state": tree})
    tree = {"x": object.__new__(Number)}
    tree["x"].value = 1
    assert call_watched(lambda: change(tree), "change", {"state": tree}, keeps=lambda result: result)["x"].value == 2


class Number:
    """Something that is never interned."""

    value: int

    def __add__(self, other: int) -> "Number":
        result = Number()
        result.value = self.value + other
        return result


def test_compile_on_runs_where_the_mesh_is() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    program = trace(lambda x: jnp.take(x, jnp.array([1, 0]), axis=1), jnp.ones((8, 2)))
    out = compile_on(mesh, program, in_shardings=(rows,), out_shardings=rows)(
        jax.device_put(jnp.arange(16.0).reshape(8, 2), rows)
    )
    assert out.sharding == rows
    np.testing.assert_array_equal(out, np.arange(16.0).reshape(8, 2)[:, ::-1])
