"""A scripted reader's turns: prompts of every role on a section of prose, and the replies to learn.

A section is real prose with planted facts, near misses among them. Each question about it is asked in a role, with a
memory that a reader may have at that point, and the reply follows from what is known of the section. The prompts are
those of the policy's own profile, built by the reader's own code, so training and reading have one format. Prompts with
the section first share it: in the prefix-tree layout it is forwarded once for all questions on it.

Memory is a few sentences of the text, unchanged; for things to list, only the list. An empty memory is "none". The
answer to a question about a planted fact is its value; about a sentence of the prose, the sentence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from memagent_evaluation.english_facts import EnglishFact, EnglishFacts, MoreFacts, sentence
from recipes.embedded.training_examples import Prose, plant
from recipes.language.follow_ups import follow_up
from recipes.language.real_questions import RealQuestion, paraphrased, real_questions
from recipes.language.turns import NOT_STATED, NOTHING, LessonTurn, asked, shuffled

TRAINING_FACTS: Final = Path(__file__).with_name("training_facts.toml")

_AROUND: Final = 800
"""Characters of prose on each side of an excerpt."""


@dataclass(frozen=True, slots=True)
class Quest:
    """A question, a reader's notes before and after a section, and the answer."""

    question: str
    before: tuple[str, ...]
    """Notes; for a list, one note."""
    after: tuple[str, ...]
    answer: str
    """From the notes after it."""
    is_whole: bool
    """Whether the notes after it are complete."""
    next_words: str = ""
    """The words to look up while a part is missing."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What turns are about, and how often."""

    full_length: float = 0.25
    """The share of sections of the greatest length; the others are shorter."""
    groups: tuple[int, int] = (2, 4)
    """The fewest and most groups of facts planted in a section."""
    of_prose: float = 0.5
    """The share of questions about sentences of the section's prose."""
    follow_ups: int = 1
    """Turns after each section that ask for what memory lacks, or add what was found."""


MIXES: Final = {
    "every-role": Mix(),
    "reading": Mix(full_length=0.6, groups=(3, 6), of_prose=0.3, follow_ups=4),
}
"""By name: one like that of the first editions, and one for strategies that read everything, chunk by chunk."""


