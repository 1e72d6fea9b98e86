"""What the commands that train have in common: how they refuse, how they fail, and which process speaks."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import typer

from memagent_graph.cli.exit_codes import ExitCode, exit_code
from memagent_graph.errors import MemAgentError, MissingExtraError

Made = TypeVar("Made")

PATIENCE: Final = 15.0
"""Seconds that a machine's other processes wait with a failure. Nearly always the first one has failed, too, and says
so; the launcher then ends the others, and would end the first one just as well if they were quicker."""

OptionNames: TypeAlias = Sequence[tuple[re.Pattern[str], str]]
"""What a hint calls by the name of a function's argument, and the option that it is on the command line."""

PRESETS: Final = (
    "memagent-paper, dapo, gru-mem (GRU-Mem, arXiv 2602.10560: gate and exit; constants ours), rememr1 (ReMemR1, arXiv "
    "2509.23040: 0.8 outcome and 0.2 steps), longrlvr (LongRLVR, arXiv 2603.02146: evidence F2), or a YAML file of "
    "settings."
)
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting in place of the preset's. Repeatable."),
]
LoRARank = Annotated[int | None, typer.Option(min=1, help="Train adapters of this rank, not all weights.")]


def from_options(kind: Callable[..., Made], options: Any, **others: Any) -> Made:
    """Make a dataclass of a command's options of the same names, and of `others` where they are not its values."""
    names = inspect.signature(kind).parameters.keys() - others.keys()
    return kind(**{name: getattr(options, name) for name in names if hasattr(options, name)}, **others)


def show_policy(folder: Path, steps: int, *more: str, why: str = "") -> None:
    """Say where a trained policy is and how to read with it; its folder alone is on standard output."""
    number = f"{steps:,} step{'' if steps == 1 else 's'}"
    first = f"{why}trained for {number}; the policy is in {folder}"
    for line in (first, *more, f'read with it: memagent read DOCUMENT --question "..." --model {folder}'):
        typer.echo(line, err=True)
    typer.echo(str(folder))


def require_extra() -> None:
    """Refuse to train without the libraries for it.

    Raises:
        MissingExtraError: they are not installed.
    """
    if importlib.util.find_spec("trl") is None:
        raise MissingExtraError("train", "training")


def is_main_process() -> bool:
    """Whether this is the one process of `accelerate launch` that prints; true without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def leave_the_others() -> None:
    """End this process' part in `accelerate launch`'s group, once its work is done.

    One that ends with the group's threads running may abort, and a finished training be taken for a failed one.
    """
    from accelerate import PartialState  # noqa: PLC0415  heavy

    PartialState().destroy_process_group()


@contextlib.contextmanager
def failures_told(
    *,
    as_json: bool,
    interrupted: str,
    option_names: OptionNames = (),
    codes: Mapping[str, ExitCode] | None = None,
) -> Iterator[None]:
    """Say what goes wrong within, once per machine, and leave with its exit code.

    Args:
        as_json: whether standard output carries a JSON object.
        interrupted: what to say after Ctrl-C.
        option_names: how messages and hints are put into the command line's words.
        codes: of errors, by their class's name, that `exit_code` does not know: importing them is slow.
    """
    try:
        with warnings.catch_warnings():
            # Names that transformers gives up and TRL still uses; the user can do nothing about them.
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            yield
    except MemAgentError as error:
        from memagent_graph.cli.console import Console  # noqa: PLC0415  it is not needed where all is well

        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(PATIENCE)
        code = (codes or {}).get(type(error).__name__, exit_code(error))
        error.message = as_options(error.message, option_names)
        error.hint = error.hint and as_options(error.hint, option_names)
        Console(as_json=as_json and is_main_process()).failure(_with_run(error), code)
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        if is_main_process():
            typer.echo(interrupted, err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def as_options(text: str, option_names: OptionNames) -> str:
    """A message or hint in the command line's words."""
    for pattern, option in option_names:
        text = pattern.sub(option, text)
    return text


def _with_run(error: MemAgentError) -> MemAgentError:
    """The error with the run in its message: the console shows a run by itself only where it can be resumed."""
    if error.run_id is not None and error.run_id not in error.message:
        error.message = f"{error.message} (run {error.run_id})"
    return error
