"""Reward functions over logged runs: values, missing rewards, gold answers, and rescoring of old runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.conversations import make_conversation
from support.evaluation import KeyTask

from memagent_evaluation.samples import Metric, Sample
from memagent_evaluation.scorers import REWARD_NAMES, score
from memagent_graph import Limits, ScriptedPolicy
from memagent_graph.events import EventKind, ReadEvent
from memagent_graph.prompts import AnswerFormat, extract_last_boxed
from memagent_graph.run_log import Conversation, Outcome, Reward, RunRecord
from memagent_training.data.reward_functions import LoggedReward
from memagent_training.data.training_runs import Gold, TrainingRun
from memagent_training.rewards.conversation_rewards import FormatReward
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.outcome_rewards import BoxedExactMatch, ExactMatch, LenientMatch, StringMatch, TokenF1
from memagent_training.rewards.reward_names import EVIDENCE_REWARDS, OUTCOME_REWARDS, choose_reward, resolve_reward
from memagent_training.training_errors import RewardError

QUESTION = "What is the key of harbor?"
GOLD = Gold(("4711",))


def make_attempt(position: int, text: str | None, *, answers: bool = False, **changes: Any) -> Conversation:
    return make_conversation(position, answers=answers, text=text, **({"id": position, "reads": ()} | changes))


def make_run(
    reply: str | None,
    *,
    answer: str | None = None,
    memories: tuple[str | Conversation, ...] = (),
    rewards: tuple[Reward, ...] = (),
    question: str = QUESTION,
    stop_reason: str = "answered",
    document: str = "k",
    gold: Gold | None = None,
) -> TrainingRun:
    updates = [item if isinstance(item, Conversation) else make_attempt(n, item) for n, item in enumerate(memories)]
    record = RunRecord(
        "r", 1.0, 2.0, question, {"key": document, "name": f"{document}.txt", "size": 1}, {}, stop_reason, answer
    )
    answer_position = updates[-1].position + 1 if updates else 0
    return TrainingRun(record, (*updates, make_attempt(answer_position, reply, answers=True)), (), rewards, gold)


def write_gold(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "gold.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


# Answers


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("so \\boxed{4711}", 1.0),
        ("\\boxed{12}, no, \\boxed{4711.}", 1.0),
        ("\\boxed{4711}, no, \\boxed{12}", 0.0),
        ("it is 4711", 0.0),
        ("\\boxed{4711}" + "x" * 300, 0.0),
        ("x" * 500 + "\\boxed{4711}" + "x" * 288, 1.0),
        ("x" * 500 + "\\boxed{4711}" + "x" * 289, 0.0),
        ("", 0.0),
        (None, None),
    ],
)
def test_boxed_exact_match_follows_the_paper(reply, expected) -> None:
    assert BoxedExactMatch()(make_run(reply, gold=GOLD)) == expected
    assert BoxedExactMatch()(make_run(reply)) is None


def test_gold_answers_in_a_list_are_alternatives() -> None:
    gold = Gold(("Big Apple", "New York City"))
    assert BoxedExactMatch()(make_run("\\boxed{new york city}", gold=gold)) == 1.0
    assert TokenF1()(make_run("", answer="New York", gold=gold)) == pytest.approx(0.8)


def test_run_without_an_answer_earns_0_and_an_unfinished_run_no_reward() -> None:
    assert LenientMatch()(make_run("", stop_reason="no_answer", gold=GOLD)) == 0.0
    assert LenientMatch()(make_run("", stop_reason="max_chunks", gold=GOLD)) is None
    assert TokenF1()(make_run("", gold=GOLD)) is StringMatch()(make_run(None, gold=GOLD)) is None


def test_gold_answers_are_found_by_run_then_by_question(tmp_path) -> None:
    lines = [{"question": QUESTION, "answers": ["1", "2"]}, {"question": "Other?", "answer": "x"}]
    gold = GoldAnswers.load(write_gold(tmp_path, *lines))
    assert gold.find(make_run("")) == Gold(("1", "2"))
    assert gold.find(make_run("", question="Other?")) == Gold(("x",))
    assert gold.find(make_run("", question="Unknown?")) is None
    assert GoldAnswers({"r": Gold(("mine",)), QUESTION: Gold(("theirs",))}).find(make_run("")) == Gold(("mine",))
    assert GoldAnswers({"r": Gold(())}).find(make_run("")) is None


@pytest.mark.parametrize("line", ["{", "[]", '{"question": "q"}', '{"question": 1, "answer": "x"}', '{"answers": [1]}'])
def test_line_without_a_gold_answer_is_named(tmp_path, line) -> None:
    path = tmp_path / "gold.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n' + line)
    with pytest.raises(RewardError, match=r"gold\.jsonl, line 2: no question"):
        GoldAnswers.load(path)
    with pytest.raises(RewardError, match="cannot be read"):
        GoldAnswers.load(tmp_path / "none.jsonl")


def test_question_about_several_documents_has_an_answer_for_each(tmp_path) -> None:
    """Documents match by name or digest; a line without one is for all documents without a line of their own."""
    lines = [
        {"question": QUESTION, "document": "a.txt", "answer": "1"},
        {"question": QUESTION, "document": "b", "answers": ["2", "two"]},
        {"question": QUESTION, "answer": "3"},
        {"question": "Other?", "document": "a", "answer": "4"},
        {"question": QUESTION, "document": "a.txt", "answers": ["1"]},
    ]
    gold = GoldAnswers.load(write_gold(tmp_path, *lines))
    assert [gold.find(make_run("", document=key)) for key in "abc"] == [Gold(("1",)), Gold(("2", "two")), Gold(("3",))]
    assert [gold.find(make_run("", question="Other?", document=key)) for key in "ab"] == [Gold(("4",)), None]


@pytest.mark.parametrize("document", [{}, {"document": "a"}])
def test_contradicting_gold_answers_are_named_with_their_lines(tmp_path, document) -> None:
    lines = [{"question": QUESTION} | document | {"answer": answer} for answer in ("1", "1", "2")]
    with pytest.raises(RewardError, match=r"gold\.jsonl, line 3: the question of line 1 again.*Name the document"):
        GoldAnswers.load(write_gold(tmp_path, *lines))


REPLIES = [
    "\\boxed{red, blue}", "\\boxed{blue and red}", "red", "\\boxed{red}", "red and blue", "", "\\boxed{}", "\\boxed{",
    "<think>\\boxed{red}</think> blue", "\\boxed{red, blue}" + " so it is" * 60, "so red it is, and \\boxed{blue}",
]  # fmt: skip


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("answer_format", list(AnswerFormat))
def test_reward_equals_the_evaluation_score_under_both_names(reply, metric, answer_format) -> None:
    """The run has its gold answer, as in a training loop."""
    gold = ("red", "blue")
    task = KeyTask()
    task.metric = metric
    sample = Sample(task, 1, 0, QUESTION, gold, lambda: iter([""]))
    visible_text = reply.rpartition("</think>")[2].strip()
    answer = extract_last_boxed(visible_text) if answer_format is AnswerFormat.BOXED else visible_text
    scores = score(sample, answer, reply, answer_format=answer_format)
    stop_reason = "no_answer" if answer is None else "answered"
    answer_run = make_run(reply, answer=answer, stop_reason=stop_reason, gold=Gold(gold, metric))
    for column, name in REWARD_NAMES.items():
        expected = getattr(scores, column)
        assert resolve_reward(column)[1](answer_run) == resolve_reward(name)[1](answer_run) == expected, name
        assert resolve_reward(column)[0] == name


def test_each_reward_name_gives_1_for_a_correct_answer_with_gold() -> None:
    right_run = make_run("it is \\boxed{4711}", answer="4711", gold=GOLD)
    rewards = {name: choose_reward(name, has_gold=True)(right_run) for name in OUTCOME_REWARDS}
    assert rewards == {name: None if name in EVIDENCE_REWARDS else 1.0 for name in OUTCOME_REWARDS}
    assert isinstance(choose_reward("strict", has_gold=True), ExactMatch)
    assert choose_reward("strict") == "strict"
    with pytest.raises(RewardError, match=r"'exact'.*Did you mean exact_match"):
        choose_reward("exact", has_gold=True)
    with pytest.raises(RewardError, match=r"'kindness'.*Choose one of: exact_match, boxed_exact_match"):
        resolve_reward("kindness")


# Feedback and composition


def test_logged_reward_is_the_newest_of_its_name_and_source() -> None:
    rewards = (
        Reward("r", "thumbs", 1.0, "person", 1.0),
        Reward("r", "thumbs", 0.0, "person", 2.0),
        Reward("r", "thumbs", 0.5, "scorer", 3.0),
        Reward("r", "thumbs", 0.9, "person", 4.0, conversation=0),
    )
    assert LoggedReward("thumbs")(make_run("", rewards=rewards)) == 0.5
    assert LoggedReward("thumbs", source="person")(make_run("", rewards=rewards)) == 0.0
    assert LoggedReward("other")(make_run("", rewards=rewards)) is None
    assert LoggedReward(None, source="scorer")(make_run("", rewards=rewards)) == 0.5


def test_format_reward_is_1_for_complete_memories_and_answers() -> None:
    overlong_event = ReadEvent(EventKind.OVERLONG, 2, "cut")
    answer_run = make_run(
        "\\boxed{1}",
        memories=(
            "fine",
            make_attempt(1, "long", finish_reason="length"),
            make_attempt(2, "long", events=(overlong_event,)),
            make_attempt(3, "", outcome=Outcome.KEPT_PREVIOUS),
        ),
    )
    assert FormatReward()(answer_run) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert FormatReward()(make_run("unboxed", stop_reason="no_answer")) == FormatReward()(make_run(" ")) == [0.0]
    assert FormatReward()(make_run(None)) is None


def test_format_reward_is_1_for_a_gate_that_keeps_the_memory(make_reader, log) -> None:
    replies = ["KEEP", "maybe", "maybe", "maybe", "REWRITE\nx 1"]
    remaining_replies = iter(replies)
    reader = make_reader(ScriptedPolicy(lambda prompt: next(remaining_replies, "KEEP")), strategy="gated", run_log=log)
    reader.read("word " * 600, "What is x?", run_id="r", limits=Limits(max_chunks=3))
    conversations = tuple(log.conversations("r"))
    assert [conversation.text for conversation in conversations] == replies
    assert FormatReward()(replace(make_run("plain"), conversations_K=conversations)) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_memories_are_parsed_from_completions() -> None:
    memories = (
        "<think>hm</think> first ",
        make_attempt(1, "long long", memory="long"),
        make_attempt(2, "junk", outcome=Outcome.DISCARDED),
        make_attempt(2, "", outcome=Outcome.KEPT_PREVIOUS, attempt=1),
        make_attempt(3, None),
    )
    assert make_run("answer", memories=memories).memories == ["first", "long", "long", "long", None, None]


# Rewards of released code and examples


@pytest.mark.parametrize(
    ("reply", "gold", "expected"),
    [
        ("\\boxed{NewYork}", "New York", 1.0),
        ("\\boxed{new york}", "NewYork", 1.0),
        ("\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("\\boxed{\\tfrac12}", "\\frac12", 1.0),
        ("\\boxed{\\left(5\\right)}", "(5)", 1.0),
        ("\\boxed{90^\\circ}", "90", 1.0),
        ("\\boxed{5\\%}", "5", 1.0),
        ("\\boxed 42$ dollars", "42", 1.0),
        ("\\boxed{New York.}", "New York", 0.0),
        ("\\boxed{the castle}", "castle", 0.0),
        ("\\boxed{-5}", "5", 0.0),
        ("\\boxed{3.5}", "35", 0.0),
        ("\\boxed{1/2}", "12", 0.0),
        ("\\boxed{C++}", "C", 0.0),
        ("\\boxed{7", "7", 0.0),
        ("\\fbox{7}", "7", 0.0),
        ("it is 7", "7", 0.0),
        ("\\boxed{7}" + "x" * 300, "7", 0.0),
        ("<think>\\boxed{7}</think>", "7", 1.0),
    ],
)
def test_released_reward_equals_the_released_code(reply, gold, expected) -> None:
    assert choose_reward("memagent_released", has_gold=True)(make_run(reply, gold=Gold((gold,)))) == expected


def test_example_reward_subtracts_a_cost_for_long_memories() -> None:
    reward = choose_reward(f"{Path(__file__).parents[3] / 'examples/own_reward.py'}:reward")
    assert callable(reward)
    gold = Gold(("4711",))
    rewards = [reward(make_run("", answer="4711", gold=gold, memories=("m" * size,))) for size in (500, 1500, 9000)]
    assert rewards == [1.0, 0.9, 0.5]
    assert reward(make_run("", answer="12", gold=gold)) == 0.0
    assert reward(make_run("", answer="4711")) is None
