"""The training data of `english`: sections, spans, questions, and the lessons made from them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from memagent_evaluation.english_facts import AdditionalFacts, EnglishFacts, list_relations, list_words
from recipes.english.encoded_lessons import TRAINING_FACTS
from recipes.english.exclusion import Exclusion
from recipes.english.lessons import LessonMaker, plant_statements
from recipes.english.pinned_texts import read_pins
from recipes.english.prose_questions import (
    HELD_OUT_QUESTIONS_PATH,
    NOT_STATED,
    QUESTIONS_PATH,
    ProseQuestion,
    load_questions,
    load_rows,
    make_loop_rows,
)
from recipes.english.sections import SOURCES_PATH, ProseSection, cut_spans

PROSE = (
    "The harbour was built in 1887 because the old one had silted up. The basin can hold forty ships. A guard is "
    "on duty every Sunday night. The tower was designed by Martha Ellwood Green. Visitors wait in the customs house. "
)
SENTENCE = "The harbour was built in 1887 because the old one had silted up."
HARBOUR_ROW = ProseQuestion("tales/a.txt", 0, len(PROSE), "when", "When did the harbour arise?", "1887", SENTENCE)
BELL_ROW = ProseQuestion(
    "notes/b.txt", 0, 99, "who", "Who repaired the bell?", "the smith", "It was repaired by the smith."
)
SECTION = ProseSection("tales/a.txt", "story", 0, len(PROSE), PROSE)


def test_spans_end_with_sentences_and_cover_the_text() -> None:
    text = PROSE * 40
    spans = list(cut_spans(text, random.Random(1)))
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == len(text)
    assert all(text[:end].rstrip().endswith(".") for _, end in spans)
    assert max(end - start for start, end in spans) <= 512 * 4.2


def test_table_is_not_prose() -> None:
    assert SECTION.is_prose
    assert not ProseSection("a", "manual", 0, 9, "| x | 1 | 2 |\n+---+---+---+\n" * 20).is_prose


def test_row_locates_its_sentence_by_position(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {name: getattr(HARBOUR_ROW, name) for name in HARBOUR_ROW.__slots__} | {"sentence": [0, 64]}
    path.write_text(json.dumps(row), "utf-8")
    assert load_questions(path, [SECTION]) == [HARBOUR_ROW]
    assert load_questions(path, []) == [], "another edition of the prose"
    for position in ([1, 64], [0, 61], [0, len(PROSE) + 9]):
        path.write_text(json.dumps(row | {"sentence": position}), "utf-8")
        with pytest.raises(ValueError, match=r"is not at \d+ to \d+ of its section"):
            load_questions(path, [SECTION])
    path.write_text(json.dumps(row | {"sentence": None, "answer": NOT_STATED}), "utf-8")
    assert not load_questions(path, [SECTION])[0].is_answered


def test_unanswered_question_leaves_the_memory_and_is_not_stated() -> None:
    row = ProseQuestion("tales/a.txt", 0, len(PROSE), "unanswered", "What is the harbour's depth?", NOT_STATED, "")
    maker = LessonMaker([SECTION], [row])
    readings = [maker.make_reading(random.Random(number)) for number in range(40)]
    lessons = [lesson for reading in readings for lesson in reading if "depth" in lesson.prompt]
    assert {lesson.reply for lesson in lessons if lesson.role == "gated_update"} == {"KEEP"}
    assert {lesson.reply for lesson in lessons if lesson.role == "answer"} == {"\\boxed{not stated}"}


def test_training_rows_overlap_neither_benchmarks_nor_held_out_rows() -> None:
    training_rows, held_out = load_rows(QUESTIONS_PATH), load_rows(HELD_OUT_QUESTIONS_PATH)
    Exclusion.load().require_clear(row["question"] for row in training_rows)
    sources = {f"{source.package}/{source.file}": source.held_out for source in read_pins(SOURCES_PATH)}
    assert not any(sources[row["source"]] for row in training_rows)
    assert all(sources[row["source"]] for row in held_out)
    assert not {row["question"] for row in training_rows} & {row["question"] for row in held_out}


def test_texts_of_unseen_questions_are_not_training_sources() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "unseen_questions.toml"
    texts = {(source.package, source.file) for source in read_pins(path, "texts")}
    assert not texts & {(source.package, source.file) for source in read_pins(SOURCES_PATH)}


def make_readings(held_out: bool = False) -> list:
    maker = LessonMaker([SECTION], [HARBOUR_ROW, BELL_ROW], held_out=held_out)
    return [maker.make_reading(random.Random(number)) for number in range(60)]


def split_prompt(prompt: str) -> tuple[str, str]:
    return prompt.partition("<section>\n")[2].partition("\n</section>")[0], prompt.partition("<memory>\n")[2].partition(
        "\n</memory>"
    )[0]


def test_reply_keeps_the_memory_or_adds_sentences_of_the_section() -> None:
    kept_count = written_count = 0
    for lesson in (lesson for reading in make_readings() for lesson in reading if lesson.role != "answer"):
        section, memory_before = split_prompt(lesson.prompt)
        reply = lesson.reply
        if lesson.role == "gated_update" and not lesson.adds_content:
            assert reply == "KEEP"
            reply = memory_before
        memory_after = reply.removeprefix("REWRITE\n")
        if not lesson.adds_content:
            assert memory_after == memory_before
            kept_count += 1
        else:
            written_count += 1
            added_text = memory_after.removeprefix(memory_before).strip()
            assert added_text in section or added_text.split(". ")[-1] in section, (added_text, section)
    assert 0.3 < kept_count / (kept_count + written_count) < 0.75


def test_readings_depend_on_the_seed_and_share_the_section_tokens() -> None:
    assert make_readings() == make_readings()
    for reading in make_readings():
        beginnings = {lesson.text.partition("</section>")[0] for lesson in reading if lesson.role != "answer"}
        assert len(beginnings) == 1


def test_answers_are_in_the_memory_or_not_stated() -> None:
    answers = [lesson for reading in make_readings() for lesson in reading if lesson.role == "answer"]
    for lesson in answers:
        answer, memory = lesson.reply.removeprefix("\\boxed{").removesuffix("}"), split_prompt(lesson.prompt)[1]
        assert lesson.adds_content == (answer != NOT_STATED)
        assert answer in {NOT_STATED, "yes", "no"} or all(
            item.casefold() in memory.casefold() for item in answer.split(", ")
        )
    assert 0.2 < sum(lesson.adds_content for lesson in answers) / len(answers) < 0.9


def test_lessons_contain_no_held_out_names() -> None:
    exclusion = Exclusion(frozenset(), frozenset(name.casefold() for name in list_words("first_names", held_out=True)))
    assert not any(exclusion.overlaps(lesson.prompt + lesson.reply) for lesson in chain(*make_readings()))
    assert any(exclusion.overlaps(lesson.prompt) for lesson in chain(*make_readings(held_out=True)))


def test_training_facts_contain_no_held_out_wording() -> None:
    additional_facts = AdditionalFacts.read(TRAINING_FACTS)
    held_out = {
        text
        for relation in list_relations()
        for texts in (relation.statements, relation.questions)
        for text in relation.select_wordings(texts, held_out=True)
        if relation.held_out or len(texts) >= 3
    }
    assert len(held_out) > 60
    for relation in additional_facts.relations:
        assert not held_out & {*relation.statements, *relation.questions, *relation.subject_questions}
    for kind, words in additional_facts.words.items():
        assert kind not in {"first_names", "family_names", "towns"} or not {*words} & {*list_words(kind, held_out=True)}


def test_every_training_relation_gives_statements_and_questions() -> None:
    additional_facts = AdditionalFacts.read(TRAINING_FACTS)
    facts = EnglishFacts(1, additional=additional_facts)
    assert len({relation.name for relation in facts.relations}) == len(facts.relations) > 150
    for relation in additional_facts.relations:
        for texts in (relation.statements, relation.questions, relation.subject_questions):
            assert relation.select_wordings(texts, held_out=False) == texts
        fact = facts.draw_fact(relation)
        assert fact.subject.lower() in fact.statement.lower()
        assert fact.value.lower() in fact.statement.lower()
        question, answer = facts.draw_question(fact)
        other_side = fact.value if answer == fact.subject else fact.subject
        assert other_side.lower() in question.lower()
        assert not set("{}") & set(fact.statement + question)


def test_questions_of_other_sections_are_asked_unless_answered_here() -> None:
    nearby_question = ProseQuestion(
        "tales/a.txt", 900, 999, "who", "Who rang the bell?", "the miller", "The miller rang the bell."
    )
    same_answer = ProseQuestion("tales/a.txt", 900, 999, "when", "When was it cast?", "1887", "It was cast in 1887.")
    maker = LessonMaker([SECTION], [HARBOUR_ROW, BELL_ROW, nearby_question, same_answer])
    lessons = [lesson for number in range(60) for lesson in maker.make_reading(random.Random(number))]
    prompts = "".join(lesson.prompt for lesson in lessons).casefold()
    assert "who rang the bell?" in prompts
    assert "when was it cast?" not in prompts


def test_statements_are_planted_between_sentences_in_order() -> None:
    text = plant_statements(random.Random(2), PROSE, ["First comes A.", "Then comes B."])
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
    from recipes.english.measure import is_right as is_right_answer

    assert is_right_answer(answer, question) == is_right


def test_loop_documents_surround_their_question_and_a_tenth_have_no_answer() -> None:
    sections = [ProseSection("tales", "story", start, start + 1, f"({start}) {PROSE}") for start in range(200)]
    questions = [replace(HARBOUR_ROW, source="tales", start=start) for start in range(200)] + [
        replace(BELL_ROW, source="b", start=0)
    ]
    rows = list(make_loop_rows([*sections, ProseSection("b", "letter", 0, 99, PROSE)], questions, random.Random(1)))
    documents = [row["document"] for row in rows if row["document"] != PROSE]
    lengths = [len(document) / (512 * 4.2) for document in documents]
    assert len(rows) == 201 and 3.8 < min(lengths) < 5 and 15 < max(lengths) <= 16
    starts = [[section.start for section in sections if section.text in document] for document in documents]
    assert all(numbers == list(range(numbers[0], numbers[0] + len(numbers))) for numbers in starts)
    assert 10 < sum(row["answers"] == [NOT_STATED] for row in rows) < 30
