"""The errors of this package, as one tree.

    MemAgentError
    ├── DocumentError               a source cannot be read, or is not the expected document
    │   ├── EmptyDocumentError          only white space
    │   ├── IncompleteDocumentError     some of its content is not in its text, and the setting is to stop then
    │   ├── EncodingError               bytes that cannot be decoded with the charset
    │   ├── UnsupportedDocumentError    a binary file that cannot be converted to text
    │   ├── DocumentMismatchError       its text is not that of the run
    │   ├── DocumentStoreError          the store of texts cannot be read or written
    │   └── RefusedSourceError          a source that a language model may not read
    ├── TokenizerError              there is no such tokenizer, or it cannot be loaded
    ├── PromptError                 a template with missing, unknown or repeated fields
    ├── ResponseFormatError         a model or JSON schema that cannot validate answers
    ├── StrategyError               an unknown or invalid way of reading
    ├── BudgetError                 question, memory, chunk and output do not fit the context window
    ├── ProfileError                budgets and prompts of a policy are missing or unreadable
    ├── PolicyError                 the language model returned nothing usable
    │   ├── NoPolicyError               none is named, and none was added to this machine
    │   ├── PolicyUnreachableError      no connection, or a time-out
    │   ├── PolicyAuthenticationError   401 or 403
    │   ├── PolicyRequestError          another 4xx: a wrong model name, an over-long prompt
    │   ├── PromptCutError              the server cut the prompt, and the setting is to stop then
    │   ├── PolicyOverloadedError       408, 409, 429 or 5xx after all retries
    │   └── PolicyResponseError         a reply that is damaged, too long, or a redirect to another server
    ├── RunError                    a problem with a run's identity or state
    │   ├── RunNotFoundError            there is no run with this id
    │   ├── RunMismatchError            resumed with another document, question or settings
    │   ├── RunHeldError                another process is reading the run
    │   ├── CheckpointError             the checkpoints of runs cannot be read or written
    │   └── RunLogError                 the log of runs cannot be read or written
    ├── RetrievalError              texts could not be ranked for a query
    ├── EvaluationError             an evaluation cannot use a task, data or results file
    ├── CorpusError                 the output of a corpus cannot be used: another run's, other settings, not writable
    └── MissingExtraError           an optional dependency is not installed

A message says what happened, and `hint` what to do next; `str(error)` contains both. Hints name options of the command
line (`--chunk-tokens`); `remedy` and `str(error)` name the corresponding Python arguments (`chunk_tokens`). Errors that
a retry cannot remove are also `PermanentError`s: errors of documents, prompts, budgets and settings, a refused key or
request, a missing extra.
"""

from __future__ import annotations

import copyreg
import importlib
import json
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

_OPTION: Final = re.compile(r"(`[^`]*`)|(?<!\S)(\(?)--([a-z]+(?:-[a-z]+)*)")
"""A command in backticks, or an option of the command line outside backticks, perhaps after a bracket."""
_ARGUMENT_BY_OPTION: Final = {"log": "run_log", "no_log": "run_log=False"}
"""The Python arguments of options that have another name."""


class MemAgentError(Exception):
    """The root of the error tree.

    Args:
        message: what happened, as one sentence without a final full stop.
        hint: the remedy, shown after the message; options of the command line have two hyphens.
        run_id: the run in which the error occurred, if any.
        chunk_index: the chunk at which the error occurred, counted from 0, if any.

    `branch` is set if the error occurred in one of several branches that were read in parallel.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        run_id: str | None = None,
        chunk_index: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.run_id = run_id
        self.chunk_index = chunk_index
        self.branch: str | None = None

    @property
    def remedy(self) -> str | None:
        """The hint with names of Python arguments, as in "Lower chunk_tokens."."""
        return self.make_remedy(lambda name: _ARGUMENT_BY_OPTION.get(name, name))

    def make_remedy(self, rename_option: Callable[[str], str]) -> str | None:
        """Return the hint with another interface's option names; `rename_option` gets a name such as `chunk_tokens`."""
        return self.hint and _OPTION.sub(
            lambda match: match[1] or match[2] + rename_option(match[3].replace("-", "_")), self.hint
        )

    def __str__(self) -> str:
        places = {"run": self.run_id, "branch": self.branch, "chunk": self.chunk_index}
        parts = [f"{name} {place}" for name, place in places.items() if place is not None]
        text = f"{self.message} ({', '.join(parts)})" if parts else self.message
        return f"{text}. {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all attributes, regardless of the arguments of a subclass's constructor."""
        return copyreg.__newobj__, (type(self), self.message), dict(self.__dict__)  # type: ignore[attr-defined]


class PermanentError(MemAgentError, RuntimeError):
    """An error that occurs again at every retry.

    It is a `RuntimeError`, because LangGraph's `RetryPolicy` retries after all exceptions except some of Python's own.
    It is not a `ValueError`, which pydantic and LangGraph's server treat as an error of their caller.
    """


class DocumentError(PermanentError):
    """A source cannot be read, or is not the expected document."""


