"""What `braidax frame` does: a Python program here, whose plans of Polars run on the ranks of a gang."""

import contextlib
import runpy
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import typer
from typer.core import TyperCommand

from braidax.errors import ArgumentError
from braidax.gang import Gang, LocalGang

_OPTIONS = ("--ranks", "--gang", "--scheduler")  # each has a value


class ScriptCommand(TyperCommand):
    """A command whose options stand before SCRIPT or directly behind it; all that follows is SCRIPT's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the options that stand behind SCRIPT in front of it."""
        script = _end_of_options(args, 0)
        end = _end_of_options(args, script + 1)
        if end > len(args) or args[script].startswith("-"):
            return super().parse_args(ctx, args)
        rest = args[end + 1 :] if args[end : end + 1] == ["--"] else args[end:]
        return super().parse_args(ctx, [*args[:script], *args[script + 1 : end], args[script], *rest])


def _end_of_options(words: Sequence[str], begin: int) -> int:
    while begin < len(words) and words[begin].partition("=")[0] in _OPTIONS:
        begin += 1 if "=" in words[begin] else 2
    return begin


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int | None,
    gang: Literal["local", "ray", "dask"],
    scheduler: str | None,
) -> None:
    """Runs a program as `python SCRIPT` would, in this process, but for what it collects: that runs on ranks.

    Where stderr is a terminal it shows what ranks do meanwhile. At the end a line there tells how many plans ran. What
    is changed in this process meanwhile (Polars, `sys.argv`, `sys.path`) is as before.

    **Arguments:** `ranks`: of the gang; None takes all workers of Dask. `scheduler`: the address of Dask's.

    **Raises:** `ArgumentError` for what is no program or no gang, before anything is started; `typer.Exit` when the
    program raises, whose traceback is written; otherwise what the gang or the program raises to end the process.
    """
    if not Path(script).is_file():
        what = "is a folder" if Path(script).is_dir() else f"there is none (seen from {Path.cwd()})"
        raise ArgumentError(f"SCRIPT {script}: {what}; expected the path of a Python file")
    if scheduler is not None and gang != "dask":
        raise ArgumentError(f"--scheduler {scheduler} is of --gang dask, and not of {gang}; leave it out")
    if ranks is None and gang != "dask":
        raise ArgumentError(
            f"--ranks is not given: say how many ranks to start, such as `braidax frame --ranks 4 {script}`"
        )
    from braidax.frame.redirecting import on_ranks

    with (
        _as_program(script, arguments),
        _started(ranks, gang, scheduler) as started,
        on_ranks(started, show="bar") as ran,
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception as error:
            error.__traceback__ = _of_program(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            raise typer.Exit(1) from error
        finally:
            sys.stdout.flush()
            typer.echo(f"braidax frame: {ran.told(started.size)}", err=True)


@contextlib.contextmanager
def _as_program(script: str, arguments: Sequence[str]) -> Generator[None]:
    """Sets what a program finds, which ranks that are started then find as well."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextlib.contextmanager
def _started(ranks: int | None, kind: Literal["local", "ray", "dask"], scheduler: str | None) -> Generator[Gang]:
    with contextlib.ExitStack() as stack:
        if kind == "dask":
            from braidax.gang.dask import DaskGang
            from braidax.gang.dask_store import open_client

            yield stack.enter_context(DaskGang(stack.enter_context(open_client(scheduler)), ranks))
            return
        assert ranks is not None
        if kind == "ray":
            from braidax.gang.ray import RayGang

            yield stack.enter_context(RayGang(ranks))
        else:
            yield stack.enter_context(LocalGang(ranks))


def _of_program(traceback: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the program's own first line on."""
    own = traceback
    while own is not None and own.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        own = own.tb_next
    return own or traceback
