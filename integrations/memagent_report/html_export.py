"""Writes a report as one HTML file that looks like a run's page: no script, no network, links only within the page."""

from __future__ import annotations

from collections.abc import Iterator

from memagent_graph.timeline.html_parts import content_policy, escaped, filled, page_title, resource
from memagent_report.bibliography import quote_location, reference_text
from memagent_report.evidence_matrix import CellState
from memagent_report.export_safety import writable
from memagent_report.report_data import ReportData, ReportSection, ReportSentence
from memagent_report.report_words import (
    NOT_QUOTED,
    WHAT_QUOTED_MEANS,
    cell_text,
    contradiction_text,
    summary,
)
from memagent_report.sentence_problems import shown

_PACKAGE = "memagent_report"


def html_page(report: ReportData) -> str:
    """Return the page as text; write it in UTF-8."""
    style = resource("page.css") + resource("report_page.css", _PACKAGE)
    return filled(
        resource("report_page.html", _PACKAGE),
        {
            "policy": content_policy(style),
            "title": page_title(report.question),
            "style": style,
            "report_id": _text(report.report_id),
            "question": _text(report.question),
            "summary": _text(summary(report)),
            "events": "".join(
                f'<p class="event">{_text(f"{each.kind.value}: {each.detail}")}</p>' for each in report.events
            ),
            "facts": "".join(_facts(report)),
            "sections": "\n".join(_section(report, section) for section in report.sections),
            "contradictions": "".join(_contradictions(report)),
            "matrix": "".join(_matrix(report)),
            "quotes": "".join(_references(report)),
            "documents": "".join(_documents(report)),
            "meaning": _text(WHAT_QUOTED_MEANS),
        },
    )


def _text(text: str) -> str:
    return escaped(writable(text))


def _facts(report: ReportData) -> Iterator[str]:
    total = report.totals
    facts = {
        "Policy": report.model,
        "Documents": f"{total['documents']:,}",
        "Sentences quoted": f"{total['quoted']:,} of {total['sentences']:,}",
        "Quotes found": f"{total['quotes_found']:,} of {total['quotes_checked']:,}",
        "Contradictions": f"{total['contradictions']:,}",
        "Tokens": f"{total['prompt_tokens']:,} in, {total['completion_tokens']:,} out",
    }
    yield from (f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items())


def _section(report: ReportData, section: ReportSection) -> str:
    sentences = "".join(_sentence(report, each) for each in section.sentences)
    body = (
        f'<ul class="sentences">{sentences}</ul>'
        if sentences
        else '<p class="hint">(empty: no document gives an answer)</p>'
    )
    return f"<section><h2>{_text(section.heading)}</h2>{body}</section>"


def _sentence(report: ReportData, sentence: ReportSentence) -> str:
    numbers = "".join(
        f'<a class="reference" href="#quote-{number}">[{number}]</a>' for number in report.numbers(sentence)
    )
    source = ""
    if sentence.document is not None:
        source = f'<span class="source">{_text(report.matrix.documents[sentence.document].name)}:</span> '
    if sentence.is_quoted:
        return f"<li>{source}{_text(sentence.text)}{numbers}</li>"
    mark = f'<span class="mark">{NOT_QUOTED}: {_text(shown(sentence.problems))}</span>'
    return f'<li class="unquoted">{source}{_text(sentence.text)}{numbers}{mark}</li>'


def _contradictions(report: ReportData) -> Iterator[str]:
    if not report.contradictions:
        return
    yield "<section><h2>Answers that contradict each other</h2>"
    for each in report.contradictions:
        title, lines = contradiction_text(report, each)
        items = "".join(f"<li>{_text(line)}</li>" for line in lines)
        yield f'<div class="differing"><p>{_text(title)}</p><ul>{items}</ul></div>'
    yield "</section>"


def _matrix(report: ReportData) -> Iterator[str]:
    matrix = report.matrix
    heads = "".join(f'<th scope="col">{_text(each)}</th>' for each in ("Document", *matrix.questions))
    yield f'<section><h2>Evidence matrix</h2><div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>'
    for number, document in enumerate(matrix.documents):
        yield f'<tr><th scope="row">{_text(document.name)}</th>'
        for question in range(len(matrix.questions)):
            cell = matrix.cell(number, question)
            kind = "" if cell.state is CellState.ANSWERED else ' class="empty"'
            yield f"<td{kind}>{_text(cell_text(cell))}</td>"
        yield "</tr>"
    yield "</tbody></table></div></section>"


def _references(report: ReportData) -> Iterator[str]:
    if not report.references:
        return
    yield '<section><h2>Quotes</h2><ol class="references">'
    for each in report.references:
        name = _text(report.matrix.documents[each.document].name)
        where = f'<span class="where">{name}, {_text(quote_location(each))}</span>'
        yield f'<li id="quote-{each.number}">[{each.number}] {where}<br><q>{_text(each.quote.text)}</q></li>'
    yield "</ol></section>"


def _documents(report: ReportData) -> Iterator[str]:
    yield '<section><h2>Documents</h2><ol class="documents">'
    for number, document in enumerate(report.matrix.documents, 1):
        yield f"<li>{number}. {_text(reference_text(document))}</li>"
    yield "</ol></section>"
