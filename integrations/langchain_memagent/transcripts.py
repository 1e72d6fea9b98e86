"""Formats messages as text for a policy, makes the questions for reading it, and finds where a history may be cut.

A cut never separates tool calls from their results.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import BeforeValidator

from memagent_graph.tokenizers import Tokenizer
from memagent_graph.tokenizers.pieces import shorten_text

_SPEAKERS = ((HumanMessage, "User"), (AIMessage, "Assistant"), (SystemMessage, "System"))


def get_messages(state: Any) -> list[AnyMessage]:
    """Return the messages of an agent's state of any type."""
    if isinstance(state, list):
        return state
    messages = state.get("messages") if isinstance(state, Mapping) else getattr(state, "messages", None)
    return list(messages or [])


def format_transcript(messages: Iterable[BaseMessage]) -> str:
    """Return the messages as a dialogue, one paragraph each: the speaker, tool calls with arguments, and their results.

    Blocks that are not text are named by their kind.
    """
    tool_names: dict[str, str] = {}
    paragraphs: list[str] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            tool_name = message.name or tool_names.get(message.tool_call_id, "a tool")
            label = "Error" if message.status == "error" else "Result"
            paragraphs.append(f"{label} of {tool_name}: {get_text(message.content)}")
            continue
        text = get_text(message.content)
        if text.strip():
            speaker = next((name for kind, name in _SPEAKERS if isinstance(message, kind)), message.type.capitalize())
            paragraphs.append(f"{speaker}: {text}")
        if isinstance(message, AIMessage):
            for call in message.tool_calls:
                tool_names[call["id"] or ""] = call["name"]
                paragraphs.append(f"Assistant calls {format_call(call['name'], call['args'])}")
    return "\n\n".join(paragraphs)


def format_call(name: str, arguments: Any) -> str:
    """Return a tool call as one line."""
    return f"{name}({json.dumps(arguments, ensure_ascii=False, default=str)})"


def get_text(content: str | Sequence[str | dict[str, Any]]) -> str:
    """Return a message's content as text; blocks that are not text become their kind in brackets."""
    if isinstance(content, str):
        return content
    texts = ((get_block_text(block), block) for block in content if _is_shown(block))
    return "\n".join(f"[{_get_block_kind(block)}]" if text is None else text for text, block in texts)


def get_block_text(block: str | dict[str, Any]) -> str | None:
    """Return the text of a content block; None for an image or anything else that is not text."""
    if isinstance(block, str):
        return block
    text = block.get("text")
    return text if block.get("type") == "text" and isinstance(text, str) else None


def replace_text(content: str | list[str | dict[str, Any]], text: str) -> str | list[str | dict[str, Any]]:
    """Return a message's content with another text; blocks that are not text are kept."""
    other_blocks = [] if isinstance(content, str) else [block for block in content if get_block_text(block) is None]
    return [{"type": "text", "text": text}, *other_blocks] if other_blocks else text


def find_safe_cuts(messages: Sequence[BaseMessage]) -> list[int]:
    """Return every position at which the messages may be divided, in ascending order, always including 0.

    A tool call and its results stay together, a call that still waits for its results is in the later part, and the
    later part never begins with a tool result, which model servers refuse.
    """
    inseparable: set[int] = set()
    call_positions: dict[str, int] = {}
    open_call_positions: dict[str, int] = {}
    for position, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            call_position = call_positions.get(message.tool_call_id, position - 1)
            inseparable.update(range(call_position + 1, position + 1))
            open_call_positions.pop(message.tool_call_id, None)
            continue
        # The next speaker ends the wait for results, or a call without one would keep all later messages together.
        open_call_positions = {}
        if isinstance(message, AIMessage):
            calls_of_message = (*message.tool_calls, *message.invalid_tool_calls)
            open_call_positions = dict.fromkeys((call["id"] or "" for call in calls_of_message), position)
            call_positions.update(open_call_positions)
    for call_position in open_call_positions.values():
        inseparable.update(range(call_position + 1, len(messages) + 1))
    return [position for position in range(len(messages) + 1) if position == 0 or position not in inseparable]


def _get_block_kind(block: str | dict[str, Any]) -> str:
    return str(block.get("type", "something")) if isinstance(block, dict) else "text"


def _is_shown(block: str | dict[str, Any]) -> bool:
    """Return whether a block is shown. Tool calls are not (`tool_calls` has them), and neither is reasoning."""
    return _get_block_kind(block) not in {
        "tool_use",
        "tool_call",
        "function_call",
        "reasoning",
        "thinking",
        "redacted_thinking",
    }


Questions: TypeAlias = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""The questions of a tool call; a single question may be passed as plain text, as models often do."""

SOURCE_KEY = "lc_source"
"""Key in a message's `additional_kwargs` by which middlewares mark the messages that they add."""

STANDING_QUESTION = "What will matter later: who wants what, names, numbers, facts, decisions, open tasks?"
"""The question for reading a dialogue that has no request."""

_MIN_TOKENS_FOR_CONTEXT = 256
"""If the budget is below 256 tokens, only the request is used. Policies with such budgets were trained on single
questions: the embedded policy finds ten of ten facts with these, and none if a sentence follows the question."""


def find_latest_request(messages: Sequence[BaseMessage]) -> tuple[int, str] | None:
    """Return the index and text of the user's last message; None if there is none.

    Messages that a middleware added do not count.
    """
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        if isinstance(message, HumanMessage) and SOURCE_KEY not in message.additional_kwargs:
            text = get_text(message.content).strip()
            if text:
                return position, text
    return None


def make_result_question(request: str | None, tool: str, arguments: Any, max_tokens: int, tokenizer: Tokenizer) -> str:
    """Return the question for reading a tool's result: the user's request, then the call's name and arguments.

    Long arguments are cut to a third of the budget, then the request is cut; "[...]" marks the cuts. If the budget is
    below `_MIN_TOKENS_FOR_CONTEXT`, only the request is used.
    """
    call = shorten_text(format_call(tool, arguments), max_tokens // 3, tokenizer.count)
    if not request:
        return shorten_text(f"What does the result of {call} say?", max_tokens, tokenizer.count)
    return _append_context(request, f"\n(The text is the result of {call}.)", max_tokens, tokenizer)


def make_history_question(request: str | None, max_tokens: int, tokenizer: Tokenizer) -> str:
    """Return the question for reading the older part of a dialogue: the user's request and `STANDING_QUESTION`.

    If the budget is below `_MIN_TOKENS_FOR_CONTEXT`, only the request is used.
    """
    if not request:
        return shorten_text(STANDING_QUESTION, max_tokens, tokenizer.count)
    return _append_context(request, f"\n{STANDING_QUESTION}", max_tokens, tokenizer)


def _append_context(request: str, context: str, max_tokens: int, tokenizer: Tokenizer) -> str:
    if max_tokens < _MIN_TOKENS_FOR_CONTEXT:
        return shorten_text(request, max_tokens, tokenizer.count)
    request_tokens = max(1, max_tokens - tokenizer.count(context))
    return shorten_text(shorten_text(request, request_tokens, tokenizer.count) + context, max_tokens, tokenizer.count)
