"""Determines which parts of a request become documents, and which text is the question. Pure functions.

If a request does not fit, its largest parts are read: as few as necessary. If that is not enough, the older part of the
conversation is read too. The user's latest request is never left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from memagent_graph.tokenizers import Tokenizer
from memagent_graph.tokenizers.pieces import shorten_text
from memagent_serve.chat_requests import ChatMessage, ChatRequest, JsonText, MessagePart, PartPosition

MESSAGE_TOKENS: Final = 8
"""Tokens reserved for what a chat template adds to each message."""
OTHER_PART_TOKENS: Final = 1024
"""The assumed tokens of an image, a sound or a video."""
MEDIA: Final = re.compile("image|audio|video")
"""Kinds of parts whose sizes are not known."""
_STUB_TOKENS: Final = 64
"""Tokens of the text that replaces a part that is read."""
_EXACT_BYTES: Final = 1 << 18
"""The tokens of texts up to this size are counted. For longer texts, four bytes per token are assumed."""
_BYTES_PER_TOKEN: Final = 4
_MAX_TOKEN_LENGTH: Final = 16
_MIN_TOKENS_FOR_CONTEXT: Final = 256
"""If the budget is below 256 tokens, the question is only the user's text: policies with such budgets were trained on
single questions."""
_DEFAULT_QUESTION: Final = "What does the text say? Name what matters in it: who, what, when, numbers, decisions."
_PARAGRAPHS: Final = re.compile(r"\n\s*\n")


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """The parts of a request that are read."""

    history: int
    """The number of messages at the beginning that are read as a transcript, except system messages."""
    positions: tuple[PartPosition, ...]
    """Parts of later messages, and of system messages, that are read, in order."""
    latest: int | None
    """The message of the user's latest request; None if there is none."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has to be read."""
        return not self.history and not self.positions


Sizes = Mapping[PartPosition, int]
"""Tokens of each part."""


def count_part_tokens(request: ChatRequest, tokenizer: Tokenizer) -> Sizes:
    """Return the tokens of each part; files count as 0, because they are always read.

    A part of another type, such as a tool's result with parts of its own, counts with its JSON.
    """

    def count_tokens(part: MessagePart) -> int:
        if part.text is not None:
            exact, text = part.text.size <= _EXACT_BYTES, part.text
            return tokenizer.count(text.decode()) if exact else text.size // _BYTES_PER_TOKEN
        if part.kind == "file" or part.raw is None:
            return 0
        if MEDIA.search(part.kind):
            return OTHER_PART_TOKENS
        content = bytes(part.raw)
        exact = len(content) <= _EXACT_BYTES
        return tokenizer.count(content.decode(errors="replace")) if exact else len(content) // _BYTES_PER_TOKEN

    return {position: count_tokens(part) for position, part in request.parts.items()}


def count_prompt_tokens(request: ChatRequest, sizes: Sizes, tokenizer: Tokenizer) -> int:
    """Return the tokens of the request's prompt, including tool calls and descriptions of tools."""
    tools = [request.fields[name] for name in ("tools", "functions") if name in request.fields]
    tools += [message.fields[name] for message in request.messages for name in _CALLS if name in message.fields]
    tool_tokens = sum(tokenizer.count(bytes(raw).decode(errors="replace")) for raw in tools)
    return tool_tokens + sum(sizes.values()) + MESSAGE_TOKENS * len(request.messages)


_CALLS: Final = ("tool_calls", "function_call")


