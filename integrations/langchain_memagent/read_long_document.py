"""`ReadLongDocument`: a tool with which an agent reads documents that are longer than its context.

    agent = create_agent(model, tools=[..., ReadLongDocument(agent=MemAgent(...), roots=["reports"])])

The model names a document and asks questions; it gets answers with numbered quotes, and the application gets run ids,
spans and costs in the tool message's artifact. If the model may not read a document, a message tells it why.

If the policy fails in the middle of a read (for example because its server is down), by default the model gets the
error with the run id and the remedy, so that an agent with other tools can continue without the document. The read is
not lost: the same question about the same document continues at the chunk where the read failed or reached a limit.
With `on_failure="raise"` a failure stops the agent instead, and `agent.invoke(None, config)` continues at that chunk.
It also does so after the process was killed; see `graph_reads`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, InjectedToolArg, ToolException
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

from langchain_memagent.graph_reads import CallingGraph, GraphReads, derive_run_id, run_in_graph
from langchain_memagent.named_documents import DocumentSources, Fetcher, NamedSource
from langchain_memagent.readings import (
    ReadArtifact,
    ReadOutcome,
    describe_reading,
    find_unfinished_runs,
    format_for_model,
)
from langchain_memagent.transcripts import Questions
from memagent_graph import MemAgent, ReadResult
from memagent_graph.documents import DocumentRef
from memagent_graph.documents.allowed_paths import AllowedRoots
from memagent_graph.errors import BudgetError, DocumentError, MemAgentError, MissingExtraError
from memagent_graph.reading.inputs import check_question
from memagent_graph.reading.state import Limits, ReaderContext
from memagent_graph.settings import ReadSettings

_DESCRIPTION = (
    "Ask questions about a document of any length, and get their answers with quotes from it. Use it for documents "
    "that are too long to look at directly. The reader is shown {shown_extent}. Ask everything that you need from one "
    "document in one call: its questions share one pass over the document. Each question is answered on its own, from "
    "the document alone, so make it complete in itself."
)
_SOURCE_HELP = {
    "path": "Path of the file to read.",
    "text": "The text to read, if it is not in a file.",
    "state_key": "The key of the agent's state that has the text to read.",
    "url": "Web address (http or https) of the document to read.",
}
_PAGES_HELP = "Of a PDF file, the pages to read, as in 5, 5-10, 12- or 1-3,7. Leave it out to read all."


def _describe_validation_error(error: ValidationError) -> str:
    problems = [
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": Value error, ")
        for problem in error.errors(include_input=False)
    ]
    return f"The arguments do not fit: {'; '.join(problems)}."


class ReadLongDocument(BaseTool):
    """Reads a document with a `MemAgent` and answers questions on it.

    Without an `agent`, a reader is made from the environment: the server of OPENAI_BASE_URL with OPENAI_API_KEY, or
    else a policy that was added to this machine. MEMAGENT_MODEL, MEMAGENT_TOKENIZER and so on are
    fields of `ReadSettings`. Documents and runs are stored in MEMAGENT_HOME.

    Errors that a model can react to are tool messages with status "error", not exceptions.

    Args:
        agent: the reader.
        roots: folders or single files. The model may name paths below them, after links are resolved. Without roots, it
            may name no path.
        max_bytes: the largest document, of any source.
        max_questions: questions in one call.
        limits: limits of the read for one question. A call costs at most `max_questions` times as much.
        on_failure: "tell" reports a failed read to the model, "raise" raises its error; see the module.
        fetcher: downloads the web addresses that the model names. It decides which hosts are allowed.
        state_keys: keys of the agent's state that the model may name.
        answer_schema: the form of the answers: a Pydantic model, or a JSON schema as a dict. The model then gets JSON,
            and each reading in the artifact has a `value`. (`response_format` is LangChain's own field.)

    Raises:
        pydantic.ValidationError: an unknown option, or a value of the wrong type.
        ResponseFormatError, MissingExtraError: `answer_schema` cannot be used.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = "read_long_document"
    description: str = ""
    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    handle_tool_error: Any = True
    handle_validation_error: Any = Field(default=_describe_validation_error)

    agent: SkipValidation[MemAgent] = Field(
        default_factory=lambda: MemAgent(settings=ReadSettings.from_environment(os.environ)), exclude=True, repr=False
    )
    roots: Sequence[Path | str] = ()
    max_bytes: int = Field(default=256 * 2**20, gt=0)
    max_questions: int = Field(default=8, gt=0)
    limits: SkipValidation[Limits] | None = None
    on_failure: Literal["tell", "raise"] = "tell"
    fetcher: SkipValidation[Fetcher] | None = Field(default=None, exclude=True, repr=False)
    state_keys: Sequence[str] = ()
    answer_schema: SkipValidation[Any] = Field(default=None, exclude=True, repr=False)

    _sources: DocumentSources = PrivateAttr()
    _reads: GraphReads = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Determine what can be read, and offer only that to the model."""
        super().model_post_init(context)
        self.description = self.description or _DESCRIPTION.format(shown_extent=self.agent.strategy.shown_extent)
        self._reads = GraphReads(self.agent, self.answer_schema)
        roots = AllowedRoots(self.roots, max_bytes=self.max_bytes)
        self._sources = DocumentSources(roots, self.fetcher, tuple(self.state_keys))
        if self.args_schema is None:
            self.args_schema = _make_arguments_schema(self._sources, self.max_questions)

    def __reduce__(self) -> NoReturn:
        self.agent.__reduce__()  # raises the error that says why

    def _run(
        self, questions: list[str], runtime: Annotated[Any, InjectedToolArg()] = None, **source_arguments: str | None
    ) -> tuple[str | ToolMessage, ReadArtifact]:
        return run_in_graph(self._arun(questions, runtime, **source_arguments))

    async def _arun(
        self, questions: list[str], runtime: Annotated[Any, InjectedToolArg()] = None, **source_arguments: str | None
    ) -> tuple[str | ToolMessage, ReadArtifact]:
        questions = self._clean_questions(questions)
        source, caller = NamedSource(**source_arguments), CallingGraph.capture(getattr(runtime, "tool_call_id", None))
        try:
            _require_short_questions(questions, await self._reads.prepare())
            state, document_tasks = getattr(runtime, "state", None), list[asyncio.Task[DocumentRef]]()

            async def get_reference() -> DocumentRef:
                """Open and store the document the first time a read needs it; later calls return the same reference."""
                if not document_tasks:
                    document_tasks.append(asyncio.create_task(self._store_document(source, state)))
                return await document_tasks[0]

            call_key = self.name, self.agent.policy.name, caller.tool_call_id, source
            run_ids = {question: derive_run_id(caller.config, *call_key, question) for question in questions}
            # Earlier calls may have left some of the questions unfinished for the same document.
            earlier_ids = find_unfinished_runs(state, self.name) if all(run_ids.values()) else {}
            key = (await get_reference())["key"] if earlier_ids else ""
            unfinished_ids = {text: earlier_ids[key, text] for text in questions if (key, text) in earlier_ids}
            read_outcomes = await self._reads.read_each(
                get_reference,
                run_ids | unfinished_ids,
                caller.report_update,
                limits=self.limits,
                past_limit=unfinished_ids,
            )
            # If the document may not be read, all reads have its error.
            document = await document_tasks[0] if document_tasks else None
            outcomes = dict(zip(run_ids, map(self._raise_unreported, read_outcomes), strict=True))
            pairs = [(question, outcomes[question]) for question in questions]
            return await asyncio.to_thread(
                self._make_reply, pairs, document, caller, can_continue=all(run_ids.values())
            )
        except MemAgentError as error:
            # The model always gets the error of a document that cannot be read.
            if self.on_failure == "raise" and not isinstance(error, DocumentError | MissingExtraError):
                raise
            raise ToolException(str(error)) from error

    def _clean_questions(self, questions: list[str]) -> list[str]:
        if not 1 <= len(questions) <= self.max_questions:
            raise ToolException(f"Ask 1 to {self.max_questions} questions in one call, not {len(questions)}.")
        questions = [question.strip() for question in questions]
        if "" in questions:
            raise ToolException("A question is empty. Write it out, or leave it out.")
        return questions

    async def _store_document(self, source: NamedSource, state: Any) -> DocumentRef:
        return await self._reads.store(await self._sources.open(source, state))

    def _raise_unreported(self, outcome: ReadResult | Exception) -> ReadOutcome:
        """Return the outcome; raise it if it is an error that is not reported to the model."""
        if isinstance(outcome, ReadResult) or (self.on_failure == "tell" and isinstance(outcome, MemAgentError)):
            return outcome
        raise outcome

    def _make_reply(
        self,
        pairs: list[tuple[str, ReadOutcome]],
        document: DocumentRef | None,
        caller: CallingGraph,
        *,
        can_continue: bool,
    ) -> tuple[str | ToolMessage, ReadArtifact]:
        content = format_for_model(pairs, can_continue=can_continue)
        results = [outcome for _, outcome in pairs if isinstance(outcome, ReadResult)]
        readings = [describe_reading(question, outcome, can_continue=can_continue) for question, outcome in pairs]
        artifact = ReadArtifact(document=results[0].document if results else document, readings=readings)
        if results:
            return content, artifact
        if caller.tool_call_id is None:
            raise ToolException(content)
        # Not an exception: its message would have no artifact, and the read could not be continued.
        message = ToolMessage(
            content, artifact=artifact, tool_call_id=caller.tool_call_id, name=self.name, status="error"
        )
        return message, artifact


class _Arguments(BaseModel):
    """The base class of the arguments. It refuses the kinds of source that this tool does not read."""

    offered_kinds: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # Models that fill in every argument leave the unnecessary ones empty.
        values = {name: value for name, value in values.items() if value != "" or name not in _SOURCE_HELP}
        for kind in _SOURCE_HELP:
            if kind not in cls.offered_kinds and values.get(kind) is not None:
                raise ValueError(f"{kind} cannot be read here; choose one of: {', '.join(cls.offered_kinds)}")
        return values


def _make_arguments_schema(sources: DocumentSources, max_questions: int) -> type[BaseModel]:
    """Return the arguments, with only the kinds of source that can be read here."""
    fields: dict[str, Any] = {
        "questions": (
            Questions,
            Field(min_length=1, description=f"The questions, 1 to {max_questions}, each complete in itself."),
        )
    }
    one_way_hint = " Name the document in exactly one way." if len(sources.kinds) > 1 else ""
    for kind in sources.kinds:
        value_type = Literal[sources.state_keys] if kind == "state_key" else str
        fields[kind] = (value_type | None, Field(default=None, description=_SOURCE_HELP[kind] + one_way_hint))
    if not {"path", "url"}.isdisjoint(sources.kinds):
        fields["pages"] = (str | None, Field(default=None, description=_PAGES_HELP))
    # Excluded from dumps: pydantic would go through the agent's whole state.
    fields["runtime"] = (Annotated[Any, InjectedToolArg()], Field(default=None, exclude=True))
    arguments = create_model("ReadLongDocumentArguments", __base__=_Arguments, **fields)
    arguments.offered_kinds = sources.kinds
    return arguments


def _require_short_questions(questions: Sequence[str], context: ReaderContext) -> None:
    """Check all questions before any chunk is read, so that one that is too long costs nothing."""
    for question in questions:
        try:
            check_question(question, context)
        except BudgetError as error:  # its hint is for the developer
            raise ToolException(f"{error.message}. Ask a shorter question.") from error
