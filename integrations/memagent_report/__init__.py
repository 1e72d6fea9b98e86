"""Reports over many documents: a matrix of answers with quotes, and sections in which every sentence cites quotes.

`report` and `areport` read documents for a question, and write the report.
"""

from __future__ import annotations

import hashlib
import itertools
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
from memagent_report.report_graph import OnUpdate, ReportJob, ReportState, run_in_new_context
from memagent_report.report_writing import list_custom_templates

__all__ = ["Report", "areport", "report"]

_MAX_CONCURRENT_DOCUMENTS: Final = 8
_REPORT_VERSION: Final = 1
"""Part of every report id. It is raised when this version cannot continue reports of older versions."""


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
        documents: values that `Document.of` accepts. A document that cannot be read gets a row of failed cells.
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
        DocumentError: no document can be read; the error is that of the first document.
        PolicyError: a call failed. With checkpoints, the same call continues the report.
        RunError: another process is writing this report.
    """
    context = await agent.aprepare()
    check_question(question, context)
    questions = [questions] if isinstance(questions, str) else list(questions)
    checked_questions = tuple(dict.fromkeys(check_questions(questions, context))) if questions else ()
    report_documents = await _store_documents(agent, list(documents))
    read_settings = {
        "limits": None if limits is None else asdict(limits),
        "policy": agent.policy.name,
        "settings": (await agent.agraph()).reader_context.settings,
    }
    report_key = {
        "version": _REPORT_VERSION,
        "question": question,
        "questions": checked_questions,
        "documents": [
            (document.name, document.reference and document.reference["key"]) for document in report_documents
        ],
        "extractive": extractive,
        "judge": judge,
        "wording": list_custom_templates(context.prompts, trained_prompts_only=context.trained_prompts_only),
        **read_settings,
    }
    job = ReportJob(
        report_id=f"report-{_compute_digest(report_key)[:20]}",
        agent=agent,
        question=question,
        questions=checked_questions,
        documents=report_documents,
        extractive=extractive,
        judge=judge,
        limits=limits,
        run_id_prefix=f"cell-{_compute_digest(read_settings)[:8]}",
        on_update=on_update,
    )
    return Report.from_dict(await run_in_new_context(_run_report(job)))


report = make_synchronous(areport)


def _compute_digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


async def _run_report(job: ReportJob) -> dict[str, Any]:
    """Begin the report, or continue it if it exists; return its values."""
    checkpointer = await job.agent.acheckpointer()
    graph = job.build_graph().compile(checkpointer=checkpointer, name="MemAgentReport")
    config: Any = {"configurable": {"thread_id": job.report_id}, "max_concurrency": _MAX_CONCURRENT_DOCUMENTS}
    state: ReportState | None = {}
    with await lease_run(checkpointer, job.report_id):
        if checkpointer is not None:
            snapshot = await graph.aget_state(config)
            if snapshot.created_at is not None:
                if "report" in snapshot.values:
                    return dict(snapshot.values["report"])
                state = None if snapshot.next else {}
        final_state = await graph.ainvoke(state, config, durability="sync" if checkpointer is not None else None)
    return dict(final_state["report"])


async def _store_documents(agent: MemAgent, sources: Sequence[DocumentSource]) -> tuple[ReportDocument, ...]:
    """Add the documents to the store, in order. Names that occur twice get a number: `a.txt (2)`.

    Raises:
        DocumentError: there are no documents, or none can be read.
    """
    if not sources:
        raise DocumentError("there are no documents", hint="Pass at least one.")
    failures: list[DocumentError] = []
    report_documents: dict[str, ReportDocument] = {}
    for source in sources:
        try:
            document = Document.of(source)
            report_document = ReportDocument(document.name, await agent.store.add_async(document))
        except DocumentError as error:
            failures.append(error)
            message = remove_folders(" ".join(str(error).split()))
            name = source.name if isinstance(source, Document | Path) else f"a {type(source).__name__}"
            report_document = ReportDocument(name, None, message)
        name = report_document.name
        names = itertools.chain([name], (f"{name} ({copy_number})" for copy_number in itertools.count(2)))
        unique_name = next(name for name in names if name not in report_documents)
        report_documents[unique_name] = replace(report_document, name=unique_name)
    if len(failures) == len(report_documents):
        raise failures[0]
    return tuple(report_documents.values())
