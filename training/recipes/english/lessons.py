"""Conversations to learn: a good reader's replies to a section, and its answers from notes.

A section is real prose; most sections have facts planted between sentences. Each question comes with notes that a
reader may have at that point. Notes are sentences of the document, unchanged, one after the other; no notes are
"none". Most sections of a document say nothing about a question, so keeping is about half of what is learnt.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from memagent_evaluation.english_facts import AdditionalFacts, EnglishFact, EnglishFacts
from memagent_graph.policies.adding import ADAPTER_FOLDER
from memagent_graph.policies.profile import require_profile
from recipes.english.prose_questions import ProseQuestion
from recipes.english.sections import ProseSection

NOT_STATED: Final = "not stated"
EMPTY: Final = "none"
CONTROL_TOKENS: Final = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(]?[A-Z])")
_NUMBER: Final = re.compile(r"(?<![\w.,-])[1-9]\d{0,5}(?![\w.,-]*\w)")
_ASIDES: Final = (
    "According to the text, {q}", "Tell me: {q}", "I would like to know: {q}", "{q} Answer briefly.",
    "Please answer this: {q}", "In this document, {q}", "{q} Thank you.",
)  # fmt: skip
_ROLES: Final = {"gated_update": 0.75, "update": 0.25}
_NOTES_CHARACTERS: Final = 900
"""The length of the longest notes; of longer notes only the last sentence is kept."""
_MISTAKES: Final = (0.55, 0.2, 0.15, 0.1)
"""The probabilities that notes have no, one, two, three sentences that do not answer."""
_PLACES: Final = (
    "bakery", "bell tower", "brewery", "bridge", "cloister", "fish market", "granary", "guest house", "hayloft",
    "infirmary", "pottery", "printing shop", "quarry", "school room", "shipyard", "stable", "tavern", "toll house",
    "weaving mill",
)  # fmt: skip
_MOVES: Final = (
    "{who} went to the {where}.", "{who} moved on to the {where}.", "{who} returned to the {where}.",
    "Then {who} ran to the {where}.", "{who} was seen going into the {where}.", "{who} is now in the {where}.",
    "After that {who} left for the {where}.", "{who} came to the {where}.",
)  # fmt: skip
_WHERE: Final = (
    "Where is {who} now?", "Where is {who} at the end?", "Where did {who} go last?", "In which place is {who}?",
    "According to the text, where is {who} in the end?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question, a reader's notes before and after a section, and the answer from the notes after it."""

    question: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    answer: str

    @property
    def adds(self) -> bool:
        """Whether the section says something that the notes lack."""
        return self.before != self.after


InquiryFactory: TypeAlias = Callable[[random.Random], Inquiry]


@dataclass(frozen=True, slots=True)
class Lesson:
    """One prompt of a role, as text, and the reply to learn."""

    role: str
    prompt: str
    reply: str
    writes: bool
    """Whether the reply adds something from the section, or is an answer other than "not stated"."""

    @property
    def text(self) -> str:
        """The whole conversation in the base's chat format."""
        return f"<|im_start|>user\n{self.prompt}<|im_end|>\n<|im_start|>assistant\n"