class EmptyDocumentError(DocumentError):
    """The document has only white space."""


class IncompleteDocumentError(DocumentError):
    """Some of the document's content is not in its text, and the setting is to stop then."""


class EncodingError(DocumentError):
    """Bytes or code points that cannot be decoded with the charset."""


class UnsupportedDocumentError(DocumentError):
    """A binary file that cannot be converted to text."""


class DocumentMismatchError(DocumentError):
    """The text is not that of a reference or a run."""


class DocumentStoreError(DocumentError):
    """The store of texts cannot be read or written. The document itself has no defect."""


class RefusedSourceError(DocumentError):
    """A source that a language model may not read."""


class TokenizerError(PermanentError):
    """There is no such tokenizer, or it cannot be loaded."""


class PromptError(PermanentError):
    """A prompt template with missing, unknown or repeated fields."""


class ResponseFormatError(PermanentError):
    """A model or JSON schema that is invalid, is too large, or uses an unsupported keyword."""


class StrategyError(PermanentError):
    """A way of reading that is unknown, cannot be loaded, or whose graph, roles or state do not fit together."""


class BudgetError(PermanentError):
    """Question, memory, chunk, template and output do not fit the context window."""


class ProfileError(PermanentError):
    """The budgets and prompts of a policy are missing or cannot be parsed."""


class PolicyError(MemAgentError):
    """The language model returned nothing usable."""


class NoPolicyError(PolicyError, PermanentError):
    """There is no policy to read with: none is named, no server is set, and none was added to this machine."""


class PolicyUnreachableError(PolicyError):
    """No connection to the server, or a time-out."""


class PolicyAuthenticationError(PolicyError, PermanentError):
    """The server refused the key (401 or 403)."""


class PolicyRequestError(PolicyError, PermanentError):
    """The server refused the request (another 4xx): a wrong model name, an over-long prompt."""

    server_message: str = ""
    """The server's message, without secrets."""
    served_model: str = ""
    """If the server has no model of this name: the name of its only model, or NAME if it has several."""


class PromptCutError(PolicyError, PermanentError):
    """The server cut the prompt, and the setting is to stop an incomplete read."""


class PolicyOverloadedError(PolicyError):
    """The server still answered 408, 409, 429 or 5xx after all retries."""

    status: int = 0
    """The HTTP status; 0 if the error has another cause."""


class PolicyResponseError(PolicyError):
    """The server's reply violates the protocol: it is damaged, too long, or a redirect to another server."""


class RunError(MemAgentError):
    """A problem with a run's identity or state."""


class RunNotFoundError(RunError, PermanentError):
    """There is no run with this id."""


class RunMismatchError(RunError, PermanentError):
    """A run resumed with another document, question or settings."""


class RunHeldError(RunError):
    """Another process is reading the run. A later attempt may succeed."""


class CheckpointError(RunError):
    """The checkpoints of runs cannot be read or written: damaged, locked, or their disk is full."""


class RunLogError(RunError):
    """The log of runs cannot be read or written: no log, of a newer version, corrupt, locked, or its disk is full."""


class RetrievalError(MemAgentError):
    """Texts could not be ranked for a query, because a retriever failed."""


class EvaluationError(MemAgentError):
    """An evaluation cannot use a task, a data file or a results file."""


class CorpusError(PermanentError):
    """The output of a corpus cannot be used: another run writes to it, it has other settings, or it is not writable."""


class MissingExtraError(PermanentError):
    """An optional dependency is not installed.

    Args:
        extra: the extra of this distribution that installs it.
        needed_for: the purpose in the message, as in "reading PDF files".
    """

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(
            f'{needed_for} needs the extra "{extra}", which is not installed',
            hint=f"Install it with: {make_install_command(extra)}.",
        )


def require_minimum(minimum: int, **numbers: float) -> None:
    """Raise `MemAgentError` if a number is below a minimum. The argument's name is in the message."""
    for name, value in numbers.items():
        if not value >= minimum:  # NaN is not, either
            raise MemAgentError(f"{name} must be at least {minimum}, got {value}", hint=f"Use {minimum} or more.")


def load_extra(module: str, extra: str, needed_for: str) -> Any:
    """Import a module that an extra of this distribution installs, and return it.

    Raises:
        MissingExtraError: the module is not installed. `extra` and `needed_for` are in the message.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(extra, needed_for) from error


def make_install_command(extra: str, package: str = "memagent-graph") -> str:
    """Return the command that installs an extra from the package's own origin: an index, or a source (PEP 610)."""
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415  slow to import, rarely needed

    try:
        origin = json.loads(distribution(package).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f'pip install {editable}".[{extra}]", in the folder that has the source of {package}'
    if vcs_info := origin.get("vcs_info"):
        return f'pip install "{package}[{extra}] @ {vcs_info["vcs"]}+{origin["url"]}"'
    if origin:
        return f'pip install "{unquote(PurePosixPath(urlsplit(origin["url"]).path).name)}[{extra}]"'
    return f'pip install "{package}[{extra}]"'
