"""The LangGraph graph of a report: plan -> read_document (one task for each document) -> write -> check.

The reader's checkpoints keep the state of the report after every step, and the state of every read after every chunk.
A report that was killed continues from there: finished documents are not read again, and unfinished ones continue at
the chunk they had reached. The run log has all calls of the policy: a run for each document and question, and the
runs of the report itself.
"""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from memagent_graph.concurrency.background import PerLoop
from memagent_graph.concurrency.shared_pass import MAX_SHARED_READS, Barrier, read_in_passes
from memagent_graph.documents import Document, DocumentRef
from memagent_graph.errors import DocumentError
from memagent_graph.events import EventKind
from memagent_graph.plain_text import remove_folders
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import Limits, ReaderContext
from memagent_graph.reading.strategy import Strategy
from memagent_graph.results import ReadResult
from memagent_graph.roles import Role, complete_prompts, fit_chunk_tokens
from memagent_graph.trace import MemoryUpdate
from memagent_report.checked_report import build_checked_report
from memagent_report.evidence_matrix import (
    CellState,
    Draft,
    EvidenceMatrix,
    MatrixCell,
    ReportDocument,
    make_extractive_draft,
)
from memagent_report.report_data import ReportEvent
from memagent_report.report_writing import (
    JUDGE,
    OUTLINE,
    QUESTIONS,
    SECTION,
    ReportPlan,
    ReportWriting,
    find_pairs_to_judge,
)
from memagent_report.source_text import SourceText, make_cell

T = TypeVar("T")
OnUpdate = Callable[[str, str, MemoryUpdate], None]
"""A function that is called with the document's name, the question, and each memory update of that read."""
_MIN_MATERIAL_TOKENS: Final = 64
"""The policy writes nothing if its prompt has room for fewer tokens of quotes, answers or documents."""
_BEGINNING_BYTES: Final = 600
"""The number of bytes of each document that the policy sees when it writes the questions."""


class ReportState(TypedDict, total=False):
    """The state of a report: JSON values only."""

    questions: list[str]
    """The questions that every document is read for."""
    cells: Annotated[dict[str, list[Any]], operator.or_]
    """The cells of each document, one for each question, by document number."""
    draft: dict[str, Any]
    events: Annotated[list[Any], operator.add]
    report: dict[str, Any]


class _ReadTask(TypedDict):
    """The input of the task that reads one document."""

    number: int
    """The document's number."""
    questions: list[str]


