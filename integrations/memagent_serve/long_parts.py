"""Determines which parts of a request are read, and which text is the question. Pure functions.

If a request does not fit, its largest parts are read: as few as necessary. If that is not enough, the older part of the
conversation is read too. The user's latest request is never left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from memagent_graph.tokenizers import Tokenizer
from memagent_graph.tokenizers.pieces import shorten_text
from memagent_serve.chat_requests import ChatMessage, ChatRequest, JSONText, MessagePart, PartPosition

MESSAGE_TOKENS: Final = 8
"""Tokens reserved for what a chat template adds to each message."""
OTHER_PART_TOKENS: Final = 1024
"""The assumed number of tokens of an image, a sound or a video."""
MEDIA_KIND: Final = re.compile("image|audio|video")
"""Kinds of parts whose token counts are not known."""
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

    request: ChatRequest
    prompt_tokens: int
    """The tokens of the request's prompt, including tool calls and descriptions of tools."""
    latest_index: int | None
    """The message of the user's latest request; None if there is none."""
    history_length: int
    """The number of messages at the beginning that are read as a transcript, except system messages."""
    positions: tuple[PartPosition, ...]
    """Parts of later messages, and of system messages, that are read, in order."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has to be read."""
        return not self.history_length and not self.positions


TokenCounts = Mapping[PartPosition, int]
"""Tokens of each part."""


def _count_part_tokens(part: MessagePart, tokenizer: Tokenizer) -> int:
    """Return the tokens of a part. Files count as 0, because they are always read.

    For a part of another type, such as a tool's result with several parts, the tokens of its JSON are counted.
    """
    if part.text is not None:
        is_exact, text = part.text.size <= _EXACT_BYTES, part.text
        return tokenizer.count(text.decode()) if is_exact else text.size // _BYTES_PER_TOKEN
    if part.kind == "file" or part.raw is None:
        return 0
    if MEDIA_KIND.search(part.kind):
        return OTHER_PART_TOKENS
    content = bytes(part.raw)
    is_exact = len(content) <= _EXACT_BYTES
    return tokenizer.count(content.decode(errors="replace")) if is_exact else len(content) // _BYTES_PER_TOKEN


def _count_prompt_tokens(request: ChatRequest, token_counts: TokenCounts, tokenizer: Tokenizer) -> int:
    tools = [request.fields[name] for name in ("tools", "functions") if name in request.fields]
    tools += [message.fields[name] for message in request.messages for name in _CALL_FIELDS if name in message.fields]
    tool_tokens = sum(tokenizer.count(bytes(raw).decode(errors="replace")) for raw in tools)
    return tool_tokens + sum(token_counts.values()) + MESSAGE_TOKENS * len(request.messages)


_CALL_FIELDS: Final = ("tool_calls", "function_call")
_RESULT_ROLES: Final = frozenset({"tool", "function"})


