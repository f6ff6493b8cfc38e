"""The `seqreg` command: its groups of commands, and how errors end it."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

from seqreg.cli import advise, new_task, show, studies, training
from seqreg.errors import DISK, NAMES, BadInput, DiskError, Stopped
from seqreg.version import __version__
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import show_warnings

USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What typer raises about the command line; newer ones bring a click of their own."""

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="""Fine-tune with smoothness regularizers: from one line to ROUGE and TensorBoard.

**A first run**, on generated text, in two minutes:

    seqreg quickstart

**Your own texts**, of a CSV, JSONL or Parquet file (also translate, classify, pairs, tag):

    seqreg train summarize --terms r3f data.path=mails.csv

**What there is:** `seqreg list`, and `seqreg show NAME` for details. Any setting of a recipe can be changed with
`key=value`; `seqreg check` prints them all.

**For programs:** every command has `--json`: one JSON document alone on the standard output (`predict`: one per line).
""",
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"seqreg {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for group in (training.app, show.app, new_task.app, advise.app, studies.app):
    app.add_typer(group)


def main() -> None:
    """Run the command `seqreg`."""
    run(app, "seqreg")


def run(app: typer.Typer, name: str) -> None:
    """Run the commands of `app`; bad input, and what stops a run, is one line and an exit code of `seqreg.errors`."""
    _open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is spelt out
        sys.stdout.reconfigure(errors="backslashreplace")
    show_warnings()
    try:
        code = app(standalone_mode=False)
        if code == 128 + signal.SIGINT:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except (BadInput, Stopped) as error:
        _end("\n".join(_shorten(plain(line)) for line in error.lines), error.code)
    except (typer.Abort, KeyboardInterrupt):  # Ctrl-C, where nothing has to be saved first
        _end("stopped", 128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("seqreg"):
            raise
        _end(f"{error.name} is not installed: pip install 'seqreg[recipes]'", 2)
    except OSError as error:
        if error.errno not in DISK | NAMES:
            raise
        code = BadInput.code if error.errno in NAMES else DiskError.code
        _end(f"{_shorten(plain(error.filename or 'output'))}: {error.strerror}", code)
    except USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(2)
        _end(f"{_shorten(plain(error.format_message().rstrip('.')))}; see {_command_of(error, name)} --help", 2)


def _open_closed() -> None:
    """Give what is printed a place where cron, or a shell's >&-, has closed the standard output.

    The next file that is opened would take its number, and have printed lines in it. `sys.__stdout__` stays None.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if name != "stdin":
                setattr(sys, name, os.fdopen(handle, "w", encoding="utf-8"))


def _end(message: str, code: int) -> None:
    print(f"seqreg: {message}", file=sys.stderr)
    sys.exit(code)


def _shorten(line: str, most: int = 2000) -> str:
    """A line without its middle, where a value in it is very long."""
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


def _command_of(error: Any, name: str) -> str:
    """The command that an error is about, as it is called."""
    names, ctx = [], getattr(error, "ctx", None)
    while ctx is not None and ctx.parent is not None:
        names.append(ctx.info_name)
        ctx = ctx.parent
    return " ".join([name, *names[::-1]])


if __name__ == "__main__":
    main()
