"""The command line: `braidax train`, `plan`, `study`, `launch`, `frame`, `inspect` and `export`.

Each command imports what it needs when it is called: `launch` does not wait for JAX.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from braidax import __version__
from braidax.cli.frame import ScriptCommand
from braidax.errors import BraidaxError


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


_TASK_HELP = "digits, wide_resnet, resnet, inception_v3, lm1b, bert or dlrm."
_DATA_HELP = "The task's data as downloaded; most have some of their own."
_STRATEGY_HELP = "Of axes, such as data=hybrid,model=tensor; also data, fully_sharded, servers."
_SERVERS_HELP = "Processes on this host that have the tables of --strategy data=servers, or all variables."
_LAUNCHED_SERVERS_HELP = "Processes to start besides, which have tables or variables for the program's steps."
_GRACE_HELP = "That processes may take to save and end when all are stopped."
_ON_ERROR_HELP = "Skip bad records, 100 at most, and list them in OUT/skipped.jsonl."
_TARGET_HELP = "Compile it for a machine that need not be here, such as h100:8 or v5e:4x4; or for what is here."
_MEASURE_HELP = "Measure what the devices here compute and send; rotated and fully_sharded axes choose by that."
_MEMORY_HELP = "GB of a device that variables may take, with --measure; all of a step, with --search."
_SEARCH_HELP = "Search for the mesh and the strategies with which a step is shortest."
_CLUSTER_HELP = "With --search: a JSON file that says what devices compute and send that are not here."
_TRIES_HELP = "With --search: how many candidates are compiled, and on the devices that are here also run."
_EVERY_HELP = "Steps between checkpoints."
_TUNE_HELP = "Turn knobs while it trains, for speed or safe; checkpoints are as far apart as that asks for."
_PATH_HELP = "Samples: a file, folder, pattern or URL; checkpoints: a folder; or machine, where there is no such path."
_FOLDER_HELP = "Of machine: a folder on the disk to measure, which is written to for a moment."
_CASE_HELP = "digits, cifar-resnet18, cifar-resnet50, imagenet-resnet18, imagenet-resnet50 or imdb-bert."
_LIMIT_HELP = "Of what trains, such as memory=2G,cores=1,disk=50M,network=100M; bytes, and bits of a network."
_PAIRS_HELP = "Some of checkfreq-ddp,sync-prefetch,pipedream-checkfreq,pipedream-prefetch,full."
_BLOCKS_HELP = "How often each setting is run; 6 or more for intervals of 95 %."
_RUN_HELP = "Folder of a run, or of one of its checkpoints."
_AT_HELP = "Node of the parameters in the tree that was saved, such as 0/params."
_LATE_ROWS_HELP = "Take rows as they were when last touched, which the optimizer would have moved since."
_PRESET_HELP = "How large the model is: full, perhaps small, or tiny."

app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Runs the command line on the arguments of this process, and exits."""
    app(prog_name="braidax")


def _tell_version(wanted: bool) -> bool:
    if wanted:
        from braidax.cli.versions import describe_versions

        typer.echo(f"braidax {__version__}\n{describe_versions()}")
        raise typer.Exit
    return wanted


_VERSION = typer.Option(
    "--version", help="Show versions and what is compiled, and exit.", callback=_tell_version, is_eager=True
)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, _VERSION] = False,
) -> None:
    """Braid loading, compute, communication and checkpoints into one JAX training step."""


