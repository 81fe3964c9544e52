"""The error tree, and the line that installs what is missing."""

import copy
import inspect
import pickle
import re
import traceback

import pytest

from braidax import errors


def _all_errors() -> list[type]:
    return [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


def test_every_error_is_one_of_ours() -> None:
    assert all(issubclass(error, errors.BraidaxError) for error in _all_errors())


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [(errors.ArgumentError, ValueError), (errors.WaitTimeout, TimeoutError), (errors.MissingExtra, ImportError)],
)
def test_an_error_is_also_what_python_calls_it(ours: type, builtin: type) -> None:
    assert issubclass(ours, builtin)


def test_the_docstring_draws_the_whole_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[│├└─ ]*(\w+)(?: \((\w+)\))?", errors.__doc__.split("```")[1])
    names = {name: builtin for name, builtin in drawn if name[0].isupper()}
    for error in _all_errors():
        assert error.__name__ in names
        builtin = names[error.__name__]
        assert not builtin or any(parent.__name__ == builtin for parent in error.__mro__)


@pytest.mark.parametrize(
    "error",
    [
        errors.PeerLost("rank 2 (host b) is lost", 2, "b"),
        errors.PeerLost("process 1 has ended", 1),
        errors.CallFailed("rank 2 (host b): ValueError: no", 2, "b", "Traceback …\nValueError: no\n"),
        errors.CallFailed("process 1 failed", 1),
    ],
)
def test_what_went_wrong_in_another_process_is_the_same_after_a_journey(
    error: errors.PeerLost | errors.CallFailed,
) -> None:
    error.add_note("and more")
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
    again = type(error)(*error.args)
    assert (again.rank, again.host, str(again)) == (error.rank, error.host, str(error))


def test_the_traceback_of_another_process_is_shown_with_the_error() -> None:
    error = errors.CallFailed(
        "process 1 failed: ValueError: no", 1, traceback="Traceback of process 1\nValueError: no\n"
    )
    shown = "".join(traceback.format_exception(error))
    assert shown.endswith(
        "process 1 failed: ValueError: no\nThe traceback there:\nTraceback of process 1\nValueError: no\n\n"
    )
    assert not hasattr(errors.CallFailed("process 1 failed", 1), "__notes__")


def test_a_process_that_is_gone_and_a_call_that_raised_are_no_failures_of_one_kind() -> None:
    assert issubclass(errors.PeerLost, errors.CommError)
    assert not issubclass(errors.CallFailed, errors.CommError | errors.GangError)


def test_import_extra_returns_the_module() -> None:
    assert errors.import_extra("json.decoder", "none", purpose="a test").__name__ == "json.decoder"


def test_import_extra_names_purpose_module_and_install_line() -> None:
    with pytest.raises(errors.MissingExtra) as caught:
        errors.import_extra("module_that_is_not_there", "parquet", purpose="reading 'a.parquet'")
    message = str(caught.value)
    assert message.startswith("reading 'a.parquet' needs the module 'module_that_is_not_there'")
    assert message.endswith('pip install "braidax[parquet]"')
    assert isinstance(caught.value.__cause__, ImportError)
