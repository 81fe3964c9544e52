"""The error tree, and the line that installs what is missing."""

import inspect
import re

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


def test_import_extra_returns_the_module() -> None:
    assert errors.import_extra("json.decoder", "none", purpose="a test").__name__ == "json.decoder"


def test_import_extra_names_purpose_module_and_install_line() -> None:
    with pytest.raises(errors.MissingExtra) as caught:
        errors.import_extra("module_that_is_not_there", "parquet", purpose="reading 'a.parquet'")
    message = str(caught.value)
    assert message.startswith("reading 'a.parquet' needs the module 'module_that_is_not_there'")
    assert message.endswith('pip install "braidax[parquet]"')
    assert isinstance(caught.value.__cause__, ImportError)
