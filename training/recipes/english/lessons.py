"""Makes the conversations to learn: a good reader's replies to a section, and its answers from notes.

A section is real prose; most sections have facts planted between sentences. Each question comes with notes that a
reader may have at that point. Notes are sentences of the document, unchanged, one after the other; "none" stands for no
notes. Most sections of a document say nothing about a question, so about half of the replies keep the notes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from memagent_evaluation.english_facts import AdditionalFacts, EnglishFact, EnglishFacts
from memagent_graph.policies.added import ENGLISH_FOLDER
from memagent_graph.policies.profile import require_profile
from recipes.english.prose_questions import NOT_STATED, ProseQuestion
from recipes.english.sections import ProseSection

"""The answer to a question that the notes do not answer."""
EMPTY: Final = "none"
"""The text of empty notes."""
CONTROL_TOKENS: Final = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(]?[A-Z])")
_NUMBER: Final = re.compile(r"(?<![\w.,-])[1-9]\d{0,5}(?![\w.,-]*\w)")
_QUESTION_FRAMES: Final = (
    "According to the text, {q}", "Tell me: {q}", "I would like to know: {q}", "{q} Answer briefly.",
    "Please answer this: {q}", "In this document, {q}", "{q} Thank you.",
)  # fmt: skip
_ROLE_PROBABILITIES: Final = {"gated_update": 0.75, "update": 0.25}
_MAX_NOTES_CHARACTERS: Final = 900
"""The maximum length of notes in characters; of longer notes only the last sentence is kept."""
_MISTAKE_PROBABILITIES: Final = (0.55, 0.2, 0.15, 0.1)
"""The probabilities that notes have none, one, two or three sentences that do not answer."""
_PLACES: Final = (
    "bakery", "bell tower", "brewery", "bridge", "cloister", "fish market", "granary", "guest house", "hayloft",
    "infirmary", "pottery", "printing shop", "quarry", "school room", "shipyard", "stable", "tavern", "toll house",
    "weaving mill",
)  # fmt: skip
_MOVE_WORDINGS: Final = (
    "{who} went to the {where}.", "{who} moved on to the {where}.", "{who} returned to the {where}.",
    "Then {who} ran to the {where}.", "{who} was seen going into the {where}.", "{who} is now in the {where}.",
    "After that {who} left for the {where}.", "{who} came to the {where}.",
)  # fmt: skip
_WHERE_QUESTIONS: Final = (
    "Where is {who} now?", "Where is {who} at the end?", "Where did {who} go last?", "In which place is {who}?",
    "According to the text, where is {who} in the end?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question with a reader's notes before and after a section, and the answer from the latter."""

    question: str
    notes_before: tuple[str, ...]
    notes_after: tuple[str, ...]
    answer: str

    @property
    def changes_notes(self) -> bool:
        """Whether the section has something to note."""
        return self.notes_before != self.notes_after


InquiryFactory: TypeAlias = Callable[[random.Random], Inquiry]


@dataclass(frozen=True, slots=True)
class Lesson:
    """One prompt of a role, as text, and the reply to learn."""

    role: str
    prompt: str
    reply: str
    adds_content: bool
    """Whether the reply adds something from the section, or is an answer other than "not stated"."""

    @property
    def text(self) -> str:
        """The whole conversation in the base's chat format."""
        return f"<|im_start|>user\n{self.prompt}<|im_end|>\n<|im_start|>assistant\n"


