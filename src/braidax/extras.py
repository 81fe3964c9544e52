"""Optional dependencies that several rooms use: each is imported here alone."""

from typing import Any

from braidax.errors import import_extra


def import_pyarrow(*, purpose: str) -> Any:
    """Returns `pyarrow`. **Arguments:** `purpose`: as `import_extra`. **Raises:** `MissingExtra`."""
    return import_extra("pyarrow", "arrow", purpose=purpose)


def import_pyarrow_csv(*, purpose: str) -> Any:
    """Returns `pyarrow.csv`. **Arguments:** `purpose`: as `import_extra`. **Raises:** `MissingExtra`."""
    return import_extra("pyarrow.csv", "arrow", purpose=purpose)


def import_pyarrow_ipc(*, purpose: str) -> Any:
    """Returns `pyarrow.ipc`. **Arguments:** `purpose`: as `import_extra`. **Raises:** `MissingExtra`."""
    return import_extra("pyarrow.ipc", "arrow", purpose=purpose)


def import_pyarrow_parquet(*, purpose: str) -> Any:
    """Returns `pyarrow.parquet`. **Arguments:** `purpose`: as `import_extra`. **Raises:** `MissingExtra`."""
    return import_extra("pyarrow.parquet", "arrow", purpose=purpose)


def import_msgspec(*, purpose: str) -> Any:
    """Returns `msgspec`. **Arguments:** `purpose`: as `import_extra`. **Raises:** `MissingExtra`."""
    return import_extra("msgspec", "json", purpose=purpose)
