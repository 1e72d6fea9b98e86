"""Checks every quote and every sentence of a draft, and builds the report from them.

The check uses code, not a model. Every quote must be at its place in its document, and every sentence must pass
`check_sentence` with the quotes that it cites. If a sentence cites no quotes, or the wrong ones, other quotes of its
section are tried. A sentence that no quotes support keeps its problems, and every format of the report marks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Final

from memagent_report.evidence_matrix import Draft, EvidenceMatrix, QuotePosition, ReportSentence, SourceQuote
from memagent_report.report_data import Report, ReportEvent
from memagent_report.sentence_checks import ProblemKind, SentenceProblem, check_sentence
from memagent_report.source_text import SourceText
from memagent_report.stated_facts import extract_facts, list_search_terms

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
    missing_count = sum(
        problem is not None and problem.kind is ProblemKind.QUOTE_NOT_IN_SOURCE for problem in quote_problems.values()
    )
    checker = _SentenceChecker(matrix, quote_problems, lower_case_words)
    sections = []
    for section in draft.sections:
        section_quotes = [position for position, _ in quotes if position.question in section.questions]
        sentences = tuple(checker.check(sentence, section_quotes) for sentence in section.sentences)
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
        quotes_found=len(quotes) - missing_count,
    )


def check_quote(quote: SourceQuote, source: SourceText, name: str) -> SentenceProblem | None:
    """Return the problem if a quote is not at its place or is cut within a sentence; None if it is correct.

    Args:
        quote: the quote.
        source: the text of its document.
        name: the document's name.
    """
    span = quote.start_char, quote.end_char
    if not quote.text or source.text[slice(*span)] != quote.text:
        place = "at its place in" if quote.text and quote.text in source.text else "in"
        return SentenceProblem(ProblemKind.QUOTE_NOT_IN_SOURCE, f"a quote is not {place} {name}")
    if quote.is_whole and not source.is_whole(*span):
        return SentenceProblem(ProblemKind.QUOTE_CUT, f"a quote from {name} begins or ends within a sentence")
    return None


@dataclass(frozen=True)
class _SentenceChecker:
    """Checks the sentences of one draft."""

    _matrix: EvidenceMatrix
    _quote_problems: Mapping[QuotePosition, SentenceProblem | None]
    _lower_case_words: set[str]

    def check(self, sentence: ReportSentence, section_quotes: Sequence[QuotePosition]) -> ReportSentence:
        """Return a sentence with the quotes that it cites, or with other quotes of its section that support it."""
        problems = self._find_problems(sentence.text, sentence.quotes)
        if problems and sentence.document is None:
            ranked_quotes = self._rank_quotes(sentence.text, section_quotes)
            for quote_count in range(1, len(ranked_quotes) + 1):
                if not self._find_problems(sentence.text, ranked_quotes[:quote_count]):
                    return replace(sentence, quotes=tuple(ranked_quotes[:quote_count]), chosen_by_code=True)
        return replace(sentence, problems=problems)

    def _find_problems(self, text: str, positions: Sequence[QuotePosition]) -> tuple[SentenceProblem, ...]:
        problems = [problem for position in positions if (problem := self._quote_problems[position]) is not None]
        valid_positions = [position for position in positions if self._quote_problems[position] is None]
        if problems and not valid_positions:
            return tuple(problems)
        quotes = [self._matrix.quote(position).text for position in valid_positions]
        file_names = [self._matrix.documents[position.document].name for position in positions]
        names = [name for file_name in file_names for name in list_document_names(file_name)]
        return (*problems, *check_sentence(text, quotes, names=names, common_words=self._lower_case_words))

    def _rank_quotes(self, text: str, section_quotes: Sequence[QuotePosition]) -> list[QuotePosition]:
        """Return the few quotes that share the most words and values with a sentence, best first."""
        terms = _list_terms(text)
        shared_counts = {
            position: len(terms & _list_terms(self._matrix.quote(position).text)) for position in section_quotes
        }
        positions = sorted(section_quotes, key=lambda position: (-shared_counts[position], position))
        return [position for position in positions[:_MAX_QUOTES] if shared_counts[position]]


def _list_terms(text: str) -> frozenset[str]:
    facts = extract_facts(text)
    return list_search_terms(facts) | {number.key for number in facts.numbers}


def list_document_names(file_name: str) -> list[str]:
    """Return the names that a sentence may use for a document: its file name with or without the ending.

    Names that could be a number or a person's name, as in `2021.txt` and `keller.txt`, are left out: they are facts to
    check.
    """
    stem = PurePath(file_name).stem
    names = [file_name] if re.search(r"[^\W\d_]", file_name) else []
    return names + ([stem] if re.search(r"[^\W\d_]", stem) and re.search(r"[\d_\s-]", stem) else [])


def find_lower_case_words(source: SourceText) -> frozenset[str]:
    """Return the words that a document has in lower case. They are not names, even if a sentence begins with one."""
    return frozenset(re.findall(r"(?<![^\W_])[a-z]{2,}", source.text[:_MAX_SEARCHED_LENGTH]))
