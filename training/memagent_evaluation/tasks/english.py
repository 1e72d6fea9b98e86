"""Facts in plain English, planted in prose among similar facts: people, places and wordings that were never trained on.

Language policies that ship are trained on the other split of `english_facts`: "english_fact:held_out=no" asks questions
of that split, for the closed loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

from memagent_evaluation.english_facts import EnglishFact, EnglishFacts, MoreFacts, clear_of
from memagent_evaluation.samples import Metric, Sample, TaskSettings
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.placements import Insertion
from memagent_graph.errors import EvaluationError

ABSENT: Final = ("not stated", "not mentioned", "none", "no answer", "not given", "does not say", "unknown")
"""Any of these means that there is no answer."""
_DRAWS: Final = 40
"""The number of attempts to draw a question that shares no answer with another one."""
_ARTICLE: Final = re.compile(r"^(?:a|an|the) ")


@dataclass(frozen=True, slots=True)
class _EnglishQuestion:
    """A question, its answers, its evidence in the document's order, and the misleading facts."""

    question: str
    gold: tuple[str, ...]
    evidence: tuple[EnglishFact, ...]
    gives: tuple[str, ...]
    """What each of the evidence contributes."""
    foreign: tuple[EnglishFact, ...]
    about: tuple[EnglishFact, ...]
    """The asked fact: the evidence, the first of several to list, or one that is not in the document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnglishTask(GeneratedTask):
    """Questions about facts in plain English.

    Attributes:
        kind: "fact", "new" (relations never trained on), "change" (the last statement counts), "list", "hop_2",
            "hop_3", these two with "_backward" (the last hop stands first), or "absent".
        foreign: tokens of the document per additional foreign fact.
        held_out: whether people, towns and wordings are those that shipped policies were not trained on.
        facts: path of a file with more relations, in the format of `training_facts.toml` of the training package.
    """

    shares_documents: ClassVar[bool] = True
    dials: ClassVar[tuple[str, ...]] = ("foreign", "held_out", "facts")
    margin: ClassVar[float] = 1.6

    kind: str
    foreign: int = 400
    held_out: bool = True
    facts: str = ""

    def __post_init__(self) -> None:
        if self.facts:
            _more_facts(self.facts)
        if self.foreign < 1:
            raise EvaluationError(
                f"{self.name} cannot have a foreign fact to each {self.foreign} tokens",
                hint="Take 1, or any larger number; of a very large one, only near misses are left.",
            )

    @property
    def draws_of(self) -> str:
        """As of any task; of a file with more relations, what is in it counts, not where it is."""
        if not self.facts:
            return self.name
        return self.name.replace(f"facts={self.facts}", f"facts={_more_facts(self.facts).digest}")

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small, or there are not enough questions for one document.
        """
        number, member = self.shared(index)
        chance = self.chance(length, number)
        more = _more_facts(self.facts) if self.facts else None
        new = self.kind == "new"
        questions = self._all_asked(EnglishFacts(chance, held_out=self.held_out, held_out_relations=new, more=more))
        insertions: list[Insertion] = []
        for place, question in enumerate(questions):
            depths = sorted(chance.random() for _ in question.evidence)
            insertions += [
                Insertion(fact.statement, depth, gold if place == member else None)
                for fact, gold, depth in zip(question.evidence, question.gives, depths, strict=True)
            ]
        others = EnglishFacts(chance, held_out=self.held_out, more=more)
        foreign = [fact for question in questions for fact in question.foreign]
        foreign += [others.fact() for _ in range(length // self.foreign)]
        clear = clear_of(fact for question in questions for fact in (*question.evidence, *question.about))
        insertions += [Insertion(fact.statement, chance.random()) for fact in foreign if clear(fact)]
        texts = [question.question for question in questions]
        haystack = haystacks.prose(self.settings.haystack, self.chance(length, number, "prose"))
        mine = questions[member]
        return self.planned(length, index, mine.question, mine.gold, haystack, insertions, texts)

    def _all_asked(self, facts: EnglishFacts) -> list[_EnglishQuestion]:
        """Return the questions that share a document; the evidence of one does not answer another."""
        number = self.settings.questions_per_document
        questions: list[_EnglishQuestion] = []
        while len(questions) < number:
            clear = clear_of(fact for question in questions for fact in question.about)
            draws = (self._make_question(facts) for _ in range(_DRAWS))
            # Words of a kind may run out; then some are drawn again, also inside a list.
            drawn = next((d for d in draws if all(map(clear, d.about)) and len({*d.gold}) == len(d.gold)), None)
            if drawn is None:
                raise EvaluationError(
                    f"{self.name} has no {number} questions on one document",
                    hint=f"Ask for {len(questions)}, or for fewer.",
                )
            questions.append(drawn)
        return questions

    def _make_question(self, facts: EnglishFacts) -> _EnglishQuestion:
        if self.kind.startswith("hop_"):
            chain, question = facts.chain(int(self.kind.split("_")[1]))
            answer = _bare(chain[-1].value)
            gives = (*(after.subject for after in chain[1:]), answer)
            order = -1 if self.kind.endswith("_backward") else 1
            foreign = (facts.fact(chain[-1].relation),)
            return _EnglishQuestion(question, (answer,), tuple(chain[::order]), gives[::order], foreign, tuple(chain))
        if self.kind == "list":
            first = facts.fact(facts.relation(plural=True))
            listed = [first, *(facts.fact(first.relation, subject=first.subject) for _ in range(2))]
            values = tuple(fact.value for fact in listed)
            question = facts.random.choice(first.relation.plural_questions).replace("{s}", first.subject)
            return _EnglishQuestion(question, values, tuple(listed), values, (facts.fact(first.relation),), (first,))
        if self.kind == "change":
            old = facts.fact(facts.relation(changes=True))
            new = facts.change(old)
            question, answer = facts.question(new)
            before = old.subject if answer == new.subject else old.value
            gives = (before, _bare(answer))
            return _EnglishQuestion(question, (_bare(answer),), (old, new), gives, (facts.near_miss(new),), (old, new))
        fact = facts.fact()
        question, answer = facts.question(fact)
        if self.kind == "absent":
            return _EnglishQuestion(question, ABSENT, (), (), (facts.near_miss(fact),), (fact,))
        return _EnglishQuestion(
            question, (_bare(answer),), (fact,), (_bare(answer),), (facts.near_miss(fact),), (fact,)
        )


@cache
def _more_facts(path: str) -> MoreFacts:
    try:
        return MoreFacts.read(Path(path).expanduser())
    except (OSError, ValueError, RecursionError) as error:  # msgspec's and tomllib's errors are ValueErrors
        raise EvaluationError(
            f"{path} has no facts: {error}", hint="Name a file in the format of training_facts.toml."
        ) from error


def _bare(answer: str) -> str:
    """Return an answer without its article."""
    return _ARTICLE.sub("", answer)


_HOPS: Final = ("hop_2", "hop_3", "hop_2_backward", "hop_3_backward")
ENGLISH: Final = tuple(f"english_{kind}" for kind in ("fact", "new", "change", "list", *_HOPS, "absent"))


def english_task(name: str, settings: TaskSettings) -> EnglishTask:
    """One of `ENGLISH`."""
    kind = name.removeprefix("english_")
    metric = Metric.ANY if kind == "absent" else Metric.ALL
    return EnglishTask(name=name, settings=settings, answer_tokens=SMALL_ANSWER_TOKENS, metric=metric, kind=kind)