@app.command("train")
def _train(
    task: Annotated[str, typer.Argument(help=_TASK_HELP, metavar="TASK")],
    data: Annotated[Path | None, typer.Option(help=_DATA_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/TASK")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the samples.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a global batch.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Axes of the mesh, such as data=4,model=2.")] = None,
    strategy: Annotated[str | None, typer.Option(help=_STRATEGY_HELP)] = None,
    servers: Annotated[int | None, typer.Option(min=1, help=_SERVERS_HELP, show_default="1")] = None,
    preset: Annotated[str | None, typer.Option(help=_PRESET_HELP)] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help="Of image tasks: height and width in pixels.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first parameters and of the shuffle.")] = 0,
    checkpoint_every: Annotated[int | None, typer.Option(min=1, help=_EVERY_HELP, show_default="100")] = None,
    overhead: Annotated[float | None, typer.Option(help="Instead: what part of the time they may take.")] = None,
    tune: Annotated[Literal["speed", "balanced", "safe"] | None, typer.Option(help=_TUNE_HELP)] = None,
    on_error: Annotated[Literal["raise", "skip"], typer.Option(help=_ON_ERROR_HELP)] = "raise",
    trace: Annotated[Path | None, typer.Option(help="Perfetto trace to write.", show_default="OUT/trace.json")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard event files.")] = None,
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="How many train together.")] = 1,
    restarts: Annotated[int, typer.Option(min=0, help="How often to go on when one of them has failed.")] = 0,
    grace_seconds: Annotated[float | None, typer.Option(min=0, help=_GRACE_HELP, show_default="30")] = None,
) -> None:
    """Train a ready-made task; run it again to go on after an interruption."""
    from braidax.cli.run_options import check_folder
    from braidax.cli.tasks import make_task, options_of, skipping_bad
    from braidax.cli.train import Files, Settings, devices_of, due_checkpoints, train

    out = Path("runs") / task if out is None else out
    devices = devices_of(mesh, strategy, servers, processes=processes)
    check_folder(out)
    # What is wrong with it is said once, and its data is there.
    made = make_task(task, out, path=data, preset=preset, image_size=image_size)
    if processes > 1:
        options = {
            "--data": data,
            "--out": out,
            "--epochs": epochs,
            "--batch-size": batch_size,
            "--mesh": mesh,
            "--strategy": strategy,
            "--servers": servers,
            "--preset": preset,
            "--image-size": image_size,
            "--seed": seed,
            "--checkpoint-every": checkpoint_every,
            "--overhead": overhead,
            "--tune": tune,
            "--on-error": on_error,
            "--trace": trace,
            "--tensorboard": tensorboard,
        }
        _train_together(task, options, processes, restarts, grace_seconds)
    files = Files(out, out / "trace.json" if trace is None else trace, tensorboard)
    due = due_checkpoints(checkpoint_every, overhead, tune)
    settings = Settings(files, devices, epochs, batch_size, seed, checkpoints=due, tune=tune)
    made = skipping_bad(made, out) if on_error == "skip" else made
    train(made, settings, options_of(task, path=data, preset=preset, image_size=image_size))


def _train_together(
    task: str, options: Mapping[str, object], processes: int, restarts: int, grace_seconds: float | None
) -> NoReturn:
    """Runs the same command in several processes that `braidax launch` starts."""
    from braidax.cli.launch import Where, launch
    from braidax.gang.program import Program

    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    program = Program("braidax.cli", ("train", task, *given), "module")
    launch(program, Where(processes=processes), restarts=restarts, grace_seconds=grace_seconds)


