"""Sail: a Spark Connect server on DataFusion, in this process; results come to its client as Arrow."""

from pathlib import Path
from typing import Any, final

from pysail.spark import SparkConnectServer
from pyspark.sql import SparkSession

from benchmarks.cylon.systems.system import Files, UnsupportedError, write_arrow
from benchmarks.cylon.tasks.sql import NAMES, text_of


@final
class Sail:
    """A server of its own, and one session with it."""

    def __init__(self) -> None:
        self._server = SparkConnectServer("127.0.0.1", 0)
        self._server.start(background=True)
        _, number = self._server.listening_address
        self._session = SparkSession.builder.remote(f"sc://127.0.0.1:{number}").getOrCreate()

    def load(self, files: Files, *, memory: bool) -> None:
        if memory:
            raise UnsupportedError("a session of Spark Connect reads files; its cache is not kept by Sail")
        for name, paths in files.items():
            self._session.read.parquet(*paths).createOrReplaceTempView(NAMES.get(name, name))

    def run(self, task: str, *, scale: float, to_caller: bool) -> Any:
        return self._session.sql(text_of(task, scale)).toArrow()

    def write(self, result: Any, path: Path) -> None:
        write_arrow(result, path)

    def close(self) -> None:
        self._session.stop()
        self._server.stop()


def opened(*, num_cores: int) -> Sail:
    return Sail()
