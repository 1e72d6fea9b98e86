"""What the training commands share: required libraries, reports of errors, and the process that prints."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from memagent_graph.cli.exit_codes import ExitCode, choose_exit_code
from memagent_graph.errors import MemAgentError, MissingExtraError
from memagent_graph.plain_text import format_count
from memagent_training.training_errors import require_version

T = TypeVar("T")

FAILURE_DELAY_SECONDS: Final = 15.0
"""The time that a machine's other processes wait before they fail. Nearly always the first process has failed too, and
reports it; then the launcher ends the others. If another process failed first, the launcher would end the first one."""

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting that replaces the preset's. Repeatable."),
]


def build_from_options(target: Callable[..., T], options: Any, **extra_values: Any) -> T:
    """Make a dataclass from a command's options of the same names, and from `extra_values` for the other fields."""
    names = inspect.signature(target).parameters.keys() - extra_values.keys()
    return target(**{name: getattr(options, name) for name in names if hasattr(options, name)}, **extra_values)


def show_policy(folder: Path, steps: int, *extra_lines: str, reason: str = "", strategy: str | None = None) -> None:
    """Print where a trained policy is and how to read with it; standard output gets only its folder."""
    summary = f"{reason}trained for {format_count(steps, 'step')}; the policy is in {folder}"
    options = shlex.join([str(folder), *(("--strategy", strategy) if strategy else ())])
    for line in (summary, *extra_lines, f'read with it: memagent read DOCUMENT --question "..." --model {options}'):
        typer.echo(line, err=True)
    typer.echo(str(folder))


def require_training_extra() -> None:
    """Refuse to train without the libraries of the extra `train`.

    Raises:
        MissingExtraError: the libraries are not installed.
        TrainingError: TRL is of a version that the trainer was not written for.
    """
    if importlib.util.find_spec("trl") is None:
        raise MissingExtraError("train", "training")
    require_version("trl>=1.16,<1.17")


def is_main_process() -> bool:
    """Return whether this is the one process of `accelerate launch` that prints; true without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def leave_process_group() -> None:
    """Leave `accelerate launch`'s process group when the work is done.

    If the group's threads still run when the process ends, it may abort, and a finished training would look failed.
    """
    from accelerate import PartialState  # noqa: PLC0415  heavy

    PartialState().destroy_process_group()


@contextlib.contextmanager
def report_failures(
    *,
    as_json: bool,
    interruption_message: str,
    exit_codes: Mapping[str, ExitCode] | None = None,
) -> Iterator[None]:
    """Report an error inside the block, once per machine, and exit with its code.

    Args:
        as_json: whether standard output has a JSON object.
        interruption_message: the message after Ctrl-C.
        exit_codes: exit codes, by class name, of errors that are slow to import and unknown to `choose_exit_code`.
    """
    try:
        with warnings.catch_warnings():
            # TRL still uses names that transformers deprecates; the user cannot change that.
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            yield
    except MemAgentError as error:
        from memagent_graph.cli.console import Console  # noqa: PLC0415  it is not needed where all is well

        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(FAILURE_DELAY_SECONDS)
        code = (exit_codes or {}).get(type(error).__name__, choose_exit_code(error))
        # The console prints only the ids of resumable runs.
        if error.run_id is not None and error.run_id not in error.message:
            error.message = f"{error.message} (run {error.run_id})"
        Console(as_json=as_json and is_main_process()).report_error(error)
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        if is_main_process():
            typer.echo(interruption_message, err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
