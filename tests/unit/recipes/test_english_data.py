"""The training data of `english`: sections, spans, questions, and the readings that they become."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from memagent_evaluation.english_facts import EnglishFacts, MoreFacts, relations, words
from recipes.english.encoded_lessons import RELATIONS
from recipes.english.exclusion import Exclusion
from recipes.english.lessons import NOT_STATED, LessonMaker, plant
from recipes.english.loop_questions import make_rows
from recipes.english.pinned_texts import read_pins
from recipes.english.prose_questions import HELD_OUT_ROWS, ROWS, ProseQuestion, question_rows, read_rows
from recipes.english.sections import SOURCES, ProseSection, cut_spans

PROSE = (
    "The harbour was built in 1887 because the old one had silted up. The basin can hold forty ships. A guard is "
    "on duty every Sunday night. The tower was designed by Martha Ellwood Green. Visitors wait in the customs house. "
)
SENTENCE = "The harbour was built in 1887 because the old one had silted up."
ROW = ProseQuestion("tales/a.txt", 0, len(PROSE), "when", "When did the harbour come into being?", "1887", SENTENCE)
OTHER = ProseQuestion(
    "notes/b.txt", 0, 99, "who", "Who repaired the bell?", "the smith", "It was repaired by the smith."
)
SECTION = ProseSection("tales/a.txt", "story", 0, len(PROSE), PROSE)


def test_sections_end_with_sentences_and_leave_nothing_out() -> None:
    text = PROSE * 40
    places = list(cut_spans(text, random.Random(1)))
    assert [start for start, _ in places] == [0, *(end for _, end in places[:-1])]
    assert places[-1][1] == len(text)
    assert all(text[:end].rstrip().endswith(".") for _, end in places)
    assert max(end - start for start, end in places) <= 512 * 4.2


def test_a_table_is_no_prose() -> None:
    assert SECTION.is_prose
    assert not ProseSection("a", "manual", 0, 9, "| x | 1 | 2 |\n+---+---+---+\n" * 20).is_prose


def test_a_row_gives_its_sentence_by_position(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {name: getattr(ROW, name) for name in ROW.__slots__} | {"sentence": [0, 64]}
    path.write_text(json.dumps(row), "utf-8")
    assert read_rows(path, [SECTION]) == [ROW]
    assert read_rows(path, []) == [], "another edition of the prose"
    for place in ([1, 64], [0, 61], [0, len(PROSE) + 9]):
        path.write_text(json.dumps(row | {"sentence": place}), "utf-8")
        with pytest.raises(ValueError, match=r"is not at \d+ to \d+ of its section"):
            read_rows(path, [SECTION])
    path.write_text(json.dumps(row | {"sentence": None, "answer": NOT_STATED}), "utf-8")
    assert not read_rows(path, [SECTION])[0].is_answered


def test_a_question_that_its_section_does_not_answer_is_kept_and_not_stated() -> None:
    row = ProseQuestion("tales/a.txt", 0, len(PROSE), "unanswered", "What is the harbour's depth?", NOT_STATED, "")
    maker = LessonMaker([SECTION], [row])
    lessons = [one for number in range(40) for one in maker.reading(random.Random(number)) if "depth" in one.prompt]
    assert {one.reply for one in lessons if one.role == "gated_update"} == {"KEEP"}
    assert {one.reply for one in lessons if one.role == "answer"} == {"\\boxed{not stated}"}


def test_rows_that_are_here_are_clear_of_what_is_measured_and_of_each_other() -> None:
    training_rows, held_out = question_rows(ROWS), question_rows(HELD_OUT_ROWS)
    Exclusion.load().require_clear(row["question"] for row in training_rows)
    sources = {f"{source.package}/{source.file}": source.held_out for source in read_pins(SOURCES)}
    assert not any(sources[row["source"]] for row in training_rows)
    assert all(sources[row["source"]] for row in held_out)
    assert not {row["question"] for row in training_rows} & {row["question"] for row in held_out}


def test_texts_that_questions_are_asked_about_are_no_sources_of_training() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "unseen_questions.toml"
    texts = {(source.package, source.file) for source in read_pins(path, "texts")}
    assert not texts & {(source.package, source.file) for source in read_pins(SOURCES)}


def readings(held_out: bool = False) -> list:
    maker = LessonMaker([SECTION], [ROW, OTHER], held_out=held_out)
    return [maker.reading(random.Random(number)) for number in range(60)]


def parts(prompt: str) -> tuple[str, str]:
    return prompt.partition("<section>\n")[2].partition("\n</section>")[0], prompt.partition("<memory>\n")[2].partition(
        "\n</memory>"
    )[0]


def test_a_reply_keeps_the_notes_or_adds_sentences_of_the_section() -> None:
    keeps = writes = 0
    for conversation in (one for reading in readings() for one in reading if one.role != "answer"):
        section, before = parts(conversation.prompt)
        reply = conversation.reply
        if conversation.role == "gated_update" and not conversation.writes:
            assert reply == "KEEP"
            reply = before
        after = reply.removeprefix("REWRITE\n")
        if not conversation.writes:
            assert after == before
            keeps += 1
        else:
            writes += 1
            new = after.removeprefix(before).strip()
            assert new in section or all(part in section for part in new.split(". ")[-1:]), (new, section)
    assert 0.3 < keeps / (keeps + writes) < 0.75


def test_readings_depend_on_the_generator_alone_and_all_conversations_on_a_section_share_its_tokens() -> None:
    assert readings() == readings()
    for reading in readings():
        beginnings = {one.text.partition("</section>")[0] for one in reading if one.role != "answer"}
        assert len(beginnings) == 1


def test_answers_are_in_the_notes_or_not_stated() -> None:
    answers = [one for reading in readings() for one in reading if one.role == "answer"]
    for one in answers:
        answer, notes = one.reply.removeprefix("\\boxed{").removesuffix("}"), parts(one.prompt)[1]
        assert one.writes == (answer != NOT_STATED)
        assert answer in {NOT_STATED, "yes", "no"} or all(
            part.casefold() in notes.casefold() for part in answer.split(", ")
        )
    assert 0.2 < sum(one.writes for one in answers) / len(answers) < 0.9


def test_no_held_out_person_or_town_is_trained_on() -> None:
    exclusion = Exclusion(frozenset(), frozenset(name.casefold() for name in words("first_names", held_out=True)))
    assert not any(exclusion.overlap(one.prompt + one.reply) for reading in readings() for one in reading)
    assert any(exclusion.overlap(one.prompt) for reading in readings(held_out=True) for one in reading)


def test_the_facts_for_training_have_none_of_what_is_held_out() -> None:
    more = MoreFacts.read(RELATIONS)
    held_out = {
        text
        for relation in relations()
        for texts in (relation.statements, relation.questions)
        for text in relation.worded(texts, held_out=True)
        if relation.held_out or len(texts) >= 3
    }
    assert len(held_out) > 60
    for relation in more.relations:
        assert not held_out & {*relation.statements, *relation.questions, *relation.subject_questions}
    for kind, listed in more.words.items():
        assert not set(listed) & set(words(kind, held_out=True)) or kind not in {"first_names", "family_names", "towns"}


def test_every_relation_for_training_makes_statements_and_questions() -> None:
    more = MoreFacts.read(RELATIONS)
    facts = EnglishFacts(1, more=more)
    assert len({relation.name for relation in facts.relations}) == len(facts.relations) > 150
    for relation in more.relations:
        for texts in (relation.statements, relation.questions, relation.subject_questions):
            assert relation.worded(texts, held_out=False) == texts
        fact = facts.fact(relation)
        assert fact.subject.lower() in fact.statement.lower()
        assert fact.value.lower() in fact.statement.lower()
        question, answer = facts.question(fact)
        other = fact.value if answer == fact.subject else fact.subject
        assert other.lower() in question.lower()
        assert not set("{}") & set(fact.statement + question)


def test_questions_on_other_sections_are_asked_unless_their_answer_is_here_too() -> None:
    near = ProseQuestion(
        "tales/a.txt", 900, 999, "who", "Who rang the bell?", "the miller", "The miller rang the bell."
    )
    same = ProseQuestion("tales/a.txt", 900, 999, "when", "When was the bell cast?", "1887", "It was cast in 1887.")
    maker = LessonMaker([SECTION], [ROW, OTHER, near, same])
    prompts = "".join(one.prompt for number in range(60) for one in maker.reading(random.Random(number))).casefold()
    assert "who rang the bell?" in prompts
    assert "when was the bell cast?" not in prompts


def test_statements_stand_between_sentences_in_their_order() -> None:
    text = plant(random.Random(2), PROSE, ["First comes A.", "Then comes B."])
    assert text.index("First comes A. ") < text.index("Then comes B. ")
    assert text.replace("First comes A. ", "").replace("Then comes B. ", "") == PROSE


@pytest.mark.parametrize(
    ("answer", "question", "is_right"),
    [
        ("No, it was cut off.", {"yes_no": "no"}, True),
        ("not stated", {"yes_no": "no"}, False),
        ("Yes", {"yes_no": "no"}, False),
        ("about fifty guineas.", {"right": [["fifty", "guineas"]]}, True),
        ("fifteen", {"right": [["fifty"], ["15"]]}, False),
        ("by a 3:1 majority", {"right": [["3:1"]]}, True),
        (None, {"right": [["six"]]}, False),
    ],
)
def test_answers_are_graded_by_whole_words(answer, question, is_right) -> None:
    from recipes.english.measure import is_right as grade

    assert grade(answer, question) == is_right


def test_a_document_of_the_loop_is_the_prose_around_its_question_and_a_tenth_of_the_questions_have_no_answer() -> None:
    sections = [ProseSection(ROW.source, "story", start, start + 1, f"({start}) {PROSE}") for start in range(200)]
    questions = [replace(ROW, start=start) for start in range(200)] + [replace(OTHER, source="b", start=0)]
    rows = list(make_rows([*sections, ProseSection("b", "letter", 0, 99, PROSE)], questions, random.Random(1)))
    documents = [row["document"] for row in rows if row["document"] != PROSE]
    lengths = [len(document) / (512 * 4.2) for document in documents]
    assert len(rows) == 201 and 3.8 < min(lengths) < 5 and 15 < max(lengths) <= 16
    starts = [[section.start for section in sections if section.text in document] for document in documents]
    assert all(numbers == list(range(numbers[0], numbers[0] + len(numbers))) for numbers in starts)
    assert 10 < sum(row["answers"] == [NOT_STATED] for row in rows) < 30
