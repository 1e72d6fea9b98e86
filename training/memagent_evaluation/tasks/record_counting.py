"""Counting over records: the document is a list of purchases, one per line, and the answer is based on a few of them.

In the manner of OOLONG (Bertsch et al., arXiv 2511.02817): every single record is easy, but the answer needs the whole
document. `records_count` asks how many purchases of a category were made on a weekday. `records_most_frequent` asks of
which category a person bought most often; all their purchases are evidence. In a document of any length, at most
`matching` records answer a question; if there are fewer, near misses (the same category on another weekday, another
person with the same surname) replace them, so that all samples need the same space. All other records have another
weekday or category, or another person.

Small variants have up to 5 instead of 12. The document has only records, unless a haystack is named: then half of the
other lines are its sentences.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.fitting import Insertion
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.invented_names import FIRST_NAMES, SURNAMES
from memagent_graph.errors import EvaluationError

RECORDS: Final = ("records_count", "records_most_frequent")
WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
CATEGORIES: Final = {
    "stationery": ("a pencil", "a ruler", "an eraser", "a stapler", "a ring binder"),
    "groceries": ("a loaf", "a jar of mustard", "a pound of rice", "a tin of beans", "a bag of onions"),
    "clothing": ("a raincoat", "a pair of socks", "a belt", "a cardigan", "a bonnet"),
    "hardware": ("a chisel", "a padlock", "a tin of nails", "a spirit level", "a hinge"),
    "toys": ("a spinning top", "a jigsaw", "a rag doll", "a set of dominoes", "a yo-yo"),
    "crockery": ("a saucer", "a milk jug", "a soup plate", "an egg cup", "a gravy boat"),
    "gardening": ("a trowel", "a watering can", "a bag of compost", "a rake", "a flower pot"),
    "bedding": ("a pillow", "a quilt", "a blanket", "a bolster", "a linen sheet"),
}
_ANSWER_TOKENS: Final = 32
_MATCHING, _SMALL_MATCHING = 12, 5
_LEAST_MATCHING: Final = 2
_RIVALS: Final = 3
_PROSE_SHARE: Final = 0.5
_MOST_QUESTIONS: Final = 12
"""The maximum, out of 48 pairs of a category and a weekday: so every asked pair has near misses that are not asked
about."""


@dataclass(frozen=True, slots=True)
class Purchase:
    """One record, without its filler: the time of day and the item."""

    weekday: str
    person: str
    category: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, its answer, its evidence, and the other purchases that would change the answer."""

    question: str
    gold: str
    purchases: tuple[Purchase, ...]
    counts: Callable[[Purchase], bool]
    near_miss: Callable[[random.Random], Purchase]
    """Draws a similar purchase; it may be one that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsTask(GeneratedTask):
    """Questions for the number of records, or for the most frequent category.

    Attributes:
        matching: the maximum number of records that answer a question; with the near misses, there are this many for
            each.
        prose_share: the share of the other lines that are sentences of prose, 0 to 1.
    """

    whole_document: ClassVar[bool] = True
    shares_documents: ClassVar[bool] = True
    dials: ClassVar[tuple[str, ...]] = ("matching", "prose_share")
    margin: ClassVar[float] = 1.3

    most_frequent: bool
    matching: int
    prose_share: float = 0.0

    def __post_init__(self) -> None:
        if self.settings.questions_per_document > _MOST_QUESTIONS:
            raise EvaluationError(
                f"{self.name} has no {self.settings.questions_per_document} questions on one document",
                hint=f"Ask for {_MOST_QUESTIONS} at most.",
            )
        if self.matching < _LEAST_MATCHING:
            raise EvaluationError(
                f"{self.name} cannot do with {self.matching} matching records",
                hint=f"Take {_LEAST_MATCHING}, or any larger number.",
            )
        if not 0 <= self.prose_share < 1:
            raise EvaluationError(
                f"{self.name} cannot have a share of {self.prose_share} of prose", hint="Take 0 to less than 1."
            )

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length. Raises EvaluationError where the length is too small."""
        number, member = self.shared(index)
        chance = self.chance(length, number)
        asked = self._asked(chance)
        insertions = []
        for place, each in enumerate(asked):
            for purchase in each.purchases:
                told = self._told(each, purchase) if place == member else None
                insertions.append(Insertion(_line(chance, purchase), chance.random(), told))
            for _ in range(self.matching - len(each.purchases)):
                purchase = _not_counted(partial(each.near_miss, chance), asked)
                insertions.append(Insertion(_line(chance, purchase), chance.random()))

        prose = haystacks.prose(self.settings.haystack, self.chance(length, number, "prose"))

        def others() -> Iterator[str]:
            source = self.chance(length, number, "lines")
            sentences = prose.units()
            while True:
                if source.random() < self.prose_share:
                    yield next(sentences).strip()
                else:
                    yield _line(source, _not_counted(partial(_purchase, source), asked))

        question, gold = asked[member].question, (asked[member].gold,)
        beside = [each.question for each in asked]
        return self.planned(length, index, question, gold, haystacks.Lines(others), insertions, beside)

    def _told(self, asked: _Asked, purchase: Purchase) -> str:
        """A record's gold string: its category, or the number if records are counted."""
        return purchase.category if self.most_frequent else asked.gold

    def _asked(self, chance: random.Random) -> list[_Asked]:
        """The questions on a document; the purchases of one do not count for another."""
        number = self.settings.questions_per_document
        if self.most_frequent:
            people = chance.sample([f"{first} {last}" for first in FIRST_NAMES for last in SURNAMES], number)
            return [self._most_frequent(chance, person) for person in people]
        pairs = chance.sample([(category, weekday) for category in CATEGORIES for weekday in WEEKDAYS], number)
        return [self._count(chance, category, weekday) for category, weekday in pairs]

    def _count(self, chance: random.Random, category: str, weekday: str) -> _Asked:
        number = chance.randint(_LEAST_MATCHING, self.matching)
        return _Asked(
            f"How many purchases in the category {category} were made on a {weekday}?",
            str(number),
            tuple(_purchase(chance, weekday=weekday, category=category) for _ in range(number)),
            lambda purchase: (purchase.category, purchase.weekday) == (category, weekday),
            lambda chance: _purchase(chance, **chance.choice(({"weekday": weekday}, {"category": category}))),
        )

    def _most_frequent(self, chance: random.Random, person: str) -> _Asked:
        first, *rivals = chance.sample(list(CATEGORIES), 1 + _RIVALS)
        number = chance.randint(_LEAST_MATCHING, self.matching // 2 + 1)
        categories, left = [first] * number, self.matching - number
        for rival in rivals:
            times = chance.randint(min(1, left), min(number - 1, left))
            categories += [rival] * times
            left -= times
        return _Asked(
            f"In which category did {person} make the most purchases?",
            first,
            tuple(_purchase(chance, person=person, category=category) for category in categories),
            lambda purchase: purchase.person == person,
            lambda chance: _purchase(chance, person=f"{chance.choice(FIRST_NAMES)} {person.split()[1]}"),
        )


def _purchase(
    chance: random.Random, *, weekday: str | None = None, person: str | None = None, category: str | None = None
) -> Purchase:
    return Purchase(
        weekday or chance.choice(WEEKDAYS),
        person or f"{chance.choice(FIRST_NAMES)} {chance.choice(SURNAMES)}",
        category or chance.choice(list(CATEGORIES)),
    )


def _not_counted(draw: Callable[[], Purchase], asked: Sequence[_Asked]) -> Purchase:
    """The first drawn purchase that counts for no question."""
    while True:
        purchase = draw()
        if not any(each.counts(purchase) for each in asked):
            return purchase


def _line(chance: random.Random, purchase: Purchase) -> str:
    hour, minute = chance.randrange(9, 18), chance.randrange(60)
    bought = chance.choice(CATEGORIES[purchase.category])
    return f"{purchase.weekday}, {hour}:{minute:02}: {purchase.person} bought {bought} ({purchase.category})."


def records_task(name: str, settings: TaskSettings) -> RecordsTask:
    """One of `RECORDS`."""
    return RecordsTask(
        name=name,
        settings=settings,
        answer_tokens=SMALL_ANSWER_TOKENS if settings.small else _ANSWER_TOKENS,
        most_frequent=name == "records_most_frequent",
        matching=_SMALL_MATCHING if settings.small else _MATCHING,
        prose_share=0.0 if settings.haystack is None else _PROSE_SHARE,
    )
