"""Facts in plain English: what is asked for stands in the document once, and nothing else there answers."""

import re

import pytest

from memagent_evaluation.english_facts import EnglishFact, EnglishFacts, list_words
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.english import ABSENT, ENGLISH
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")


def samples_of(name, count=5, length=1200, **settings):
    task = load_task(name, TaskSettings(TOKENIZER, **settings))
    return [task.sample(length, index) for index in range(count)]


@pytest.mark.parametrize("name", [name for name in ENGLISH if name != "english_absent"])
def test_the_evidence_stands_in_the_document_and_holds_the_answer(name):
    for sample in samples_of(name):
        text = "".join(sample.text())
        assert all(text.count(needle.text) == 1 for needle in sample.needles)
        evidence = " ".join(needle.text for needle in sample.needles).casefold()
        assert all(gold.casefold() in evidence for gold in sample.gold)
        assert not any(gold.casefold() in sample.question.casefold() for gold in sample.gold)


def test_of_a_fact_that_changes_the_later_statement_is_the_answer():
    for sample in samples_of("english_change"):
        first, last = sorted(sample.needles, key=lambda needle: needle.depth)
        assert last.gold == sample.gold[0]
        assert first.gold != sample.gold[0]


@pytest.mark.parametrize(("name", "answer_at"), [("english_hop_3", -1), ("english_hop_3_backward", 0)])
def test_facts_of_a_chain_are_in_forward_or_reverse_order(name, answer_at):
    for sample in samples_of(name):
        in_order = sorted(sample.needles, key=lambda needle: needle.depth)
        assert in_order[answer_at].gold == sample.gold[0]
        assert not any(needle.gold in sample.question for needle in sample.needles)


def test_where_nothing_answers_there_is_no_evidence_and_any_way_to_say_so_is_right():
    for sample in samples_of("english_absent"):
        assert sample.needles == ()
        assert sample.gold == ABSENT


@pytest.fixture
def statements(monkeypatch):
    """All facts by their statements, and what each question asks for: the relation, and the side that it names."""
    facts, questions = {}, {}
    state, question = EnglishFacts.draw_statement, EnglishFacts.draw_question

    def record_fact(self, relation, subject, value):
        text = state(self, relation, subject, value)
        facts.setdefault(text, EnglishFact(relation, subject, value, text))
        return text

    def record_question(self, fact):
        text, answer = question(self, fact)
        questions[text] = fact.relation.name, fact.value if answer == fact.subject else fact.subject
        return text, answer

    monkeypatch.setattr(EnglishFacts, "draw_statement", record_fact)
    monkeypatch.setattr(EnglishFacts, "draw_question", record_question)
    return facts, questions


def facts_in(text, facts):
    return [fact for statement, fact in facts.items() if statement in text]


@pytest.mark.parametrize("name", ["english_fact", "english_new", "english_absent"])
def test_nothing_but_the_evidence_answers(name, statements):
    facts, questions = statements
    samples = samples_of(name, count=6, length=3000, questions_per_document=6)
    (text,) = {"".join(sample.text()) for sample in samples}
    for sample in samples:
        relation, side = questions[sample.question]
        own = {needle.text for needle in sample.needles}
        others = [fact for fact in facts_in(text, facts) if fact.statement not in own]
        assert others
        assert not [fact for fact in others if fact.relation.name == relation and side in {fact.subject, fact.value}]


@pytest.mark.parametrize("name", ["english_hop_2", "english_hop_3_backward", "english_list"])
def test_nothing_but_the_evidence_says_anything_of_its_subjects_in_its_relations(name, statements):
    for sample in samples_of(name, count=6, length=2500, questions_per_document=6):
        own = {needle.text for needle in sample.needles}
        facts = facts_in("".join(sample.text()), statements[0])
        known = {(fact.relation.name, fact.subject) for fact in facts if fact.statement in own}
        assert not [f for f in facts if f.statement not in own and (f.relation.name, f.subject) in known]
        if name != "english_list":
            count = len({relation for relation, _ in known})
            assert count == int(name.split("_")[2]), "no relation stands in a chain twice"


def test_list_items_are_stated_once_for_several_questions():
    for sample in samples_of("english_list", count=8, length=2500, questions_per_document=8):
        assert len({*sample.gold}) == len(sample.gold) == 3


def test_the_training_split_and_the_held_out_split_share_no_people():
    for split, held_out in ((":held_out=no", False), ("", True)):
        samples = samples_of(f"english_fact{split}", 24, length=300)
        vocabulary = {
            word for sample in samples for needle in sample.needles for word in re.findall(r"\w+", needle.text)
        }
        assert len(vocabulary & {*list_words("first_names", held_out=held_out)}) > 5
        assert not vocabulary & {*list_words("first_names", held_out=not held_out)}
