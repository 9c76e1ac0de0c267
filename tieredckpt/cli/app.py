"""The verbs of the command line, and what an error becomes: one line on stderr and exit code 1."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tieredckpt import __version__
from tieredckpt.cli.agent import agent
from tieredckpt.cli.bench import bench
from tieredckpt.cli.bench_chfs import bench_chfs
from tieredckpt.cli.bench_codecs import bench_codecs
from tieredckpt.cli.bench_gpu import bench_gpu
from tieredckpt.cli.bench_sweep import bench_sweep
from tieredckpt.cli.console import errors, output, printable
from tieredckpt.cli.copy import copy
from tieredckpt.cli.demo import demo
from tieredckpt.cli.diff import diff
from tieredckpt.cli.doctor import doctor
from tieredckpt.cli.ending import ended_in_order
from tieredckpt.cli.interchange import export, import_
from tieredckpt.cli.ls import ls
from tieredckpt.cli.plan import plan
from tieredckpt.cli.ram import adopt, forget, fork
from tieredckpt.cli.restore import restore
from tieredckpt.cli.show import show
from tieredckpt.cli.simulate import simulate
from tieredckpt.cli.upkeep import collect, delete, evict, pin, promote
from tieredckpt.cli.verify import verify
from tieredckpt.errors import TieredCkptError

__all__ = ["app"]

app = typer.Typer(
    help="Checkpoints of large-model training, stored in tiers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a defect is reported with the traceback that everybody knows
)


class _Shown(logging.Handler):
    """The library's log, for the terminal: its messages may carry text of a checkpoint."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and (error := record.exc_info[1]) is not None:
            text = f"{text}: {type(error).__name__}: {error}"
        errors().print(f"{record.levelname.lower()}: {printable(text)}", style="yellow")


def _version(wanted: bool) -> None:
    if wanted:
        output().print(f"tieredckpt {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the library's warnings, not only its errors.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    log = logging.getLogger("tieredckpt")
    shown = _Shown(logging.INFO if verbose else logging.ERROR)
    level, propagates = log.level, log.propagate
    log.addHandler(shown)
    log.setLevel(shown.level)
    log.propagate = False

    def restore_log() -> None:
        log.removeHandler(shown)
        log.setLevel(level)
        log.propagate = propagates

    context.call_on_close(restore_log)


def _reporting(verb: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(verb)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            with ended_in_order():
                verb(*arguments, **options)
        except TieredCkptError as error:
            text = "; ".join(line for line in str(error).split("\n") if line)
            errors().print(f"{type(error).__name__}: {printable(text)}", style="bold red")
            raise typer.Exit(1) from error

    return run


_bench = typer.Typer(invoke_without_command=True)
_bench.callback()(_reporting(bench))
_bench.command("chfs")(_reporting(bench_chfs))
_bench.command("codecs")(_reporting(bench_codecs))
_bench.command("gpu")(_reporting(bench_gpu))
_bench.command("sweep")(_reporting(bench_sweep))
app.add_typer(_bench, name="bench")

for _verb in (
    demo,
    ls,
    show,
    diff,
    verify,
    restore,
    promote,
    evict,
    pin,
    delete,
    collect,
    copy,
    adopt,
    forget,
    fork,
    agent,
    doctor,
    plan,
    simulate,
    export,
):
    app.command()(_reporting(_verb))
app.command("import")(_reporting(import_))
