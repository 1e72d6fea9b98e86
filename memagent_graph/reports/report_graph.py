"""The LangGraph graph of a report: plan -> read_document, one for each -> write -> check.

Its state is saved after every step, and every read's at every chunk, in the reader's checkpoints. So a report that is
killed continues where it was: documents that were read are not read again, and those in the middle of it continue at
their chunk. All calls of the policy are in the run log, as runs whose ids begin with the report's.
"""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Final, TypeVar
from weakref import WeakValueDictionary

from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from memagent_graph.concurrency.background import PerLoop
from memagent_graph.concurrency.pace import AT_ONCE, Reach, in_passes
from memagent_graph.documents import Document, DocumentRef
from memagent_graph.errors import DocumentError, RunMismatchError, RunNotFoundError
from memagent_graph.events import EventKind
from memagent_graph.reader import MemAgent, result_of
from memagent_graph.reading.state import Limits, ReaderContext
from memagent_graph.reading.strategy import Strategy
from memagent_graph.reports.answered_cells import cell_of
from memagent_graph.reports.checked_report import checked_report
from memagent_graph.reports.drafts import Draft, extractive_draft
from memagent_graph.reports.evidence_matrix import (
    Cell,
    CellState,
    EvidenceMatrix,
    ReportDocument,
    from_json,
    to_json,
)
from memagent_graph.reports.export_safety import without_folders
from memagent_graph.reports.report_data import ReportEvent
from memagent_graph.reports.report_roles import JUDGE, OUTLINE, QUESTIONS, SECTION, are_understood
from memagent_graph.reports.report_writing import ReportPlan, ReportWriting
from memagent_graph.reports.source_text import SourceText
from memagent_graph.results import ReadResult
from memagent_graph.roles import Role, excess_tokens, prompts_for
from memagent_graph.trace import MemoryUpdate

T = TypeVar("T")
OnUpdate = Callable[[str, str, MemoryUpdate], None]
"""Called with a document's name, a question, and each update of the memory of that read."""
_LEAST_TOKENS: Final = 64
"""With room for fewer tokens of quotes, a section is not worth writing."""
_BEGINNING_BYTES: Final = 600
"""How much of each document the policy is shown when it is asked for questions."""


class ReportState(TypedDict, total=False):
    """The state of a report: JSON values only."""

    questions: list[str]
    """What every document is asked."""
    cells: Annotated[dict[str, list[Any]], operator.or_]
    """By the document's number, one for each question."""
    draft: dict[str, Any]
    events: Annotated[list[Any], operator.add]
    report: dict[str, Any]


class _Sent(TypedDict):
    """What the task of one document gets."""

    numbers: list[int]
    """Its number; several if documents have the same text, which is read once."""
    questions: list[str]