class TraceMaker:
    """Composes turns from prose and facts; all randomness comes from the given generator."""

    def __init__(self, prose: Prose, *, held_out: bool = False, mix: Mix = MIXES["every-role"]) -> None:
        self.prose = prose
        self.held_out = held_out
        self.mix = mix
        self._more = None if held_out else MoreFacts.read(TRAINING_FACTS)

    def _facts(self, rng: random.Random) -> EnglishFacts:
        return EnglishFacts(rng, held_out=self.held_out, more=self._more)

    def turns(self, rng: random.Random, characters: int, on_section: int, elsewhere: int) -> list[LessonTurn]:
        """Return turns on one section of about the given number of characters, then turns of roles that see none."""
        facts = self._facts(rng)
        text = self.prose.stretch(rng, characters)
        text = text[text.find(" ") + 1 :]
        quests, statements = self._plant(rng, facts)
        prose, text = text, plant(rng, text, statements, in_order=True)
        real, foreign = _whole_in(text, real_questions(prose)), real_questions(self.prose.stretch(rng, 1500))
        foreign = [question for question in foreign if not question.could_be_answered_by(text)]
        turns: list[LessonTurn] = []
        while len(turns) < on_section:
            draw = rng.random()
            if real and draw < self.mix.of_prose:
                quest = _real_here(rng, rng.choice(real), foreign)
            elif foreign and draw < self.mix.of_prose + 0.1:
                quest = _real_elsewhere(rng, rng.choice(foreign), foreign)
            else:
                quest = rng.choice(quests)(rng)
            turns.append(_on_section(rng, replace(quest, question=asked(rng, quest.question)), text))
        for _ in range(elsewhere):
            of_prose = foreign + real
            is_real = bool(of_prose) and rng.random() < 0.5
            made = _real_here(rng, rng.choice(of_prose), foreign) if is_real else rng.choice(quests)(rng)
            turns.append(_without_section(rng, replace(made, question=asked(rng, made.question)), facts))
        return turns + [follow_up(rng, facts, real) for _ in range(self.mix.follow_ups)]

    def turns_on_excerpt(self, rng: random.Random, characters: int, count: int) -> list[LessonTurn]:
        """Return turns of the role "question", each on the same excerpt of about the given number of characters.

        Retrieval shows passages that share words with a question, whether they answer it or not. So some
        questions are about sentences around the excerpt, and many facts have a near miss in it. At most half as many
        questions as have an answer have none: from more of them, a policy learns to give up.
        """
        facts = self._facts(rng)
        around = self.prose.stretch(rng, characters + 2 * _AROUND)
        prose = around[_AROUND:-_AROUND].partition(" ")[2]
        quests, statements = self._plant(rng, facts, kinds=rng.choices((0, 1, 2, 3), (15, 35, 35, 15))[0])
        text = plant(rng, prose, statements, in_order=True)
        real = _whole_in(text, real_questions(prose))
        others = real_questions(around) + real_questions(self.prose.stretch(rng, 1500))
        absent = [question for question in others if not question.could_be_answered_by(text)]
        turns: dict[str, LessonTurn] = {}
        for _ in range(count):
            draw = rng.random()
            if quests and draw < 0.55:
                while (quest := rng.choice(quests)(rng)).before:
                    pass
                question, answer = quest.question, quest.answer
            elif real and draw < 0.85:
                chosen = rng.choice(real)
                question, answer = chosen.question, chosen.statement
                question = paraphrased(rng, question) if rng.random() < 0.7 else question
            elif absent and draw < 0.95:
                question, answer = rng.choice(absent).question, NOT_STATED
            else:
                question, answer = facts.question(facts.fact())[0], NOT_STATED
            reply = f"\\boxed{{{answer}}}"
            turn = LessonTurn("question", asked(rng, question), {"chunk": text}, reply, writes=answer != NOT_STATED)
            turns.setdefault(question, turn)
        answered = [turn for turn in turns.values() if turn.writes]
        unanswered = [turn for turn in turns.values() if not turn.writes]
        return answered + unanswered[: max(1, len(answered) // 2)]

    def _plant(
        self, rng: random.Random, facts: EnglishFacts, kinds: int | None = None
    ) -> tuple[list[Callable[[random.Random], Quest]], list[str]]:
        """Functions that make quests, and the statements that the section needs for them, in order."""
        makers: list[Callable[[random.Random], Quest]] = []
        statements: list[str] = []
        number = rng.randint(*self.mix.groups) if kinds is None else kinds
        for kind in rng.choices(("single", "change", "hops", "list", "absent"), (34, 16, 22, 14, 14), k=number):
            made, stated = getattr(self, f"_{kind}")(rng, facts)
            makers += made
            statements += stated
        return makers, statements

    def _single(
        self, rng: random.Random, facts: EnglishFacts
    ) -> tuple[list[Callable[[random.Random], Quest]], list[str]]:
        """Return a fact in this section, with a near miss next to it in most sections."""
        fact = facts.fact()
        missed = [facts.near_miss(fact)] if rng.random() < 0.7 else []
        other = facts.near_miss(fact)
        strangers = [facts.fact() for _ in range(2)]

        def here(rng: random.Random) -> Quest:
            question, answer = facts.question(fact)
            draw = rng.random()
            if draw < 0.25:
                known = (facts.state(fact.relation, fact.subject, fact.value),)
                return Quest(question, known, known, answer, True)
            noted = _noted_by_mistake(rng, [other, *strangers])
            return Quest(question, noted, (*noted, fact.statement), answer, True)

        def elsewhere(rng: random.Random) -> Quest:
            question, answer = facts.question(other)
            noted = _noted_by_mistake(rng, [fact, *strangers])
            known = rng.random() < 0.6
            before = (*noted, other.statement) if known else noted
            return Quest(question, before, before, answer if known else NOT_STATED, known)

        return [here, here, elsewhere], [fact.statement for fact in shuffled(rng, [fact, *missed])]

    def _absent(
        self, rng: random.Random, facts: EnglishFacts
    ) -> tuple[list[Callable[[random.Random], Quest]], list[str]]:
        """Return a near miss is here, but not what is asked for."""
        fact = facts.fact()
        missed = facts.near_miss(fact)

        def absent(rng: random.Random) -> Quest:
            return Quest(facts.question(fact)[0], (), (), NOT_STATED, False)

        return [absent], [missed.statement]

    def _change(
        self, rng: random.Random, facts: EnglishFacts
    ) -> tuple[list[Callable[[random.Random], Quest]], list[str]]:
        """Return a sample with a value that changes: the last statement counts."""
        old = facts.fact(facts.relation(changes=True))
        new = facts.change(old)
        both = rng.random() < 0.3

        def changed(rng: random.Random) -> Quest:
            question, answer = facts.question(new)
            known = (old.statement,) if rng.random() < 0.75 and not both else ()
            return Quest(question, known, (new.statement,), answer, False)

        miss = facts.near_miss(old)

        def other(rng: random.Random) -> Quest:
            question, answer = facts.question(miss)
            return Quest(question, (miss.statement,), (miss.statement,), answer, False)

        return [changed, changed, other], [*([old.statement] if both else []), new.statement]

    def _list(
        self, rng: random.Random, facts: EnglishFacts
    ) -> tuple[list[Callable[[random.Random], Quest]], list[str]]:
        """Several values of one subject."""
        relation = facts.relation(plural=True)
        first = facts.fact(relation)
        rest = [facts.fact(relation, subject=first.subject) for _ in range(rng.randint(1, 3))]
        here = rng.randint(1, 2)
        all_of_them = shuffled(rng, [first, *rest])
        question = rng.choice(relation.plural_questions).replace("{s}", first.subject)

        def listed(rng: random.Random) -> Quest:
            stand_here, before = all_of_them[:here], all_of_them[here:]
            if rng.random() < 0.25:
                before = []
            known = [fact.value for fact in before]
            values = [*known, *(fact.value for fact in stand_here)]
            note = (_list_note(first.subject, known),) if known else ()
            return Quest(question, note, (_list_note(first.subject, values),), ", ".join(values), False)

        return [listed, listed], [fact.statement for fact in all_of_them[:here]]

    def _hops(
        self, rng: random.Random, facts: EnglishFacts
    ) -> tuple[list[Callable[[random.Random], Quest]], list[str]]:
        """Two or three facts, each of which only the one before it makes matter; the section has some of them."""
        chain, question = facts.chain(3 if rng.random() < 0.25 else 2)
        here = [rng.random() < 0.6 for _ in chain]
        here[rng.randrange(len(chain))] = True
        missed = [facts.fact(chain[-1].relation)] if rng.random() < 0.6 else []
        stated = [fact for fact, stands_here in zip(chain, here, strict=True) if stands_here]

        def hops(rng: random.Random) -> Quest:
            first = here.index(True)
            known = first if rng.random() < 0.7 else rng.randint(0, len(chain))
            reached = known
            while reached < len(chain) and here[reached]:
                reached += 1
            whole, begun = reached == len(chain), 0 < reached < len(chain)
            notes = tuple(fact.statement for fact in chain)
            return Quest(
                question,
                notes[:known],
                notes[:reached],
                chain[-1].value if whole else NOT_STATED,
                whole,
                next_words=chain[reached].subject if begun else "",
            )

        return [hops, hops], [fact.statement for fact in shuffled(rng, [*stated, *missed])]


def _whole_in(text: str, questions: Sequence[RealQuestion]) -> list[RealQuestion]:
    """Return the questions on sentences into which no statement was planted."""
    words = " ".join(text.split())
    return [question for question in questions if question.statement in words]


def _noted_by_mistake(rng: random.Random, facts: Sequence[EnglishFact]) -> tuple[str, ...]:
    """Return what a reader that tends to note too much may have noted before."""
    return tuple(fact.statement for fact in shuffled(rng, facts)[: rng.choices((0, 1, 2), (60, 30, 10))[0]])


def _list_note(subject: str, values: Sequence[str]) -> str:
    return sentence(f"{subject}: {', '.join(values)}.")


def _real_here(rng: random.Random, real: RealQuestion, foreign: Sequence[RealQuestion]) -> Quest:
    """Return a sentence of this section; earlier notes are kept with it, because they may be what matters."""
    question = paraphrased(rng, real.question) if rng.random() < 0.7 else real.question
    if rng.random() < 0.2:
        return Quest(question, (real.statement,), (real.statement,), real.statement, True)
    noted = _other_statements(rng, real, foreign)
    return Quest(question, noted, (*noted, real.statement), real.statement, True)


def _real_elsewhere(rng: random.Random, real: RealQuestion, others: Sequence[RealQuestion]) -> Quest:
    noted = _other_statements(rng, real, others)
    known = rng.random() < 0.4
    before = tuple(shuffled(rng, [*noted, real.statement])) if known else noted
    return Quest(real.question, before, before, real.statement if known else NOT_STATED, known)


def _other_statements(rng: random.Random, real: RealQuestion, others: Sequence[RealQuestion]) -> tuple[str, ...]:
    """Up to two sentences that do not answer a question and may have been noted for it."""
    notes = {question.statement for question in others if not real.could_be_answered_by(question.statement)}
    return tuple(shuffled(rng, sorted(notes))[: rng.choices((0, 1, 2), (60, 30, 10))[0]])


def _on_section(rng: random.Random, quest: Quest, section: str) -> LessonTurn:
    """Return a turn of one of the roles that see a section."""
    before, after = " ".join(quest.before), " ".join(quest.after) or "none"
    fields = {"chunk": section, "memory": before or rng.choice(("", "none"))}
    changed = quest.after != quest.before
    role = rng.choices(
        ("update", "gated_update", "gated_update_or_stop", "extract", "map", "recall_update", "question"),
        (38, 27, 10, 9, 3, 8, 5),
    )[0]
    if role == "gated_update":
        reply = f"REWRITE\n{after}" if changed else "KEEP"
    elif role == "gated_update_or_stop":
        word = "STOP" if quest.is_whole and quest.after else "REWRITE" if changed else "KEEP"
        reply = f"{word}\n{after}" if changed else word
    elif role in {"extract", "map"}:
        if role == "map" and quest.before:  # it sees no memory, and what is in memory may also be here
            return _on_section(rng, quest, section)
        additions = " ".join(note for note in quest.after if note not in quest.before) if changed else ""
        reply = additions or "none"
    elif role == "recall_update":
        fields["recalled"] = NOTHING
        reply = after + (f"\nRECALL: {quest.next_words}" if quest.next_words and changed else "")
    elif role == "question":
        if quest.before:
            return _on_section(rng, quest, section)
        reply = f"\\boxed{{{quest.answer}}}"
    else:
        reply = after
    answers = quest.answer != NOT_STATED
    return LessonTurn(role, quest.question, fields, reply, writes=answers if role == "question" else changed)


def _without_section(rng: random.Random, quest: Quest, facts: EnglishFacts) -> LessonTurn:
    """Return a turn that merges findings, or answers from memory."""
    noise = [facts.fact().statement for _ in range(rng.randint(0, 2))]
    if quest.after and rng.random() < 0.2:
        is_list = any(":" in note for note in quest.after)
        findings = [*quest.after] if is_list else shuffled(rng, [*quest.after, *noise])
        kept = [finding for finding in findings if finding in quest.after]
        return LessonTurn("merge", quest.question, {"chunk": "\n".join(findings)}, " ".join(kept))
    if rng.random() < 0.12 and noise and quest.after:  # a memory that does not answer
        return LessonTurn("answer", quest.question, {"memory": noise[0]}, f"\\boxed{{{NOT_STATED}}}")
    memory = {"memory": " ".join(quest.after) or rng.choice(("", "none"))}
    return LessonTurn("answer", quest.question, memory, f"\\boxed{{{quest.answer}}}", writes=quest.answer != NOT_STATED)
