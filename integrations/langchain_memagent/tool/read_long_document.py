"""`ReadLongDocument`: a tool with which an agent reads documents that are longer than its context.

    agent = create_agent(model, tools=[..., ReadLongDocument(agent=MemAgent(...), roots=["reports"])])

The model names a document and asks questions; it gets answers with numbered quotes, and the application gets run ids,
spans and costs in the tool message's artifact. If the model may not read something, a message tells it why.

If the policy fails in the middle of a read (for example because its server is down), the model is told by default, with
the run id and the remedy, so that an agent with other tools can continue without the document. The read is not lost: if
the agent has a checkpointer, or the reader has its own checkpoints, the same question about the same document continues
at the chunk where the read failed or reached a limit. With `on_failure="raise"` a failure stops the agent instead, and
`agent.invoke(None, config)` continues at that chunk, as it does after the process was killed.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from langchain_core.messages import ToolMessage
from langchain_core.runnables.config import ensure_config
from langchain_core.tools import BaseTool, InjectedToolArg, ToolException
from langgraph.config import get_stream_writer
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SkipValidation,
    ValidationError,
    create_model,
    model_validator,
)

from langchain_memagent.questions import Questions
from langchain_memagent.task_places import kept_for_retries
from langchain_memagent.tool.agent_checkpoints import aread_in_agent, has_checkpointer, read_in_agent
from langchain_memagent.tool.allowed_documents import DocumentSources, Fetcher, FileBackend, NamedSource
from langchain_memagent.tool.call import Outcome, ReadCall, read_alone, unfinished_readings
from langchain_memagent.tool.readings import ReadArtifact, content_for_model
from memagent_graph import MemAgent
from memagent_graph.concurrency.background import run_sync
from memagent_graph.documents import DocumentRef
from memagent_graph.documents.allowed_roots import AllowedRoots
from memagent_graph.errors import BudgetError, DocumentError, MemAgentError, MissingExtraError
from memagent_graph.reading.graph import check_question
from memagent_graph.reading.state import Limits, ReaderContext
from memagent_graph.reading.structured import structured
from memagent_graph.response_format import ResponseFormat
from memagent_graph.settings import ReadSettings
from memagent_graph.trace import MemoryUpdate

_DESCRIPTION = (
    "Read a whole document of any length with questions in mind, and get their answers with quotes from it. "
    "Use it for documents that are too long to look at directly. Ask everything that you need from one document in "
    "one call: its questions share one pass over the document. Each question is answered on its own, from the document "
    "alone, so make it complete in itself."
)
_SOURCES = {
    "path": "Path of the file to read.",
    "text": "The text to read, if it is not in a file.",
    "state_key": "The key of the agent's state that has the text to read.",
    "url": "Web address (http or https) of the document to read.",
}
_PAGES = "Of a PDF file, the pages to read, as in 5, 5-10, 12- or 1-3,7. Leave it out to read all."


def _describe_wrong_arguments(error: Any) -> str:
    if not isinstance(error, ValidationError):
        return "The arguments do not fit the tool's schema."
    wrong = [
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": Value error, ")
        for each in error.errors(include_input=False)
    ]
    return f"The arguments do not fit: {'; '.join(wrong)}."


def _reader_of_environment() -> MemAgent:
    return MemAgent(settings=ReadSettings.from_environment(os.environ))


class ReadLongDocument(BaseTool):
    """Reads a document with a `MemAgent` and answers questions on it.

    Without an `agent`, a reader is made from the environment: the server of OPENAI_BASE_URL with OPENAI_API_KEY, or the
    policy that was added, or the embedded one; MEMAGENT_MODEL, MEMAGENT_TOKENIZER and so on are the fields of
    `ReadSettings`. Documents and runs are stored in MEMAGENT_HOME.

    Errors that a model can react to are tool messages with status "error", not exceptions.

    Args:
        agent: the reader.
        roots: folders, or single files, below which the model may name paths, links followed. Without any, none.
        max_bytes: the largest document, of any source.
        max_questions: questions in one call.
        limits: where the read for one question stops early; a call costs at most `max_questions` times as much.
        on_failure: "tell" the model of a read that failed, or "raise" the error; see the module.
        fetcher: gets the content of the web addresses that the model may name; refusing hosts is its job.
        backend: a deepagents backend; absolute paths are looked up in it first.
        state_keys: keys of the agent's state that the model may name.
        answer_schema: the form of the answers: a Pydantic model, or a JSON schema as a dict. The model then gets JSON,
            and each reading in the artifact has a `value`. (`response_format` is LangChain's own field.)

    Raises:
        pydantic.ValidationError: an option of another name, or a value of the wrong type.
        ResponseFormatError, MissingExtraError: `answer_schema` cannot be used.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = "read_long_document"
    description: str = _DESCRIPTION
    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    handle_tool_error: Any = True
    handle_validation_error: Any = Field(default=_describe_wrong_arguments)

    agent: SkipValidation[MemAgent] = Field(default_factory=_reader_of_environment, exclude=True, repr=False)
    """The reader."""
    roots: Sequence[Path | str] = ()
    """Folders, or single files, below which the model may name paths, links followed. Without any, none."""
    max_bytes: int = Field(default=256 * 2**20, gt=0)
    """The largest document, of any source."""
    max_questions: int = Field(default=8, gt=0)
    """Questions in one call."""
    limits: SkipValidation[Limits] | None = None
    """Where the read for one question stops early; a call costs at most `max_questions` times as much."""
    on_failure: Literal["tell", "raise"] = "tell"
    """What becomes of a read that fails: the model is told, or the error is raised. See the module."""
    fetcher: SkipValidation[Fetcher] | None = Field(default=None, exclude=True, repr=False)
    """Gets the content of the web addresses that the model may name; refusing hosts is its job."""
    backend: SkipValidation[FileBackend] | None = Field(default=None, exclude=True, repr=False)
    """A deepagents backend; absolute paths are looked up in it first."""
    state_keys: Sequence[str] = ()
    """Keys of the agent's state that the model may name."""
    answer_schema: SkipValidation[Any] = Field(default=None, exclude=True, repr=False)
    """The form of the answers: a Pydantic model, or a JSON schema as a dict."""

    _sources: DocumentSources = PrivateAttr()
    _format: ResponseFormat | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Determine what can be read, and offer only that to the model."""
        super().model_post_init(context)
        self._format = None if self.answer_schema is None else ResponseFormat.of(self.answer_schema)
        self._sources = DocumentSources(
            AllowedRoots(self.roots, max_bytes=self.max_bytes), self.fetcher, self.backend, tuple(self.state_keys)
        )
        if self.args_schema is None:
            self.args_schema = _arguments_schema(self._sources, self.max_questions)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "ReadLongDocument cannot be pickled, as its reader cannot: that has connections, threads and open files. "
            "Create the tool in the process that uses it; a process that is forked from this one can use it as it is."
        )

    @property
    def base_url(self) -> str | None:
        """The server of the reader's policy; None for a policy in this process."""
        return getattr(self.agent.policy, "base_url", None)

    @property
    def model(self) -> str:
        """The name of the reader's policy."""
        return self.agent.policy.name

    def _run(
        self, questions: list[str], runtime: Annotated[Any, InjectedToolArg()] = None, **named: str | None
    ) -> tuple[str | ToolMessage, ReadArtifact]:
        asked = self._checked(questions)
        config = ensure_config()
        call = self._call(asked, NamedSource(**named), runtime, is_kept=has_checkpointer(config))
        if not call.keeps_own:
            config = kept_for_retries(config)
        with self._errors_for_model():
            _check_questions(call.questions, structured(run_sync(self.agent.aprepare()), self._format))
            # An agent's synchronous checkpointer is used from this thread.
            in_agent = has_checkpointer(config) and not call.keeps_own
            outcome = read_in_agent(call, config) if in_agent else run_sync(read_alone(call, config))
            return self._reply(outcome, asked, runtime)

    async def _arun(
        self, questions: list[str], runtime: Annotated[Any, InjectedToolArg()] = None, **named: str | None
    ) -> tuple[str | ToolMessage, ReadArtifact]:
        asked = self._checked(questions)
        config = ensure_config()
        call = self._call(asked, NamedSource(**named), runtime, is_kept=has_checkpointer(config))
        if not call.keeps_own:
            config = kept_for_retries(config)
        with self._errors_for_model():
            _check_questions(call.questions, structured(await self.agent.aprepare(), self._format))
            in_agent = has_checkpointer(config) and not call.keeps_own
            outcome = await (aread_in_agent if in_agent else read_alone)(call, config)
            return self._reply(outcome, asked, runtime)

    def _checked(self, questions: list[str]) -> list[str]:
        if not 1 <= len(questions) <= self.max_questions:
            raise ToolException(f"Ask 1 to {self.max_questions} questions in one call, not {len(questions)}.")
        asked = [question.strip() for question in questions]
        if "" in asked:
            raise ToolException("A question is empty. Write it out, or leave it out.")
        return asked

    def _call(self, asked: list[str], named: NamedSource, runtime: Any, *, is_kept: bool) -> ReadCall:
        different = tuple(dict.fromkeys(asked))
        # The reading graph has its own state and stream; these two belong to the agent's graph.
        here = contextvars.copy_context()
        return ReadCall(
            agent=self.agent,
            questions=different,
            store_document=partial(_in_context, here, self._store, named, getattr(runtime, "state", None)),
            report=partial(_report, here, _stream_writer()),
            limits=self.limits,
            response_format=self._format,
            raises=self.on_failure == "raise",
            is_kept=is_kept,
            unfinished=unfinished_readings(getattr(runtime, "state", None), self.name),
            key=_key(getattr(runtime, "tool_call_id", None), different, named),
        )

    async def _store(self, named: NamedSource, state: Any) -> DocumentRef:
        document = await self._sources.open(named, state)
        replace = (await self.agent.aprepare()).replace_undecodable
        return await self.agent.store.add_async(document, replace_undecodable=replace)

    def _reply(self, outcome: Outcome, asked: list[str], runtime: Any) -> tuple[str | ToolMessage, ReadArtifact]:
        readings = outcome.for_each(asked)
        content = content_for_model(readings)
        artifact = ReadArtifact(document=outcome.document, readings=readings)
        if any(reading["error"] is None for reading in readings):
            return content, artifact
        if (tool_call_id := getattr(runtime, "tool_call_id", None)) is None:
            raise ToolException(content)
        # The message of an exception has no artifact, without which the read cannot be continued.
        failed = ToolMessage(content, artifact=artifact, tool_call_id=tool_call_id, name=self.name, status="error")
        return failed, artifact

    @contextmanager
    def _errors_for_model(self) -> Iterator[None]:
        """Errors become messages for the model, unless `on_failure` is "raise" and the read failed.

        The model is always told if a document cannot be read.
        """
        try:
            yield
        except MemAgentError as error:
            if self.on_failure == "raise" and not isinstance(error, DocumentError | MissingExtraError):
                raise
            raise ToolException(str(error)) from error


class _Arguments(BaseModel):
    """Base of the arguments of every such tool; it has the kinds of source that this tool does not read."""

    offered: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # Models that fill in every argument leave the unnecessary ones empty.
        given = {name: value for name, value in given.items() if value != "" or name not in _SOURCES}
        if others := [kind for kind in _SOURCES if kind not in cls.offered and given.get(kind) is not None]:
            raise ValueError(f"{others[0]} cannot be read here; give one of: {', '.join(cls.offered)}")
        return given


def _arguments_schema(sources: DocumentSources, max_questions: int) -> type[BaseModel]:
    """The arguments, with only the kinds of source that can be read here."""
    fields: dict[str, Any] = {
        "questions": (
            Questions,
            Field(min_length=1, description=f"The questions, 1 to {max_questions}, each complete in itself."),
        )
    }
    only = " Name the document in exactly one way." if len(sources.kinds) > 1 else ""
    for kind in sources.kinds:
        kind_of_value = Literal[sources.state_keys] if kind == "state_key" else str
        fields[kind] = (kind_of_value | None, Field(default=None, description=_SOURCES[kind] + only))
    if not {"path", "url"}.isdisjoint(sources.kinds):
        fields["pages"] = (str | None, Field(default=None, description=_PAGES))
    # Excluded from dumps: pydantic would go through the agent's whole state.
    fields["runtime"] = (Annotated[Any, InjectedToolArg()], Field(default=None, exclude=True))
    arguments = create_model("ReadLongDocumentArguments", __base__=_Arguments, **fields)
    arguments.offered = sources.kinds
    return arguments


def _check_questions(questions: Sequence[str], context: ReaderContext) -> None:
    """Check all questions before any chunk is read, so that one that is too long costs nothing."""
    for question in questions:
        try:
            check_question(question, context)
        except BudgetError as error:  # its hint is for the developer
            raise ToolException(f"{error.message}. Ask a shorter question.") from error


async def _in_context(context: contextvars.Context, store: Callable[..., Any], *arguments: Any) -> DocumentRef:
    reference: DocumentRef = await asyncio.create_task(store(*arguments), context=context.copy())
    return reference


def _stream_writer() -> Callable[[Any], None]:
    """The agent's stream; outside of an agent nothing is written."""
    try:
        return get_stream_writer()
    except (RuntimeError, KeyError):
        return lambda _: None


def _report(
    context: contextvars.Context, write: Callable[[Any], None], run_id: str, question: str, update: MemoryUpdate
) -> None:
    progress = {"run_id": run_id, "question": question, "chunk": update.chunk_index, "progress": update.progress}
    context.copy().run(write, {"type": "memagent.progress", **progress})


def _key(tool_call_id: str | None, questions: Sequence[str], named: NamedSource) -> str | None:
    """Distinguishes this tool call from others, also when it is executed again after a crash."""
    if tool_call_id is None:
        return None
    return hashlib.sha256(repr((tool_call_id, questions, named)).encode("utf-8", "replace")).hexdigest()[:24]
