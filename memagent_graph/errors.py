"""Everything that this package raises on purpose, as one tree.

    MemAgentError
    ├── DocumentError               a source cannot be read, or is not the document that was meant
    │   ├── EmptyDocumentError          nothing but white space
    │   ├── EncodingError               bytes that are not text in the charset that was tried
    │   ├── UnsupportedDocumentError    a binary file that no converter here turns into text
    │   ├── DocumentMismatchError       another text than the one that a run began with
    │   └── RefusedSourceError          a source that a language model named and that it may not read
    ├── TokenizerError              no such tokenizer, or one that cannot be loaded here
    ├── PromptError                 a template with missing, unknown or repeated fields
    ├── StrategyError               a way of reading that is not known, or not well formed
    ├── BudgetError                 question, memory, chunk and output do not fit the context window
    ├── ProfileError                no budgets and prompts where a policy's are said to be, or unreadable ones
    ├── PolicyError                 the language model gave nothing usable
    │   ├── PolicyUnreachableError      no connection, or a time-out
    │   ├── PolicyAuthenticationError   401 or 403
    │   ├── PolicyRequestError          another 4xx: a wrong model name, an over-long prompt
    │   ├── PolicyOverloadedError       429 or 5xx after all retries
    │   └── PolicyResponseError         an answer that is not what the protocol promises
    ├── RunError                    something about a run's identity or state
    │   ├── RunNotFoundError            no run of that id in this log
    │   ├── RunMismatchError            resumed with another document, question or settings
    │   └── RunLogError                 the log of runs cannot be read or written
    ├── RetrievalError              texts that cannot be ranked beside a query
    ├── EvaluationError             a task, a data file or a results file that an evaluation cannot use
    └── MissingExtraError           an optional dependency is not installed

Messages say what happened; `hint` says what to do next, and `str(error)` holds both. Those that trying again does not
mend are `LastingError`s, too: documents, prompts, budgets, settings, a refused key or request, what is not installed.
"""

from __future__ import annotations


class MemAgentError(Exception):
    """Root of the tree.

    Args:
        message: What happened, one sentence without a final full stop.
        hint: The remedy, shown after the message.
        run_id: The run in which it happened, where there is one.
        chunk_index: The chunk at which it happened, counted from 0, where there is one.

    `branch` is set where it happened in one of several branches that were read side by side.
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

    def __str__(self) -> str:
        place = []
        if self.run_id is not None:
            place.append(f"run {self.run_id}")
        if self.branch is not None:
            place.append(f"branch {self.branch}")
        if self.chunk_index is not None:
            place.append(f"chunk {self.chunk_index}")
        text = f"{self.message} ({', '.join(place)})" if place else self.message
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling with every attribute, whatever the subclass's constructor takes."""
        return _rebuild, (type(self), self.message), dict(self.__dict__)


def _rebuild(cls: type[MemAgentError], message: str) -> MemAgentError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    return error


class LastingError(MemAgentError, RuntimeError):
    """An error that comes again however often the same is tried.

    It is a `RuntimeError` because LangGraph's `RetryPolicy` tries again after every exception that is none of Python's
    own; `RuntimeError` and not `ValueError`, which pydantic and LangGraph's server take for errors of their callers.
    """


class DocumentError(LastingError):
    """A source cannot be read, or is not the document that was meant."""


class EmptyDocumentError(DocumentError):
    """The document holds nothing but white space."""


class EncodingError(DocumentError):
    """Bytes, or code points, that are not text in the charset that was tried."""


class UnsupportedDocumentError(DocumentError):
    """A binary file that no converter here turns into text."""


class DocumentMismatchError(DocumentError):
    """Another text than the one that a reference or a run began with."""


class RefusedSourceError(DocumentError):
    """A source that a language model named and that it may not read."""


class TokenizerError(LastingError):
    """No such tokenizer, or one that cannot be loaded here."""


class PromptError(LastingError):
    """A prompt template with missing, unknown or repeated fields."""


class StrategyError(LastingError):
    """A way of reading that nobody knows, that cannot be loaded, or whose graph, roles or state do not fit together."""


class BudgetError(LastingError):
    """Question, memory, chunk, template and output do not fit the context window."""


class ProfileError(LastingError):
    """No budgets and prompts where a policy's are said to be, or ones that cannot be understood."""


class PolicyError(MemAgentError):
    """The language model gave nothing usable."""


class PolicyUnreachableError(PolicyError):
    """No connection to the server, or a time-out."""


class PolicyAuthenticationError(PolicyError, LastingError):
    """The server refused the key (401 or 403)."""


class PolicyRequestError(PolicyError, LastingError):
    """The server refused the request (another 4xx): a wrong model name, an over-long prompt."""


class PolicyOverloadedError(PolicyError):
    """The server kept answering 429 or 5xx after all retries."""


class PolicyResponseError(PolicyError):
    """The server's answer is not what the protocol promises."""


class RunError(MemAgentError):
    """Something about a run's identity or state."""


class RunNotFoundError(RunError, LastingError):
    """No run of that id in this log."""


class RunMismatchError(RunError, LastingError):
    """A run resumed with another document, question or settings."""


class CheckpointError(RunError):
    """The checkpoints of runs cannot be read or written: damaged, locked, or their disk is full."""


class RunLogError(RunError):
    """The log of runs cannot be read or written: no log, of a newer version, corrupt, locked, or its disk is full."""


class RetrievalError(MemAgentError):
    """Texts cannot be ranked beside a query: an embedder failed."""


class EvaluationError(MemAgentError):
    """A task, a data file or a results file that an evaluation cannot use."""


class MissingExtraError(LastingError):
    """An optional dependency is not installed.

    Args:
        extra: The extra of this distribution that brings it.
        needed_for: What was asked for, as in "reading PDF files".
    """

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(
            f'{needed_for} needs the extra "{extra}", which is not installed',
            hint=f'Install it with: pip install "memagent-graph[{extra}]"',
        )
        self.extra = extra
        self.needed_for = needed_for
