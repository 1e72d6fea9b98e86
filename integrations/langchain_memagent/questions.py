"""Questions: how models pass them to tools, and how to ask about tool results and histories within the token budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from langchain_core.messages import BaseMessage, HumanMessage
from pydantic import BeforeValidator

from langchain_memagent.transcripts import format_call, get_text
from memagent_graph.tokenizers import Tokenizer
from memagent_graph.tokenizers.pieces import shorten_text

Questions: TypeAlias = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""The questions of a tool call; a single question may be passed as plain text, as models often do."""

SOURCE = "lc_source"
"""Key in a message's `additional_kwargs` by which middlewares mark the messages that they add."""

STANDING_QUESTION = "What will matter later: who wants what, names, numbers, facts, decisions, open tasks?"
"""The question for reading a dialogue that has no request."""

_MIN_TOKENS_FOR_CONTEXT = 256
"""If the budget is below 256 tokens, only the request is used. Policies with such budgets were trained on single
questions: the embedded policy finds ten of ten facts with these, and none if another sentence follows the question."""


def find_latest_request(messages: Sequence[BaseMessage]) -> tuple[int, str] | None:
    """Return the index and text of the user's last message; None if there is none.

    Messages that a middleware added do not count.
    """
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        if isinstance(message, HumanMessage) and SOURCE not in message.additional_kwargs:
            text = get_text(message.content).strip()
            if text:
                return position, text
    return None


def make_result_question(request: str | None, tool: str, arguments: Any, tokens: int, tokenizer: Tokenizer) -> str:
    """Return the question for reading a tool's result: the user's request, then the call's name and arguments.

    Long arguments are cut to a third of the budget, then the request is cut; "[...]" marks the cuts. If the budget is
    below `_MIN_TOKENS_FOR_CONTEXT`, only the request is used.
    """
    call = shorten_text(format_call(tool, arguments), tokens // 3, tokenizer.count)
    if not request:
        return shorten_text(f"What does the result of {call} say?", tokens, tokenizer.count)
    return _append_context(request, f"\n(The text is the result of {call}.)", tokens, tokenizer)


def make_history_question(request: str | None, tokens: int, tokenizer: Tokenizer) -> str:
    """Return the question for reading the older part of a dialogue: the user's request and `STANDING_QUESTION`.

    If the budget is below `_MIN_TOKENS_FOR_CONTEXT`, only the request is used.
    """
    if not request:
        return shorten_text(STANDING_QUESTION, tokens, tokenizer.count)
    return _append_context(request, f"\n{STANDING_QUESTION}", tokens, tokenizer)


def _append_context(request: str, context: str, tokens: int, tokenizer: Tokenizer) -> str:
    if tokens < _MIN_TOKENS_FOR_CONTEXT:
        return shorten_text(request, tokens, tokenizer.count)
    room = max(1, tokens - tokenizer.count(context))
    return shorten_text(shorten_text(request, room, tokenizer.count) + context, tokens, tokenizer.count)
