"""Requests taken apart: which parts are read, and which text is the question."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent_graph import load_tokenizer
from memagent_serve.chat_requests import ChatRequest, PartPosition, parse_chat, parse_fields
from memagent_serve.long_parts import (
    ReadingPlan,
    compose_question,
    count_part_tokens,
    count_prompt_tokens,
    plan_reading,
)

TOKENIZER = load_tokenizer("embedded")


def request(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return parse_chat(parse_fields(json.dumps({"model": "m", "messages": list(messages), **fields}).encode()))


def say(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def plan(chat: ChatRequest, room: int, findings: int = 100) -> ReadingPlan:
    sizes = count_part_tokens(chat, TOKENIZER)
    total = count_prompt_tokens(chat, sizes, TOKENIZER)
    return plan_reading(chat, sizes, prompt_tokens=total, max_tokens=room, findings_tokens=findings)


# What is read


def test_the_fewest_and_largest_parts_are_read() -> None:
    chat = request(say("user", "word " * 2000), say("user", "some " * 300), say("user", "Which?"))
    reading = plan(chat, 1000)
    assert reading.positions == (PartPosition(0, 0),)
    assert reading.history_length == 0
    assert reading.latest_index == 2


def test_a_long_system_message_is_read_and_everything_where_nothing_fits() -> None:
    chat = request(say("system", "rule " * 2000), say("user", "Which?"))
    assert plan(chat, 500).positions == (PartPosition(0, 0),)
    chat = request(say("system", "rule " * 200), say("user", "word " * 200))
    assert plan(chat, 150).positions == (PartPosition(0, 0), PartPosition(1, 0))


def test_of_many_small_messages_the_older_are_read_as_one() -> None:
    messages = [say("user" if n % 2 == 0 else "assistant", f"message {n} " + "word " * 20) for n in range(80)]
    chat = request(say("system", "Be brief."), *messages, say("user", "Which?"))
    reading = plan(chat, 1000)
    assert 0 < reading.history_length < 81
    assert reading.positions == ()
    rest = TOKENIZER.count(" ".join(str(message["content"]) for message in messages[reading.history_length - 1 :]))
    assert rest < 1000


def test_a_tool_result_is_never_parted_from_its_call() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rounds: list[dict[str, Any]] = []
    for n in range(40):
        rounds.append(say("assistant", None, tool_calls=[{**call, "id": f"c{n}"}]))
        rounds.append(say("tool", "word " * 30, tool_call_id=f"c{n}"))
    chat = request(say("user", "Find it."), *rounds)
    reading = plan(chat, 900)
    assert reading.history_length
    assert chat.messages[reading.history_length].role == "assistant"
    assert reading.latest_index == 0, "the user's request stays"


# The question


def test_the_last_user_message_is_the_question_with_system_and_earlier_messages() -> None:
    chat = request(
        say("system", "Answer in French."),
        say("user", "word " * 3000),
        say("assistant", "I see."),
        say("user", "Which key?"),
    )
    question = compose_question(chat, plan(chat, 1000), TOKENIZER, 1024, with_context=True)
    assert question == (
        "Instructions: Answer in French.\n\nEarlier in the conversation: Assistant: I see.\n\nQuestion: Which key?"
    )
    assert compose_question(chat, plan(chat, 1000), TOKENIZER, 1024, with_context=False) == "Which key?"
    assert compose_question(chat, plan(chat, 1000), TOKENIZER, 64, with_context=True) == "Which key?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Summarise this:\n\n{}\n\nWhich key?", "Summarise this:\n[...]\nWhich key?"),
        ("{}\n\nWhich key?\n", "Which key?"),
    ],
)
def test_of_one_long_message_its_first_and_last_paragraphs_are_the_question(text: str, expected: str) -> None:
    chat = request(say("user", text.format("word " * 5000)))
    question = compose_question(chat, plan(chat, 1000), TOKENIZER, 600, with_context=True)
    assert question.endswith(expected)
    assert TOKENIZER.count(question) <= 600


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=20), st.integers(1, 60)),
        min_size=1,
        max_size=4,
    ),
    st.integers(8, 400),
    st.booleans(),
)
def test_a_question_is_within_its_budget_and_says_something(
    messages: list[tuple[str, str, int]], tokens: int, context: bool
) -> None:
    chat = request(*(say(role, text * times) for role, text, times in messages))
    question = compose_question(chat, plan(chat, 100, 25), TOKENIZER, tokens, with_context=context)
    assert question.strip() or all(not text.strip() for _, text, _ in messages)
    assert TOKENIZER.count(question) <= tokens
