"""`report` and `areport`: from a question and documents to a report whose every sentence is bound to checked quotes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from memagent_graph.concurrency.background import run_sync
from memagent_graph.documents import Document
from memagent_graph.errors import DocumentError, MemAgentError
from memagent_graph.reader import DocumentSource, MemAgent
from memagent_graph.reading.graph import check_question, checked_questions
from memagent_graph.reading.state import Limits
from memagent_graph.reports.checked_report import Report
from memagent_graph.reports.document_metadata import metadata_of
from memagent_graph.reports.evidence_matrix import ReportDocument
from memagent_graph.reports.export_safety import without_folders
from memagent_graph.reports.report_graph import OnUpdate, ReportState, ReportWork
from memagent_graph.reports.report_roles import wording
from memagent_graph.storage.checkpoints import lease_of

DOCUMENTS_AT_ONCE: Final = 8
"""Documents that are read at the same time by default."""
_VERSION: Final = 1
"""Of what a report's id stands for; it changes when older states cannot be continued."""


@dataclass(frozen=True, slots=True)
class ReportSource:
    """A document of a report with what is known about it, for its reference and BibTeX entry.

    Args:
        document: anything that `Document.of` takes.
        name: what the report calls it; by default the document's own name.
        metadata: title, author (several are joined with " and "), year, journal, publisher, doi, url, ... It is added
            to what the document itself has (see `document_metadata`).
    """

    document: DocumentSource
    name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


async def areport(
    agent: MemAgent,
    question: str,
    documents: Iterable[DocumentSource | ReportSource],
    *,
    questions: Iterable[str] = (),
    extractive: bool = False,
    judge: bool = False,
    report_id: str | None = None,
    limits: Limits | None = None,
    documents_at_once: int = DOCUMENTS_AT_ONCE,
    on_update: OnUpdate | None = None,
) -> Report:
    """Read each document with the same questions, and write a report from the answers and their quotes alone.

    The id follows from the documents' text, the questions and the settings. With checkpoints, the same call after a
    kill or an error continues the report, and after its end gives it again, without a call of the policy. Documents
    that another report has read with the same questions and settings are not read again.

    Args:
        agent: reads; the caller closes it.
        question: what the report is about.
        documents: anything that `Document.of` takes, or `ReportSource`s. One that cannot be read is a row of failed
            cells. Live streams are refused.
        questions: what every document is asked. Without any, the policy writes two to six; one that has no prompt for
            that asks the report's question itself.
        extractive: make the sections of the cells' answers; otherwise the policy writes them, if it has prompts for it.
        judge: let the policy judge whether answers that differ contradict each other.
        report_id: your own id; documents are read for it alone. A report with this id and other documents or settings
            is refused.
        limits: bounds for each read, that is for each question on each document.
        documents_at_once: how many documents are read at the same time.
        on_update: called with a document's name, a question, and each update of that read's memory.

    Raises:
        MemAgentError, BudgetError: a question is empty or too long; nothing was read.
        DocumentError: none of the documents can be read; this is the first one's error.
        PolicyError: a call failed. With checkpoints, the same call continues the report.
        RunError: another process writes this report.
    """
    context = await agent.aprepare()
    check_question(question, context)
    asked = tuple(checked_questions(asked_, context)) if (asked_ := list(questions)) else ()
    if documents_at_once < 1:
        raise MemAgentError(f"documents_at_once is {documents_at_once}", hint="Use 1 or more.")
    opened = await _opened(agent, list(documents))
    reads = {
        "limits": None if limits is None else asdict(limits),
        "policy": agent.policy.name,
        "settings": (await agent.agraph()).reader_context.settings,
    }
    what = {
        "version": _VERSION,
        "question": question,
        "questions": asked,
        "documents": [(each.name, each.reference and each.reference["key"]) for each in opened],
        "extractive": extractive,
        "judge": judge,
        "wording": wording(context.prompts, own_words_only=context.own_words_only),
        **reads,
    }
    digest = _digest(what)
    work = ReportWork(
        report_id=report_id or f"report-{digest[:20]}",
        agent=agent,
        question=question,
        questions=asked,
        documents=opened,
        extractive=extractive,
        judge=judge,
        limits=limits,
        runs=report_id or f"cell-{_digest(reads)[:8]}",
        on_update=on_update,
    )
    # In a context of its own: called in a node or tool of another graph, it would otherwise be a part of that graph.
    task = asyncio.create_task(_carried_out(work, digest, documents_at_once), context=Context())
    return Report.from_dict(await task)


