"""Extracts quotes from a document's text, for the cell of a finished read, and finds the sentences around passages.

Quotes are copied from the text, with their positions, so that each can be compared with the text at its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from memagent_graph.documents import DocumentRef, DocumentStore, SourceMark
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.provenance.overlap import find_quotes as find_shared_passages
from memagent_graph.provenance.places import find_section_label
from memagent_graph.results import ReadResult
from memagent_report.evidence_matrix import CellState, MatrixCell, SourceQuote
from memagent_report.stated_facts import Facts, extract_facts, list_search_terms, stem

MAX_QUOTE_LENGTH: Final = 600
"""Maximum characters of a quote. A longer sentence is quoted in part; see `SourceQuote.is_whole`."""
_SENTENCE_END: Final = re.compile(
    r"[.!?\u061f\u06d4\u0964\u0965][\"'\u201d\u2019)\]]*(?=\s+[^\sa-z])|[。！？][」』”’）]*"  # a sentence
    r"|\n[^\S\n]*(?=\n)|\n(?=[^\S\n]*(?:[-*\u2022|#]|\d+[.)]\s|[A-Z][\w /-]{0,30}:[ \t]))"  # a list, a table, a field
)
_ABBREVIATION: Final = re.compile(
    r"(?:^|[\s(])(?:[A-Z]|[A-Za-z]\.[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|No|Nos|Fig|Figs|Sec|Art|vs|cf|al|etc|Inc|Ltd|Co|Corp|Jr|Sr|pp|p|"
    r"Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec|approx|ca|Rev|Gen|Col|Vol|v)$"
)
_SEARCH_RADIUS: Final = 1500
"""The number of characters on each side of a passage that are searched for the ends of its sentence."""


@dataclass(frozen=True)
class SourceText:
    """The text of a document, and the positions at which its pages begin."""

    text: str = field(repr=False)
    sections: Sequence[SourceMark] = ()

    @classmethod
    def load(cls, store: DocumentStore, document: DocumentRef) -> SourceText:
        """Load the text from the store.

        Raises:
            DocumentError: the text is no longer in the store.
        """
        return cls(store.read(document, 0, document["size"]), store.sections(document))

    def find_sentence(self, start: int, end: int) -> tuple[int, int, bool]:
        """Return the complete sentences, list items or table rows around a passage.

        Returns:
            The first character, the end, and whether the sentences are complete. Surrounding white space is left out.
            Sentences that are longer than `MAX_QUOTE_LENGTH` are cut at word boundaries around the passage.
        """
        search_start, search_end = max(0, start - _SEARCH_RADIUS), min(len(self.text), end + _SEARCH_RADIUS)
        ends = [search_start] if search_start == 0 else []
        matches = _SENTENCE_END.finditer(self.text, search_start, search_end)
        ends += [match.end() for match in matches if self._ends_sentence(match)]
        sentence_start = max((position for position in ends if position <= start), default=search_start)
        sentence_end = min((position for position in ends if position >= max(end, start + 1)), default=search_end)
        sentence_start, sentence_end = self._trim(sentence_start, sentence_end)
        if sentence_end - sentence_start <= max(MAX_QUOTE_LENGTH, end - start):
            return sentence_start, sentence_end, True
        margin = max(0, MAX_QUOTE_LENGTH - (end - start)) // 2
        cut_start, cut_end = max(sentence_start, start - margin), min(sentence_end, end + margin)
        return *self._cut_at_words(cut_start, cut_end), False

    def is_whole(self, start: int, end: int) -> bool:
        """Return whether a passage begins and ends where a sentence, a list item or a table row does."""
        sentence_start, sentence_end, is_whole = self.find_sentence(start, end)
        if (sentence_start, sentence_end) == (start, end):
            return is_whole
        # Several sentences: only the first and the last matter, and these may be longer than a quote.
        first_start, _, is_first_whole = self.find_sentence(start, start + 1)
        _, last_end, is_last_whole = self.find_sentence(max(start, end - 1), end)
        return (first_start == start or not is_first_whole) and (last_end == end or not is_last_whole)

    def _ends_sentence(self, match: re.Match[str]) -> bool:
        if match[0][0] not in ".":
            return True
        return _ABBREVIATION.search(self.text, max(0, match.start() - 8), match.start()) is None

    def _trim(self, start: int, end: int) -> tuple[int, int]:
        text = self.text[start:end].rstrip()
        return start + len(text) - len(text.lstrip()), start + len(text)

    def _cut_at_words(self, start: int, end: int) -> tuple[int, int]:
        while start > 0 and start < end and not self.text[start - 1].isspace():
            start += 1
        while end < len(self.text) and end > start and not self.text[end].isspace():
            end -= 1
        return self._trim(start, end)


# The cell of a finished read

_MAX_QUOTES = 8
"""Maximum number of quotes in one cell."""
_ANSWER_WEIGHT, _FACT_WEIGHT = 3, 10
"""The weights of the answer's words, and of its names, numbers and dates. A word of the question has the weight 1."""


