"""Moves rows of tables in C, and finds their slots. Raises `ValueError` for buffers that do not fit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def take(table: NDArray[Any], ids: NDArray[np.int64], rows: NDArray[Any], width: int, unit: int, /) -> None: ...
def put(table: NDArray[Any], ids: NDArray[np.int64], rows: NDArray[Any], width: int, unit: int, /) -> None: ...
def open_queue() -> int: ...
def close_queue(queue: int, /) -> None: ...
def exchange(
    queue: int,
    file: int,
    memory: NDArray[np.uint8],
    size: int,
    frames: NDArray[np.int64],
    outgoing: NDArray[np.int64],
    incoming: NDArray[np.int64],
    first: int,
    end: int,
    /,
) -> None: ...
def sum(
    rows: NDArray[Any],
    slots: NDArray[np.int32],
    sums: NDArray[Any],
    width: int,
    size: int,
    first: int,
    end: int,
    /,
) -> None: ...
def adagrad(
    table: NDArray[np.float32],
    kept: NDArray[np.float32],
    touched: NDArray[np.int64],
    ids: NDArray[np.int64],
    gradients: NDArray[np.float32],
    width: int,
    rate: float,
    eps: float,
    step: int,
    first: int,
    end: int,
    /,
) -> None: ...
def find(
    entries: NDArray[Any], table: NDArray[np.uint32], ids: NDArray[np.int64], slots: NDArray[np.int32], /
) -> int: ...
def insert(
    entries: NDArray[Any], table: NDArray[np.uint32], ids: NDArray[np.int64], slots: NDArray[np.int32], /
) -> int: ...
def remove(
    entries: NDArray[Any], table: NDArray[np.uint32], ids: NDArray[np.int64], slots: NDArray[np.int32], /
) -> int: ...
