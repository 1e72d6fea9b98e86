import math
import random
import sys
from array import array
from pathlib import Path

import pytest
import torch

from memagent_evaluation.english_facts import EnglishFacts, MoreFacts, relations, words
from memagent_graph.policies.profile import require_profile
from memagent_graph.prompts import last_boxed
from memagent_graph.reading.side_by_side import unless_none
from memagent_graph.roles import Parsed
from memagent_graph.strategies.gated import decision, decision_without_stop
from memagent_graph.strategies.recall import memory_and_query
from memagent_graph.strategies.reread import next_question
from memagent_training.forward.scoring import LogProbs
from recipes.embedded.training_examples import Prose
from recipes.language import supervised
from recipes.language.reader_traces import TRAINING_FACTS, TraceMaker
from recipes.language.real_questions import real_questions
from recipes.language.supervised import (
    KEEP_WEIGHT,
    SHIPPED,
    UNSURE_WEIGHT,
    WRITE_WEIGHT,
    Example,
    weighted_loss,
)
from recipes.language.turns import NOT_STATED, LessonTurn

PROSE = (
    "The daemon reads its settings when it starts. If the settings file is missing, the daemon writes a new one. "
    "The log file contains one line for each request that was served. Nothing else is written to the disk. "
    "To stop the daemon, use the stop command of the service manager. Every worker has a queue of its own. "
)
PARSERS = {
    "gated_update": decision_without_stop,
    "gated_update_or_stop": decision,
    "extract": unless_none,
    "map": unless_none,
    "merge": unless_none,
    "recall_update": memory_and_query,
    "decompose": next_question(()),
}


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> TraceMaker:
    path = tmp_path_factory.mktemp("corpus") / "train.txt"
    path.write_text(PROSE * 40, encoding="utf-8")
    return TraceMaker(Prose(path))


@pytest.fixture(scope="module")
def turns(maker: TraceMaker) -> list[LessonTurn]:
    return [turn for seed in range(60) for turn in maker.turns(random.Random(seed), 600, 12, 6)]


def test_every_role_that_ships_words_is_trained(turns: list[LessonTurn]) -> None:
    shipped = {path.stem for path in (Path(SHIPPED) / "templates").glob("*.txt")}
    assert {turn.role for turn in turns} == shipped


def test_every_reply_has_the_form_that_its_role_asks_for(turns: list[LessonTurn]) -> None:
    prompts = require_profile(SHIPPED).prompts
    for turn in turns:
        if parse := PARSERS.get(turn.role):
            assert isinstance(parse(turn.reply, prompts), Parsed), turn
        if turn.role in {"answer", "question"}:
            assert last_boxed(turn.reply)


def test_what_is_written_stands_in_the_prompt(turns: list[LessonTurn]) -> None:
    prompts = require_profile(SHIPPED).prompts
    for turn in turns:
        if turn.role in {"update", "extract", "integrate", "merge"} and turn.reply != "none":
            seen = " ".join(turn.content(prompts).split())
            for word in turn.reply.replace(",", " ").replace(":", " ").split():
                assert word.strip(".") in seen, (word, turn)


def test_a_gate_keeps_exactly_where_an_update_would_copy(turns: list[LessonTurn]) -> None:
    for turn in turns:
        if turn.role == "gated_update" and turn.reply != "KEEP":
            assert turn.reply.removeprefix("REWRITE\n") != turn.fields["memory"]


def test_a_section_that_answers_is_never_said_to_have_nothing_while_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(PROSE * 40, encoding="utf-8")
    maker = TraceMaker(Prose(tmp_path / "train.txt"))
    answered = 0
    for seed in range(400):
        for turn in maker.turns(random.Random(seed), 300, 12, 0):
            if turn.role in {"update", "map", "extract"} and turn.fields["memory"] in {"", "none"}:
                stands_here = turn.question in {each.question for each in real_questions(turn.fields["chunk"])}
                answered += stands_here
                assert not (stands_here and turn.reply == "none"), turn
    assert answered


def test_an_empty_memory_is_answered_with_not_stated(turns: list[LessonTurn]) -> None:
    empty = [turn for turn in turns if turn.role == "answer" and turn.fields["memory"] in {"", "none"}]
    assert empty
    assert all(turn.reply == f"\\boxed{{{NOT_STATED}}}" for turn in empty)