class LessonMaker:
    """Composes conversations; all randomness comes from the generator that each call is given.

    Args:
        sections: the prose, in any order.
        questions: questions on the sections' prose.
        held_out: whether to use the people, towns, wordings and frames that are kept for measuring.
        more: further relations to train on.
        change_weight: how often planted values change; the other kinds of planted facts weigh 94 together.
    """

    def __init__(
        self,
        sections: Sequence[ProseSection],
        questions: Sequence[ProseQuestion],
        *,
        held_out: bool = False,
        additional: AdditionalFacts | None = None,
        change_weight: int = 24,
    ) -> None:
        self._sections, self._held_out, self._additional = sections, held_out, additional
        self._change_weight = change_weight
        self._prompts = replace(require_profile(ADAPTER_FOLDER).prompts, control_tokens=frozenset(CONTROL_TOKENS))
        self._questions_by_section: dict[tuple[str, int], list[ProseQuestion]] = {}
        for question in questions:
            self._questions_by_section.setdefault((question.source, question.start), []).append(question)
        self._with_questions = [
            section for section in sections if (section.source, section.start) in self._questions_by_section
        ]
        self._answered = [question for question in questions if question.is_answered]
        self._questions_by_source: dict[str, list[ProseQuestion]] = {}
        for question in self._answered:
            self._questions_by_source.setdefault(question.source, []).append(question)

    def reading(self, rng: random.Random, count: int = 9) -> list[Lesson]:
        """Return `count` conversations of one role on one section, and a third as many answers from notes."""
        has_questions = bool(self._with_questions) and rng.random() < 0.7
        section = rng.choice(self._with_questions if has_questions else self._sections)
        facts = EnglishFacts(rng, held_out=self._held_out, additional=self._additional)
        inquiry_factories, statements = self._plant(
            rng, facts, rng.choice((0, 1, 2)) if has_questions else rng.randint(2, 4)
        )
        text = plant(rng, section.text, statements)
        here = self._questions_by_section.get((section.source, section.start), [])
        elsewhere = self._find_answered_elsewhere(rng, section)
        inquiries: list[Inquiry] = []
        while len(inquiries) < count:
            draw = rng.random()
            if here and draw < 0.45:
                inquiries.append(self._make_prose_inquiry(rng, rng.choice(here), elsewhere))
            elif elsewhere and draw < 0.65:
                inquiries.append(self._make_other_inquiry(rng, rng.choice(elsewhere), elsewhere))
            elif inquiry_factories:
                inquiries.append(rng.choice(inquiry_factories)(rng))
            else:
                inquiries.append(self._make_unanswerable(facts))
        role = rng.choices(list(_ROLES), list(_ROLES.values()))[0]
        conversations = [self._make_conversation(rng, role, inquiry, text) for inquiry in inquiries]
        return conversations + [
            self._answer(rng, inquiry, facts) for inquiry in rng.sample(inquiries, max(1, count // 3))
        ]

    def _find_answered_elsewhere(self, rng: random.Random, section: ProseSection) -> list[ProseQuestion]:
        """Return questions that the section does not answer, most often on other sections of the same source."""
        text = section.text.casefold()
        near = [
            question
            for question in self._questions_by_source.get(section.source, ())
            if question.start != section.start and question.answer.casefold() not in text
        ]
        if near and rng.random() < 0.6:
            return near
        return [
            question
            for question in rng.sample(self._answered, min(len(self._answered), 50))
            if question.source != section.source
        ]

    def _make_conversation(self, rng: random.Random, role: str, inquiry: Inquiry, section: str) -> Lesson:
        question = _vary(rng, inquiry.question)
        before, after = (" ".join(notes) or EMPTY for notes in (inquiry.before, inquiry.after))
        prompt = self._prompts.messages(role, question, memory=before, chunk=section)[0]["content"]
        reply = after if role == "update" else f"REWRITE\n{after}" if inquiry.adds else "KEEP"
        return Lesson(role, prompt, reply, inquiry.adds)

    def _answer(self, rng: random.Random, inquiry: Inquiry, facts: EnglishFacts) -> Lesson:
        """Return an answer from the notes after a section, or, one time in five, from notes that do not answer."""
        notes, answer = inquiry.after, inquiry.answer
        if rng.random() < 0.2:
            notes, answer = tuple(facts.draw_fact().statement for _ in range(rng.randint(0, 2))), NOT_STATED
        prompt = self._prompts.messages("answer", _vary(rng, inquiry.question), memory=" ".join(notes))[0]["content"]
        return Lesson("answer", prompt, f"\\boxed{{{answer}}}", answer != NOT_STATED)

    def _make_prose_inquiry(
        self, rng: random.Random, question: ProseQuestion, others: Sequence[ProseQuestion]
    ) -> Inquiry:
        """Return a question on this section's prose; the notes hold it already, or nothing, or something by mistake."""
        noise = _make_mistakes(rng, others)
        if not question.is_answered:
            return Inquiry(question.question, noise, noise, NOT_STATED)
        after = _shorten((*noise, question.sentence))
        if rng.random() < 0.2:
            notes = tuple(rng.sample(after, len(after)))
            return Inquiry(question.question, notes, notes, question.answer)
        earlier = _with_another_number(rng, question)
        if earlier and len(after) > len(noise) and rng.random() < 0.5:
            return Inquiry(question.question, (*noise, earlier), after, question.answer)
        return Inquiry(question.question, noise, after, question.answer)

    def _make_other_inquiry(
        self, rng: random.Random, question: ProseQuestion, others: Sequence[ProseQuestion]
    ) -> Inquiry:
        """Return a question that this section does not answer; an earlier section may have answered it."""
        noise = _make_mistakes(rng, others)
        is_noted = rng.random() < 0.5
        notes = _shuffle(rng, (*noise, question.sentence)) if is_noted else noise
        return Inquiry(question.question, notes, notes, question.answer if is_noted else NOT_STATED)

    def _plant(self, rng: random.Random, facts: EnglishFacts, count: int) -> tuple[list[InquiryFactory], list[str]]:
        """Return functions that make inquiries, and the statements that the section needs for them, in order."""
        inquiry_factories: list[InquiryFactory] = []
        statements: list[str] = []
        kinds = (
            self._plant_single_fact,
            self._plant_change,
            self._plant_two_hop,
            self._plant_list,
            self._plant_yes_no,
            self._plant_moves,
        )
        for kind in rng.choices(kinds, (32, self._change_weight, 28, 14, 8, 12), k=count):
            new_factories, new_statements = kind(rng, facts)
            inquiry_factories += new_factories
            statements += new_statements
        if inquiry_factories:
            inquiry_factories.append(lambda rng: self._make_unanswerable(facts))
        return inquiry_factories, statements

    def _make_unanswerable(self, facts: EnglishFacts) -> Inquiry:
        """Return a question that nothing in the document answers."""
        return Inquiry(facts.draw_question(facts.draw_fact())[0], (), (), NOT_STATED)

    def _plant_single_fact(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant a fact, and in most sections a similar fact; another similar fact may stand elsewhere."""
        fact = facts.draw_fact()
        miss, other = facts.draw_near_miss(fact), facts.draw_near_miss(fact)

        def here(rng: random.Random) -> Inquiry:
            question, answer = facts.draw_question(fact)
            if rng.random() < 0.2:
                notes = (facts.draw_statement(fact.relation, fact.subject, fact.value),)
                return Inquiry(question, notes, notes, answer)
            noise: tuple[str, ...] = (other.statement,) if rng.random() < 0.3 else ()
            noise += tuple(facts.draw_fact().statement for _ in range(_count_mistakes(rng)))
            return Inquiry(question, noise, _shorten((*noise, fact.statement)), answer)

        def elsewhere(rng: random.Random) -> Inquiry:
            question, answer = facts.draw_question(other)
            noise = tuple(facts.draw_fact().statement for _ in range(_count_mistakes(rng)))
            is_noted = rng.random() < 0.5
            notes = _shuffle(rng, (*noise, other.statement)) if is_noted else noise
            return Inquiry(question, notes, notes, answer if is_noted else NOT_STATED)

        statements = [fact.statement, *([miss.statement] if rng.random() < 0.7 else [])]
        return [here, here, elsewhere], rng.sample(statements, len(statements))

    def _plant_change(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant a value that changes: the last statement counts, and replaces the earlier one in the notes."""
        old = facts.draw_fact(facts.draw_relation(changes=True))
        new, miss = facts.draw_change(old), facts.draw_near_miss(old)
        both = rng.random() < 0.3

        def ask_change(rng: random.Random) -> Inquiry:
            question, answer = facts.draw_question_about(new.relation, new.subject), new.value
            if new.subject != old.subject:
                question, answer = facts.draw_question(new)
            notes = (old.statement,) if not both and rng.random() < 0.75 else ()
            noise = (facts.draw_fact().statement for _ in range(_count_mistakes(rng)))
            before = _shuffle(rng, (*noise, *notes))
            after = (*(note for note in before if note != old.statement), new.statement)
            return Inquiry(question, before, after, answer)

        def other(rng: random.Random) -> Inquiry:
            question, answer = facts.draw_question(miss)
            return Inquiry(question, (miss.statement,), (miss.statement,), answer)

        return [ask_change, ask_change, other], [*([old.statement] if both else []), new.statement]

    def _plant_two_hop(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant two facts that only together answer, in either order, or one or none of them, among facts like them
        about others. The second fact is noted only if the first is known.
        """
        chain, question = facts.draw_chain(2)
        first, second = chain
        here = rng.choice((chain, chain[::-1], [first], [second], []))
        kinds = rng.choices((first.relation, second.relation), (1, 2), k=rng.randint(0, 3))
        others = [facts.draw_fact(relation) for relation in kinds]

        def ask(rng: random.Random) -> Inquiry:
            before = list(rng.choices(((), (first.statement,), (first.statement, second.statement)), (9, 9, 2))[0])
            before += [facts.draw_fact(rng.choice(chain).relation).statement for _ in range(_count_mistakes(rng))]
            rng.shuffle(before)
            after = list(before)
            for fact, is_linked in ((first, True), (second, first.statement in before or first in here)):
                if fact in here and is_linked and fact.statement not in after:
                    after.append(fact.statement)
            answer = second.value if {first.statement, second.statement} <= set(after) else NOT_STATED
            return Inquiry(question, tuple(before), tuple(after), answer)

        statements = [fact.statement for fact in here]
        for fact in others:
            statements.insert(rng.randint(0, len(statements)), fact.statement)
        return [ask, ask], statements

    def _plant_list(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant several values of one subject among values of other subjects; some may be in the notes already."""
        relation = facts.draw_relation(plural=True)
        items: list[EnglishFact] = [facts.draw_fact(relation)]
        items += [facts.draw_fact(relation, subject=items[0].subject) for _ in range(rng.randint(1, 2))]
        question = rng.choice(relation.plural_questions).replace("{s}", items[0].subject)
        old = items[: rng.randint(0, len(items) - 1)]
        new = items[len(old) :]
        others = [facts.draw_fact(relation).statement for _ in range(rng.randint(0, 2))]

        def ask(rng: random.Random) -> Inquiry:
            before = tuple(fact.statement for fact in old)
            after = (*before, *(fact.statement for fact in new))
            return Inquiry(question, before, after, ", ".join(fact.value for fact in items))

        first = rng.randint(0, len(others))
        return [ask, ask], [*others[:first], *(fact.statement for fact in new), *others[first:]]

    def _plant_yes_no(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant a fact for a yes-or-no question about its value or another value."""
        fact = facts.draw_fact()
        miss = facts.draw_fact(fact.relation)

        def ask(rng: random.Random) -> Inquiry:
            is_true = rng.random() < 0.5
            claim = facts.draw_statement(fact.relation, fact.subject, fact.value if is_true else miss.value).rstrip(".")
            question = rng.choice(("Is it true that {c}?", "{c}: yes or no?", "Does the text say that {c}?"))
            return Inquiry(question.format(c=claim), (), (fact.statement,), "yes" if is_true else "no")

        return [ask], [fact.statement]

    def _plant_moves(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant people who go from place to place; the last place of a person counts."""
        people = list(dict.fromkeys(facts.draw("first_names") for _ in range(3)))
        moves = [(rng.choice(people), rng.choice(_PLACES)) for _ in range(rng.randint(1, 7))]
        texts = [rng.choice(_MOVES).format(who=who, where=where) for who, where in moves]
        last = {who: (text, where) for (who, where), text in zip(moves, texts, strict=True)}

        def ask(rng: random.Random) -> Inquiry:
            who, before = rng.choice(people), rng.choice(_PLACES)
            notes = (rng.choice(_MOVES).format(who=who, where=before),) if rng.random() < 0.7 else ()
            question = rng.choice(_WHERE).format(who=who)
            if who in last:
                text, where = last[who]
                return Inquiry(question, notes, (text,), f"the {where}")
            return Inquiry(question, notes, notes, f"the {before}" if notes else NOT_STATED)

        return [ask, ask], texts


def plant(rng: random.Random, text: str, statements: Sequence[str]) -> str:
    """Return the text with the statements in it, in order, each between two sentences."""
    places = [match.end() for match in _SENTENCE_END.finditer(text)] or [len(text)]
    spots = sorted(rng.choices(places, k=len(statements)))
    pieces, last = [], 0
    for place, statement in zip(spots, statements, strict=True):
        pieces += [text[last:place], statement, " "]
        last = place
    return "".join([*pieces, text[last:]])


def _count_mistakes(rng: random.Random) -> int:
    return rng.choices(range(len(_MISTAKES)), _MISTAKES)[0]


def _make_mistakes(rng: random.Random, others: Sequence[ProseQuestion]) -> tuple[str, ...]:
    """Return sentences that were noted by mistake."""
    count = min(_count_mistakes(rng), len(others))
    return _shorten(tuple(question.sentence for question in rng.sample(list(others), count)))


def _with_another_number(rng: random.Random, question: ProseQuestion) -> str:
    """Return a question's sentence with its answer's number changed, or "" if the answer has no number."""
    numbers = _NUMBER.findall(question.answer)
    if len(numbers) != 1 or len(re.findall(rf"(?<!\w){re.escape(numbers[0])}(?!\w)", question.sentence)) != 1:
        return ""
    number = int(numbers[0])
    others = range(max(1, number // 2), 2 * number + 3) if number < 1000 else range(number - 40, number + 41)
    other = rng.choice([value for value in others if value != number])
    return re.sub(rf"(?<!\w){number}(?!\w)", str(other), question.sentence)


def _shuffle(rng: random.Random, notes: tuple[str, ...]) -> tuple[str, ...]:
    notes = _shorten(notes)
    return tuple(rng.sample(notes, len(notes)))


def _shorten(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the notes, or only the last note if they are too long."""
    return notes if sum(map(len, notes)) <= _NOTES_CHARACTERS else notes[-1:]


def _vary(rng: random.Random, question: str) -> str:
    """Return the question, at times with something around it."""
    if rng.random() < 0.75:
        return question
    frame = rng.choice(_ASIDES)
    return frame.format(q=question if frame.startswith("{q}") else question[:1].lower() + question[1:])
