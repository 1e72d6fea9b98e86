"""Reports over many documents: a matrix of answers with quotes, and sections in which every sentence cites quotes.

`report` and `areport` read documents for a question, and write the report.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from memagent_graph.concurrency.background import make_synchronous
from memagent_graph.documents import Document
from memagent_graph.errors import DocumentError
from memagent_graph.plain_text import remove_folders
from memagent_graph.reader import DocumentSource, MemAgent
from memagent_graph.reading.inputs import check_question, check_questions
from memagent_graph.reading.state import Limits
from memagent_graph.storage.checkpoints import lease_run
from memagent_report.evidence_matrix import ReportDocument
from memagent_report.report_data import Report
from memagent_report.report_graph import OnUpdate, ReportState, ReportWork, run_in_new_context
from memagent_report.report_writing import list_custom_templates

__all__ = ["Report", "areport", "report"]

_DOCUMENTS_AT_ONCE: Final = 8
_VERSION: Final = 1
"""A part of every report's id; it changes when reports of older versions cannot be continued."""


async def areport(
    agent: MemAgent,
    question: str,
    documents: Iterable[DocumentSource],
    *,
    questions: Iterable[str] = (),
    extractive: bool = False,
    judge: bool = False,
    limits: Limits | None = None,
    on_update: OnUpdate | None = None,
) -> Report:
    """Read every document for the same questions, and write a report from the answers and their quotes alone.

    The report's id is a digest of the documents' text, the questions and the settings. With checkpoints,
    the same call continues a report that was killed or failed. If the report is finished, the call returns it without
    calling the policy. Documents that another report has read for the same questions and settings are not read again.

    >>> answers = report(agent, "What do the contracts say about notice?", [Path("a.pdf")])  # doctest: +SKIP
    >>> print(answers.to_markdown())  # doctest: +SKIP

    Args:
        agent: the reader; the caller closes it.
        question: the question of the report.
        documents: anything that `Document.of` accepts. A document that cannot be read gets a row of failed cells.
        questions: the questions that every document is read for; a repeated one counts once. If there are none, the
            policy writes two to six. If it has no prompt for this, every document is read for the report's own
            question.
        extractive: use the cells' answers as sections; otherwise the policy writes them, if it has prompts for this.
        judge: let the policy judge, pair by pair, whether different answers contradict each other. Without it, the
            report lists no contradictions.
        limits: limits of each read; there is one read for each question and document.
        on_update: called with a document's name, a question, and each memory update of that read.

    Raises:
        MemAgentError, BudgetError: a question is empty or too long; nothing was read.
        DocumentError: no document can be read; this is the error of the first one.
        PolicyError: a call failed. With checkpoints, the same call continues the report.
        RunError: another process is writing this report.
    """
    context = await agent.aprepare()
    check_question(question, context)
    questions = list(questions)
    checked_questions = tuple(dict.fromkeys(check_questions(questions, context))) if questions else ()
    report_documents = await _report_documents(agent, list(documents))
    reads = {
        "limits": None if limits is None else asdict(limits),
        "policy": agent.policy.name,
        "settings": (await agent.agraph()).reader_context.settings,
    }
    identity = {
        "version": _VERSION,
        "question": question,
        "questions": checked_questions,
        "documents": [
            (document.name, document.reference and document.reference["key"]) for document in report_documents
        ],
        "extractive": extractive,
        "judge": judge,
        "wording": list_custom_templates(context.prompts, trained_prompts_only=context.trained_prompts_only),
        **reads,
    }
    work = ReportWork(
        report_id=f"report-{_digest(identity)[:20]}",
        agent=agent,
        question=question,
        questions=checked_questions,
        documents=report_documents,
        extractive=extractive,
        judge=judge,
        limits=limits,
        runs=f"cell-{_digest(reads)[:8]}",
        on_update=on_update,
    )
    return Report.from_dict(await run_in_new_context(_run_report(work)))


report = make_synchronous(areport)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


async def _run_report(work: ReportWork) -> dict[str, Any]:
    """Begin the report, or continue it if it exists; return its values."""
    saver = await work.agent.acheckpointer() if work.agent.keeps_checkpoints else None
    graph = work.graph().compile(checkpointer=saver, name="MemAgentReport")
    config: Any = {"configurable": {"thread_id": work.report_id}, "max_concurrency": _DOCUMENTS_AT_ONCE}
    state: ReportState | None = {}
    with lease_run(saver, work.report_id):
        if saver is not None:
            snapshot = await graph.aget_state(config)
            if snapshot.created_at is not None:
                if "report" in snapshot.values:
                    return dict(snapshot.values["report"])
                state = None if snapshot.next else {}
        options: dict[str, Any] = {"durability": "sync"} if saver is not None else {}
        end = await graph.ainvoke(state, config, **options)
    return dict(end["report"])


async def _report_documents(agent: MemAgent, sources: Sequence[DocumentSource]) -> tuple[ReportDocument, ...]:
    """Add the documents to the store, in order; names that occur twice get a number.

    Raises:
        DocumentError: there are none, or none can be read.
    """
    if not sources:
        raise DocumentError("there are no documents", hint="Pass at least one.")
    failures: list[DocumentError] = []
    report_documents: list[ReportDocument] = []
    for source in sources:
        try:
            document = Document.of(source)
            reference = await agent.store.add_async(document)
            report_documents.append(ReportDocument(document.name, reference))
        except DocumentError as error:
            failures.append(error)
            message = remove_folders(" ".join(str(error).split()))
            report_documents.append(ReportDocument(_get_display_name(source), None, message))
    if len(failures) == len(report_documents):
        raise failures[0]
    return _with_different_names(report_documents)


def _get_display_name(source: DocumentSource) -> str:
    if isinstance(source, Document):
        return source.name
    return Path(source).name if isinstance(source, Path) else f"a {type(source).__name__}"


def _with_different_names(documents: Sequence[ReportDocument]) -> tuple[ReportDocument, ...]:
    """Make the names unique: the second `a.txt` becomes `a.txt (2)`."""
    names: set[str] = set()
    unique_documents = []
    for document in documents:
        name, number = document.name, 1
        while name in names:
            number += 1
            name = f"{document.name} ({number})"
        names.add(name)
        unique_documents.append(replace(document, name=name))
    return tuple(unique_documents)