def test_equal_seeds_give_equal_turns(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(PROSE * 40, encoding="utf-8")
    maker = TraceMaker(Prose(tmp_path / "train.txt"))
    assert maker.turns(random.Random(1), 500, 5, 2) == maker.turns(random.Random(1), 500, 5, 2)


def test_a_turn_writes_where_memory_comes_out_changed(turns: list[LessonTurn]) -> None:
    updates = [turn for turn in turns if turn.role == "update"]
    assert {turn.writes for turn in updates} == {True, False}
    for turn in updates:
        before = "none" if turn.fields["memory"] == "" else turn.fields["memory"]
        assert turn.writes == (turn.reply != before), turn


def test_a_fact_that_has_to_be_written_weighs_more_than_one_to_be_kept() -> None:
    def loss(*, writes: bool, opening: int = 0) -> tuple[float, float]:
        mask_BT = torch.tensor([[True, True, True, False]])
        scores = LogProbs(torch.tensor([[-1.0, -2.0, -3.0, 0.0]]), None, mask_BT)
        example = Example("update", array("q", [1]), array("q", [2, 3, 4]), writes, opening)
        total, weight = weighted_loss([example], scores)
        return float(total), weight

    def expected(*decisive: float) -> tuple[float, float]:
        unsure = [1 + UNSURE_WEIGHT * (1 - math.exp(-loss)) for loss in (1, 2, 3)]
        weights = [one * other for one, other in zip(unsure, decisive, strict=True)]
        return sum(loss * weight for loss, weight in zip((1, 2, 3), weights, strict=True)), sum(weights)

    assert loss(writes=False) == pytest.approx(expected(KEEP_WEIGHT, KEEP_WEIGHT, 1))
    assert loss(writes=True) == pytest.approx(expected(WRITE_WEIGHT, WRITE_WEIGHT, 1))
    assert loss(writes=True, opening=1) == pytest.approx(expected(1, WRITE_WEIGHT, WRITE_WEIGHT))


def test_questions_on_an_excerpt_are_answered_by_it_or_not_at_all(maker: TraceMaker) -> None:
    found = [turn for seed in range(60) for turn in maker.turns_on_excerpt(random.Random(seed), 300, count=12)]
    assert {turn.role for turn in found} == {"question"}
    answered = [turn for turn in found if turn.writes]
    for turn in answered:
        answer = last_boxed(turn.reply)
        assert answer
        excerpt = " ".join(turn.fields["chunk"].split()).lower()
        assert all(part.lower() in excerpt for part in ([answer] if answer.lower() in excerpt else answer.split(", ")))
    unanswered = [turn for turn in found if not turn.writes]
    assert {turn.reply for turn in unanswered} == {f"\\boxed{{{NOT_STATED}}}"}
    assert 0.1 < len(unanswered) / len(found) < 0.4


def test_the_facts_for_training_have_none_of_what_is_held_out() -> None:
    more = MoreFacts.read(TRAINING_FACTS)
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
    more = MoreFacts.read(TRAINING_FACTS)
    facts = EnglishFacts(1, more=more)
    assert len({each.name for each in facts.relations}) == len(facts.relations) > 150
    for relation in more.relations:
        for texts in (relation.statements, relation.questions, relation.subject_questions):
            assert relation.worded(texts, held_out=False) == texts
        fact = facts.fact(relation)
        assert fact.subject.lower() in fact.statement.lower()
        assert fact.value.lower() in fact.statement.lower()
        question, answer = facts.question(fact)
        named = fact.value if answer == fact.subject else fact.subject
        assert named.lower() in question.lower()
        assert not set("{}") & set(fact.statement + question)


def test_what_training_cannot_start_from_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, corpus = tmp_path / "base", tmp_path / "corpus"

    def refusal(*more: str) -> str:
        arguments = ["supervised", "--base", str(base), "--corpus", str(corpus), "--out", str(tmp_path / "out"), *more]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit, match="2"):
            supervised.main()
        return capsys.readouterr().err

    assert "memagent policy add smollm2-untrained" in refusal()
    base.mkdir()
    (base / "config.json").write_text("{}", encoding="utf-8")
    assert "recipes.embedded.corpus" in refusal()
    corpus.mkdir()
    (corpus / "train.txt").write_text(PROSE, encoding="utf-8")
    assert "--excerpts is a share, from 0 to 1" in refusal("--excerpts", "2")
    assert not (tmp_path / "out").exists()
