"""A report whose sentences are bound to quotes, and whose quotes are compared with the documents.

The draft's sentences are checked here, by code alone: every quote must be in its document, and a sentence must pass
`check_sentence` with the quotes that it names. One that names none, or the wrong ones, is tried with the other quotes
of its section; what no quotes support keeps its problems and is marked wherever the report is shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Final

from memagent_graph.reports.contradictions import contradictions
from memagent_graph.reports.drafts import Draft, DraftSentence
from memagent_graph.reports.evidence_matrix import (
    EvidenceMatrix,
    QuotePlace,
    ReportDocument,
    SourceQuote,
    from_json,
    to_json,
)
from memagent_graph.reports.html_export import html_page
from memagent_graph.reports.markdown_export import markdown
from memagent_graph.reports.report_data import ReportData, ReportEvent, ReportSection, ReportSentence
from memagent_graph.reports.sentence_checks import check_sentence
from memagent_graph.reports.sentence_problems import Problem, ProblemKind
from memagent_graph.reports.source_text import SourceText
from memagent_graph.reports.stated_facts import content_stems, facts_of

_MOST_BOUND: Final = 4
"""Quotes of one sentence, where the code chooses them."""
_READ_FOR_WORDS: Final = 2_000_000
"""Characters of each document from which its ordinary words are taken."""


@dataclass(frozen=True)
class Report(ReportData):
    """A report over documents, from `memagent_graph.report`."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; `Report.from_dict` takes them back."""
        named = ("report_id", "mode", "model", "matrix", "sections", "contradictions", "events")
        values = {name: to_json(getattr(self, name)) for name in named}
        return {
            **values,
            "quotes_checked": self.quotes_checked,
            "quotes_found": self.quotes_found,
            "references": to_json(self.references),
            "totals": dict(self.totals),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """The report that `to_dict` gave.

        Raises:
            msgspec.ValidationError: these are not a report's values.
        """
        computed = {"references", "totals"}
        return from_json({name: value for name, value in values.items() if name not in computed}, cls)

    def to_markdown(self) -> str:
        """The report in Markdown; text of documents and policy cannot become a link, an image, HTML or TeX."""
        return markdown(self)

    def to_html(self) -> str:
        """The report as one page that loads nothing."""
        return html_page(self)


def checked_report(
    report_id: str,
    model: str,
    matrix: EvidenceMatrix,
    draft: Draft,
    sources: Iterable[tuple[int, SourceText]],
    events: Sequence[ReportEvent] = (),
) -> Report:
    """Check every quote and sentence of a draft.

    Args:
        report_id: its id.
        model: the policy's name.
        matrix: the cells.
        draft: the sections.
        sources: the number and text of each document that is quoted; one is needed at a time.
        events: what happened so far.
    """
    quotes = list(matrix.quotes())
    flaws: dict[QuotePlace, Problem | None] = {}
    words: set[str] = set()
    for number, source in sources:
        own = ((place, quote) for place, quote in quotes if place.document == number)
        flaws |= {place: quote_flaw(quote, source, matrix.documents[number].name) for place, quote in own}
        words |= words_in_lower_case(source)
    absent = [flaw for flaw in flaws.values() if flaw and flaw.kind is ProblemKind.QUOTE_NOT_IN_SOURCE]
    is_common = words.__contains__
    sections = []
    for section in draft.sections:
        pool = [place for place, _ in quotes if place.question in section.questions]
        sentences = tuple(_bound(each, pool, matrix, flaws, is_common) for each in section.sentences)
        sections.append(ReportSection(section.heading, section.questions, sentences))
    listed = tuple(replace(each, judgement=draft.judgements.get(each.question)) for each in contradictions(matrix))
    return Report(
        report_id=report_id,
        mode=draft.mode,
        model=model,
        matrix=matrix,
        sections=tuple(sections),
        contradictions=listed,
        events=tuple(events),
        quotes_checked=len(quotes),
        quotes_found=len(quotes) - len(absent),
    )


def quote_flaw(quote: SourceQuote, source: SourceText, name: str) -> Problem | None:
    """What is wrong with a quote: it is not in its document, or begins or ends within a sentence. None if nothing is.

    Args:
        quote: the quote.
        source: its document's text.
        name: the document's name.
    """
    found = source.find(quote.text, quote.start_char)
    if found is None:
        return Problem(ProblemKind.QUOTE_NOT_IN_SOURCE, f"a quote is not in {name}")
    if quote.is_whole and not source.is_whole(*found):
        return Problem(ProblemKind.QUOTE_CUT, f"a quote from {name} begins or ends within a sentence")
    return None


def _bound(
    drafted: DraftSentence,
    pool: Sequence[QuotePlace],
    matrix: EvidenceMatrix,
    flaws: Mapping[QuotePlace, Problem | None],
    is_common: Callable[[str], bool],
) -> ReportSentence:
    """A sentence with the quotes that it names, or with others of its section that have what it states."""
    named = _problems(drafted.text, drafted.quotes, matrix, flaws, is_common)
    if not named or drafted.document is not None:
        return ReportSentence(drafted.text, drafted.quotes, named, drafted.document)
    others = _nearest(drafted.text, pool, matrix)
    for count in range(1, len(others) + 1):
        if not _problems(drafted.text, others[:count], matrix, flaws, is_common):
            return ReportSentence(drafted.text, tuple(others[:count]), (), chosen_by_code=True)
    return ReportSentence(drafted.text, drafted.quotes, named)


def _problems(
    text: str,
    places: Sequence[QuotePlace],
    matrix: EvidenceMatrix,
    flaws: Mapping[QuotePlace, Problem | None],
    is_common: Callable[[str], bool],
) -> tuple[Problem, ...]:
    own = [flaw for place in places if (flaw := flaws[place]) is not None]
    quotes = [matrix.quote(place).text for place in places if flaws[place] is None]
    if own and not quotes:
        return tuple(own)
    named = [name for place in places for name in names_in_sentences(matrix.documents[place.document])]
    return (*own, *check_sentence(text, quotes, named=named, is_common=is_common))


def names_in_sentences(document: ReportDocument) -> tuple[str, ...]:
    """What a sentence may call a document: its name, that without the ending, and its title.

    Not where that could be a number or a person's name, as for `2021.txt` and `keller.txt`: those are facts to check.
    """
    stem, title = PurePath(document.name).stem, document.metadata.get("title", "")
    found = [document.name] if re.search(r"[^\W\d_]", document.name) else []
    found += [stem] if re.search(r"[^\W\d_]", stem) and re.search(r"[\d_\s-]", stem) else []
    return (*found, *([title] if len(title.split()) > 2 else []))


def _nearest(text: str, pool: Sequence[QuotePlace], matrix: EvidenceMatrix) -> list[QuotePlace]:
    """The few quotes with most of a sentence's words and values, best first."""
    facts = facts_of(text)
    wanted = content_stems(facts) | {number.key for number in facts.numbers}

    def shared(place: QuotePlace) -> int:
        quote = facts_of(matrix.quote(place).text)
        return len(wanted & (content_stems(quote) | {number.key for number in quote.numbers}))

    ranked = sorted(pool, key=lambda place: (-shared(place), place))
    return [place for place in ranked[:_MOST_BOUND] if shared(place)]


def words_in_lower_case(source: SourceText) -> frozenset[str]:
    """The words that a document has in lower case, which are no names where a sentence begins with them."""
    return frozenset(re.findall(r"(?<![^\W_])[a-z]{2,}", source.text[:_READ_FOR_WORDS]))