def make_cell(result: ReadResult, source: SourceText, document_index: int, question_index: int) -> MatrixCell:
    """Return the cell for one read.

    Its quotes are the complete sentences around the passages behind the memory (see `RunView.provenance`). Those that
    contain the answer's numbers, dates and words come first, then those that contain the question's words.

    Args:
        result: the finished read.
        source: the document's text.
        document_index: the row, counted from 0.
        question_index: the column, counted from 0.
    """
    state = CellState.EMPTY if gives_no_answer(result.answer) else CellState.ANSWERED
    if result.stop_reason.resumable:
        state = CellState.STOPPED
    usage = result.usage
    return MatrixCell(
        document=document_index,
        question=question_index,
        state=state,
        # Some servers send lone surrogates, which cannot be stored.
        answer=(result.answer or "").encode("utf-8", "replace").decode() if state is CellState.ANSWERED else None,
        quotes=_select_quotes(result, source) if state is CellState.ANSWERED else (),
        run_id=result.run_id,
        stop_reason=result.stop_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        seconds=round(usage.seconds, 3),
        chunks_read=result.chunks_read,
    )


def _select_quotes(result: ReadResult, source: SourceText) -> tuple[SourceQuote, ...]:
    answer, question_terms = extract_facts(result.answer or ""), list_search_terms(extract_facts(result.question))
    spans: dict[tuple[int, int], bool] = {}
    view = result.view()
    for evidence in view.provenance.evidence:
        # Other passages of the chunk may have the answer's words, even if no line of the final memory has them.
        chunk_start, chunk_text = view.load_text_around(evidence)
        answer_passages = find_shared_passages(result.answer or "", chunk_text, chunk_start)[:2]
        for passage in ((evidence.start_char, evidence.end_char), *answer_passages):
            start, end, is_whole = source.find_sentence(*passage)
            spans.setdefault((start, end), is_whole)
    weights = _weigh_terms(answer)
    candidates = {span: _find_terms(source.text[slice(*span)], weights, question_terms) for span in spans}
    quotes: list[SourceQuote] = []
    covered_terms: set[str] = set()
    while candidates and len(quotes) < _MAX_QUOTES:
        best_span = max(
            candidates, key=lambda span: (_compute_gain(candidates[span], weights, covered_terms), -span[0])
        )
        gain = _compute_gain(candidates[best_span], weights, covered_terms)
        if gain <= 0 or (quotes and not (candidates[best_span] & weights.keys()) - covered_terms):
            break
        covered_terms |= candidates.pop(best_span)
        page = find_section_label(source.sections, best_span[0])
        quotes.append(SourceQuote(source.text[slice(*best_span)], *best_span, page, spans[best_span]))
    return tuple(quotes)


def _weigh_terms(answer: Facts) -> dict[str, int]:
    """Return the words and values of the answer that quotes should contain, each with its weight."""
    names = [stem(word.text) for word in answer.words if word.is_name]
    weights = dict.fromkeys(list_search_terms(answer), _ANSWER_WEIGHT)
    return weights | dict.fromkeys([*names, *_list_values(answer)], _FACT_WEIGHT)


def _list_values(facts: Facts) -> list[str]:
    date_parts = (part for date in facts.dates for part in (date.year, date.month, date.day))
    return [number.key for number in facts.numbers] + [str(part) for part in date_parts if part is not None]


def _find_terms(text: str, weights: dict[str, int], question_terms: frozenset[str]) -> set[str]:
    """Return the words and values of a text that are in the answer; words of the question have a "?" in front."""
    facts = extract_facts(text)
    terms = {*list_search_terms(facts), *_list_values(facts)}
    return (terms & weights.keys()) | {f"?{term}" for term in terms & question_terms}


def _compute_gain(matches: set[str], weights: dict[str, int], covered_terms: set[str]) -> int:
    return sum(weights.get(term, 1) for term in matches - covered_terms)
