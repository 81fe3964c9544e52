"""The command line: `braidax train` and `braidax inspect`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from braidax.cli.inspect import inspect
from braidax.cli.machine import parse_mesh, parse_spec
from braidax.cli.train import Settings, train
from braidax.data import open as open_source
from braidax.errors import BraidaxError
from braidax.tasks.task import Task


class _Commands(TyperGroup):
    """Turns an error of braidax into one clean message and exit code 1, and Ctrl-C into exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BraidaxError as error:
            if ctx.params["debug"]:
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line on the arguments of this process, and exits."""
    app(prog_name="braidax")


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Braid loading, compute, communication and checkpoints into one JAX training step."""


@app.command("train")
def _train(
    task: Annotated[str, typer.Argument(help="What to train: digits or wide_resnet.", metavar="TASK")],
    data: Annotated[Path | None, typer.Option(help="For wide_resnet: CIFAR or MNIST as downloaded.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/TASK")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the samples.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a global batch.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Axes of the mesh, such as data=4,model=2.")] = None,
    preset: Annotated[str | None, typer.Option(help="For wide_resnet: full, small or tiny.")] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help="For wide_resnet: height and width in pixels.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first parameters and of the shuffle.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    trace: Annotated[Path | None, typer.Option(help="Perfetto trace to write.", show_default="OUT/trace.json")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard event files.")] = None,
) -> None:
    """Train a ready-made task; run it again to go on after an interruption."""
    out = Path("runs") / task if out is None else out
    settings = Settings(
        out=out,
        trace=out / "trace.json" if trace is None else trace,
        tensorboard=tensorboard,
        mesh=None if mesh is None else parse_mesh(mesh),
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        checkpoint_every=checkpoint_every,
    )
    train(_task(task, out, data, preset, image_size), settings)


@app.command("inspect")
def _inspect(
    path: Annotated[str, typer.Argument(help="A file or folder of samples, a pattern, or a URL.", metavar="PATH")],
    columns: Annotated[str | None, typer.Option(help="Of a table or of records, such as text,label.")] = None,
    split: Annotated[str | None, typer.Option(help="Such as train or test, where a format has splits.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Show batches on this mesh, such as data=4,model=2.")] = None,
    spec: Annotated[str, typer.Option(help="Mesh axes per dim of a batch: data, or data+model,-.")] = "data",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a global batch.")] = None,
) -> None:
    """Show what the loader would see: format, files, samples and, given a mesh, the layout of a batch."""
    axes = None if mesh is None else parse_mesh(mesh)
    source = open_source(path, columns=None if columns is None else columns.split(","), split=split)
    inspect(source, mesh=axes, spec=parse_spec(spec), batch_size=batch_size, console=Console())


def _task(name: str, out: Path, data: Path | None, preset: str | None, image_size: int | None) -> Task:
    if name == "digits":
        from braidax.tasks.digits import digits

        given = {"--data": data, "--preset": preset, "--image-size": image_size}
        for option, value in given.items():
            if value is not None:
                raise typer.BadParameter(f"{value}: digits bring their own data and model", param_hint=option)
        return digits(out / "data")
    if name == "wide_resnet":
        from braidax.tasks.wide_resnet import wide_resnet

        if data is None:
            raise typer.BadParameter("wide_resnet needs the path of CIFAR or MNIST as downloaded", param_hint="--data")
        return wide_resnet(data, preset=preset or "full", image_size=image_size)
    raise typer.BadParameter(f"{name!r} is no task; there are digits and wide_resnet", param_hint="TASK")