def plan_reading(request: ChatRequest, tokenizer: Tokenizer, *, max_tokens: int, findings_tokens: int) -> ReadingPlan:
    """Determine what to read so that the rest fits.

    Args:
        request: the request.
        tokenizer: counts tokens.
        max_tokens: the maximum tokens of a prompt.
        findings_tokens: tokens of the findings that replace the read parts.
    """
    token_counts = {position: _count_part_tokens(part, tokenizer) for position, part in request.parts.items()}
    prompt_tokens = _count_prompt_tokens(request, token_counts, tokenizer)
    messages = request.messages
    latest_index = find_latest_request(messages)
    make_plan = partial(ReadingPlan, request, prompt_tokens, latest_index)
    file_positions = [position for position, part in request.parts.items() if part.kind == "file"]
    if prompt_tokens <= max_tokens and not file_positions:
        return make_plan(0, ())
    max_tokens -= findings_tokens

    def find_texts(longer_than: int) -> list[PartPosition]:
        texts = (position for position, part in request.parts.items() if part.text is not None)
        return [position for position in texts if token_counts[position] > longer_than]

    large_parts = find_texts(max(findings_tokens // 2, _STUB_TOKENS))
    largest_parts: list[PartPosition] = []
    remaining_tokens = prompt_tokens + _STUB_TOKENS * len(file_positions)
    for position in sorted(large_parts, key=lambda position: -token_counts[position]):
        if remaining_tokens > max_tokens:
            largest_parts.append(position)
            remaining_tokens -= _count_saved_tokens(token_counts, position)
    if remaining_tokens <= max_tokens:
        return make_plan(0, tuple(sorted([*file_positions, *largest_parts])))
    rest_tokens_by_message = [MESSAGE_TOKENS] * len(messages)  # without those that are saved by the largest parts
    for position, tokens in token_counts.items():
        rest_tokens_by_message[position.message] += tokens
    for position in largest_parts:
        rest_tokens_by_message[position.message] -= _count_saved_tokens(token_counts, position)
    is_kept = [message.role in _SYSTEM_ROLES or index == latest_index for index, message in enumerate(messages)]
    history_length, rest_tokens = 0, sum(rest_tokens_by_message)
    for index in range(1, len(messages)):
        rest_tokens -= 0 if is_kept[index - 1] else rest_tokens_by_message[index - 1]
        if messages[index].role in _RESULT_ROLES:
            continue  # A tool's result must follow its call, or model servers refuse the request.
        history_length = index
        if rest_tokens <= max_tokens:
            break
    else:  # Not even the last message fits with the system message, so everything is read.
        largest_parts = find_texts(_STUB_TOKENS)
    # Files of older messages are read with the transcript.
    positions = [
        position
        for position in [*largest_parts, *file_positions]
        if position.message >= history_length or is_kept[position.message]
    ]
    return make_plan(history_length, tuple(sorted(positions)))


def find_latest_request(messages: Sequence[ChatMessage]) -> int | None:
    """Return the index of the last user message with text, or of a later one with a file if the text has had a reply.

    A file without text belongs to the question before it, unless an assistant's text without tool calls is between.
    """
    file_index = None
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.role == "user" and _has_text(message):
            return index
        if message.role == "user" and file_index is None and any(part.kind == "file" for part in message.parts):
            file_index = index
        is_text = file_index is not None and message.role == "assistant" and _has_text(message)
        if is_text and not any(map(message.get_field, _CALL_FIELDS)):  # calls can be long
            return file_index
    return file_index


def _has_text(message: ChatMessage) -> bool:
    return any(part.text and part.text.size for part in message.parts)


def is_front_end_task(request: ChatRequest) -> bool:
    """Return whether the latest request is a task of the chat front end itself, such as a title for the conversation.

    Open WebUI begins such requests with "### Task:", as it begins a question about documents, which has no history.
    """
    latest_index = find_latest_request(request.messages)
    if latest_index is None:
        return False
    texts = [part.text.decode() for part in request.messages[latest_index].parts if part.text and part.text.size]
    return bool(texts) and texts[0].lstrip().startswith("### Task:") and "<chat_history>" in texts[0]


def compose_question(plan: ReadingPlan, tokenizer: Tokenizer, max_tokens: int, *, with_context: bool) -> str:
    """Return the question for reading a request, in at most `max_tokens` tokens.

    Args:
        plan: the request, and the parts of it that are read.
        tokenizer: counts tokens.
        max_tokens: the question's budget.
        with_context: whether the question includes the system message and earlier messages; not needed if the model
            sees these messages afterwards.
    """
    is_small = max_tokens < _MIN_TOKENS_FOR_CONTEXT
    question = _collect_request_text(plan, plan.latest_index, max_tokens, tokenizer)
    if not question:
        messages = plan.request.messages[: plan.latest_index or 0]
        indices = (index for index, message in enumerate(messages) if message.role == "user" and _has_text(message))
        earlier_request = _collect_request_text(plan, max(indices, default=None), max_tokens, tokenizer)
        question = _DEFAULT_QUESTION
        if earlier_request:
            question += f" If this request is about the text, answer it too: {earlier_request}"
    if is_small or not with_context:
        return shorten_text(question, max_tokens, tokenizer.count)
    question = shorten_text(question, max_tokens // 2, tokenizer.count)
    context_tokens = max_tokens - tokenizer.count(question) - _STUB_TOKENS
    system_text = _collect_unread_text(plan, max_tokens, of_system=True)
    if system_text:
        system_text = shorten_text(f"Instructions: {system_text}", max(1, context_tokens // 2), tokenizer.count)
    context_tokens -= tokenizer.count(system_text)
    earlier_text = _collect_unread_text(plan, max_tokens, of_system=False)
    if earlier_text:
        earlier_text = f"Earlier in the conversation: {earlier_text}"
        earlier_text = shorten_text(earlier_text, max(1, context_tokens), tokenizer.count)
    parts = [system_text, earlier_text, f"Question: {question}" if system_text or earlier_text else question]
    return shorten_text("\n\n".join(filter(None, parts)), max_tokens, tokenizer.count)


def _collect_request_text(plan: ReadingPlan, index: int | None, max_tokens: int, tokenizer: Tokenizer) -> str:
    """Return the text of a message; of its parts that are read, only the paragraphs where a question usually is."""
    texts, read_positions, is_small = [], frozenset(plan.positions), max_tokens < _MIN_TOKENS_FOR_CONTEXT
    for part_index, part in enumerate(plan.request.messages[index].parts if index is not None else ()):
        if part.text is not None and PartPosition(index or 0, part_index) in read_positions:
            texts.append(_cut_to_paragraphs(part.text, max_tokens, tokenizer, only_one=is_small))
        elif part.text is not None:
            texts.append(_limit_length(part.text, max_tokens))
    return "\n\n".join(filter(None, (text.strip() for text in texts)))


_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_SPEAKERS: Final = {"user": "User", "assistant": "Assistant", "tool": "Result", "function": "Result"}


def name_speaker(message: ChatMessage) -> str:
    """Return the speaker of a message, as named in a transcript."""
    return _SPEAKERS.get(message.role, message.role.capitalize())


def _collect_unread_text(plan: ReadingPlan, max_tokens: int, *, of_system: bool) -> str:
    """Return the text of the system messages, or of the other messages before the latest request.

    The parts that are read are left out, except the instructions at the beginning of a long system message.
    """
    paragraphs, read_positions = [], frozenset(plan.positions)
    for index, message in enumerate(plan.request.messages):
        is_system = message.role in _SYSTEM_ROLES
        is_earlier = plan.history_length <= index < (plan.latest_index or 0)
        if is_system != of_system or not (is_system or is_earlier):
            continue
        texts = []
        for part_index, part in enumerate(message.parts):
            is_read = PartPosition(index, part_index) in read_positions
            if part.text is not None and (is_system or not is_read):
                texts.append(_limit_length(part.text, max_tokens)[: max_tokens * 2 if is_read else None])
        text = "\n".join(texts).strip()
        if text:
            paragraphs.append(text if is_system else f"{name_speaker(message)}: {text}")
    return "\n".join(paragraphs)


def _limit_length(text: JSONText, max_tokens: int) -> str:
    """Return a text. If it certainly has more than `max_tokens` tokens, return only its beginning and end."""
    max_length = max_tokens * _MAX_TOKEN_LENGTH
    full_text = text.decode()
    return (
        full_text if len(full_text) <= 2 * max_length else f"{full_text[:max_length]} [...] {full_text[-max_length:]}"
    )


def _cut_to_paragraphs(text: JSONText, max_tokens: int, tokenizer: Tokenizer, *, only_one: bool) -> str:
    """Return the first and the last paragraph of a long text, where a question with a document usually is.

    Args:
        text: the text.
        max_tokens: the maximum for both paragraphs together.
        tokenizer: counts tokens.
        only_one: return only one paragraph: the one with a question, otherwise the last.
    """
    max_length = max_tokens * _MAX_TOKEN_LENGTH
    full_text = text.decode()
    first_paragraph = _PARAGRAPHS.split(full_text[:max_length].strip(), 1)[0].strip()
    last_paragraph = _PARAGRAPHS.split(full_text[-max_length:].strip())[-1].strip()
    if only_one:
        is_first_better = first_paragraph.endswith("?") and not last_paragraph.endswith("?")
        return shorten_text(first_paragraph if is_first_better else last_paragraph, max_tokens, tokenizer.count)
    tokens_each = max(1, max_tokens // 2 - 4)
    beginning = shorten_text(first_paragraph, tokens_each, tokenizer.count)
    end = shorten_text(last_paragraph, tokens_each, tokenizer.count)
    return f"{beginning}\n[...]\n{end}"


def _count_saved_tokens(token_counts: TokenCounts, position: PartPosition) -> int:
    return token_counts[position] - _STUB_TOKENS