@app.command("plan")
def _plan(
    task: Annotated[str, typer.Argument(help=_TASK_HELP, metavar="TASK")],
    data: Annotated[Path | None, typer.Option(help=_DATA_HELP)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a global batch.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Axes of the mesh, such as data=4,model=2.")] = None,
    strategy: Annotated[str | None, typer.Option(help=_STRATEGY_HELP)] = None,
    preset: Annotated[str | None, typer.Option(help=_PRESET_HELP)] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help="Of image tasks: height and width in pixels.")] = None,
    target: Annotated[str | None, typer.Option(help=_TARGET_HELP)] = None,
    measure: Annotated[bool, typer.Option("--measure", help=_MEASURE_HELP)] = False,
    memory_gb: Annotated[float | None, typer.Option(min=0, help=_MEMORY_HELP)] = None,
    search: Annotated[bool, typer.Option("--search", help=_SEARCH_HELP)] = False,
    devices: Annotated[int | None, typer.Option(min=1, help="With --search: how many, of those here.")] = None,
    cluster: Annotated[Path | None, typer.Option(help=_CLUSTER_HELP)] = None,
    tries: Annotated[int, typer.Option(min=1, help=_TRIES_HELP)] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what becomes of each variable of a task, and why; of the model nothing is computed."""
    from dataclasses import replace

    from braidax.cli.measure import check_measured, measured
    from braidax.cli.target import check_target, mesh_for, tell
    from braidax.cli.tasks import make_task
    from braidax.cli.train import devices_of, made_step

    if search:
        from braidax.cli.search import Search
        from braidax.cli.search import search as find

        if mesh or strategy or measure or json:
            raise typer.BadParameter(
                "it says mesh and strategies itself; leave out --mesh, --strategy, --measure, --json",
                param_hint="--search",
            )
        made = make_task(task, Path("runs") / task, path=data, preset=preset, image_size=image_size)
        find(made, batch_size, Search(devices, cluster, target, memory_gb, tries))
        return
    on = devices_of(mesh, strategy)
    check_target(on.strategies, target)
    check_measured(on, memory_gb, measure=measure, target=target)
    made = make_task(task, Path("runs") / task, path=data, preset=preset, image_size=image_size)
    if target is not None:
        on = replace(on, mesh=mesh_for(target, on.mesh))
    if measure:
        on, machine = measured(on, memory_gb)
        typer.echo(f"{machine}\n", err=json)
    with made_step(made, on, batch_size=batch_size or made.batch_size, num_steps=1) as step:
        if target is None:
            typer.echo(step.plan.to_json() if json else str(step.plan))
        else:
            tell(step, target, as_json=json)


@app.command("study")
def _study(
    case: Annotated[str, typer.Option(help=_CASE_HELP)] = "digits",
    quick: Annotated[bool, typer.Option("--quick", help="A small model, few steps: within a minute or so.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the study.", show_default="studies/CASE")] = None,
    data: Annotated[Path | None, typer.Option(help="The real samples as downloaded; or made-up ones.")] = None,
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, max=2, help="That train together.")] = 1,
    limit: Annotated[str | None, typer.Option(help=_LIMIT_HELP)] = None,
    pairs: Annotated[str | None, typer.Option(help=_PAIRS_HELP, show_default="all")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help=_BLOCKS_HELP, show_default="8")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of each run that count.", show_default="30")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order, the parameters and the shuffle.")] = 0,
) -> None:
    """Measure how prefetch, checkpoints, gradient sync and stages overlap; run it again to go on."""
    from braidax.cli.study import Effort, Wanted, study

    wanted = Wanted(case, data, quick, processes, limit, pairs, Effort(blocks, steps, seed))
    study(wanted, Path("studies") / case if out is None else out)


@app.command("launch", context_settings={"allow_interspersed_args": False})
def _launch(
    script: Annotated[str, typer.Argument(help="Program to run, or braidax with a command.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Of SCRIPT.", metavar="ARGUMENTS")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    processes: Annotated[int | None, typer.Option("--processes", "-n", min=1, help="How many to start.")] = None,
    servers: Annotated[int, typer.Option(min=0, help=_LAUNCHED_SERVERS_HELP)] = 0,
    hosts: Annotated[Path | None, typer.Option(help="File with lines such as node1, or node1: 0,1,server.")] = None,
    gang: Annotated[Literal["ray", "dask"] | None, typer.Option(help="Run in the ranks of Ray or Dask.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Of Dask, such as tcp://host:8786.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="How often to start all again when one has failed.")] = 0,
    grace_seconds: Annotated[float | None, typer.Option(min=0, help=_GRACE_HELP, show_default="30")] = None,
    devices_per_process: Annotated[int | None, typer.Option(min=1, help="GPUs, or virtual CPU devices.")] = None,
    initialize: Annotated[Literal["jax", "nothing"], typer.Option(help="What to join before SCRIPT begins.")] = "jax",
    transport: Annotated[str, typer.Option(help="What carries messages: tcp, ucx or mpi.")] = "tcp",
    ssh: Annotated[str, typer.Option(envvar="BRAIDAX_SSH", help="Command that reaches hosts.")] = "ssh",
    address: Annotated[str | None, typer.Option(help="Of this machine, as the hosts reach it.")] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter on the hosts.", show_default="this one")] = None,
) -> None:
    """Run a program in many processes that live and die together, joined to one jax.distributed."""
    from braidax.cli.launch import Where, launch
    from braidax.gang.over_ssh import Remote
    from braidax.gang.program import Program

    remote = Remote(ssh=ssh, address=address) if python is None else Remote(ssh=ssh, address=address, python=python)
    if script == "braidax" and not module and not Path(script).exists():
        script, module = "braidax.cli", True  # its own commands, such as train
    program = Program(script, tuple(arguments or ()), "module" if module else "script", initialize, devices_per_process)
    where = Where(processes, servers, hosts, gang, scheduler, remote)
    launch(program, where, restarts=restarts, transport=transport, grace_seconds=grace_seconds)


@app.command("frame", cls=ScriptCommand, context_settings={"allow_interspersed_args": False})
def _frame(
    script: Annotated[str, typer.Argument(help="Program to run, written for Polars in one process.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Of SCRIPT.", metavar="ARGUMENTS")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="How many compute its plans.")] = None,
    gang: Annotated[Literal["local", "ray", "dask"], typer.Option(help="Where the ranks are.")] = "local",
    scheduler: Annotated[str | None, typer.Option(help="Of Dask, such as tcp://host:8786.")] = None,
) -> None:
    """Run a program here, with the plans that it collects by Polars computed by the ranks of a gang."""
    from braidax.cli.frame import run_script

    run_script(script, arguments or (), ranks=ranks, gang=gang, scheduler=scheduler)


def _inspect_machine(
    others: Mapping[str, object], mesh: str | None, folder: Path | None, *, again: bool, json: bool
) -> None:
    """Prints what this machine can do. **Arguments:** `others`: options that are not of machines."""
    from braidax.cli.machine import make_mesh, parse_mesh
    from braidax.tune import calibrate

    for name, value in others.items():
        if value is not None:
            raise typer.BadParameter(f"{name} is not of machine; leave it out")
    devices = make_mesh(None if mesh is None else parse_mesh(mesh))
    found = calibrate(devices, Path() if folder is None else folder, measure="again" if again else "once")
    typer.echo(found.to_json() if json else str(found))


@app.command("inspect")
def _inspect(
    path: Annotated[str, typer.Argument(help=_PATH_HELP)],
    columns: Annotated[str | None, typer.Option(help="Of a table or of records, such as text,label.")] = None,
    split: Annotated[str | None, typer.Option(help="Such as train or test, where a format has splits.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Show batches on this mesh, such as data=4,model=2.")] = None,
    spec: Annotated[str, typer.Option(help="Mesh axes per dim of a batch: data, or data+model,-.")] = "data",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a global batch.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Plan for a mesh over so many, simulated.")] = None,
    check: Annotated[
        Literal["newest", "all", "none"] | None,
        typer.Option(help="Whose arrays are read and checked, of checkpoints.", show_default="newest"),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help=_FOLDER_HELP, show_default="this one")] = None,
    again: Annotated[bool, typer.Option("--again", help="Of machine: measure it anew.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Of machine: print the rates as JSON.")] = False,
) -> None:
    """Show what the loader would see, with a batch's layout given a mesh; what checkpoints there are; or what this
    machine can do.
    """
    if path == "machine" and not Path(path).exists():
        others = {"--columns": columns, "--split": split, "--batch-size": batch_size}
        _inspect_machine({**others, "--processes": processes, "--check": check}, mesh, folder, again=again, json=json)
        return
    for name, value in {"--folder": folder, "--again": again, "--json": json}.items():
        if value:
            raise typer.BadParameter(f"{name} is of machine, and {path} is another; leave it out")
    from braidax.cli.inspect_checkpoint import inspect_checkpoint, is_checkpoint

    if is_checkpoint(Path(path)):
        of_samples = {
            "columns": columns,
            "split": split,
            "mesh": mesh,
            "batch-size": batch_size,
            "processes": processes,
        }
        for name, value in of_samples.items():
            if value is not None:
                raise typer.BadParameter(f"{path} has checkpoints, and --{name} is of samples; leave it out")
        inspect_checkpoint(Path(path), check=check or "newest", console=Console())
        return
    if check is not None:
        raise typer.BadParameter(f"--check is of checkpoints, and {path} has none; leave it out, or correct the path")

    from braidax.cli.inspect import inspect
    from braidax.cli.machine import parse_mesh, parse_spec
    from braidax.data import open as open_source

    axes = None if mesh is None else parse_mesh(mesh)
    source = open_source(path, columns=None if columns is None else columns.split(","), split=split)
    inspect(source, mesh=axes, spec=parse_spec(spec), batch_size=batch_size, processes=processes, console=Console())


@app.command("export")
def _export(
    run: Annotated[Path, typer.Argument(help=_RUN_HELP)],
    file: Annotated[Path, typer.Argument(help="To write, such as model.safetensors.")],
    step: Annotated[int | None, typer.Option(min=0, help="Of the checkpoint.", show_default="the newest")] = None,
    at: Annotated[str | None, typer.Option(help=_AT_HELP, show_default="found")] = None,
    names: Annotated[Literal["slashed", "dotted"], typer.Option(help="Of tensors: a/b or a.b.")] = "slashed",
    late_rows: Annotated[bool, typer.Option("--late-rows", help=_LATE_ROWS_HELP)] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace FILE if it is there.")] = False,
) -> None:
    """Write the parameters of a run as one safetensors file, whole and without padding."""
    from braidax.checkpoint import export_safetensors

    saved = export_safetensors(
        run,
        file,
        step=step,
        at=at,
        name=str if names == "slashed" else lambda path: path.replace("/", "."),
        late_rows="as saved" if late_rows else "refuse",
        existing="replace" if replace else "refuse",
    )
    typer.echo(f"{file}: the parameters of step {saved:,}, {file.stat().st_size:,} bytes")