@dataclass(frozen=True)
class ReportWork:
    """One report: what it is about, who reads, and what it may do.

    Args:
        report_id: its id, with which its runs' ids begin, and under which its state is saved.
        agent: reads the documents.
        question: what the report is about.
        questions: what every document is asked; empty if the policy is to write the questions.
        documents: the documents, in the store.
        extractive: whether the sections are the cells' answers even if the policy could write them.
        judge: whether the policy judges contradictions.
        limits: of each read.
        runs: what the ids of the documents' runs begin with. With the same beginning, a document that another report
            has read with the same question is not read again.
        on_update: called with every update.
    """

    report_id: str
    agent: MemAgent
    question: str
    questions: tuple[str, ...]
    documents: tuple[ReportDocument, ...]
    extractive: bool = False
    judge: bool = False
    limits: Limits | None = None
    runs: str = "cell"
    on_update: OnUpdate | None = field(default=None, repr=False)

    def graph(self) -> StateGraph[Any, Any, Any, Any]:
        """The graph, to be compiled with the reader's checkpointer."""
        builder: Any = StateGraph(ReportState)
        builder.add_node("plan", self._plan)
        builder.add_node("read_document", self._read_document)
        builder.add_node("write", self._write)
        builder.add_node("check", self._check)
        builder.add_edge(START, "plan")
        builder.add_conditional_edges("plan", self._each_document, ["read_document"])
        builder.add_edge("read_document", "write")
        builder.add_edge("write", "check")
        builder.add_edge("check", END)
        graph: StateGraph[Any, Any, Any, Any] = builder
        return graph

    async def _plan(self, state: ReportState) -> ReportState:
        """The questions: those given, the policy's, or the report's own question."""
        if self.questions:
            return {"questions": list(self.questions), "events": []}
        if reason := await self._unable(ReportPlan(), QUESTIONS):
            detail = f"{reason}; every document is asked the report's question itself"
            return {"questions": [self.question], "events": [_event(EventKind.NOT_PLANNED, detail)]}
        beginnings = await asyncio.to_thread(self._beginnings)
        result = await self._run(ReportPlan(), beginnings, "documents", "plan")
        if result.answer:
            return {"questions": result.answer.splitlines(), "events": []}
        detail = "the policy wrote no question; every document is asked the report's question itself"
        return {"questions": [self.question], "events": [_event(EventKind.NOT_PLANNED, detail)]}

    def _each_document(self, state: ReportState) -> list[Send]:
        same: dict[str, list[int]] = {}
        for number, document in enumerate(self.documents):
            key = document.reference["key"] if document.reference else f"failed {number}"
            same.setdefault(key, []).append(number)
        return [
            Send("read_document", _Sent(numbers=numbers, questions=state["questions"])) for numbers in same.values()
        ]

    async def _read_document(self, sent: _Sent) -> ReportState:
        """One document, once for all questions; a document that cannot be read is a row of failed cells."""
        document, questions = self.documents[sent["numbers"][0]], sent["questions"]
        if document.reference is None:
            return self._failed(sent, document.error or "")
        different = list(dict.fromkeys(questions))
        run_ids = [self._run_id(document.reference, asked) for asked in different]
        reads = [
            partial(self._read_one, document, asked, run_id) for asked, run_id in zip(different, run_ids, strict=True)
        ]
        async with AsyncExitStack() as stack:
            # Another report of this process may read the same. The order is that of all, so no two wait for each other.
            for run_id in sorted(run_ids):
                await stack.enter_async_context(_lock_of(run_id))
            outcomes = dict(zip(different, await _on_its_own(in_passes(reads, AT_ONCE)), strict=True))
        errors = [each for each in outcomes.values() if isinstance(each, Exception)]
        if others := [each for each in errors if not isinstance(each, DocumentError)]:
            raise others[0]
        if errors:
            return self._failed(sent, without_folders(" ".join(str(errors[0]).split())))
        source = await asyncio.to_thread(self._source, document)
        cells: dict[str, list[Any]] = {}
        for number in sent["numbers"]:
            cells[str(number)] = []
            for place, asked in enumerate(questions):
                result = outcomes[asked]
                assert isinstance(result, ReadResult)  # noqa: S101  errors were raised above
                cells[str(number)].append(to_json(await asyncio.to_thread(cell_of, result, source, number, place)))
        return {"cells": cells}

    def _failed(self, sent: _Sent, error: str) -> ReportState:
        cells = {
            str(number): [
                to_json(Cell(number, question, CellState.FAILED, error=error))
                for question in range(len(sent["questions"]))
            ]
            for number in sent["numbers"]
        }
        return {"cells": cells}

    def _run_id(self, reference: DocumentRef, asked: str) -> str:
        what = f"{reference['key']} {asked}".encode("utf-8", "surrogatepass")
        return f"{self.runs}-{sha256(what).hexdigest()[:20]}"

    async def _read_one(self, document: ReportDocument, asked: str, run_id: str, pace: Reach) -> ReadResult:
        tell = self.on_update
        report = None if tell is None else partial(tell, document.name, asked)
        assert document.reference is not None  # noqa: S101  `_read_document` has looked
        return await result_of(self._parts(self.agent, document.reference, asked, run_id, pace), report)

    async def _parts(
        self, agent: MemAgent, reference: DocumentRef, question: str, run_id: str, pace: Reach | None = None
    ) -> AsyncGenerator[MemoryUpdate | ReadResult, None]:
        """A run's updates and result; of a run that was begun before, those left."""
        limits = self.limits if agent is self.agent else None
        if agent.keeps_checkpoints:
            try:
                async with aclosing(agent.astream_resume(run_id, limits=limits, pace=pace)) as parts:
                    async for part in parts:
                        yield part
                return
            except (RunNotFoundError, RunMismatchError):
                pass
        async with aclosing(agent.astream(reference, question, run_id=run_id, limits=limits, pace=pace)) as parts:
            async for part in parts:
                yield part

    async def _write(self, state: ReportState) -> ReportState:
        """The draft: the policy's, or, if it has no prompts for that, the cells' answers."""
        matrix = self._matrix(state)
        events: list[Any] = []
        write, judge = not self.extractive, self.judge
        if not any(cell.state is CellState.ANSWERED for cell in matrix.cells):
            write = judge = False
        if write and (reason := await self._unable(ReportWriting(), OUTLINE, SECTION)):
            write = False
            events.append(_event(EventKind.EXTRACTIVE, f"{reason}; the sections are the answers of the cells"))
        if judge and (reason := await self._unable(ReportWriting(), JUDGE)):
            judge = False
            events.append(_event(EventKind.NOT_JUDGED, f"{reason}; contradictions are not judged"))
        if not write and not judge:
            return {"draft": to_json(extractive_draft(matrix)), "events": events}
        text = json.dumps(to_json(matrix), ensure_ascii=False)
        result = await self._run(ReportWriting(judge=judge, write=write), text, "evidence matrix", "writing")
        events += [_event(each.kind, each.detail) for each in result.events]
        return {"draft": json.loads(result.answer or ""), "events": events}

    async def _check(self, state: ReportState) -> ReportState:
        """The report: every quote and sentence compared with the documents."""
        matrix = self._matrix(state)
        quoted = dict.fromkeys(place.document for place, _ in matrix.quotes())
        # One text at a time: all of them may be more than the memory holds.
        sources = ((number, self._source(matrix.documents[number])) for number in quoted)
        events = [from_json(each, ReportEvent) for each in state.get("events", ())]
        draft = from_json(state["draft"], Draft)
        report = await asyncio.to_thread(
            checked_report, self.report_id, self.agent.policy.name, matrix, draft, sources, events
        )
        return {"report": report.to_dict()}

    def _matrix(self, state: ReportState) -> EvidenceMatrix:
        cells = [from_json(each, Cell) for number in range(len(self.documents)) for each in state["cells"][str(number)]]
        return EvidenceMatrix(self.question, tuple(state["questions"]), self.documents, tuple(cells))

    def _source(self, document: ReportDocument) -> SourceText:
        assert document.reference is not None  # noqa: S101  only such documents have quotes
        return SourceText.of(self.agent.store, document.reference)

    def _beginnings(self) -> str:
        lines = []
        for document in self.documents:
            if document.reference is not None:
                store = self.agent.store
                start = store.read_bytes(document.reference, 0, _BEGINNING_BYTES).decode(errors="ignore")
                lines.append(f"{document.name}: {' '.join(start.split())}")
        return "\n".join(lines)

    async def _unable(self, strategy: Strategy, *roles: Role) -> str:
        """Why the policy cannot be asked in these roles; "" if it can."""
        context = await self.agent.aprepare()
        names = ", ".join(role.name for role in roles)
        if not are_understood(roles, context.prompts, own_words_only=context.own_words_only):
            return f"the policy has no prompt for {names}"
        if _chunk_tokens(strategy, context) < _LEAST_TOKENS:
            return f"the context window of {context.budget.context_window} tokens is too small for {names}"
        return ""

    async def _run(self, strategy: Strategy, text: str, name: str, place: str) -> ReadResult:
        """A run over a text of the report's own, with the same policy, log and checkpoints."""
        # A checkpointer that is open, not a file's path: what the copy opened itself nobody would close.
        saver = await self.agent.acheckpointer() if self.agent.keeps_checkpoints else None
        tokens = _chunk_tokens(strategy, await self.agent.aprepare())
        agent = self.agent.copy(strategy=strategy, checkpoints=saver, budget_changes={"chunk_tokens": tokens})
        reference = await self.agent.store.add_async(Document.from_text(text, f"{self.report_id}: {name}"))
        return await _on_its_own(result_of(self._parts(agent, reference, self.question, f"{self.report_id}-{place}")))


def _chunk_tokens(strategy: Strategy, context: ReaderContext) -> int:
    """How many tokens of quotes, answers or documents a prompt of the report's own roles has room for."""
    prompts = prompts_for(strategy.roles, context.prompts, own_words_only=context.own_words_only)
    excess = excess_tokens(strategy.roles, prompts, context.budget, context.tokenizer.count)
    return context.budget.chunk_tokens - max(0, excess)


_locks: PerLoop[WeakValueDictionary[str, asyncio.Lock]] = PerLoop(WeakValueDictionary)


def _lock_of(run_id: str) -> asyncio.Lock:
    """The lock of a run, the same for all reports on this event loop."""
    return _locks.get().setdefault(run_id, asyncio.Lock())


async def _on_its_own(work: Coroutine[Any, Any, T]) -> T:
    """Run work outside of the graph whose node this is; otherwise its graphs would be parts of that graph."""
    return await asyncio.create_task(work, context=Context())


def _event(kind: EventKind, detail: str) -> Any:
    return to_json(ReportEvent(kind, detail))
