"""From a finished read to a cell of the matrix: its answer, and the sentences of the document that it was read from."""

from __future__ import annotations

from memagent_graph.events import StopReason
from memagent_graph.provenance.overlap import quotes as shared_passages
from memagent_graph.reports.evidence_matrix import Cell, CellState, SourceQuote, gives_no_answer
from memagent_graph.reports.source_text import SourceText
from memagent_graph.reports.stated_facts import Facts, content_stems, facts_of, stem
from memagent_graph.results import ReadResult

MOST_QUOTES = 8
"""Quotes of one cell."""
_ANSWER_WEIGHT, _FACT_WEIGHT = 3, 10


def cell_of(result: ReadResult, source: SourceText, document: int, question: int) -> Cell:
    """The cell of one read.

    Its quotes are the whole sentences around the passages that the run's own evidence names (see
    `ReadResult.evidence`), best first: those that have the answer's numbers, dates and words, then the question's.

    Args:
        result: the read.
        source: the document's text.
        document: the row.
        question: the column.
    """
    stopped = result.stop_reason.resumable
    empty = gives_no_answer(result.answer)
    state = CellState.STOPPED if stopped else CellState.EMPTY if empty else CellState.ANSWERED
    usage = result.usage
    return Cell(
        document=document,
        question=question,
        state=state,
        # A half surrogate pair, which some servers send, cannot be stored.
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
        # The answer may be in the chunk's other passages, which no line of the final memory has in words.
        chunk = result.updates[each.update]
        text = source.text[chunk.start_char : chunk.end_char]
        for low, high in shared_passages(result.answer or "", text, chunk.start_char)[:2]:
            start, end, whole = source.sentence(low, high)
            spans.setdefault((start, end), whole)
    wanted = _wanted(answer)
    left = {span: _held(source.text[slice(*span)], wanted, asked) for span in spans}
    chosen: list[tuple[int, int]] = []
    covered: set[str] = set()
    while left and len(chosen) < MOST_QUOTES:
        best = max(left, key=lambda span: (_gain(left[span], wanted, covered), -span[0]))
        gain = _gain(left[best], wanted, covered)
        if gain <= 0 or (chosen and not (left[best] & wanted.keys()) - covered):
            break
        covered |= left.pop(best)
        chosen.append(best)
    return tuple(
        SourceQuote(source.text[start:end], start, end, source.page(start), spans[start, end]) for start, end in chosen
    )


def _wanted(answer: Facts) -> dict[str, int]:
    """What quotes should have of the answer, and how much each is worth."""
    wanted = dict.fromkeys(content_stems(answer), _ANSWER_WEIGHT)
    for word in answer.names:
        wanted[stem(word.text)] = _FACT_WEIGHT
    return wanted | dict.fromkeys((*_values(answer), *answer.codes), _FACT_WEIGHT)


def _values(facts: Facts) -> list[str]:
    dates = [f"{part}" for date in facts.dates for part in (date.year, date.month, date.day) if part is not None]
    return [number.key for number in facts.numbers] + dates


def _held(text: str, wanted: dict[str, int], asked: frozenset[str]) -> set[str]:
    facts = facts_of(text)
    held = {*content_stems(facts), *_values(facts), *facts.codes}
    return (held & wanted.keys()) | {f"?{each}" for each in held & asked}


def _gain(held: set[str], wanted: dict[str, int], covered: set[str]) -> int:
    return sum(wanted.get(each, 1) for each in held - covered)
