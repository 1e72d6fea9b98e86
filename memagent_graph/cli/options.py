"""Options that several commands share: name, type, help and default.

Options of a policy and a reader come from the fields of `memagent_graph.settings`. The options here set when a command
stops and where it writes. An option of a single command is in the command's module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from memagent_graph.errors import MemAgentError
from memagent_graph.settings import PolicySettings, ReadSettings, RuleSettings, WordingSettings, list_text_fields
from memagent_graph.storage.bounded_files import MAX_WORDING_BYTES, read_text_file
from memagent_graph.storage.private_files import get_default_checkpoints_path

if TYPE_CHECKING:
    from memagent_graph.reader import MemAgent


OPTION_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Policy and server": (
        "policy", "profile", "tokenizer", "dtype", "api_key", "concurrency", "timeout", "retries",
        "session_header", "unsupported",
        "chat_template_kwargs", "header", "ca_file", "proxy",
    ),
    "Several machines": ("ray", "ray_actors"),
    "Prompts and budgets": (
        "layout", "answer_format", "update_template", "answer_template", "empty_memory", "context_window",
        "question_tokens", "memory_tokens", "chunk_tokens", "answer_tokens", "boundary",
    ),
    "Document": ("pages", "encoding", "replace_undecodable", "converter", "on_incomplete", "max_bytes"),
    "Tables and datasets": (
        "text_column", "path_column", "id_column", "question_column", "keep_column", "root", "subset", "split",
    ),
    "What may be opened": ("allow_private_addresses",),
    "Sampling": ("temperature", "top_p", "seed", "logprobs"),
    "Memories that cannot be used": ("on_truncated", "on_empty", "on_refused", "on_invented"),
    "Limits": ("max_chunks", "max_questions", "max_documents", "max_tokens", "max_tokens_total", "max_seconds"),
    "Who may ask": ("keys", "without_keys", "server_name", "allow_origin", "allow_remote"),
    "Load": (
        "max_reads", "max_waiting", "max_reads_per_key", "max_connections", "max_body", "request_memory", "storage",
        "total_storage", "keep_minutes", "cancel_on_close",
    ),
    "Prices and throughput": ("price_in", "price_out", "tokens_per_second"),
    "Where runs are kept": (
        "run_id", "checkpoints", "no_checkpoints", "store", "log", "no_log", "keep_documents",
    ),
    "Output": ("out", "formats", "force", "as_json", "updates", "quiet"),
}  # fmt: skip
"""The groups of options in a long help, by field names. Options without a group come first."""

# An evaluation's tasks

HaystackOption = Annotated[
    Path | None,
    typer.Option(
        help="Text to hide facts in: a file, or a folder with .txt and .md files.", show_default="Python's docs"
    ),
]
SmallOption = Annotated[
    bool, typer.Option("--small", help="Use small variants, for a small context, of tasks that have them.")
]

# Settings


def make_setting_options() -> dict[str, Any]:
    """Return the annotations (type and option) of all settings that have a text form, by name."""
    options: dict[str, Any] = {}
    for name, (field, text_type) in list_text_fields(ReadSettings).items():
        metadata = field.metadata
        flags = [f"--{name.replace('_', '-')}"] if text_type is bool else []
        default = {} if metadata["default_text"] is None else {"show_default": metadata["default_text"]}
        option = typer.Option(*flags, help=metadata["help"], min=metadata["min"], max=metadata["max"], **default)
        options[name] = Annotated[text_type, option]
    return options


# Limits of a command

MaxTokensTotalOption = Annotated[
    int | None, typer.Option(min=1, help="Stop after this many tokens. The run can be resumed.")
]
MaxSecondsOption = Annotated[
    float | None, typer.Option(min=0.001, help="Stop after this many seconds. The run can be resumed.")
]

# Storage

CHECKPOINTS_HELP: Final = (
    "SQLite file for checkpoints, or a PostgreSQL server that several machines share: postgresql://USER@HOST/DATABASE."
)
CheckpointsOption = Annotated[str | None, typer.Option(help=CHECKPOINTS_HELP, show_default="user's data folder")]
STORE_HELP: Final = "Folder for the documents' texts. Machines that mount the same folder can continue a run."
StoreOption = Annotated[str | None, typer.Option("--store", help=STORE_HELP, show_default="user's data folder")]
LogOption = Annotated[
    Path | None, typer.Option("--log", help="SQLite file for the run log.", show_default="user's data folder")
]

# Prices and output

PriceInOption = Annotated[float | None, typer.Option(min=0.0, help="Price per million prompt tokens.")]
PriceOutOption = Annotated[float | None, typer.Option(min=0.0, help="Price per million completion tokens.")]
JSONOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Do not show progress.")]


def print_json(values: Mapping[str, Any]) -> None:
    """Print a JSON object on standard output, in ASCII, so that every terminal and file name can be shown."""
    sys.stdout.write(json.dumps(values) + "\n")


def open_reader(command: Any, settings: ReadSettings, *, store: Any = None, is_logged: bool = True) -> MemAgent:
    """Return a reader with the checkpoints, log and store of a command, or with the defaults in the data folder.

    A run without a log cannot be resumed, so it has checkpoints only if `--checkpoints` is given.

    Args:
        command: the command, with `checkpoints`, `log` and `store`.
        settings: the settings of the reader.
        store: an open store, which replaces `--store`.
        is_logged: whether the runs are logged.
    """
    from memagent_graph.reader import MemAgent

    return MemAgent(
        settings=settings,
        store=store or command.store,
        checkpoints=command.checkpoints or (get_default_checkpoints_path() if is_logged else None),
        run_log=(command.log or True) if is_logged else False,
    )


@dataclass(frozen=True, kw_only=True)
class ReaderOptions(PolicySettings, WordingSettings, RuleSettings):
    """The options of a reader. A command that samples also has `SamplingSettings`."""

    def make_settings(self) -> ReadSettings:
        """Return the reader's settings, with the policy chosen.

        An option with the name of a setting is that setting.
        """
        names = {field.name for field in fields(self)} & {field.name for field in fields(ReadSettings)}
        return ReadSettings(**{name: getattr(self, name) for name in names}).resolve()


_MAX_QUESTIONS = 10_000


def expand_questions(texts: Iterable[str]) -> list[str]:
    """Return the questions, with each @FILE replaced by the questions in that file.

    Raises:
        MemAgentError: a question is empty; a file cannot be read, or contains no questions.
    """
    questions: list[str] = []
    for text in texts:
        if not text.strip():
            raise MemAgentError("the question is empty", hint="Ask something.")
        if not text.startswith("@"):
            questions.append(text)
            continue
        try:
            content = read_text_file(Path(text[1:]).expanduser(), MAX_WORDING_BYTES, allow_pipes=True)
            lines = [line.strip() for line in content.splitlines() if line.strip()]
            if len(lines) > _MAX_QUESTIONS:
                raise ValueError(f"there are more than {_MAX_QUESTIONS:,}")
        except (OSError, ValueError, RuntimeError) as error:  # an unknown user after ~
            raise MemAgentError(
                f"the questions in {text[1:]} cannot be read: {error}",
                hint="Write the path of a UTF-8 text file after @, with one question per line.",
            ) from error
        if not lines:
            raise MemAgentError(f"{text[1:]} contains no questions", hint="Write one question per line.")
        questions += lines
    return questions
