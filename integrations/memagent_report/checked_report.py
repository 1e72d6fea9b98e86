"""Checks every quote and every sentence of a draft, and builds the report from them.

The check uses code, not a model. Every quote must be in its document, and every sentence must pass
`check_sentence` with the quotes that it cites. If a sentence cites no quotes, or the wrong ones, other quotes of its
section are tried. A sentence that no quotes support keeps its problems, and every format of the report marks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Final

from memagent_report.evidence_matrix import (
    Draft,
    EvidenceMatrix,
    QuotePosition,
    ReportSentence,
    SourceQuote,
)
from memagent_report.report_data import Report, ReportEvent
from memagent_report.sentence_checks import ProblemKind, SentenceProblem, check_sentence
from memagent_report.source_text import SourceText
from memagent_report.stated_facts import extract_facts, list_content_stems

_MAX_QUOTES: Final = 4
"""The maximum number of quotes for a sentence if the code chooses them."""
_MAX_SEARCHED_LENGTH: Final = 2_000_000
"""The number of characters of each document that are searched for words in lower case."""


def build_checked_report(
    report_id: str,
    model: str,
    matrix: EvidenceMatrix,
    draft: Draft,
    sources: Iterable[tuple[int, SourceText]],
    events: Sequence[ReportEvent] = (),
) -> Report:
    """Check every quote and sentence of a draft, and return the report.

    Args:
        report_id: the report's id.
        model: the policy's name.
        matrix: the cells with their quotes.
        draft: the sections to check.
        sources: the number and the text of each quoted document; only one text is used at a time.
        events: the events so far.
    """
    quotes = list(matrix.quotes())
    quote_problems: dict[QuotePosition, SentenceProblem | None] = {}
    lower_case_words: set[str] = set()
    for document_number, source in sources:
        name = matrix.documents[document_number].name
        for position, quote in quotes:
            if position.document == document_number:
                quote_problems[position] = check_quote(quote, source, name)
        lower_case_words |= find_lower_case_words(source)
    missing_quotes = [
        problem for problem in quote_problems.values() if problem and problem.kind is ProblemKind.QUOTE_NOT_IN_SOURCE
    ]
    is_common = lower_case_words.__contains__
    sections = []
    for section in draft.sections:
        section_quotes = [position for position, _ in quotes if position.question in section.questions]
        sentences = tuple(
            _check_sentence(sentence, section_quotes, matrix, quote_problems, is_common)
            for sentence in section.sentences
        )
        sections.append(replace(section, sentences=sentences))
    return Report(
        report_id=report_id,
        mode=draft.mode,
        model=model,
        matrix=matrix,
        sections=tuple(sections),
        contradictions=draft.contradictions,
        events=tuple(events),
        quotes_checked=len(quotes),
        quotes_found=len(quotes) - len(missing_quotes),
    )


def check_quote(quote: SourceQuote, source: SourceText, name: str) -> SentenceProblem | None:
    """Return the problem if a quote is not in its document or is cut within a sentence; None if it is correct.

    Args:
        quote: the quote.
        source: the text of its document.
        name: the document's name.
    """
    span = source.find_quote(quote.text, quote.start_char)
    if span is None:
        return SentenceProblem(ProblemKind.QUOTE_NOT_IN_SOURCE, f"a quote is not in {name}")
    if quote.is_whole and not source.is_whole(*span):
        return SentenceProblem(ProblemKind.QUOTE_CUT, f"a quote from {name} begins or ends within a sentence")
    return None


def _check_sentence(
    sentence: ReportSentence,
    section_quotes: Sequence[QuotePosition],
    matrix: EvidenceMatrix,
    quote_problems: Mapping[QuotePosition, SentenceProblem | None],
    is_common: Callable[[str], bool],
) -> ReportSentence:
    """Return a sentence with the quotes that it cites, or with other quotes of its section that support it."""
    problems = _find_problems(sentence.text, sentence.quotes, matrix, quote_problems, is_common)
    if not problems or sentence.document is not None:
        return replace(sentence, problems=problems)
    ranked_quotes = _rank_quotes(sentence.text, section_quotes, matrix)
    for quote_count in range(1, len(ranked_quotes) + 1):
        if not _find_problems(sentence.text, ranked_quotes[:quote_count], matrix, quote_problems, is_common):
            return replace(sentence, quotes=tuple(ranked_quotes[:quote_count]), chosen_by_code=True)
    return replace(sentence, problems=problems)


def _find_problems(
    text: str,
    positions: Sequence[QuotePosition],
    matrix: EvidenceMatrix,
    quote_problems: Mapping[QuotePosition, SentenceProblem | None],
    is_common: Callable[[str], bool],
) -> tuple[SentenceProblem, ...]:
    problems = [problem for position in positions if (problem := quote_problems[position]) is not None]
    quotes = [matrix.quote(position).text for position in positions if quote_problems[position] is None]
    if problems and not quotes:
        return tuple(problems)
    names = [name for position in positions for name in list_document_names(matrix.documents[position.document].name)]
    return (*problems, *check_sentence(text, quotes, names=names, is_common=is_common))


def list_document_names(file_name: str) -> list[str]:
    """Return the names that a sentence may use for a document: its file name with or without the ending.

    Names that could be a number or a person's name, as in `2021.txt` and `keller.txt`, are left out: they are facts to
    check.
    """
    stem = PurePath(file_name).stem
    names = [file_name] if re.search(r"[^\W\d_]", file_name) else []
    return names + ([stem] if re.search(r"[^\W\d_]", stem) and re.search(r"[\d_\s-]", stem) else [])


def _rank_quotes(text: str, section_quotes: Sequence[QuotePosition], matrix: EvidenceMatrix) -> list[QuotePosition]:
    """Return the few quotes that share the most words and values with a sentence, best first."""

    def list_terms(passage: str) -> frozenset[str]:
        facts = extract_facts(passage)
        return list_content_stems(facts) | {number.key for number in facts.numbers}

    sentence_terms = list_terms(text)

    def count_shared(position: QuotePosition) -> int:
        return len(sentence_terms & list_terms(matrix.quote(position).text))

    positions = sorted(section_quotes, key=lambda position: (-count_shared(position), position))
    return [position for position in positions[:_MAX_QUOTES] if count_shared(position)]


def find_lower_case_words(source: SourceText) -> frozenset[str]:
    """Return the words that a document has in lower case. They are not names, even if a sentence begins with one."""
    return frozenset(re.findall(r"(?<![^\W_])[a-z]{2,}", source.text[:_MAX_SEARCHED_LENGTH]))
