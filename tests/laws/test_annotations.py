"""Annotations: each can be checked at run time, and is, in every test."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest

from braidax.cli.tasks import make_task
from braidax.data.transforms.images.kernels import resize
from braidax.errors import import_extra
from tests.support import annotations
from tests.support.tree import modules


@pytest.fixture(autouse=True)
def every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks what other tests have called often before, too."""
    monkeypatch.setattr(annotations, "MOST_CALLS", math.inf)


def test_every_annotation_can_be_checked() -> None:
    for module in modules():
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    annotations.make_checks()
    assert annotations.unreadable == []


def test_annotations_are_checked() -> None:
    with pytest.raises(Exception, match="violates type hint <class 'str'>"):
        import_extra(3, "none", purpose="a test")  # pyright: ignore[reportArgumentType]


def test_shapes_are_checked_across_arguments() -> None:
    with pytest.raises(Exception, match="Expected type: <class 'UInt8\\[ndarray, 'm h2 w2 c'\\]'>"):
        resize(np.zeros((2, 4, 4, 3), np.uint8), np.zeros((2, 2, 2, 1), np.uint8))


def test_what_is_imported_for_type_checkers_only_is_not_checked_and_the_rest_is(tmp_path: Path) -> None:
    task = make_task(
        "digits", tmp_path / "out", path=None, preset=None, image_size=None
    )  # its annotation is such a name
    assert type(task).__name__ == "Task"
    with pytest.raises(Exception, match="violates type hint"):
        make_task(3, tmp_path / "out", path=None, preset=None, image_size=None)  # pyright: ignore[reportArgumentType]


def test_what_was_checked_often_is_not_checked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "MOST_CALLS", 0)
    with pytest.raises(AttributeError):
        import_extra(3, "none", purpose="a test")  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("unchecked")
def test_a_test_may_pass_what_annotations_forbid() -> None:
    with pytest.raises(AttributeError):
        import_extra(3, "none", purpose="a test")  # pyright: ignore[reportArgumentType]


def test_an_annotation_that_cannot_be_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "unreadable", [])

    def function(array: "np.ndarray[int, int]") -> None: ...  # pyright: ignore[reportInvalidTypeArguments]

    function.__annotations__["array"] = np.ndarray[int, int]  # pyright: ignore[reportInvalidTypeArguments]
    assert annotations.checked(function) is function
    assert len(annotations.unreadable) == 1
