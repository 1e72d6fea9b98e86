"""Turns a finished read into a cell of the matrix: its answer, and the sentences of the document that support it."""

from __future__ import annotations

from memagent_graph.events import StopReason
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.provenance.overlap import quotes as shared_passages
from memagent_graph.results import ReadResult
from memagent_report.evidence_matrix import Cell, CellState, SourceQuote
from memagent_report.source_text import SourceText
from memagent_report.stated_facts import Facts, content_stems, facts_of, stem

MOST_QUOTES = 8
"""The maximum number of quotes in one cell."""
_ANSWER_WEIGHT, _FACT_WEIGHT = 3, 10
"""The weights of a word of the answer, and of a name, number, date or code in it; a word of the question has 1."""


def cell_of(result: ReadResult, source: SourceText, document: int, question: int) -> Cell:
    """Return the cell for one read.

    Its quotes are the whole sentences around the passages in the run's evidence (see `ReadResult.evidence`). Those that
    contain the answer's numbers, dates and words come first, then those that contain the question's words.

    Args:
        result: the finished read.
        source: the document's text.
        document: the row, counted from 0.
        question: the column, counted from 0.
    """
    stopped = result.stop_reason.resumable
    empty = gives_no_answer(result.answer)
    state = CellState.STOPPED if stopped else CellState.EMPTY if empty else CellState.ANSWERED
    usage = result.usage
    return Cell(
        document=document,
        question=question,
        state=state,
        # Some servers send half surrogate pairs, which cannot be stored.
        answer=(result.answer or "").encode("utf-8", "replace").decode() if state is CellState.ANSWERED else None,
        quotes=_quotes(result, source) if state is CellState.ANSWERED else (),
        run_id=result.run_id,
        stop_reason=StopReason(result.stop_reason),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        seconds=round(usage.seconds, 3),
        chunks_read=result.chunks_read,
    )


def _quotes(result: ReadResult, source: SourceText) -> tuple[SourceQuote, ...]:
    answer, asked = facts_of(result.answer or ""), content_stems(facts_of(result.question))
    spans: dict[tuple[int, int], bool] = {}
    for each in result.evidence:
        start, end, whole = source.sentence(each.start_char, each.end_char)
        spans.setdefault((start, end), whole)
        # Other passages of the chunk may have the answer's words, even if no line of the final memory has them.
        chunk = result.updates[each.update]
        text = source.text[chunk.start_char : chunk.end_char]
        for low, high in shared_passages(result.answer or "", text, chunk.start_char)[:2]:
            start, end, whole = source.sentence(low, high)
            spans.setdefault((start, end), whole)
    weights = _weights(answer)
    left = {span: _matches(source.text[slice(*span)], weights, asked) for span in spans}
    chosen: list[tuple[int, int]] = []
    covered: set[str] = set()
    while left and len(chosen) < MOST_QUOTES:
        best = max(left, key=lambda span: (_gain(left[span], weights, covered), -span[0]))
        gain = _gain(left[best], weights, covered)
        if gain <= 0 or (chosen and not (left[best] & weights.keys()) - covered):
            break
        covered |= left.pop(best)
        chosen.append(best)
    return tuple(
        SourceQuote(source.text[start:end], start, end, source.page(start), spans[start, end]) for start, end in chosen
    )


def _weights(answer: Facts) -> dict[str, int]:
    """Return the words and values of the answer that quotes should contain, each with its weight."""
    weights = dict.fromkeys(content_stems(answer), _ANSWER_WEIGHT)
    for word in answer.names:
        weights[stem(word.text)] = _FACT_WEIGHT
    return weights | dict.fromkeys((*_values(answer), *answer.codes), _FACT_WEIGHT)


def _values(facts: Facts) -> list[str]:
    dates = [f"{part}" for date in facts.dates for part in (date.year, date.month, date.day) if part is not None]
    return [number.key for number in facts.numbers] + dates


def _matches(text: str, weights: dict[str, int], asked: frozenset[str]) -> set[str]:
    """Return the words and values of a text that are in the answer; words of the question have a "?" in front."""
    facts = facts_of(text)
    found = {*content_stems(facts), *_values(facts), *facts.codes}
    return (found & weights.keys()) | {f"?{each}" for each in found & asked}


def _gain(matches: set[str], weights: dict[str, int], covered: set[str]) -> int:
    return sum(weights.get(each, 1) for each in matches - covered)
