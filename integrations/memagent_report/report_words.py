"""The wording of a report, the same in every format."""

from __future__ import annotations

from memagent_graph.plain_text import counted
from memagent_report.contradictions import Contradiction, ContradictionRule
from memagent_report.drafts import ReportMode
from memagent_report.evidence_matrix import Cell, CellState
from memagent_report.report_data import ReportData, ReportSentence

NOT_QUOTED = "not quoted"
"""The mark of a sentence that its quotes do not support."""
WHAT_QUOTED_MEANS = (
    "A sentence is quoted if its numbers, units, dates, names and quotations appear in its quotes, and the quotes "
    "appear in their documents, character by character except for white space and Unicode variants. This does not make "
    "it true. "
    f'Sentences marked "{NOT_QUOTED}" failed this check.'
)
_RULES = {
    ContradictionRule.YES_NO: "yes against no",
    ContradictionRule.DATES: "different dates",
    ContradictionRule.NUMBERS: "different numbers",
    ContradictionRule.ANSWERS: "different answers",
}


def summary(report: ReportData) -> str:
    """Summarize in a few sentences what was read and found."""
    total = report.totals
    explanation = (
        f"{counted(total['documents'], 'document')} read with {counted(total['questions'], 'question')}: "
        f"{total['answered']} of {len(report.matrix.cells)} cells have an answer. "
        f"{total['quoted']} of {counted(total['sentences'], 'sentence')} quoted; "
        f"{total['quotes_found']} of {counted(total['quotes_checked'], 'quote')} found in the documents."
    )
    if report.mode is ReportMode.WRITTEN:
        return explanation
    return f"{explanation} The sentences are the answers of the cells."


def cell_text(cell: Cell) -> str:
    """Return the text of a cell: its answer, or why there is none."""
    if cell.state is CellState.ANSWERED:
        return cell.answer or ""
    if cell.state is CellState.FAILED:
        return f"(failed: {cell.error})"
    return "(empty)" if cell.state is CellState.EMPTY else f"(stopped: {cell.stop_reason})"


def sentence_text(report: ReportData, sentence: ReportSentence) -> str:
    """Return a sentence; if it is a cell's answer, the document's name is put in front."""
    if sentence.document is None:
        return sentence.text
    return f"{report.matrix.documents[sentence.document].name}: {sentence.text}"


def contradiction_text(report: ReportData, found: Contradiction) -> tuple[str, list[str]]:
    """Return a title for a contradiction, and a line for each group of documents that agree."""
    judged = {None: "", True: "; judged a contradiction by the policy", False: "; judged compatible by the policy"}
    title = f"{report.matrix.questions[found.question]} ({_RULES[found.rule]}{judged[found.judgement]})"
    lines = []
    for group in found.groups:
        names: dict[str, list[str]] = {}
        for document in group:
            answer = report.matrix.cell(document, found.question).answer or ""
            names.setdefault(answer, []).append(report.matrix.documents[document].name)
        lines.append("; ".join(f"{', '.join(each)}: {answer}" for answer, each in names.items()))
    return title, lines
