"""Specs: what a user writes becomes one sharding per leaf, or an error that names what is wrong."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.data.sharding.specs import batch_parts, resolve_shardings, shared_batch_parts
from braidax.errors import SpecError


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"))


def leaf(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


BATCH = {"image": leaf(8, 6, 4), "label": leaf(8, dtype=np.int32), "more": (leaf(8, 2), leaf(8, 2))}


def test_one_spec_holds_for_all_leaves(mesh: Mesh) -> None:
    assert resolve_shardings(BATCH, mesh, P("data")) == [NamedSharding(mesh, P("data"))] * 4


def test_a_spec_holds_for_all_leaves_below_it(mesh: Mesh) -> None:
    specs = {"image": P("data", "model"), "label": P(), "more": P(("data", "model"))}
    got = [sharding.spec for sharding in resolve_shardings(BATCH, mesh, specs)]
    assert got == [P("data", "model"), P(), P(("data", "model")), P(("data", "model"))]


def test_a_named_sharding_keeps_its_own_mesh(mesh: Mesh) -> None:
    other = Mesh(np.array(jax.devices()[5:1:-1]), ("stage",), axis_types=(AxisType.Auto,))
    own = NamedSharding(other, P("stage"))
    specs = {"image": own, "label": P("model"), "more": (own, P())}
    got = resolve_shardings(BATCH, mesh, specs)
    assert got == [own, NamedSharding(mesh, P("model")), own, NamedSharding(mesh, P())]


def test_no_mesh_is_needed_where_every_leaf_has_its_own(mesh: Mesh) -> None:
    own = NamedSharding(mesh, P("data"))
    assert resolve_shardings(BATCH, None, own) == [own] * 4


def test_a_tree_of_one_leaf_is_a_batch(mesh: Mesh) -> None:
    assert resolve_shardings(leaf(8), mesh, P("model")) == [NamedSharding(mesh, P("model"))]


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (P(), 1),
        (P(None, "data"), 1),
        (P("data"), 4),
        (P("model", "data"), 2),
        (P(("data", "model")), 8),
        (P(("model",)), 2),
        (P("unknown"), 1),
        (None, 1),
    ],
)
def test_parts_of_the_batch_dim(mesh: Mesh, spec: Any, parts: int) -> None:
    assert batch_parts(spec, mesh) == parts
    if isinstance(spec, P) and "unknown" not in spec:
        assert batch_parts(NamedSharding(mesh, spec), None) == parts
    assert batch_parts(spec, None) == 1


def test_a_batch_must_suit_every_leaf() -> None:
    six = jax.make_mesh((3, 2), ("three", "two"), devices=jax.devices()[:6])
    four = jax.make_mesh((4,), ("four",), devices=jax.devices()[:4])
    specs = {"a": P("three"), "b": P("two", "three"), "c": [NamedSharding(four, P("four")), P()]}
    assert shared_batch_parts(six, specs) == 12
    assert shared_batch_parts(six, P()) == 1
    assert shared_batch_parts(None, NamedSharding(four, P("four"))) == 4


def refused(batch: Any, mesh: Mesh | None, specs: Any) -> str:
    with pytest.raises(SpecError) as caught:
        resolve_shardings(batch, mesh, specs)
    return str(caught.value)


def test_an_axis_that_the_mesh_lacks(mesh: Mesh) -> None:
    message = refused(BATCH, mesh, {**BATCH, "image": P("data", None, "seq"), "label": P(), "more": P()})
    assert "specs['image']" in message
    assert "names the axis 'seq' for dim 2" in message
    assert "['data', 'model']" in message


@pytest.mark.parametrize("spec", [P("data", "data"), P(("data", "data")), P("data", ("model", "data"))])
def test_an_axis_used_twice(mesh: Mesh, spec: P) -> None:
    message = refused(leaf(16, 16), mesh, spec)
    assert str(spec) in message
    assert "names the axis 'data' twice" in message


def test_more_entries_than_dims(mesh: Mesh) -> None:
    for spec in (P("data", None), NamedSharding(mesh, P("data", None))):
        message = refused(BATCH, mesh, {"image": P(), "label": spec, "more": P()})
        assert "specs['label']" in message
        assert "2 entries, but the leaf has the 1 dims [8]" in message


@pytest.mark.parametrize(
    ("batch_size", "spec", "facts"),
    [
        (10, P("data"), ("batch_size=10 is not divisible by 4", "(data=4)", "use 8 or 12")),
        (12, P(("data", "model")), ("batch_size=12 is not divisible by 8", "(data=4 x model=2)", "use 8 or 16")),
        (3, P("data"), ("batch_size=3 is not divisible by 4", "; use 4")),
    ],
)
def test_a_batch_that_does_not_divide(mesh: Mesh, batch_size: int, spec: P, facts: tuple[str, ...]) -> None:
    message = refused({"x": leaf(batch_size)}, mesh, spec)
    for fact in facts:
        assert fact in message
    assert " or " not in message.split("use ")[1] or batch_size > 4
    assert message == refused({"x": leaf(batch_size)}, None, NamedSharding(mesh, spec))


def test_another_dim_that_does_not_divide(mesh: Mesh) -> None:
    message = refused({"x": leaf(8, 4, 7)}, mesh, P("data", None, "model"))
    assert "dim 2 of leaf ['x'], of size 7, is not divisible by 2" in message
    assert "specs['x']" in message
    assert "split another dim, or pad it" in message


@pytest.mark.parametrize("spec", ["data", None, 3])
def test_what_is_no_spec(mesh: Mesh, spec: Any) -> None:
    message = refused(BATCH, mesh, {"image": P(), "label": spec, "more": P()})
    assert f"specs['label']={spec!r} is neither a PartitionSpec nor a NamedSharding" in message


@pytest.mark.parametrize(
    "specs",
    [
        {"image": P(), "label": P()},
        {"image": P(), "label": P(), "more": P(), "extra": P()},
        {"image": P(), "label": P(), "more": (P(), P(), P())},
        [P(), P(), P()],
        {"image": {"deeper": P()}, "label": P(), "more": P()},
    ],
)
def test_a_tree_that_does_not_fit(mesh: Mesh, specs: Any) -> None:
    message = refused(BATCH, mesh, specs)
    assert message.startswith(f"specs={specs!r} does not fit the batch")
    for name in ("['image']", "['label']", "['more'][0]", "['more'][1]"):
        assert name in message


def test_a_partition_spec_without_a_mesh() -> None:
    message = refused(BATCH, None, P("data"))
    assert "specs['image']=P('data',) is a PartitionSpec, but mesh=None" in message


def test_a_sharding_on_an_abstract_mesh(mesh: Mesh) -> None:
    message = refused({"x": leaf(8)}, mesh, NamedSharding(mesh.abstract_mesh, P("data")))
    assert "specs['x']" in message
    assert "abstract mesh" in message


def test_what_is_not_a_whole_value_or_not_decided(mesh: Mesh) -> None:
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)
    assert "dim 1 unconstrained" in refused(leaf(8, 2), auto, P("data", P.UNCONSTRAINED))
    assert "dim 0 unconstrained" in refused(leaf(8, 2), None, NamedSharding(auto, P(P.UNCONSTRAINED)))
    assert "unreduced" in refused(leaf(8, 2), mesh, P("data", unreduced=frozenset({"model"})))
