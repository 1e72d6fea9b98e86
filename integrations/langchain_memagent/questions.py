"""Questions: how models pass them to tools, and how they are made for tool results and histories, within the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from langchain_core.messages import BaseMessage, HumanMessage
from pydantic import BeforeValidator

from langchain_memagent.transcripts import call_text, content_text
from memagent_graph.tokenizers import Tokenizer
from memagent_graph.tokenizers.pieces import shortened

Questions: TypeAlias = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""An argument of a tool: models that ask one question often pass it as plain text."""

SOURCE = "lc_source"
"""Key in a message's `additional_kwargs` with which middlewares mark messages of their own."""

STANDING_QUESTION = "What will matter later: who wants what, names, numbers, facts, decisions, open tasks?"
"""The question for a dialogue if there is no other one."""

_ROOM_FOR_MORE = 256
"""With a question budget below this, in tokens, the question is only the request. A policy with such a budget was
trained on single questions: the embedded one finds ten of ten facts with them, and none if another sentence follows."""


def latest_request(messages: Sequence[BaseMessage]) -> tuple[int, str] | None:
    """Return the index and text of the user's last message; messages that a middleware wrote for the user do not count.

    None if there is none.
    """
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        if isinstance(message, HumanMessage) and SOURCE not in message.additional_kwargs:
            text = content_text(message.content).strip()
            if text:
                return position, text
    return None


def about_result(request: str | None, tool: str, arguments: Any, tokens: int, tokenizer: Tokenizer) -> str:
    """Return the question for reading what a tool returned: the user's request, then which call it was.

    Long arguments are cut first, to a third of the budget, then the request; "[...]" marks what is missing. A small
    budget is the request's alone.
    """
    call = shortened(call_text(tool, arguments), tokens // 3, tokenizer.count)
    if not request:
        return shortened(f"What does the result of {call} say?", tokens, tokenizer.count)
    return _with_request(request, f"\n(The text is the result of {call}.)", tokens, tokenizer)


def about_history(request: str | None, tokens: int, tokenizer: Tokenizer) -> str:
    """Return the question for reading the older part of a dialogue: the user's request, then whatever may matter later.

    A small budget is the request's alone.
    """
    if not request:
        return shortened(STANDING_QUESTION, tokens, tokenizer.count)
    return _with_request(request, f"\n{STANDING_QUESTION}", tokens, tokenizer)


def _with_request(request: str, rest: str, tokens: int, tokenizer: Tokenizer) -> str:
    if tokens < _ROOM_FOR_MORE:
        return shortened(request, tokens, tokenizer.count)
    room = max(1, tokens - tokenizer.count(rest))
    return shortened(shortened(request, room, tokenizer.count) + rest, tokens, tokenizer.count)
