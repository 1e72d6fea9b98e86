"""Finds answers to one question that contradict each other, by rules for yes and no, dates and numbers.

The rules compare answers. They do not know whether two documents are about the same thing, so a policy can be asked to
judge what they find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from memagent_report.evidence_matrix import Cell, CellState, EvidenceMatrix
from memagent_report.stated_facts import Facts, content_stems, facts_of

_LONGEST_COMPARED: Final = 30
"""In words. Numbers and dates of longer answers may be about different things, so they are not compared."""
_LONGEST_SHORT: Final = 6
"""In words: the longest answer that `ContradictionRule.ANSWERS` compares."""


class ContradictionRule(StrEnum):
    """The rule by which answers differ."""

    YES_NO = "yes_no"
    """One answer begins with yes, the other with no."""
    DATES = "dates"
    """Every date in one answer excludes every date in the other."""
    NUMBERS = "numbers"
    """The answers have numbers with the same unit, or without units, and share none."""
    ANSWERS = "answers"
    """Short answers that share no word."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Documents that give different answers to one question."""

    question: int
    rule: ContradictionRule
    groups: tuple[tuple[int, ...], ...]
    """The numbers of the documents; the documents of a group agree."""
    judgement: bool | None = None
    """Whether the policy judges this to be a contradiction; None if it was not asked."""


def contradictions(matrix: EvidenceMatrix) -> tuple[Contradiction, ...]:
    """Return at most one contradiction for each question, from the first rule that finds one."""
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
    """Group the documents: each joins the first group in which no answer differs from its own."""
    groups: list[list[int]] = []
    for document, facts in answers.items():
        fitting = next((group for group in groups if not any(differ(facts, answers[each]) for each in group)), None)
        if fitting is None:
            groups.append([document])
        else:
            fitting.append(document)
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
    """Yield the name and the answer of each document in a contradiction, group by group."""
    for group in found.groups:
        for document in group:
            yield matrix.documents[document].name, matrix.cell(document, found.question).answer or ""
