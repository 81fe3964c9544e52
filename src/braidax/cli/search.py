"""What `braidax plan --search` does: it prints candidates, and why the winner won."""

from pathlib import Path
from typing import NamedTuple

import typer

from braidax.cli.machine import make_mesh
from braidax.errors import ArgumentError
from braidax.tasks.task import Task
from braidax.tune import Cluster, plan


class Search(NamedTuple):
    """What a search is told. **Fields:** the options `--devices`, `--cluster`, `--target`, `--memory-gb` and
    `--tries`."""

    devices: int | None
    cluster: Path | None
    target: str | None
    memory_gb: float | None
    tries: int


def search(task: Task, batch_size: int | None, told: Search) -> None:
    """Searches, and prints the table. **Raises:** `typer.BadParameter`; `ArgumentError` as `braidax.tune.plan`."""
    if told.devices is not None and told.cluster is not None:
        raise typer.BadParameter("a cluster has its own number; leave one of them out", param_hint="--devices")
    if told.target is not None and told.cluster is None:
        raise typer.BadParameter("it is of a cluster; give --cluster FILE, too", param_hint="--target")
    cluster = None if told.cluster is None else _read(told.cluster)
    mesh = make_mesh(None if told.devices is None else {"data": told.devices}) if cluster is None else None
    found = plan(
        task.loss,
        task.optimizer(1),
        init=task.init,
        batch=task.train.batch_spec(batch_size or task.batch_size),
        cluster=cluster,
        target=told.target,
        devices=None if mesh is None else [*mesh.devices.flat],
        memory_bytes=None if told.memory_gb is None else max(1, int(told.memory_gb * 1e9)),
        measure=told.tries,
        tell=lambda doing: typer.echo(f"{doing} …", err=True),
    )
    typer.echo(str(found))


def _read(file: Path) -> Cluster:
    try:
        return Cluster.from_json(file.read_text())
    except (OSError, UnicodeDecodeError, ArgumentError) as error:
        raise ArgumentError(f"{file} is no cluster ({error}): expected what Cluster.to_json returns") from error
