"""Invented people, towns, companies and things, with words that no other task uses.

Every name has two halves, so that names that share one can be confused. Names of companies and things have an article.
"""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Final

from memagent_graph.errors import EvaluationError

_MAX_TAKEN_SHARE: Final = 0.5
"""The maximum share of a kind's names in use: above it, a free one is drawn too rarely."""


class Kind(StrEnum):
    """The kind of a name."""

    PERSON = "person"
    TOWN = "town"
    COMPANY = "company"
    THING = "thing"


WORDS: Final[dict[str, tuple[str, ...]]] = {
    kind: tuple(words.split())
    for kind, words in tomllib.loads(files(__package__).joinpath("invented_names.toml").read_text("utf-8")).items()
}
FIRST_NAMES, SURNAMES = WORDS["first_names"], WORDS["surnames"]

_PATTERNS: Final = {
    Kind.PERSON: ("{} {}", FIRST_NAMES, SURNAMES),
    Kind.TOWN: ("{}{}", WORDS["town_starts"], WORDS["town_ends"]),
    Kind.COMPANY: ("the {} {}", WORDS["company_names"], WORDS["trades"]),
    Kind.THING: ("the {} {}", WORDS["thing_marks"], WORDS["things"]),
}


@dataclass(frozen=True, slots=True)
class Entity:
    """Someone or something that has a name."""

    kind: Kind
    halves: tuple[str, str]

    @property
    def name(self) -> str:
        """Its form inside a sentence, with its article."""
        return _PATTERNS[self.kind][0].format(*self.halves)

    @property
    def bare(self) -> str:
        """Without the article: as the answer to a question."""
        return self.name.removeprefix("the ")


class Names:
    """Entities of one document, each only once.

    Args:
        chance: the source of random numbers.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._taken: set[Entity] = set()

    def new(self, kind: Kind) -> Entity:
        """Return another entity of a kind.

        Raises:
            EvaluationError: nearly all names are in use.
        """
        _, first, second = _PATTERNS[kind]
        if sum(entity.kind is kind for entity in self._taken) >= _MAX_TAKEN_SHARE * len(first) * len(second):
            raise EvaluationError(
                f"a document needs more names of the kind {kind.value!r} than there are",
                hint="Ask for fewer distractors, or for fewer questions on each document.",
            )
        while True:
            entity = Entity(kind, (self._chance.choice(first), self._chance.choice(second)))
            if entity not in self._taken:
                return self._take(entity)

    def resembling(self, entity: Entity) -> Entity:
        """Return another entity, which shares half of its name with this one; if all of these are in use, any other."""
        _, first, second = _PATTERNS[entity.kind]
        halves = [((entity.halves[0],), second), (first, (entity.halves[1],))]
        self._chance.shuffle(halves)
        for some, others in halves:
            left = [other for a in some for b in others if (other := Entity(entity.kind, (a, b))) not in self._taken]
            if left:
                return self._take(self._chance.choice(left))
        return self.new(entity.kind)

    def _take(self, entity: Entity) -> Entity:
        self._taken.add(entity)
        return entity
