"""The command line: `memagent read | resume | doctor | demo | ...`. A module has the commands that share options.

Exit codes: 0 answered, 2 wrong usage, 3 unusable document, 4 failure of the policy or its server, 5 stopped at a limit
and resumable, 6 unknown or mismatched run, 7 invalid settings, 8 read to the end without an answer, 9 policy collapse
in training, 10 unusable checkpoints, 130 interrupted.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from memagent_graph.cli.commands import CommandGroup

app = typer.Typer(
    name="memagent",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(f"memagent {version('memagent-graph')}")
        raise typer.Exit


@app.callback()
def memagent(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Read documents of any length with a language model whose context is small."""


def main() -> None:
    """Run the `memagent` command."""
    # Threads that spin while they wait make a local policy many times slower if another program is running.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    gc.set_threshold(50_000)  # imported objects stay, so frequent collections would be useless
    _prepare_standard_streams()
    try:
        app()
    except OSError as error:
        if error.errno not in _WRITE_ERROR_CODES or error.filename is not None:  # the error is not of standard output
            raise
        # Otherwise the remaining output would fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(
            f"error: cannot write to standard output: {error.strerror}\n"
            "what to do: Make room, or write elsewhere. A read that has finished is in the log: memagent show latest.\n"
        )
        sys.exit(1)


def _prepare_standard_streams() -> None:
    """Let output and errors replace characters that the terminal cannot show with question marks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # the parent process has closed it
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  open to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_WRITE_ERROR_CODES: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
