"""Facts in plain English: splits, statements, questions, near misses, changes and chains."""

import random
from itertools import pairwise

import pytest

from memagent_evaluation.english_facts import EnglishFacts, list_relations, list_words

SEEDS = range(200)


def test_splits_share_no_people_towns_or_wordings() -> None:
    for kind in ("first_names", "family_names", "towns"):
        assert all(list_words(kind, held_out=held_out) for held_out in (False, True))
        assert not set(list_words(kind, held_out=False)) & set(list_words(kind, held_out=True))
    for relation in list_relations():
        for texts in (relation.statements, relation.questions):
            if len(texts) >= 3 and not relation.held_out:
                splits = [set(relation.select_wordings(texts, held_out=held_out)) for held_out in (False, True)]
                assert not set.intersection(*splits)


def test_held_out_relations_are_drawn_only_on_request() -> None:
    held_out = {relation.name for relation in list_relations() if relation.held_out}
    assert len(held_out) >= 5
    names = {EnglishFacts(seed).draw_fact().relation.name for seed in SEEDS}
    assert not names & held_out
    names = {EnglishFacts(seed, held_out=True, held_out_relations=True).draw_fact().relation.name for seed in SEEDS}
    assert names <= held_out


@pytest.mark.parametrize("held_out", [False, True])
def test_statement_is_a_sentence_with_its_subject_and_value(held_out: bool) -> None:
    for seed in SEEDS:
        fact = EnglishFacts(seed, held_out=held_out).draw_fact()
        assert fact.subject.lower() in fact.statement.lower()
        assert fact.value.lower() in fact.statement.lower()
        assert fact.statement[0] == fact.statement[0].upper()
        assert fact.statement.endswith(".")
        assert "{" not in fact.statement


def test_question_names_one_side_of_the_fact_and_asks_for_the_other() -> None:
    for seed in SEEDS:
        facts = EnglishFacts(seed)
        fact = facts.draw_fact()
        question, answer = facts.draw_question(fact)
        assert {answer} <= {fact.subject, fact.value}
        other_side = fact.value if answer == fact.subject else fact.subject
        assert other_side.lower() in question.lower()
        assert answer.lower() not in question.lower().replace(other_side.lower(), "")
        assert "{" not in question


def test_near_misses_share_neither_subject_nor_value_in_the_same_relation() -> None:
    founding_year = next(relation for relation in list_relations() if relation.name == "founded_year")
    for seed in SEEDS:
        facts = EnglishFacts(seed)
        fact = facts.draw_fact(founding_year)
        near_misses = [facts.draw_near_miss(fact) for _ in range(3)]  # groups have three relations
        assert len({(item.relation.name, item.subject) for item in [fact, *near_misses]}) == 4
        fact = facts.draw_fact()
        near_miss = facts.draw_near_miss(fact)
        is_same_relation = near_miss.relation.name == fact.relation.name
        assert not (is_same_relation and (near_miss.subject == fact.subject or near_miss.value == fact.value))


def test_symmetric_relations_draw_each_person_once() -> None:
    neighbours = next(relation for relation in list_relations() if relation.name == "neighbour_of")
    for seed in range(20):
        facts = EnglishFacts(seed, held_out=True)
        neighbour_facts = [facts.draw_fact(neighbours) for _ in range(20)]
        assert len({person for item in neighbour_facts for person in (item.subject, item.value)}) == 40


def test_change_replaces_exactly_one_side_of_a_fact() -> None:
    for seed in SEEDS:
        facts = EnglishFacts(seed)
        old = facts.draw_fact(facts.draw_relation(changes=True))
        new = facts.draw_change(old)
        assert (new.subject == old.subject) != (new.value == old.value)


@pytest.mark.parametrize("hops", [2, 3])
def test_question_about_a_chain_does_not_name_intermediate_people(hops: int) -> None:
    for seed in SEEDS:
        chain, question = EnglishFacts(seed).draw_chain(hops)
        assert len(chain) == hops
        for link, next_link in pairwise(chain):
            assert next_link.subject in {link.subject, link.value}
            assert next_link.subject not in question
        assert chain[-1].value.lower() not in question.lower()


def test_equal_seeds_give_equal_facts() -> None:
    assert EnglishFacts(5).draw_fact() == EnglishFacts(random.Random(5)).draw_fact()