def plan_reading(request: ChatRequest, sizes: Sizes, *, total: int, room: int, findings: int) -> ReadingPlan:
    """Determine what to read so that the rest fits.

    Args:
        request: the request.
        sizes: the sizes of its parts, in tokens.
        total: tokens of the whole prompt.
        room: the maximum tokens of a prompt.
        findings: tokens of the findings that replace the read parts.
    """
    messages = request.messages
    latest = find_latest_request(messages)
    files = [position for position, part in request.parts.items() if part.kind == "file"]
    if total <= room and not files:
        return ReadingPlan(0, (), latest)
    room -= findings

    def find_texts(longer_than: int) -> list[PartPosition]:
        texts = (position for position, part in request.parts.items() if part.text is not None)
        return [position for position in texts if sizes[position] > longer_than]

    large = find_texts(max(findings // 2, _STUB_TOKENS))
    largest, remaining_tokens = _choose_largest(large, sizes, total + _STUB_TOKENS * len(files), room)
    if remaining_tokens <= room:
        return ReadingPlan(0, tuple(sorted([*files, *largest])), latest)
    history, remaining_indices = 0, set(range(len(messages)))
    # A tool's result must follow the call, or model servers refuse it.
    for history in (index for index in range(1, len(messages)) if messages[index].role not in {"tool", "function"}):
        remaining_indices = {
            index
            for index, message in enumerate(messages)
            if index >= history or message.role in _SYSTEM or index == latest
        }
        rest = sum(size for position, size in sizes.items() if position.message in remaining_indices)
        rest += MESSAGE_TOKENS * len(remaining_indices)
        large = [position for position in largest if position.message in remaining_indices]
        if rest - sum(_count_saved_tokens(sizes, position) for position in large) <= room:
            break
    else:  # Not even the last message fits with the system message: everything is read.
        large = [position for position in find_texts(_STUB_TOKENS) if position.message in remaining_indices]
    # Files of older messages are read with the transcript.
    files = [file for file in files if file.message in remaining_indices]
    return ReadingPlan(history, tuple(sorted({*large, *files})), latest)


def find_latest_request(messages: Sequence[ChatMessage]) -> int | None:
    """Return the last message with text of the user."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "user" and any(part.text and part.text.size for part in messages[index].parts):
            return index
    return None


def is_front_end_task(request: ChatRequest) -> bool:
    """Return whether the user's latest request is a chat front end's own task, such as a title for the conversation.

    Open WebUI begins these with "### Task:".
    """
    latest = find_latest_request(request.messages)
    if latest is None:
        return False
    first = next(part.text for part in request.messages[latest].parts if part.text and part.text.size)
    return first.decode().lstrip().startswith("### Task:")


def compose_question(
    request: ChatRequest, plan: ReadingPlan, tokenizer: Tokenizer, tokens: int, *, with_context: bool
) -> str:
    """Return the question for reading a request, in at most `tokens` tokens.

    Args:
        request: the request.
        plan: its parts that are read.
        tokenizer: counts.
        tokens: the question's budget.
        with_context: whether the question includes the system message and earlier messages; not needed if the model
            sees these messages afterwards.
    """
    message = request.messages[plan.latest] if plan.latest is not None else None
    is_small = tokens < _MIN_TOKENS_FOR_CONTEXT
    texts = []
    for part_index, part in enumerate(message.parts if message else ()):
        if part.text is not None and PartPosition(plan.latest or 0, part_index) in plan.positions:
            texts.append(_cut_to_paragraphs(part.text, tokens, tokenizer, only_one=is_small))
        elif part.text is not None:
            texts.append(_limit_length(part.text, tokens))
    question = "\n\n".join(filter(None, (text.strip() for text in texts))) or _DEFAULT_QUESTION
    if is_small or not with_context:
        return shorten_text(question, tokens, tokenizer.count)
    question = shorten_text(question, tokens // 2, tokenizer.count)
    room = tokens - tokenizer.count(question) - _STUB_TOKENS
    system = _collect_unread_text(request, plan, tokens, lambda index, role: role in _SYSTEM)
    system = shorten_text(f"Instructions: {system}", max(1, room // 2), tokenizer.count) if system else ""
    room -= tokenizer.count(system)
    earlier = _collect_unread_text(
        request, plan, tokens, lambda index, role: role not in _SYSTEM and index < (plan.latest or 0)
    )
    earlier = shorten_text(f"Earlier in the conversation: {earlier}", max(1, room), tokenizer.count) if earlier else ""
    parts = [system, earlier, f"Question: {question}" if system or earlier else question]
    return shorten_text("\n\n".join(filter(None, parts)), tokens, tokenizer.count)


_SYSTEM: Final = frozenset({"system", "developer"})
_SPEAKERS: Final = {"user": "User", "assistant": "Assistant", "tool": "Result", "function": "Result"}


def name_speaker(message: ChatMessage) -> str:
    """Return the speaker of a message, as named in a transcript."""
    return _SPEAKERS.get(message.role, message.role.capitalize())


def _collect_unread_text(
    request: ChatRequest, plan: ReadingPlan, tokens: int, is_included: Callable[[int, str], bool]
) -> str:
    """Return the text of chosen messages, except the parts that are read."""
    paragraphs = []
    for index, message in enumerate(request.messages):
        if not is_included(index, message.role) or (index < plan.history and message.role not in _SYSTEM):
            continue
        parts = [
            (part.text, PartPosition(index, part_index) in plan.positions)
            for part_index, part in enumerate(message.parts)
        ]
        # In a long system message, the beginning has the instructions.
        texts = [
            _limit_length(text, tokens)[: tokens * 2 if is_read else None]
            for text, is_read in parts
            if text is not None and (message.role in _SYSTEM or not is_read)
        ]
        text = "\n".join(texts).strip()
        if text:
            paragraphs.append(text if message.role in _SYSTEM else f"{name_speaker(message)}: {text}")
    return "\n".join(paragraphs)


def _limit_length(text: JsonText, tokens: int) -> str:
    """Return a text; only its beginning and end if it certainly has more than `tokens` tokens."""
    limit = tokens * _MAX_TOKEN_LENGTH
    whole = text.decode()
    return whole if len(whole) <= 2 * limit else f"{whole[:limit]} [...] {whole[-limit:]}"


def _cut_to_paragraphs(text: JsonText, tokens: int, tokenizer: Tokenizer, *, only_one: bool) -> str:
    """Return the first and the last paragraph of a long text, where a question with a document usually is.

    Args:
        text: the text.
        tokens: the maximum for both.
        tokenizer: counts.
        only_one: return only one of them: the one with a question, otherwise the last.
    """
    reach = tokens * _MAX_TOKEN_LENGTH
    whole = text.decode()
    first = _PARAGRAPHS.split(whole[:reach].strip(), 1)[0].strip()
    last = _PARAGRAPHS.split(whole[-reach:].strip())[-1].strip()
    if only_one:
        return shorten_text(first if first.endswith("?") and not last.endswith("?") else last, tokens, tokenizer.count)
    half = max(1, tokens // 2 - 4)
    return f"{shorten_text(first, half, tokenizer.count)}\n[...]\n{shorten_text(last, half, tokenizer.count)}"


def _choose_largest(
    positions: Sequence[PartPosition], sizes: Sizes, total: int, room: int
) -> tuple[list[PartPosition], int]:
    """Choose the fewest large parts so that the rest fits; if it never fits, choose all of them.

    Returns:
        the chosen parts, and the tokens of the rest.
    """
    chosen: list[PartPosition] = []
    for position in sorted(positions, key=lambda position: -sizes[position]):
        if total <= room:
            break
        chosen.append(position)
        total -= _count_saved_tokens(sizes, position)
    return chosen, total


def _count_saved_tokens(sizes: Sizes, position: PartPosition) -> int:
    return sizes[position] - _STUB_TOKENS
