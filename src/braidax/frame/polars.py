"""Polars, which computes every piece of a plan: an extra, imported here alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from braidax.errors import import_extra
from braidax.extras import import_msgspec

_PURPOSE = "a frame"

if TYPE_CHECKING:
    import polars as pl
    from polars import Schema
else:
    pl = import_extra("polars", "frame", purpose=_PURPOSE)
    Schema = Mapping  # what it is; its own annotations cannot be checked at run time

msgpack: Any = import_msgspec(purpose=_PURPOSE).msgpack
Raw: Any = import_msgspec(purpose=_PURPOSE).Raw
register_io_source: Any = import_extra("polars.io.plugins", "frame", purpose=_PURPOSE).register_io_source

__all__ = ["Raw", "Schema", "msgpack", "pl", "register_io_source"]