@dataclass(frozen=True)
class ReportJob:
    """One report: its question, its documents, its reader and its options.

    Args:
        report_id: the report's id; its state is saved under this id, and the ids of its own runs begin with it.
        agent: the reader.
        question: the question of the report.
        questions: the questions that every document is read for; if there are none, the policy writes them.
        documents: the documents, which are in the store.
        run_id_prefix: the prefix of the run ids of reads. Reports with the same settings share these runs, so that a
            document is not read twice for the same question.
        extractive: whether the sections are the cells' answers, even if the policy could write them.
        judge: whether the policy judges which answers contradict each other.
        limits: the limits of each read.
        on_update: called with every memory update.
    """

    report_id: str
    agent: MemAgent
    question: str
    questions: tuple[str, ...]
    documents: tuple[ReportDocument, ...]
    run_id_prefix: str
    extractive: bool = False
    judge: bool = False
    limits: Limits | None = None
    on_update: OnUpdate | None = field(default=None, repr=False)

    def build_graph(self) -> StateGraph[Any, Any, Any, Any]:
        """Build the graph; the caller compiles it with the reader's checkpointer."""
        builder: Any = StateGraph(ReportState)
        builder.add_node("plan", self._plan)
        builder.add_node("read_document", self._read_document)
        builder.add_node("write", self._write)
        builder.add_node("check", self._check)
        builder.add_edge(START, "plan")
        builder.add_conditional_edges("plan", self._send_documents, ["read_document"])
        builder.add_edge("read_document", "write")
        builder.add_edge("write", "check")
        builder.add_edge("check", END)
        graph: StateGraph[Any, Any, Any, Any] = builder
        return graph

    async def _plan(self, state: ReportState) -> ReportState:
        """Choose the questions: the caller's, the policy's, or the report's own question."""
        if self.questions:
            return {"questions": list(self.questions), "events": []}
        reason = await self._find_obstacle(ReportPlan(), QUESTIONS)
        if not reason:
            beginnings = await asyncio.to_thread(self._read_beginnings)
            result = await self._run_strategy(ReportPlan(), beginnings, "documents", "plan")
            if result.answer:
                return {"questions": result.answer.splitlines(), "events": []}
            reason = "the policy wrote no question"
        detail = f"{reason}; every document is read for the report's question itself"
        return {"questions": [self.question], "events": [_make_event(EventKind.NOT_PLANNED, detail)]}

    def _send_documents(self, state: ReportState) -> list[Send]:
        return [
            Send("read_document", _ReadTask(number=document_number, questions=state["questions"]))
            for document_number in range(len(self.documents))
        ]

    async def _read_document(self, task: _ReadTask) -> ReportState:
        """Read one document once for all questions; if it cannot be read, its row has failed cells."""
        document_number, questions = task["number"], task["questions"]
        document = self.documents[document_number]
        if document.reference is None:
            return self._make_failed_row(task, document.error or "")
        keys = [f"{document.reference['key']} {question}".encode("utf-8", "surrogatepass") for question in questions]
        run_ids = [f"{self.run_id_prefix}-{sha256(key).hexdigest()[:20]}" for key in keys]
        reads = [
            partial(self._read_one, document.name, document.reference, question, run_id)
            for question, run_id in zip(questions, run_ids, strict=True)
        ]
        async with AsyncExitStack() as stack:
            # Another report on this event loop may read the same document. All reports take the locks in the same
            # order, so there is no deadlock.
            for run_id in sorted(run_ids):
                await stack.enter_async_context(_run_locks.get().setdefault(run_id, asyncio.Lock()))
            outcomes = await run_in_new_context(read_in_passes(reads, MAX_SHARED_READS))
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if fatal_errors := [error for error in errors if not isinstance(error, DocumentError)]:
            raise fatal_errors[0]
        if errors:
            return self._make_failed_row(task, remove_folders(" ".join(str(errors[0]).split())))
        source = await asyncio.to_thread(SourceText.load, self.agent.store, document.reference)
        cells = []
        for question_number, result in enumerate(outcomes):
            assert isinstance(result, ReadResult)  # noqa: S101  errors were raised above
            cell = await asyncio.to_thread(make_cell, result, source, document_number, question_number)
            cells.append(msgspec.to_builtins(cell))
        return {"cells": {str(document_number): cells}}

    def _make_failed_row(self, task: _ReadTask, error: str) -> ReportState:
        cells = [
            msgspec.to_builtins(MatrixCell(task["number"], question, CellState.FAILED, error=error))
            for question in range(len(task["questions"]))
        ]
        return {"cells": {str(task["number"]): cells}}

    async def _read_one(
        self, name: str, reference: DocumentRef, question: str, run_id: str, barrier: Barrier
    ) -> ReadResult:
        on_update = None if self.on_update is None else partial(self.on_update, name, question)
        return await self.agent.aresume_or_read(
            run_id, reference, question, on_update=on_update, limits=self.limits, barrier=barrier
        )

    async def _write(self, state: ReportState) -> ReportState:
        """Let the policy write the draft. If it has no prompts for this, the draft consists of the cells' answers."""
        matrix = self._load_matrix(state)
        events: list[Any] = []
        has_answers = any(cell.state is CellState.ANSWERED for cell in matrix.cells)
        should_write, should_judge = has_answers and not self.extractive, has_answers and self.judge
        if should_write and (reason := await self._find_obstacle(ReportWriting(), OUTLINE, SECTION)):
            should_write = False
            events.append(_make_event(EventKind.EXTRACTIVE, f"{reason}; the sections are the answers of the cells"))
        if should_judge and (reason := await self._find_obstacle(ReportWriting(), JUDGE)):
            should_judge = False
            events.append(_make_event(EventKind.NOT_JUDGED, f"{reason}; contradictions are not judged"))
        if should_judge and (omitted_count := find_pairs_to_judge(matrix)[1]):
            detail = f"{omitted_count} further pairs of answers were not compared"
            events.append(_make_event(EventKind.NOT_JUDGED, detail))
        if not should_write and not should_judge:
            return {"draft": msgspec.to_builtins(make_extractive_draft(matrix)), "events": events}
        text = json.dumps(msgspec.to_builtins(matrix), ensure_ascii=False)
        strategy = ReportWriting(judge=should_judge, write=should_write)
        result = await self._run_strategy(strategy, text, "evidence matrix", "writing")
        events += [_make_event(event.kind, event.detail) for event in result.events]
        return {"draft": json.loads(result.answer or ""), "events": events}

    async def _check(self, state: ReportState) -> ReportState:
        """Check every quote and sentence, and build the report."""
        matrix = self._load_matrix(state)
        quoted_documents = dict.fromkeys(position.document for position, _ in matrix.quotes())
        # One text at a time, because all of them may not fit in memory.
        sources = (
            (document_number, SourceText.load(self.agent.store, reference))
            for document_number in quoted_documents
            if (reference := matrix.documents[document_number].reference) is not None
        )
        events = [msgspec.convert(event, ReportEvent) for event in state.get("events", ())]
        draft = msgspec.convert(state["draft"], Draft)
        report = await asyncio.to_thread(
            build_checked_report, self.report_id, self.agent.policy.name, matrix, draft, sources, events
        )
        return {"report": report.to_dict()}

    def _load_matrix(self, state: ReportState) -> EvidenceMatrix:
        cells = [
            msgspec.convert(cell, MatrixCell)
            for document_number in range(len(self.documents))
            for cell in state["cells"][str(document_number)]
        ]
        return EvidenceMatrix(self.question, tuple(state["questions"]), self.documents, tuple(cells))

    def _read_beginnings(self) -> str:
        lines = []
        for document in self.documents:
            if document.reference is not None:
                beginning = self.agent.store.read_bytes(document.reference, 0, _BEGINNING_BYTES)
                lines.append(f"{document.name}: {' '.join(beginning.decode(errors='ignore').split())}")
        return "\n".join(lines)

    async def _find_obstacle(self, strategy: Strategy, *roles: Role) -> str:
        """Return why the policy cannot be used in these roles; "" if it can."""
        context = await self.agent.aprepare()
        names = ", ".join(role.name for role in roles)
        if context.trained_prompts_only and any(role.name not in context.prompts.templates for role in roles):
            return f"the policy has no prompt for {names}"
        if _count_chunk_tokens(strategy, context) < _MIN_MATERIAL_TOKENS:
            return f"the context window of {context.budget.context_window} tokens is too small for {names}"
        return ""

    async def _run_strategy(self, strategy: Strategy, text: str, name: str, purpose: str) -> ReadResult:
        """Run a strategy on a text of the report itself, with the same policy, log and checkpoints."""
        # Pass the open checkpointer: if the copy opened the file itself, nobody would close it.
        checkpointer = await self.agent.acheckpointer()
        chunk_tokens = _count_chunk_tokens(strategy, await self.agent.aprepare())
        agent = self.agent.copy(strategy=strategy, checkpoints=checkpointer, chunk_tokens=chunk_tokens)
        reference = await self.agent.store.add_async(Document.from_text(text, f"{self.report_id}: {name}"))
        run_id = f"{self.report_id}-{purpose}"
        return await run_in_new_context(agent.aresume_or_read(run_id, reference, self.question))


def _count_chunk_tokens(strategy: Strategy, context: ReaderContext) -> int:
    """Return how many tokens of quotes, answers or documents fit in a prompt of these roles."""
    prompts = complete_prompts(strategy.roles, context.prompts, trained_prompts_only=context.trained_prompts_only)
    return fit_chunk_tokens(strategy.roles, prompts, context.budget, context.tokenizer.count)


_run_locks: PerLoop[WeakValueDictionary[str, asyncio.Lock]] = PerLoop(WeakValueDictionary)


async def run_in_new_context(work: Coroutine[Any, Any, T]) -> T:
    """Run work in a new context, so that LangGraph does not treat its graphs as parts of the graph that is running."""
    return await asyncio.create_task(work, context=Context())


def _make_event(kind: EventKind, detail: str) -> Any:
    return msgspec.to_builtins(ReportEvent(kind, detail))
