"""Analysis of chat requests: which parts are read, and which text is the question."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent_graph import load_tokenizer
from memagent_serve.chat_requests import ChatMessage, ChatRequest, PartPosition, parse_chat, parse_fields
from memagent_serve.long_parts import ReadingPlan, compose_question, plan_reading

TOKENIZER = load_tokenizer("embedded")


def make_request(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return parse_chat(parse_fields(json.dumps({"model": "m", "messages": list(messages), **fields}).encode()))


def make_message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def make_plan(chat: ChatRequest, room: int, findings: int = 100) -> ReadingPlan:
    return plan_reading(chat, TOKENIZER, max_tokens=room, findings_tokens=findings)


# What is read


def test_as_few_parts_as_possible_are_read_largest_first() -> None:
    chat = make_request(*(make_message("user", text) for text in ("word " * 2000, "some " * 300, "Which?")))
    plan = make_plan(chat, 1000)
    assert (plan.positions, plan.history_length, plan.latest_index) == ((PartPosition(0, 0),), 0, 2)


def test_long_system_message_is_read_and_all_parts_if_none_fits() -> None:
    chat = make_request(make_message("system", "rule " * 2000), make_message("user", "Which?"))
    assert make_plan(chat, 500).positions == (PartPosition(0, 0),)
    chat = make_request(make_message("system", "rule " * 200), make_message("user", "word " * 200))
    assert make_plan(chat, 150).positions == (PartPosition(0, 0), PartPosition(1, 0))


def test_older_ones_of_many_small_messages_are_read_as_history() -> None:
    texts = [f"message {number} " + "word " * 20 for number in range(80)]
    messages = [make_message(role, text) for role, text in zip(["user", "assistant"] * 40, texts, strict=True)]
    chat = make_request(make_message("system", "Be brief."), *messages, make_message("user", "Which?"))
    plan = make_plan(chat, 1000)
    assert 0 < plan.history_length < 81
    assert plan.positions == ()
    assert TOKENIZER.count(" ".join(texts[plan.history_length - 1 :])) < 1000


def test_tool_result_is_never_separated_from_its_call_whose_arguments_are_not_decoded(monkeypatch) -> None:
    monkeypatch.setattr(ChatMessage, "get_field", None)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool_messages: list[dict[str, Any]] = []
    for number in range(40):
        tool_messages.append(make_message("assistant", None, tool_calls=[{**call, "id": f"c{number}"}]))
        tool_messages.append(make_message("tool", "word " * 30, tool_call_id=f"c{number}"))
    chat = make_request(make_message("user", "Find it."), *tool_messages)
    plan = make_plan(chat, 900)
    assert chat.messages[plan.history_length].role == "assistant"
    assert plan.latest_index == 0, "the user's request stays"


def test_processor_time_of_a_plan_grows_only_linearly_with_the_messages() -> None:
    chat = make_request(*[make_message("user", "hi")] * 20_000)
    start = time.process_time()
    assert make_plan(chat, 4000).history_length > 10_000
    assert time.process_time() - start < 20, "a walk through all messages for each message takes a minute"


# The question


def test_question_is_the_last_user_message_with_context() -> None:
    chat = make_request(
        make_message("system", "Answer in French."),
        make_message("user", "word " * 3000),
        make_message("assistant", "I see."),
        make_message("user", "Which key?"),
    )
    question = compose_question(make_plan(chat, 1000), TOKENIZER, 1024, with_context=True)
    assert question == (
        "Instructions: Answer in French.\n\nEarlier in the conversation: Assistant: I see.\n\nQuestion: Which key?"
    )
    assert compose_question(make_plan(chat, 1000), TOKENIZER, 1024, with_context=False) == "Which key?"
    assert compose_question(make_plan(chat, 1000), TOKENIZER, 64, with_context=True) == "Which key?"


def test_file_without_text_belongs_to_the_question_before_it_unless_that_has_a_reply() -> None:
    question, file = make_message("user", "Which?"), make_message("user", [{"type": "file"}])
    for reply, beginning in ((None, "Which?"), ("", "Which?"), ("Send it.", "What does the text say?")):
        plan = make_plan(make_request(question, make_message("assistant", reply), file), 1000)
        question_text = compose_question(plan, TOKENIZER, 128, with_context=True)
        assert question_text.startswith(beginning) and question_text.endswith("Which?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Summarise this:\n\n{}\n\nWhich key?", "Summarise this:\n[...]\nWhich key?"),
        ("{}\n\nWhich key?\n", "Which key?"),
    ],
)
def test_question_of_a_long_message_is_its_first_and_last_paragraph(text: str, expected: str) -> None:
    chat = make_request(make_message("user", text.format("word " * 5000)))
    question = compose_question(make_plan(chat, 1000), TOKENIZER, 600, with_context=True)
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
def test_question_is_within_its_budget_and_not_empty(
    messages: list[tuple[str, str, int]], max_tokens: int, with_context: bool
) -> None:
    chat = make_request(*(make_message(role, text * times) for role, text, times in messages))
    question = compose_question(make_plan(chat, 100, 25), TOKENIZER, max_tokens, with_context=with_context)
    assert question.strip() or all(not text.strip() for _, text, _ in messages)
    assert TOKENIZER.count(question) <= max_tokens
