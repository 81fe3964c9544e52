"""Tables that write themselves: loaded as they are, written once for all processes, and gone when nobody reads them."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import polars as pl
import pytest
from jax.sharding import PartitionSpec as P

import braidax as bx
from braidax.data.written import WritesArrow, Written, write
from braidax.errors import ArgumentError, CallFailed, SpecError
from braidax.gang import LocalGang
from tests.support.data.jax_gang import RUN_SECONDS, jax_gang
from tests.support.data.written import ROWS, Table
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder that tables lie in."""
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tables"


def folders(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir()) if store.exists() else []


def test_a_loader_computes_a_table_once_and_takes_it_along(store: Path) -> None:
    table = Table()
    assert isinstance(table, WritesArrow)
    with bx.DataLoader(table, batch_size=8, seed=None, epochs=2) as loader:
        assert len(folders(store)) == 1
        assert loader.num_samples == ROWS
        found = [np.asarray(batch["x"]).tolist() for batch in loader]
        assert found == 2 * np.arange(ROWS).reshape(-1, 8).tolist()
    assert (folders(store), table.num_writes) == ([], 1)
    loader.close()


def test_an_opened_table_stays_as_long_as_its_source(store: Path) -> None:
    source = bx.open(Table(), transform=lambda sample: {"y": 2 * sample["x"]})
    batches = [np.asarray(batch["y"]).tolist() for batch in bx.DataLoader(source, batch_size=ROWS, seed=None)]
    assert batches == [(2 * np.arange(ROWS)).tolist()]
    gc.collect()
    assert len(folders(store)) == 1
    del source
    gc.collect()
    assert folders(store) == []


def test_a_loader_that_nobody_closes_lets_go_of_its_table(store: Path) -> None:
    loader = bx.DataLoader(Table(), batch_size=ROWS)
    assert len(folders(store)) == 1
    del loader
    gc.collect()
    assert folders(store) == []


def bad_loaders() -> Iterator[tuple[Any, ...]]:
    wrong = ValueError("no space on rank 1")
    yield Table(error=wrong), {}, ValueError, "no space on rank 1"
    yield Table(error=KeyboardInterrupt("stop")), {}, KeyboardInterrupt, "stop"
    yield Table(pl.DataFrame({"x": []}, schema={"x": pl.Int32})), {}, ArgumentError, "source: the table has no rows"
    yield Table(pl.DataFrame({"s": ["a"] * ROWS})), {}, ArgumentError, r"has the leaf \['s'\], whose size varies"
    yield Table(), {"specs": P("model")}, SpecError, "model"
    yield Table(), {"on_error": "pass"}, ArgumentError, "on_error='pass' is not"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("table", "options", "kind", "words"), list(bad_loaders()))
def test_what_cannot_be_loaded_leaves_nothing(
    table: Table, options: dict[str, Any], kind: type[BaseException], words: str, store: Path
) -> None:
    mesh = jax.make_mesh((2,), ("data",))
    with pytest.raises(kind, match=words):
        bx.DataLoader(table, mesh, **{"specs": P("data"), "batch_size": 8, **options})
    assert folders(store) == []
    assert table.num_writes == 1


def test_options_of_files_are_refused_for_a_table(store: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^columns=\['x'\]: no option of this format; Table was recognized"):
        bx.open(Table(), columns=["x"])
    assert folders(store) == []


def test_a_folder_for_tables_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(ArgumentError, match=r"^source: no folder for the table can be made in .*file/tables \(Not a "):
        bx.DataLoader(Table())


def test_whoever_reads_last_removes_a_table(store: Path) -> None:
    first = write(Table())
    (name,) = folders(store)
    second = Written(store / name)
    first.close()
    assert folders(store) == [name]
    assert len(second.source) == ROWS
    second.close()
    assert folders(store) == []
    with pytest.raises(ArgumentError, match=r"is not to be seen from here \(No such file or directory\); expected a"):
        Written(store / name)


LEFT = """
import os, signal, sys
import braidax as bx
from tests.support.data.written import Table
source = bx.open(Table())
print("there", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(("number", "is_left"), [(signal.SIGINT, False), (signal.SIGKILL, True)])
def test_what_a_killed_process_leaves_the_next_one_removes(
    number: int, is_left: bool, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_children(monkeypatch, *LOAD_AND_SAVE, codes=(LEFT,))
    stranger = store / f"table-{'0' * 32}"
    stranger.mkdir(parents=True)
    (stranger / "in-use.json").write_text("{}")
    (store / "mine").mkdir()
    others = folders(store)
    with subprocess.Popen([sys.executable, "-c", LEFT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        write(Table()).close()
        assert len(folders(store)) == len(others) + 1  # that of a process that lives stays
        process.send_signal(number)
        process.wait(30)
    assert len(folders(store)) == len(others) + is_left
    write(Table()).close()
    assert folders(store) == others


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGang]:
    with jax_gang(2, 2) as running:
        yield running


def load(comm: Any, cache: str, error: str) -> tuple[list[list[int]], int, int]:
    """Loads a table in one of two processes; returns the rows here, how often it was written, and what is left."""
    os.environ["BRAIDAX_CACHE"] = cache
    table = Table(error=OSError(error) if error else None)
    mesh = jax.make_mesh((4,), ("data",))
    with bx.DataLoader(table, mesh, P("data"), batch_size=8, seed=None) as loader:
        found = [sorted(int(x) for shard in batch["x"].addressable_shards for x in shard.data) for batch in loader]
    comm.barrier()
    return found, table.num_writes, len(folders(Path(cache) / "tables"))


def test_several_processes_have_a_table_written_once(gang: LocalGang, tmp_path: Path) -> None:
    found = gang.run(load, str(tmp_path / "shared"), "", timeout_seconds=RUN_SECONDS)
    assert [one[1:] for one in found] == [(1, 0), (0, 0)]
    for batch in range(ROWS // 8):
        assert found[0][0][batch] + found[1][0][batch] == list(range(8 * batch, 8 * batch + 8))


def test_all_processes_hear_why_a_table_was_not_written(gang: LocalGang, tmp_path: Path) -> None:
    told = gang.run(refused, str(tmp_path / "shared"), timeout_seconds=RUN_SECONDS)
    assert told[0] == "OSError: no space"
    assert told[1] == "CallFailed: process 0 cannot write the table: OSError: no space"
    assert folders(tmp_path / "shared" / "tables") == []


def refused(comm: Any, cache: str) -> str:
    try:
        load(comm, cache, "no space")
    except (OSError, CallFailed) as error:
        return f"{type(error).__name__}: {error}"
    return ""
