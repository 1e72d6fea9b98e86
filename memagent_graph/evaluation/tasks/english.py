"""Facts in plain English, planted in prose among facts that resemble them: people, places, wordings never trained on.

What shipped language policies are trained with is the other split of `english_facts`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Final

from memagent_graph.evaluation.english_facts import EnglishFact, EnglishFacts
from memagent_graph.evaluation.samples import Metric, Sample, TaskSettings
from memagent_graph.evaluation.tasks import haystacks
from memagent_graph.evaluation.tasks.fitting import Insertion
from memagent_graph.evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask

ABSENT: Final = ("not stated", "not mentioned", "none", "no answer", "not given", "does not say", "unknown")
"""Any of these says that nothing answers."""
_ARTICLE: Final = re.compile(r"^(?:a|an|the) ")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, its answers, what it rests on in the document's order, and what stands there to mislead."""

    question: str
    gold: tuple[str, ...]
    evidence: tuple[tuple[str, str], ...]
    """Statements, and what each contributes."""
    foreign: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnglishTask(GeneratedTask):
    """Questions about facts in plain English.

    Attributes:
        kind: "fact", "new" (relations never trained on), "change" (the last statement counts), "list", "hop_2", "hop_3"
            or "absent".
        foreign: Tokens of the document to each further foreign fact.
    """

    shares_documents: ClassVar[bool] = True
    dials: ClassVar[tuple[str, ...]] = ("foreign",)
    margin: ClassVar[float] = 1.3

    kind: str
    foreign: int = 400

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length. Raises EvaluationError where the length is too small."""
        number, member = self.shared(index)
        chance = self.chance(length, number)
        facts = EnglishFacts(chance, held_out=True, held_out_relations=self.kind == "new")
        asked = [self._asked(facts) for _ in range(self.settings.questions_per_document)]
        insertions: list[Insertion] = []
        for place, each in enumerate(asked):
            depths = sorted(chance.random() for _ in each.evidence)
            insertions += [
                Insertion(statement, depth, gold if place == member else None)
                for (statement, gold), depth in zip(each.evidence, depths, strict=True)
            ]
            insertions += [Insertion(statement, chance.random()) for statement in each.foreign]
        others = EnglishFacts(chance, held_out=True)
        taken = {word for each in asked for word in each.gold}
        for _ in range(length // self.foreign):
            fact = others.fact()
            if not {fact.subject, fact.value} & taken:
                insertions.append(Insertion(fact.statement, chance.random()))
        questions = [each.question for each in asked]
        haystack = haystacks.prose(self.settings.haystack, self.chance(length, number, "prose"))
        mine = asked[member]
        return self.planned(length, index, mine.question, mine.gold, haystack, insertions, questions)

    def _asked(self, facts: EnglishFacts) -> _Asked:
        if self.kind.startswith("hop_"):
            chain, question = facts.chain(int(self.kind[-1]))
            evidence = [(each.statement, after.subject) for each, after in pairwise(chain)]
            evidence.append((chain[-1].statement, _bare(chain[-1].value)))
            miss = facts.fact(chain[-1].relation)
            return _Asked(question, (_bare(chain[-1].value),), tuple(evidence), (miss.statement,))
        if self.kind == "list":
            first = facts.fact(facts.relation(plural=True))
            all_of_them = [first, *(facts.fact(first.relation, subject=first.subject) for _ in range(2))]
            question = facts.random.choice(first.relation.plural_questions).replace("{s}", first.subject)
            return _Asked(
                question,
                tuple(each.value for each in all_of_them),
                tuple((each.statement, each.value) for each in all_of_them),
                (facts.fact(first.relation).statement,),
            )
        if self.kind == "change":
            old = facts.fact(facts.relation(changes=True))
            new = facts.change(old)
            return self._about(facts, new, [old])
        fact = facts.fact()
        asked = self._about(facts, fact, [])
        if self.kind == "absent":
            return _Asked(asked.question, ABSENT, (), asked.foreign)
        return asked

    @staticmethod
    def _about(facts: EnglishFacts, fact: EnglishFact, before: list[EnglishFact]) -> _Asked:
        question, answer = facts.question(fact)
        evidence = tuple((each.statement, _bare(each.value)) for each in before)
        miss = facts.near_miss(fact)
        return _Asked(question, (_bare(answer),), (*evidence, (fact.statement, _bare(answer))), (miss.statement,))


def _bare(answer: str) -> str:
    """An answer without its article."""
    return _ARTICLE.sub("", answer)


ENGLISH: Final = tuple(f"english_{kind}" for kind in ("fact", "new", "change", "list", "hop_2", "hop_3", "absent"))


def english_task(name: str, settings: TaskSettings) -> EnglishTask:
    """One of `ENGLISH`."""
    kind = name.removeprefix("english_")
    metric = Metric.ANY if kind == "absent" else Metric.ALL
    return EnglishTask(name=name, settings=settings, answer_tokens=SMALL_ANSWER_TOKENS, metric=metric, kind=kind)