class LessonMaker:
    """Composes conversations; all randomness comes from the generator that each call gets.

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
        self._prompts = replace(require_profile(ENGLISH_FOLDER).prompts, control_tokens=frozenset(CONTROL_TOKENS))
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

    def make_reading(self, rng: random.Random, count: int = 9) -> list[Lesson]:
        """Return `count` conversations of one role on one section, and a third as many answers from notes."""
        has_questions = bool(self._with_questions) and rng.random() < 0.7
        section = rng.choice(self._with_questions if has_questions else self._sections)
        facts = EnglishFacts(rng, held_out=self._held_out, additional=self._additional)
        inquiry_factories, statements = self._plant_facts(
            rng, facts, rng.choice((0, 1, 2)) if has_questions else rng.randint(2, 4)
        )
        text = plant_statements(rng, section.text, statements)
        section_questions = self._questions_by_section.get((section.source, section.start), [])
        other_questions = self._find_answered_elsewhere(rng, section)
        inquiries: list[Inquiry] = []
        while len(inquiries) < count:
            chance = rng.random()
            if section_questions and chance < 0.45:
                inquiries.append(self._make_prose_inquiry(rng, rng.choice(section_questions), other_questions))
            elif other_questions and chance < 0.65:
                inquiries.append(self._make_other_inquiry(rng, rng.choice(other_questions), other_questions))
            elif inquiry_factories:
                inquiries.append(rng.choice(inquiry_factories)(rng))
            else:
                inquiries.append(self._make_unanswerable(facts))
        role = rng.choices(list(_ROLE_PROBABILITIES), list(_ROLE_PROBABILITIES.values()))[0]
        conversations = [self._make_conversation(rng, role, inquiry, text) for inquiry in inquiries]
        return conversations + [
            self._make_answer(rng, inquiry, facts) for inquiry in rng.sample(inquiries, max(1, count // 3))
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
        question = _vary_question(rng, inquiry.question)
        text_before, text_after = (" ".join(notes) or EMPTY for notes in (inquiry.notes_before, inquiry.notes_after))
        prompt = self._prompts.messages(role, question, memory=text_before, chunk=section)[0]["content"]
        reply = text_after if role == "update" else f"REWRITE\n{text_after}" if inquiry.changes_notes else "KEEP"
        return Lesson(role, prompt, reply, inquiry.changes_notes)

    def _make_answer(self, rng: random.Random, inquiry: Inquiry, facts: EnglishFacts) -> Lesson:
        """Return an answer from the notes after a section, or, one time in five, from notes that do not answer."""
        notes, answer = inquiry.notes_after, inquiry.answer
        if rng.random() < 0.2:
            notes, answer = tuple(facts.draw_fact().statement for _ in range(rng.randint(0, 2))), NOT_STATED
        question = _vary_question(rng, inquiry.question)
        prompt = self._prompts.messages("answer", question, memory=" ".join(notes))[0]["content"]
        return Lesson("answer", prompt, f"\\boxed{{{answer}}}", answer != NOT_STATED)

    def _make_prose_inquiry(
        self, rng: random.Random, question: ProseQuestion, others: Sequence[ProseQuestion]
    ) -> Inquiry:
        """Return a question on this section's prose; the notes may already have the answer, or mistakes, or nothing."""
        noise = _make_mistakes(rng, others)
        if not question.is_answered:
            return Inquiry(question.question, noise, noise, NOT_STATED)
        notes_after = _shorten_notes((*noise, question.sentence))
        if rng.random() < 0.2:
            notes = tuple(rng.sample(notes_after, len(notes_after)))
            return Inquiry(question.question, notes, notes, question.answer)
        outdated_sentence = _change_number(rng, question)
        if outdated_sentence and len(notes_after) > len(noise) and rng.random() < 0.5:
            return Inquiry(question.question, (*noise, outdated_sentence), notes_after, question.answer)
        return Inquiry(question.question, noise, notes_after, question.answer)

    def _make_other_inquiry(
        self, rng: random.Random, question: ProseQuestion, others: Sequence[ProseQuestion]
    ) -> Inquiry:
        """Return a question that this section does not answer; an earlier section may have answered it."""
        noise = _make_mistakes(rng, others)
        is_noted = rng.random() < 0.5
        notes = _shuffle_notes(rng, (*noise, question.sentence)) if is_noted else noise
        return Inquiry(question.question, notes, notes, question.answer if is_noted else NOT_STATED)

    def _plant_facts(
        self, rng: random.Random, facts: EnglishFacts, count: int
    ) -> tuple[list[InquiryFactory], list[str]]:
        """Return functions that make inquiries, and the statements that the section needs for them, in order."""
        inquiry_factories: list[InquiryFactory] = []
        statements: list[str] = []
        plant_functions = (
            self._plant_single_fact,
            self._plant_change,
            self._plant_two_hop,
            self._plant_list,
            self._plant_yes_no,
            self._plant_moves,
        )
        for plant_fact in rng.choices(plant_functions, (32, self._change_weight, 28, 14, 8, 12), k=count):
            new_factories, new_statements = plant_fact(rng, facts)
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
        near_miss, absent_fact = facts.draw_near_miss(fact), facts.draw_near_miss(fact)

        def ask_here(rng: random.Random) -> Inquiry:
            question, answer = facts.draw_question(fact)
            if rng.random() < 0.2:
                notes = (facts.draw_statement(fact.relation, fact.subject, fact.value),)
                return Inquiry(question, notes, notes, answer)
            noise: tuple[str, ...] = (absent_fact.statement,) if rng.random() < 0.3 else ()
            noise += tuple(facts.draw_fact().statement for _ in range(_count_mistakes(rng)))
            return Inquiry(question, noise, _shorten_notes((*noise, fact.statement)), answer)

        def ask_elsewhere(rng: random.Random) -> Inquiry:
            question, answer = facts.draw_question(absent_fact)
            noise = tuple(facts.draw_fact().statement for _ in range(_count_mistakes(rng)))
            is_noted = rng.random() < 0.5
            notes = _shuffle_notes(rng, (*noise, absent_fact.statement)) if is_noted else noise
            return Inquiry(question, notes, notes, answer if is_noted else NOT_STATED)

        statements = [fact.statement, *([near_miss.statement] if rng.random() < 0.7 else [])]
        return [ask_here, ask_here, ask_elsewhere], rng.sample(statements, len(statements))

    def _plant_change(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant a value that changes: the last statement counts, and replaces the earlier one in the notes."""
        old_fact = facts.draw_fact(facts.draw_relation(changes=True))
        new_fact, near_miss = facts.draw_change(old_fact), facts.draw_near_miss(old_fact)
        has_both = rng.random() < 0.3

        def ask_change(rng: random.Random) -> Inquiry:
            question, answer = facts.draw_question_about(new_fact.relation, new_fact.subject), new_fact.value
            if new_fact.subject != old_fact.subject:
                question, answer = facts.draw_question(new_fact)
            notes = (old_fact.statement,) if not has_both and rng.random() < 0.75 else ()
            noise = (facts.draw_fact().statement for _ in range(_count_mistakes(rng)))
            notes_before = _shuffle_notes(rng, (*noise, *notes))
            notes_after = (*(note for note in notes_before if note != old_fact.statement), new_fact.statement)
            return Inquiry(question, notes_before, notes_after, answer)

        def ask_near_miss(rng: random.Random) -> Inquiry:
            question, answer = facts.draw_question(near_miss)
            return Inquiry(question, (near_miss.statement,), (near_miss.statement,), answer)

        statements = [old_fact.statement] if has_both else []
        return [ask_change, ask_change, ask_near_miss], [*statements, new_fact.statement]

    def _plant_two_hop(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant two facts that answer only together, in either order, or one or none of them, among similar facts about
        other subjects. The second fact is noted only if the first is known.
        """
        chain, question = facts.draw_chain(2)
        first, second = chain
        stated_facts = rng.choice((chain, chain[::-1], [first], [second], []))
        relations = rng.choices((first.relation, second.relation), (1, 2), k=rng.randint(0, 3))
        other_facts = [facts.draw_fact(relation) for relation in relations]

        def ask(rng: random.Random) -> Inquiry:
            notes_before = list(
                rng.choices(((), (first.statement,), (first.statement, second.statement)), (9, 9, 2))[0]
            )
            notes_before += [facts.draw_fact(rng.choice(chain).relation).statement for _ in range(_count_mistakes(rng))]
            rng.shuffle(notes_before)
            notes_after = list(notes_before)
            for fact, is_linked in ((first, True), (second, first.statement in notes_before or first in stated_facts)):
                if fact in stated_facts and is_linked and fact.statement not in notes_after:
                    notes_after.append(fact.statement)
            answer = second.value if {first.statement, second.statement} <= set(notes_after) else NOT_STATED
            return Inquiry(question, tuple(notes_before), tuple(notes_after), answer)

        statements = [fact.statement for fact in stated_facts]
        for fact in other_facts:
            statements.insert(rng.randint(0, len(statements)), fact.statement)
        return [ask, ask], statements

    def _plant_list(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant several values of one subject among values of other subjects; some may be in the notes already."""
        relation = facts.draw_relation(plural=True)
        items: list[EnglishFact] = [facts.draw_fact(relation)]
        items += [facts.draw_fact(relation, subject=items[0].subject) for _ in range(rng.randint(1, 2))]
        question = rng.choice(relation.plural_questions).replace("{s}", items[0].subject)
        noted_items = items[: rng.randint(0, len(items) - 1)]
        new_items = items[len(noted_items) :]
        other_statements = [facts.draw_fact(relation).statement for _ in range(rng.randint(0, 2))]

        def ask(rng: random.Random) -> Inquiry:
            notes_before = tuple(fact.statement for fact in noted_items)
            notes_after = (*notes_before, *(fact.statement for fact in new_items))
            return Inquiry(question, notes_before, notes_after, ", ".join(fact.value for fact in items))

        position = rng.randint(0, len(other_statements))
        other_statements[position:position] = [fact.statement for fact in new_items]
        return [ask, ask], other_statements

    def _plant_yes_no(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant a fact for a yes-or-no question about its value or another value."""
        fact = facts.draw_fact()
        other_fact = facts.draw_fact(fact.relation)

        def ask(rng: random.Random) -> Inquiry:
            is_true = rng.random() < 0.5
            value = fact.value if is_true else other_fact.value
            claim = facts.draw_statement(fact.relation, fact.subject, value).rstrip(".")
            question = rng.choice(("Is it true that {c}?", "{c}: yes or no?", "Does the text say that {c}?"))
            return Inquiry(question.format(c=claim), (), (fact.statement,), "yes" if is_true else "no")

        return [ask], [fact.statement]

    def _plant_moves(self, rng: random.Random, facts: EnglishFacts) -> tuple[list[InquiryFactory], list[str]]:
        """Plant people who go from place to place; the last place of a person counts."""
        people = list(dict.fromkeys(facts.draw("first_names") for _ in range(3)))
        moves = [(rng.choice(people), rng.choice(_PLACES)) for _ in range(rng.randint(1, 7))]
        statements = [rng.choice(_MOVE_WORDINGS).format(who=person, where=place) for person, place in moves]
        last_move_by_person = {
            person: (statement, place) for (person, place), statement in zip(moves, statements, strict=True)
        }

        def ask(rng: random.Random) -> Inquiry:
            person, noted_place = rng.choice(people), rng.choice(_PLACES)
            notes = (rng.choice(_MOVE_WORDINGS).format(who=person, where=noted_place),) if rng.random() < 0.7 else ()
            question = rng.choice(_WHERE_QUESTIONS).format(who=person)
            if person in last_move_by_person:
                statement, place = last_move_by_person[person]
                return Inquiry(question, notes, (statement,), f"the {place}")
            return Inquiry(question, notes, notes, f"the {noted_place}" if notes else NOT_STATED)

        return [ask, ask], statements


def plant_statements(rng: random.Random, text: str, statements: Sequence[str]) -> str:
    """Return the text with the statements in it, in order, each between two sentences."""
    sentence_ends = [match.end() for match in _SENTENCE_END.finditer(text)] or [len(text)]
    positions = sorted(rng.choices(sentence_ends, k=len(statements)))
    pieces, end = [], 0
    for position, statement in zip(positions, statements, strict=True):
        pieces += [text[end:position], statement, " "]
        end = position
    return "".join([*pieces, text[end:]])


def _count_mistakes(rng: random.Random) -> int:
    return rng.choices(range(len(_MISTAKE_PROBABILITIES)), _MISTAKE_PROBABILITIES)[0]


def _make_mistakes(rng: random.Random, others: Sequence[ProseQuestion]) -> tuple[str, ...]:
    """Return sentences that a reader noted by mistake."""
    mistake_count = min(_count_mistakes(rng), len(others))
    return _shorten_notes(tuple(question.sentence for question in rng.sample(list(others), mistake_count)))


def _change_number(rng: random.Random, question: ProseQuestion) -> str:
    """Return a question's sentence with another number than the answer's; "" if the answer has no single number."""
    numbers = _NUMBER.findall(question.answer)
    if len(numbers) != 1 or len(re.findall(rf"(?<!\w){re.escape(numbers[0])}(?!\w)", question.sentence)) != 1:
        return ""
    answer_number = int(numbers[0])
    other_numbers = (
        range(max(1, answer_number // 2), 2 * answer_number + 3)
        if answer_number < 1000
        else range(answer_number - 40, answer_number + 41)
    )
    other_number = rng.choice([value for value in other_numbers if value != answer_number])
    return re.sub(rf"(?<!\w){answer_number}(?!\w)", str(other_number), question.sentence)


def _shuffle_notes(rng: random.Random, notes: tuple[str, ...]) -> tuple[str, ...]:
    notes = _shorten_notes(notes)
    return tuple(rng.sample(notes, len(notes)))


def _shorten_notes(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the notes, or only the last note if they are too long."""
    return notes if sum(map(len, notes)) <= _MAX_NOTES_CHARACTERS else notes[-1:]


def _vary_question(rng: random.Random, question: str) -> str:
    """Return the question, one time in four in a frame such as "Tell me: ..."."""
    if rng.random() < 0.75:
        return question
    frame = rng.choice(_QUESTION_FRAMES)
    return frame.format(q=question if frame.startswith("{q}") else question[:1].lower() + question[1:])
