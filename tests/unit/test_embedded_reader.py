"""The lockstep readers that the embedded policy is measured with: what they compute is what the graph computes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch

from memagent_evaluation.planted_facts import PlantedFacts
from memagent_graph import Document, LocalPolicy, MemAgent, UpdateRule, UpdateRules
from recipes.embedded.batched_reader import MAX_REPLY_TOKENS, Reader, ReadOutcome, ReplyRequest, default_prose
from recipes.embedded.batches import collate
from recipes.embedded.documents import (
    Question,
    Setting,
    questions_alone,
    questions_with_foreign_facts,
)
from recipes.embedded.training_examples import EMPTY, Row, RowBranch

SHIPPED = Path(__file__).resolve().parents[2] / "memagent_graph" / "embedded"


@pytest.fixture
def reader() -> Reader:
    return Reader(SHIPPED, seed=1)


@pytest.fixture
def questions(reader: Reader) -> list[Question]:
    facts = PlantedFacts(random.Random(4), held_out=True, number_share=1.0)
    return questions_with_foreign_facts(reader.tokenizer, default_prose(), Setting(4, foreign=True), facts, 2)


def told(outcomes: list[ReadOutcome]) -> list[tuple[str, int | None]]:
    return [(outcome.answer, outcome.lost_at) for outcome in outcomes]


@pytest.mark.parametrize("guarded", [False, True])
async def test_it_answers_as_the_graph_does(
    reader: Reader, questions: list[Question], tmp_path: Path, guarded: bool
) -> None:
    (found,) = reader.read(questions, [0.0], guarded=guarded)
    rules = UpdateRules(invented=UpdateRule.KEEP_PREVIOUS if guarded else UpdateRule.ACCEPT)
    async with MemAgent(LocalPolicy(SHIPPED), rules=rules, store=tmp_path, run_log=False) as agent:
        document = Document.from_text("".join(questions[0].chunks))
        read = [await agent.aread(document, question.problem) for question in questions]
    assert [outcome.answer for outcome in found] == [result.answer for result in read]
    assert sum(outcome.is_right for outcome in found) >= 2


def test_reading_at_two_temperatures_is_reading_at_each(reader: Reader, questions: list[Question]) -> None:
    (alone,) = reader.read(questions, [0.0])
    greedy, hot = reader.read(questions, [0.0, 3.0])
    assert told(greedy) == told(alone)
    assert [outcome.risk for outcome in greedy] == pytest.approx([outcome.risk for outcome in alone], rel=1e-3)
    assert any(outcome.lost_at is not None for outcome in hot)  # samples are no copies of the greedy choice


def test_a_guarded_reader_keeps_its_memory_where_the_policy_makes_something_up(
    reader: Reader, questions: list[Question]
) -> None:
    whole = [question for question in questions if question.whole]
    (plain,) = reader.read(whole, [2.0])
    (guarded,) = reader.read(whole, [2.0], guarded=True)
    lost, kept = ([outcome for outcome in way if outcome.lost_at is not None] for way in (plain, guarded))
    assert len(lost) > len(kept)


def test_readers_at_one_temperature_sample_for_themselves(reader: Reader, questions: list[Question]) -> None:
    question = questions[0]
    prompt = reader.form.question(EMPTY, question.problem)
    trunk = reader.form.trunk(question.chunks[0])
    replies = reader.complete(trunk, [ReplyRequest(prompt, reader.form.reply(EMPTY), 2.0)] * 12)
    assert len({reply for reply, _ in replies}) > 1


def test_a_value_that_is_lost_is_not_read_on_for(reader: Reader) -> None:
    facts = PlantedFacts(random.Random(5), held_out=True, number_share=1.0)
    asked = questions_alone(reader.tokenizer, default_prose(), Setting(3, foreign=False), facts, 4)
    (found,) = reader.read(asked, [4.0])
    lost = [outcome for outcome in found if outcome.lost_at is not None]
    assert lost
    for outcome in lost:
        assert outcome.answer == ""
        assert not outcome.is_right
        assert outcome.lost_at is not None
        assert outcome.overwrites <= outcome.lost_at


def test_what_is_expected_of_a_reply_does_not_change_it(reader: Reader, questions: list[Question]) -> None:
    """A right guess costs one pass; after a wrong one the reply is generated, with a cache, and is the same."""
    memories = [str(questions[0].value), str(questions[1].value), EMPTY, "a dog that barked"]
    trunk = reader.form.trunk(questions[0].chunks[0])
    prompts = [reader.form.question(memory, questions[0].problem) for memory in memories]
    guessed, wrong = (
        [ReplyRequest(p, reader.form.reply(g), 0.0) for p, g in zip(prompts, guesses, strict=True)]
        for guesses in (memories, ["x"] * len(memories))
    )
    replies = [reply for reply, _ in reader.complete(trunk, wrong)]
    assert replies == [reply for reply, _ in reader.complete(trunk, guessed)]
    assert len(set(replies)) > 2
    for prompt, reply in zip(prompts, replies, strict=True):
        ids: list[int] = []
        while not ids or (ids[-1] != reader.end and len(ids) < MAX_REPLY_TOKENS):
            (logits,) = reader.logits(Row(trunk, [RowBranch.of(prompt + ids, [reader.end], True, "read", 1.0)]))
            ids += reader.choose(logits, 0.0)
        assert reader.form.encoding.decode([token for token in ids if token != reader.end]).strip() == reply


def test_what_nobody_wants_is_left_out_of_the_last_layer_only(reader: Reader) -> None:
    form = reader.form
    branches = [
        RowBranch.of(form.question(memory, "What is the launch code?"), form.reply(memory), True, "read", 1.0)
        for memory in (EMPTY, "48213")
    ]
    batch = collate([Row(form.trunk("The launch code is 48213."), branches)])
    everywhere = torch.arange(len(batch.tokens))
    with torch.no_grad():
        all_logits = reader.policy.logits(replace(batch, wanted=everywhere))
        wanted = reader.policy.logits(batch)
    torch.testing.assert_close(wanted, all_logits[batch.wanted], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunks", [1, 2])
def test_facts_are_planted_where_no_sentence_ends(reader: Reader, chunks: int) -> None:
    facts = PlantedFacts(random.Random(6), held_out=True, number_share=1.0)
    asked = questions_with_foreign_facts(reader.tokenizer, "words " * 3000, Setting(chunks, foreign=True), facts, 0)
    assert len(asked) == max(1, chunks // 2)
    assert all(str(question.value) in "".join(question.chunks) for question in asked)


@pytest.mark.parametrize(
    ("memory", "stands"),
    [("48213", True), ("none 48213.", True), ("482137", False), ("148213", False), ("48213 48213", True), ("", False)],
)
def test_a_value_with_further_digits_is_lost(memory: str, stands: bool) -> None:
    question = Question("What?", "48213", ("a", "b"), 0, whole=True)
    state = ReadOutcome(question, 0.0, memory="48213")
    state.overwrite(1, memory, 0.0)
    assert (state.lost_at is None) is (stands or not memory), "an empty reply leaves the memory as it is"
