"""The exit codes of `memagent`, and the report of errors at the end of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

import typer

from memagent_graph.errors import (
    BudgetError,
    CheckpointError,
    CorpusError,
    DocumentError,
    DocumentStoreError,
    EvaluationError,
    MemAgentError,
    MissingExtraError,
    PolicyError,
    ProfileError,
    PromptError,
    ResponseFormatError,
    RunError,
    TokenizerError,
)

if TYPE_CHECKING:
    from memagent_graph.cli.console import Console


class ExitCode(IntEnum):
    """The process's exit codes."""

    ANSWERED = 0
    USAGE = 2
    DOCUMENT = 3
    POLICY = 4
    STOPPED = 5
    RUN = 6
    SETTINGS = 7
    NO_ANSWER = 8
    COLLAPSED = 9
    CHECKPOINTS = 10
    INTERRUPTED = 130


def choose_exit_code(error: MemAgentError) -> ExitCode:
    """Return the exit code for an error."""
    codes = (
        (DocumentStoreError | CheckpointError, ExitCode.CHECKPOINTS),
        (DocumentError, ExitCode.DOCUMENT),
        (PolicyError, ExitCode.POLICY),
        (RunError, ExitCode.RUN),
        (BudgetError | ProfileError | PromptError | TokenizerError, ExitCode.SETTINGS),
        (EvaluationError | CorpusError | MissingExtraError | ResponseFormatError, ExitCode.SETTINGS),
    )
    return next((code for error_types, code in codes if isinstance(error, error_types)), ExitCode.USAGE)


@contextmanager
def report_failures(console: Console | None = None, *, as_json: bool = False) -> Iterator[None]:
    """Print an error that is raised in the block, and exit with its code."""
    try:
        yield
    except MemAgentError as error:
        from memagent_graph.cli.console import Console

        (console or Console(as_json=as_json)).report_error(error)
        raise typer.Exit(choose_exit_code(error)) from None
