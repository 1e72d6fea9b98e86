"""English tasks: the evidence is in the document once, and no other sentence answers the question."""

import re

import pytest

from memagent_evaluation.english_facts import EnglishFact, EnglishFacts, list_words
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.english import ABSENT, ENGLISH
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")


def make_samples(name, count=5, length=1200, **settings):
    task = load_task(name, TaskSettings(TOKENIZER, **settings))
    return [task.sample(length, index) for index in range(count)]


@pytest.mark.parametrize("name", [name for name in ENGLISH if name != "english_absent"])
def test_evidence_is_in_the_document_once_and_contains_the_answer(name):
    for sample in make_samples(name):
        text = "".join(sample.text())
        assert all(text.count(needle.text) == 1 for needle in sample.needles)
        evidence = " ".join(needle.text for needle in sample.needles).casefold()
        assert all(gold.casefold() in evidence for gold in sample.gold)
        assert not any(gold.casefold() in sample.question.casefold() for gold in sample.gold)


def test_later_statement_of_a_changing_fact_is_the_answer():
    for sample in make_samples("english_change"):
        earlier_needle, later_needle = sorted(sample.needles, key=lambda needle: needle.depth)
        assert later_needle.gold == sample.gold[0]
        assert earlier_needle.gold != sample.gold[0]


@pytest.mark.parametrize(("name", "answer_index"), [("english_hop_3", -1), ("english_hop_3_backward", 0)])
def test_facts_of_a_chain_are_in_forward_or_reverse_order(name, answer_index):
    for sample in make_samples(name):
        needles = sorted(sample.needles, key=lambda needle: needle.depth)
        assert needles[answer_index].gold == sample.gold[0]
        assert not any(needle.gold in sample.question for needle in sample.needles)


def test_unanswerable_questions_have_no_evidence_and_accept_any_refusal():
    for sample in make_samples("english_absent"):
        assert sample.needles == ()
        assert sample.gold == ABSENT


@pytest.fixture
def statements(monkeypatch):
    """All facts by statement, and for each question its relation and the side that it names."""
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


def find_facts(text, facts):
    return [fact for statement, fact in facts.items() if statement in text]


@pytest.mark.parametrize("name", ["english_fact", "english_new", "english_absent"])
def test_only_the_evidence_answers_the_question(name, statements):
    facts, questions = statements
    samples = make_samples(name, count=6, length=3000, questions_per_document=6)
    (text,) = {"".join(sample.text()) for sample in samples}
    for sample in samples:
        relation, side = questions[sample.question]
        evidence_texts = {needle.text for needle in sample.needles}
        other_facts = [fact for fact in find_facts(text, facts) if fact.statement not in evidence_texts]
        assert other_facts
        assert not [f for f in other_facts if f.relation.name == relation and side in {f.subject, f.value}]


@pytest.mark.parametrize("name", ["english_hop_2", "english_hop_3_backward", "english_list"])
def test_only_the_evidence_states_its_relations_of_its_subjects(name, statements):
    for sample in make_samples(name, count=6, length=2500, questions_per_document=6):
        evidence = {needle.text for needle in sample.needles}
        facts = find_facts("".join(sample.text()), statements[0])
        keys = {(fact.relation.name, fact.subject) for fact in facts if fact.statement in evidence}
        assert not [f for f in facts if f.statement not in evidence and (f.relation.name, f.subject) in keys]
        if name != "english_list":
            count = len({relation for relation, _ in keys})
            assert count == int(name.split("_")[2]), "no relation stands in a chain twice"


def test_list_items_are_stated_once_for_several_questions():
    for sample in make_samples("english_list", count=8, length=2500, questions_per_document=8):
        assert len({*sample.gold}) == len(sample.gold) == 3


def test_training_and_held_out_splits_share_no_people():
    for split, held_out in ((":held_out=no", False), ("", True)):
        samples = make_samples(f"english_fact{split}", 24, length=300)
        vocabulary = {
            word for sample in samples for needle in sample.needles for word in re.findall(r"\w+", needle.text)
        }
        assert len(vocabulary & {*list_words("first_names", held_out=held_out)}) > 5
        assert not vocabulary & {*list_words("first_names", held_out=not held_out)}
