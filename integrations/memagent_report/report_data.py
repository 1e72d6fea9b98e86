"""The data of a report, and the numbering of its references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from memagent_graph.events import EventKind
from memagent_report.contradictions import Contradiction
from memagent_report.drafts import ReportMode
from memagent_report.evidence_matrix import CellState, EvidenceMatrix, QuotePlace, SourceQuote
from memagent_report.sentence_problems import Problem


@dataclass(frozen=True, slots=True)
class ReportSentence:
    """One sentence of the report."""

    text: str
    quotes: tuple[QuotePlace, ...]
    """The quotes that it cites."""
    problems: tuple[Problem, ...] = ()
    """What the quotes do not support; empty if the sentence is quoted."""
    document: int | None = None
    """The document whose answer it is, in an extractive report."""
    chosen_by_code: bool = False
    """Whether the code chose its quotes, because those that the policy cited do not support it."""

    @property
    def is_quoted(self) -> bool:
        """Whether everything that can be compared is in its quotes, and the quotes are in their documents."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A heading and its sentences."""

    heading: str
    questions: tuple[int, ...]
    sentences: tuple[ReportSentence, ...]


@dataclass(frozen=True, slots=True)
class ReportEvent:
    """Something that readers of the report should know."""

    kind: EventKind
    detail: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A quote that the report uses, with the number that its sentences cite."""

    number: int
    document: int
    quote: SourceQuote


@dataclass(frozen=True)
class ReportData:
    """The data of a report over documents: matrix, sections, contradictions and events."""

    report_id: str
    mode: ReportMode
    model: str
    """The policy's name."""
    matrix: EvidenceMatrix
    sections: tuple[ReportSection, ...]
    contradictions: tuple[Contradiction, ...] = ()
    events: tuple[ReportEvent, ...] = ()
    quotes_checked: int = 0
    """The number of quotes in all cells; each was looked up in its document."""
    quotes_found: int = 0
    """The number of those that are in their document."""

    @property
    def question(self) -> str:
        """The question of the report."""
        return self.matrix.question

    @cached_property
    def references(self) -> tuple[Reference, ...]:
        """The quotes that the sentences cite, numbered from 1 in the order of their first use."""
        numbers = self._numbers
        found: dict[int, Reference] = {}
        for place in (place for sentence in self.sentences for place in sentence.quotes):
            number = numbers[self._key(place)]
            found.setdefault(number, Reference(number, place.document, self.matrix.quote(place)))
        return tuple(found[number] for number in sorted(found))

    @cached_property
    def _numbers(self) -> dict[tuple[int, int, int], int]:
        numbers: dict[tuple[int, int, int], int] = {}
        for place in (place for sentence in self.sentences for place in sentence.quotes):
            numbers.setdefault(self._key(place), len(numbers) + 1)
        return numbers

    def _key(self, place: QuotePlace) -> tuple[int, int, int]:
        """Return a key that is the same for one passage in several cells."""
        quote = self.matrix.quote(place)
        return place.document, quote.start_char, quote.end_char

    def numbers(self, sentence: ReportSentence) -> list[int]:
        """Return the numbers of a sentence's references, in ascending order."""
        return sorted({self._numbers[self._key(place)] for place in sentence.quotes})

    @property
    def sentences(self) -> Iterator[ReportSentence]:
        """The sentences of all sections."""
        return (sentence for section in self.sections for sentence in section.sentences)

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """Counts of documents, questions, cells by state, sentences, quotes and tokens."""
        cells = self.matrix.cells
        states = {state.value: sum(cell.state is state for cell in cells) for state in CellState}
        sentences = list(self.sentences)
        return {
            "documents": len(self.matrix.documents),
            "questions": len(self.matrix.questions),
            **states,
            "sentences": len(sentences),
            "quoted": sum(sentence.is_quoted for sentence in sentences),
            "contradictions": len(self.contradictions),
            "quotes_checked": self.quotes_checked,
            "quotes_found": self.quotes_found,
            "prompt_tokens": sum(cell.prompt_tokens for cell in cells),
            "completion_tokens": sum(cell.completion_tokens for cell in cells),
        }
