"""Frames of Dask's collections, and back."""

from typing import Any

from braidax.errors import ArgumentError, import_extra
from braidax.frame.clusters.partitions import as_pandas, give, take
from braidax.frame.collecting import Partition
from braidax.frame.frame import Frame
from braidax.frame.polars import pl
from braidax.gang import Gang
from braidax.gang.dask import DaskGang
from braidax.gang.dask_handing import placed


def from_dask(collection: Any, gang: Gang) -> Frame:
    """Returns a frame of a table of Dask, whose partitions stay on their workers: each rank takes those of its own.

    What is not computed yet is computed by Dask first. Rows are in the order of the ranks, and on each in that of the
    partitions: sort them where another one matters. Missing values of pandas are nulls; levels of an index with a name
    are columns, and one without a name is left out.

    **Arguments:** `collection`: a `dask.dataframe.DataFrame`, or a list of `Delayed` or `Future`s of tables of pandas,
    pyarrow or Polars. `gang`: a `DaskGang` on the same cluster.

    **Raises:** `ArgumentError` for what is none, and naming partition, column and dtype for what Polars cannot
    represent, or partitions that differ; what Dask raises for a partition that fails; `GangError` for workers that end.
    """
    if not isinstance(gang, DaskGang):
        raise ArgumentError(f"gang is a {type(gang).__name__}: expected a DaskGang, whose ranks are Dask's workers")
    gang.check_whole()
    futures = _futures(collection, gang)
    return take(gang, futures, placed(gang.client, gang.workers, futures))


def to_dask(frame: Frame) -> Any:
    """Returns a `dask.dataframe.DataFrame` of a frame on a `DaskGang`: a partition for each rank, on its worker.

    The frame is computed now. Columns have the dtypes of Arrow (`pandas.ArrowDtype`). The rows lie in the memory of the
    workers as long as somebody refers to them, also behind the end of the gang.

    **Raises:** `ArgumentError` for a frame of another gang, and naming column and dtype for what Arrow cannot
    represent; `MissingExtra`; otherwise as `Frame.collect`.
    """
    gang = frame.gang
    if not isinstance(gang, DaskGang):
        raise ArgumentError(f"frame is one of a {type(gang).__name__}: expected one of a DaskGang")
    dataframe = import_extra("dask.dataframe", "dask-frame", purpose="a frame as one of Dask")
    futures, schema = give(frame, gang, as_pandas)
    return dataframe.from_delayed(futures, meta=as_pandas(Partition(pl.DataFrame(schema=schema))))


def _futures(collection: Any, gang: DaskGang) -> list[Any]:
    """Returns futures of the partitions, which are computed where they are not yet."""
    kind = type(collection)
    if isinstance(collection, list | tuple):
        parts: list[Any] = list(collection)
    elif kind.__module__.startswith("dask.dataframe") and kind.__name__ == "DataFrame":
        parts = list(collection.to_delayed())
    else:
        raise ArgumentError(
            f"collection is a {kind.__module__}.{kind.__qualname__}: expected a dask.dataframe.DataFrame, or a list of "
            "Delayed or Futures of tables"
        )
    if not parts:
        raise ArgumentError("collection is empty: expected one partition or more, since the first one says the columns")
    for number, part in enumerate(parts):
        if type(part).__module__ not in ("dask.delayed", "distributed.client"):
            raise ArgumentError(
                f"collection[{number}] is a {type(part).__module__}.{type(part).__qualname__}: expected a Delayed or a "
                "Future of a table"
            )
    return [gang.client.compute(part) if type(part).__module__ == "dask.delayed" else part for part in parts]
