"""Facts in plain English, planted in prose among similar facts.

People, places and wordings are from the held-out split of `english_facts`, which no policy that ships was trained on;
"english_fact:held_out=no" asks about the training split, for the closed loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from memagent_evaluation.english_facts import EnglishFact, EnglishFacts, make_distinctness_check
from memagent_evaluation.samples import Metric, Sample, TaskSettings
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.placements import Insertion
from memagent_graph.errors import EvaluationError

ABSENT: Final = ("not stated", "not mentioned", "none", "no answer", "not given", "does not say", "unknown")
"""Any of these answers means that the document does not have the fact."""
_MAX_QUESTION_DRAWS: Final = 40
"""The number of attempts to draw a question that shares no answer with another one on the document."""
_ARTICLE: Final = re.compile(r"^(?:a|an|the) ")


@dataclass(frozen=True, slots=True)
class _EnglishQuestion:
    """A question with its evidence, in the document's order, and with foreign facts that resemble it."""

    question: str
    gold: tuple[str, ...]
    evidence: tuple[EnglishFact, ...]
    evidence_gold: tuple[str, ...]
    """The gold string of each fact of the evidence."""
    foreign_facts: tuple[EnglishFact, ...]
    subject_facts: tuple[EnglishFact, ...]
    """The facts that the question is about: the evidence, the first fact of a list, or the absent fact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnglishTask(GeneratedTask):
    """Questions about facts in plain English.

    Attributes:
        kind: "fact", "new" (relations never trained on), "change" (the last statement counts), "list", "hop_2",
            "hop_3", "hop_2_backward", "hop_3_backward" (the last hop comes first), or "absent".
        foreign: one more foreign fact for every so many tokens of the document.
        held_out: whether people, towns and wordings come from the split that no shipped policy was trained on.
    """

    shares_documents: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("foreign", "held_out")
    length_margin: ClassVar[float] = 1.6

    kind: str
    foreign: int = 400
    held_out: bool = True

    def __post_init__(self) -> None:
        if self.foreign < 1:
            raise EvaluationError(
                f"{self.name} cannot have a foreign fact for every {self.foreign} tokens",
                hint="Take 1 or more; a very large number leaves only the near misses.",
            )

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small, or there are not enough questions for one document.
        """
        document_index, question_index = divmod(index, self.settings.questions_per_document)
        rng = self.make_sample_rng(length, document_index)
        is_new = self.kind == "new"
        questions = self._draw_questions(EnglishFacts(rng, held_out=self.held_out, held_out_relations=is_new))
        insertions: list[Insertion] = []
        for position, question in enumerate(questions):
            depths = sorted(rng.random() for _ in question.evidence)
            insertions += [
                Insertion(fact.statement, depth, gold if position == question_index else None)
                for fact, gold, depth in zip(question.evidence, question.evidence_gold, depths, strict=True)
            ]
        facts = EnglishFacts(rng, held_out=self.held_out)
        foreign_facts = [fact for question in questions for fact in question.foreign_facts]
        foreign_facts += [facts.draw_fact() for _ in range(length // self.foreign)]
        is_distinct = make_distinctness_check(
            fact for question in questions for fact in (*question.evidence, *question.subject_facts)
        )
        insertions += [Insertion(fact.statement, rng.random()) for fact in foreign_facts if is_distinct(fact)]
        haystack = haystacks.make_prose_haystack(
            self.settings.haystack, self.make_sample_rng(length, document_index, "prose")
        )
        question = questions[question_index]
        all_questions = [other.question for other in questions]
        return self.lay_out_sample(length, index, question.question, question.gold, haystack, insertions, all_questions)

    def _draw_questions(self, facts: EnglishFacts) -> list[_EnglishQuestion]:
        """Draw the questions that share a document, so that no evidence of one question answers another."""
        count = self.settings.questions_per_document
        questions: list[_EnglishQuestion] = []
        while len(questions) < count:
            is_distinct = make_distinctness_check(fact for question in questions for fact in question.subject_facts)
            candidates = (self._draw_question(facts) for _ in range(_MAX_QUESTION_DRAWS))
            # Words of a kind may run out, and are then drawn again, even within a list.
            question = next(
                (q for q in candidates if all(map(is_distinct, q.subject_facts)) and len({*q.gold}) == len(q.gold)),
                None,
            )
            if question is None:
                raise EvaluationError(
                    f"{self.name} has no {count} questions on one document",
                    hint=f"Ask for {len(questions)}, or for fewer.",
                )
            questions.append(question)
        return questions

    def _draw_question(self, facts: EnglishFacts) -> _EnglishQuestion:
        if self.kind.startswith("hop_"):
            chain, question = facts.draw_chain(int(self.kind.split("_")[1]))
            answer = _remove_article(chain[-1].value)
            evidence_gold = (*(fact.subject for fact in chain[1:]), answer)
            step = -1 if self.kind.endswith("_backward") else 1
            foreign_facts = (facts.draw_fact(chain[-1].relation),)
            return _EnglishQuestion(
                question, (answer,), tuple(chain[::step]), evidence_gold[::step], foreign_facts, tuple(chain)
            )
        if self.kind == "list":
            first_fact = facts.draw_fact(facts.draw_relation(plural=True))
            list_facts = [
                first_fact,
                *(facts.draw_fact(first_fact.relation, subject=first_fact.subject) for _ in range(2)),
            ]
            values = tuple(fact.value for fact in list_facts)
            question = facts.random.choice(first_fact.relation.plural_questions).replace("{s}", first_fact.subject)
            return _EnglishQuestion(
                question, values, tuple(list_facts), values, (facts.draw_fact(first_fact.relation),), (first_fact,)
            )
        if self.kind == "change":
            old_fact = facts.draw_fact(facts.draw_relation(changes=True))
            new_fact = facts.draw_change(old_fact)
            question, answer = facts.draw_question(new_fact)
            old_answer = old_fact.subject if answer == new_fact.subject else old_fact.value
            evidence_gold = (old_answer, _remove_article(answer))
            return _EnglishQuestion(
                question,
                (_remove_article(answer),),
                (old_fact, new_fact),
                evidence_gold,
                (facts.draw_near_miss(new_fact),),
                (old_fact, new_fact),
            )
        fact = facts.draw_fact()
        question, answer = facts.draw_question(fact)
        if self.kind == "absent":
            return _EnglishQuestion(question, ABSENT, (), (), (facts.draw_near_miss(fact),), (fact,))
        gold = (_remove_article(answer),)
        return _EnglishQuestion(question, gold, (fact,), gold, (facts.draw_near_miss(fact),), (fact,))


def _remove_article(answer: str) -> str:
    """Return an answer without its article, as gold strings are."""
    return _ARTICLE.sub("", answer)


_HOPS: Final = ("hop_2", "hop_3", "hop_2_backward", "hop_3_backward")
ENGLISH: Final = tuple(f"english_{kind}" for kind in ("fact", "new", "change", "list", *_HOPS, "absent"))


def make_english_task(name: str, settings: TaskSettings) -> EnglishTask:
    """Return the task of one of `ENGLISH`."""
    kind = name.removeprefix("english_")
    metric = Metric.ANY if kind == "absent" else Metric.ALL
    return EnglishTask(name=name, settings=settings, answer_tokens=SMALL_ANSWER_TOKENS, metric=metric, kind=kind)
