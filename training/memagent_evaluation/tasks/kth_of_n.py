"""The k-th of n near-identical texts, to be repeated word for word.

In the manner of MRCR (Vodrahalli et al., arXiv 2409.12640; OpenAI-MRCR): several notes about one harbour, in the same
form, are in prose among notes about other harbours, and only their order determines the asked one. The evidence is all
notes about it up to that one. `Scores.string_match` has MRCR's metric, the similarity of answer and note after the
words that all of these notes begin with; strict accuracy needs the whole note.

There are as many notes about other harbours as about the asked one. Small variants have 2, and shorter notes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, Final

from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.scorers import similarity_after_prefix
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.fitting import Insertion
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.invented_names import Kind, Names
from memagent_graph.errors import EvaluationError

KTH: Final = {f"kth_of_{number}": number for number in (2, 4, 8)}
ORDINALS: Final = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_CARGO: Final = (
    "copper wire", "dried figs", "roof tiles", "sheep's wool", "window glass", "salted herring", "pine tar", "sewing "
    "machines", "wax paper", "fresh oranges", "fence posts", "church candles", "brass fittings", "cane chairs",
    "bottled ink", "rye flour",
)  # fmt: skip
_HOURS: Final = ("seven", "eight", "nine", "ten", "eleven", "noon", "one", "two", "three", "four", "five", "six")
_BEGINNING: Final = "Harbour note for {town}: "
_NOTE: Final = "{crates} crates of {cargo} came ashore at {hour}, and {who} signed for them."
_SMALL_NOTE: Final = "{crates} crates of {cargo} came ashore at {hour}."
_ANSWER_TOKENS: Final = 96
_SMALL_OTHERS: Final = 2


@dataclass(frozen=True, slots=True)
class _Notes:
    """The notes about one harbour, in the document's order, and the number of the asked one."""

    town: str
    texts: tuple[str, ...]
    asked: int

    @property
    def question(self) -> str:
        """The question."""
        return (
            f"Several harbour notes for {self.town} stand in the text. Repeat the {ORDINALS[self.asked]} of them word "
            'for word, from "Harbour note" on.'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KthOfNTask(GeneratedTask):
    """Questions for one of several texts that are almost the same.

    Attributes:
        number: how many there are.
        others: how many more there are about something else, for each question.
    """

    shares_documents: ClassVar[bool] = True
    dials: ClassVar[tuple[str, ...]] = ("others",)
    margin: ClassVar[float] = 1.3

    number: int
    others: int

    def __post_init__(self) -> None:
        if self.others < 0:
            raise EvaluationError(
                f"{self.name} cannot have {self.others} other notes", hint="Take 0, or any larger number."
            )

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for the notes, or there are not enough names for them.
        """
        number, member = self.shared(index)
        chance = self.chance(length, number)
        names = Names(chance)
        harbours = [self._notes(chance, names) for _ in range(self.settings.questions_per_document)]
        insertions = []
        for place, harbour in enumerate(harbours):
            depths = sorted(chance.random() for _ in harbour.texts)
            for k, (text, depth) in enumerate(zip(harbour.texts, depths, strict=True)):
                shows = place == member and k <= harbour.asked
                insertions.append(Insertion(text, depth, text if shows else None))
            others = [self._note(chance, names, names.new(Kind.TOWN).name) for _ in range(self.others)]
            insertions += [Insertion(text, chance.random()) for text in others]
        asked = harbours[member]
        haystack = haystacks.prose(self.settings.haystack, self.chance(length, number, "prose"))
        questions = [harbour.question for harbour in harbours]
        return self.planned(length, index, asked.question, (asked.texts[asked.asked],), haystack, insertions, questions)

    def own_score(self, sample: Sample, answer: str) -> float:
        """MRCR's metric, 0 to 1: how similar the answer is to the note, if it begins as the note does."""
        (gold,) = sample.gold
        return similarity_after_prefix(answer, gold, gold[: gold.index(": ") + 2])

    def _notes(self, chance: random.Random, names: Names) -> _Notes:
        town = names.new(Kind.TOWN).name
        texts: dict[str, None] = {}
        while len(texts) < self.number:
            texts[self._note(chance, names, town)] = None
        return _Notes(town, tuple(texts), chance.randrange(self.number))

    def _note(self, chance: random.Random, names: Names, town: str) -> str:
        pattern = _SMALL_NOTE if self.settings.small else _NOTE
        hour = chance.choice(_HOURS)
        return (_BEGINNING + pattern).format(
            town=town,
            crates=chance.randrange(12, 100),
            cargo=chance.choice(_CARGO),
            hour=hour if hour == "noon" else f"{chance.choice(('', 'half past ', 'a quarter past '))}{hour}",
            who=names.new(Kind.PERSON).name,
        )


def kth_task(name: str, settings: TaskSettings) -> KthOfNTask:
    """One of `KTH`."""
    return KthOfNTask(
        name=name,
        settings=settings,
        answer_tokens=SMALL_ANSWER_TOKENS if settings.small else _ANSWER_TOKENS,
        number=KTH[name],
        others=_SMALL_OTHERS if settings.small else KTH[name],
    )
