"""Answers of documents to one question that cannot all be right, by rules over yes and no, dates and numbers.

The rules compare answers; they do not know whether two documents speak of the same thing. So what they list is a
contradiction only if the question asks each document about the same thing, and a policy may be asked to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from memagent_graph.reports.evidence_matrix import Cell, CellState, EvidenceMatrix
from memagent_graph.reports.stated_facts import Facts, content_stems, facts_of

_LONGEST_COMPARED: Final = 30
"""Words. Numbers and dates of longer answers may be about many things."""
_LONGEST_SHORT: Final = 6


class ContradictionRule(StrEnum):
    """By what answers differ."""

    YES_NO = "yes_no"
    DATES = "dates"
    """They have dates, and each of one excludes each of the other."""
    NUMBERS = "numbers"
    """They have numbers with the same units, or without, and none in common."""
    ANSWERS = "answers"
    """Short answers without a word in common."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Documents that answer a question differently."""

    question: int
    rule: ContradictionRule
    groups: tuple[tuple[int, ...], ...]
    """The documents, by their numbers; those of a group agree."""
    judgement: bool | None = None
    """What the policy said, if it was asked: whether it is a contradiction."""


def contradictions(matrix: EvidenceMatrix) -> tuple[Contradiction, ...]:
    """Those of every question, at most one for each: that of the first rule that finds one."""
    found = (_of_question(list(matrix.column(number)), number) for number in range(len(matrix.questions)))
    return tuple(each for each in found if each is not None)


def _of_question(cells: Sequence[Cell], question: int) -> Contradiction | None:
    answers = {
        cell.document: facts_of(cell.answer) for cell in cells if cell.state is CellState.ANSWERED and cell.answer
    }
    for rule, applies, differ in _RULES:
        compared = {document: facts for document, facts in answers.items() if applies(facts)}
        groups = _grouped(compared, differ)
        if len(groups) > 1:
            return Contradiction(question, rule, groups)
    return None


def _grouped(answers: dict[int, Facts], differ: Callable[[Facts, Facts], bool]) -> tuple[tuple[int, ...], ...]:
    """The documents in groups: each joins the first group with none of whose answers its own differs."""
    groups: list[list[int]] = []
    for document, facts in answers.items():
        home = next((group for group in groups if not any(differ(facts, answers[each]) for each in group)), None)
        if home is None:
            groups.append([document])
        else:
            home.append(document)
    return tuple(map(tuple, groups))


def _yes_or_no(facts: Facts) -> str:
    first = facts.words[0].text if facts.words and not facts.text[: facts.words[0].start].strip() else ""
    return first if first in {"yes", "no"} else ""


def _is_short(facts: Facts, most: int = _LONGEST_COMPARED) -> bool:
    return len(facts.text.split()) <= most


def _different_dates(left: Facts, right: Facts) -> bool:
    return all(one.excludes(other) for one in left.dates for other in right.dates)


def _different_numbers(left: Facts, right: Facts) -> bool:
    pairs = [(one, other) for one in left.numbers for other in right.numbers if _same_unit(one.unit, other.unit)]
    return bool(pairs) and all(one.value != other.value for one, other in pairs)


def _same_unit(left: str, right: str) -> bool:
    return left == right or not left or not right


_RULES: Final[tuple[tuple[ContradictionRule, Callable[[Facts], bool], Callable[[Facts, Facts], bool]], ...]] = (
    (
        ContradictionRule.YES_NO,
        lambda facts: bool(_yes_or_no(facts)),
        lambda left, right: _yes_or_no(left) != _yes_or_no(right),
    ),
    (ContradictionRule.DATES, lambda facts: bool(facts.dates) and _is_short(facts), _different_dates),
    (
        ContradictionRule.NUMBERS,
        lambda facts: bool(facts.numbers) and not facts.dates and _is_short(facts),
        _different_numbers,
    ),
    (
        ContradictionRule.ANSWERS,
        lambda facts: not (facts.numbers or facts.dates or _yes_or_no(facts)) and _is_short(facts, _LONGEST_SHORT),
        lambda left, right: not content_stems(left) & content_stems(right),
    ),
)


def compared_answers(matrix: EvidenceMatrix, found: Contradiction) -> Iterator[tuple[str, str]]:
    """The names and answers of the documents in a contradiction, group by group."""
    for group in found.groups:
        for document in group:
            yield matrix.documents[document].name, matrix.cell(document, found.question).answer or ""