def report(
    agent: MemAgent,
    question: str,
    documents: Iterable[DocumentSource | ReportSource],
    *,
    questions: Iterable[str] = (),
    extractive: bool = False,
    judge: bool = False,
    report_id: str | None = None,
    limits: Limits | None = None,
    documents_at_once: int = DOCUMENTS_AT_ONCE,
    on_update: OnUpdate | None = None,
) -> Report:
    """`areport` for synchronous code.

    >>> found = report(agent, "What do the contracts say about notice?", [Path("a.pdf"), Path("b.pdf")])
    ... # doctest: +SKIP
    >>> print(found.to_markdown())  # doctest: +SKIP
    """
    return run_sync(
        areport(
            agent,
            question,
            documents,
            questions=questions,
            extractive=extractive,
            judge=judge,
            report_id=report_id,
            limits=limits,
            documents_at_once=documents_at_once,
            on_update=on_update,
        )
    )


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


async def _carried_out(work: ReportWork, digest: str, documents_at_once: int) -> dict[str, Any]:
    """Begin the report, or continue one with this id."""
    saver = await work.agent.acheckpointer() if work.agent.keeps_checkpoints else None
    graph = work.graph().compile(checkpointer=saver, name="MemAgentReport")
    place: Any = {
        "configurable": {"thread_id": work.report_id},
        "max_concurrency": documents_at_once,
        "metadata": {"report": digest},
    }
    given: ReportState | None = {}
    with lease_of(saver, work.report_id):
        if saver is not None:
            snapshot = await graph.aget_state(place)
            if snapshot.created_at is not None:
                _require_same(snapshot.metadata, digest, work.report_id)
                if "report" in snapshot.values:
                    return dict(snapshot.values["report"])
                given = None if snapshot.next else {}
        options: dict[str, Any] = {"durability": "sync"} if saver is not None else {}
        state = await graph.ainvoke(given, place, **options)
    return dict(state["report"])


def _require_same(metadata: Any, digest: str, report_id: str) -> None:
    """Refuse to continue a report with other documents, questions or settings.

    Raises:
        RunMismatchError: the id belongs to another report, or to a run.
    """
    from memagent_graph.errors import RunMismatchError  # noqa: PLC0415

    if (metadata or {}).get("report") != digest:
        raise RunMismatchError(
            "there is a report, or a run, with this id and other documents, questions or settings",
            hint="Choose another id, or leave it out: then it follows from documents, questions and settings.",
            run_id=report_id,
        )


async def _opened(agent: MemAgent, given: Sequence[DocumentSource | ReportSource]) -> tuple[ReportDocument, ...]:
    """The documents in the store, in order; equal names get a number.

    Raises:
        DocumentError: there are none, one is a live stream, or none can be read.
    """
    if not given:
        raise DocumentError("there are no documents", hint="Give at least one.")
    replace = (await agent.aprepare()).replace_undecodable
    failures: list[DocumentError] = []
    opened: list[ReportDocument] = []
    for each in given:
        source = each if isinstance(each, ReportSource) else ReportSource(each)
        try:
            document = Document.of(source.document)
            if document.is_live:
                raise DocumentError(
                    f"{document.name} is a live stream", hint="Collect its text first: a report quotes what stays."
                )
            reference = await agent.store.add_async(document, replace_undecodable=replace)
            metadata = {
                **await asyncio.to_thread(metadata_of, source.document, agent.store, reference),
                **source.metadata,
            }
            named = ReportDocument(source.name or document.name, reference, metadata)
        except DocumentError as error:
            failures.append(error)
            name = source.name or _name_of(source.document)
            named = ReportDocument(name, None, dict(source.metadata), without_folders(" ".join(str(error).split())))
        opened.append(named)
    if len(failures) == len(opened):
        raise failures[0]
    return _with_different_names(opened)


def _name_of(source: DocumentSource) -> str:
    if isinstance(source, Document):
        return source.name
    return Path(source).name if isinstance(source, Path) else f"a {type(source).__name__}"


def _with_different_names(documents: Sequence[ReportDocument]) -> tuple[ReportDocument, ...]:
    """Documents with names that are not used twice: the second `a.txt` is `a.txt (2)`."""
    from dataclasses import replace  # noqa: PLC0415

    used: set[str] = set()
    found = []
    for document in documents:
        name, number = document.name, 1
        while name in used:
            number += 1
            name = f"{document.name} ({number})"
        used.add(name)
        found.append(replace(document, name=name))
    return tuple(found)
