"""Meshes and specs as they are written on the command line."""

import jax
import pytest
import typer
from jax.sharding import PartitionSpec as P

from braidax.cli.machine import describe_mesh, make_mesh, parse_mesh, parse_spec
from braidax.errors import ArgumentError


@pytest.fixture(autouse=True)
def started() -> None:
    """JAX has its eight devices, whichever test is the first."""
    assert len(jax.devices()) == 8


def test_a_mesh_is_read() -> None:
    assert parse_mesh("data=4,model=2") == {"data": 4, "model": 2}
    assert parse_mesh(" data=1 ") == {"data": 1}


@pytest.mark.parametrize("text", ["", "data", "data=0", "data=-1", "data=two", "4=data", "data=2,data=2", "data=2,"])
def test_what_is_no_mesh_is_named(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"expected different axes .* such as data=4,model=2") as caught:
        parse_mesh(text)
    assert caught.value.format_message().startswith(f"Invalid value for --mesh: {text!r}: ")


def test_a_spec_is_read() -> None:
    assert parse_spec("data") == P("data")
    assert parse_spec("data+model,-") == P(("data", "model"), None)
    assert parse_spec("-,model") == P(None, "model")


@pytest.mark.parametrize("text", ["", "data,", "1", "data+", "a b"])
def test_what_is_no_spec_is_named(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected mesh axes per dim") as caught:
        parse_spec(text)
    assert caught.value.format_message().startswith(f"Invalid value for --spec: {text!r}: ")


def test_a_mesh_is_made_of_the_devices_there_are() -> None:
    mesh = make_mesh({"data": 2, "model": 2})
    assert dict(mesh.shape) == {"data": 2, "model": 2}
    assert list(mesh.devices.flat) == jax.devices()[:4]
    assert describe_mesh(mesh).startswith("4 virtual CPU devices as data=2 x model=2 on ")
    assert describe_mesh(make_mesh({"data": 1})) == "1 CPU device as data=1"


def test_without_a_choice_it_is_four_by_two() -> None:
    assert dict(make_mesh(None).shape) == {"data": 4, "model": 2}


def test_too_few_devices_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"--mesh data=64 asks for 64 devices, but there are 8 of platform 'cpu'"):
        make_mesh({"data": 64})
