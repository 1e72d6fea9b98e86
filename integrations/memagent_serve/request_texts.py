"""Makes the document that is read for a request, and the request with the findings that is then passed on.

The document consists of the long parts of the request, one after the other, each with its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import msgspec

from memagent_graph.converters import Block, Parts
from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.documents.omissions import load_omissions
from memagent_graph.plain_text import make_one_line
from memagent_graph.results import ReadResult
from memagent_graph.tokenizers import Tokenizer
from memagent_graph.tokenizers.pieces import shorten_text
from memagent_serve.chat_requests import ChatMessage, ChatRequest, MessagePart, PartPosition
from memagent_serve.long_parts import MESSAGE_TOKENS, ReadingPlan, find_latest_request, name_speaker

_MAX_NAME_LENGTH: Final = 120
_MAX_INSTRUCTION_LENGTH: Final = 600
"""The number of characters of a long system message that stay in the request."""
_PARAGRAPH_BREAK: Final = "\n\n"

Files: TypeAlias = Mapping[PartPosition, DocumentRef]
"""The text of each attached file, from the store."""


@dataclass(frozen=True, slots=True)
class Source:
    """A text that is read, and its name."""

    name: str
    load_pieces: Callable[[], Parts]
    """Returns the blocks of the text, with the names of its sections, and its omissions."""
    reference: DocumentRef | None = None
    """The text in the store, if it is there already."""


def list_sources(plan: ReadingPlan, files: Files, store: DocumentStore) -> list[Source]:
    """Return the texts that a plan reads, in order."""
    sources, parts, tool_names = [], plan.request.parts, _list_tool_names(plan.request)
    if plan.history_length:
        sources.append(Source("the earlier conversation", lambda: _iter_transcript(plan, files, store)))
    for position in plan.positions:
        reference = files.get(position)
        load_pieces = _make_piece_loader(parts[position], reference, store)
        sources.append(Source(_name_source(plan.request, position, reference, tool_names), load_pieces, reference))
    return sources


def join_sources(sources: Sequence[Source]) -> Document:
    """Return all sources as one document. If there are several, each is a section with its name as the heading."""
    if len(sources) == 1:
        return Document.from_pieces(sources[0].load_pieces, sources[0].name)
    names = make_one_line(", ".join(source.name for source in sources), _MAX_NAME_LENGTH)
    return Document.from_pieces(lambda: _iter_sources(sources), f"{len(sources)} texts: {names}")


def _iter_sources(sources: Sequence[Source]) -> Parts:
    for source_number, source in enumerate(sources, 1):
        separator = "" if source_number == 1 else _PARAGRAPH_BREAK
        yield Block(f"{separator}[{source_number} of {len(sources)}: {source.name}]{_PARAGRAPH_BREAK}", source.name)
        for piece in source.load_pieces():
            if isinstance(piece, Block):
                yield replace(piece, label=piece.label and f"{source.name}, {piece.label}")
            else:
                yield replace(piece, place=", ".join(filter(None, (source.name, piece.place))))


def _make_piece_loader(part: MessagePart, reference: DocumentRef | None, store: DocumentStore) -> Callable[[], Parts]:
    if reference is not None:
        return lambda: iter_stored_pieces(store, reference)
    text = part.text
    assert text is not None  # noqa: S101  a plan names texts and files
    return lambda: iter([Block(text.decode())])


def iter_stored_pieces(store: DocumentStore, ref: DocumentRef) -> Parts:
    """Yield a stored text in blocks that begin at its sections and headings, and its omissions."""
    yield from load_omissions(ref)
    blocks = {mark.start_char: Block("", mark.label) for mark in store.sections(ref)}
    for mark in store.headings(ref) if "headings" in ref else ():
        blocks[mark.start_char] = replace(blocks.get(mark.start_char, Block("")), headings=(mark.label,))
    block_starts = sorted(blocks, reverse=True)
    position = 0
    for piece in store.pieces(ref):
        block, text = Block(""), piece
        while block_starts and block_starts[-1] < position + len(text):
            block_start = block_starts.pop()
            yield replace(block, text=text[: block_start - position])
            block, text, position = blocks[block_start], text[block_start - position :], block_start
        yield replace(block, text=text)
        position += len(text)


def _iter_transcript(plan: ReadingPlan, files: Files, store: DocumentStore) -> Parts:
    """Yield the older messages as a dialogue, one paragraph each, without system messages and the latest request."""
    for index, message in enumerate(plan.request.messages[: plan.history_length]):
        if message.role in {"system", "developer"} or index == plan.latest_index:
            continue
        yield Block(f"{name_speaker(message)}: ")
        for part_index, part in enumerate(message.parts):
            if part.kind in {"text", "file"}:
                for piece in _make_piece_loader(part, files.get(PartPosition(index, part_index)), store)():
                    yield Block(piece.text) if isinstance(piece, Block) else piece
            else:
                yield Block(f"[{part.kind}]")
        if (calls := message.fields.get("tool_calls")) is not None:
            yield Block(f"{_PARAGRAPH_BREAK}Assistant calls {bytes(calls).decode(errors='replace')}")
        yield Block(_PARAGRAPH_BREAK)


def _name_source(
    request: ChatRequest, position: PartPosition, reference: DocumentRef | None, tool_names: Mapping[str | None, str]
) -> str:
    message = request.messages[position.message]
    if reference is not None:
        return make_one_line(reference["name"], _MAX_NAME_LENGTH)
    if message.role in {"tool", "function"}:
        return f"the result of {make_one_line(_find_tool_name(message, tool_names), _MAX_NAME_LENGTH)}"
    if message.role in {"system", "developer"}:
        return "the system message"
    return f"message {position.message + 1} ({message.role})" if len(request.messages) > 1 else "the message"


def _find_tool_name(message: ChatMessage, tool_names: Mapping[str | None, str]) -> str:
    """Return the name of the tool whose result is in a message; "a tool" if no message has the call."""
    if isinstance(name := message.get_field("name"), str) and name:
        return name
    call_id = message.get_field("tool_call_id")
    return tool_names.get(call_id if isinstance(call_id, str) else None, "a tool")


def _list_tool_names(request: ChatRequest) -> dict[str | None, str]:
    """Return the name of the tool of each call, by the call's id."""
    tool_names: dict[str | None, str] = {}
    for message in request.messages:
        with suppress(msgspec.DecodeError):
            for call in _tool_calls_decoder.decode(message.fields.get("tool_calls", b"null")) or ():
                if call.function is not None:
                    tool_names.setdefault(call.id, call.function.name)
    return tool_names


class _Function(msgspec.Struct):
    name: str


class _ToolCall(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


_tool_calls_decoder: Final[msgspec.json.Decoder[list[_ToolCall] | None]] = msgspec.json.Decoder(list[_ToolCall] | None)


# The request with the findings

_SERVER_FIELDS: Final = (
    "tools", "functions", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "response_format"
)  # fmt: skip
"""Fields that only the model server supports."""


def needs_model_server(plan: ReadingPlan) -> bool:
    """Return whether the model server must write the reply from the findings; otherwise the read's answer is the reply.

    It must if only the model server supports the request (tools, a response format, log-probs), or if tool results or
    the older part of a conversation are read.
    """
    request = plan.request
    reads_results = any(request.messages[position.message].role in {"tool", "function"} for position in plan.positions)
    return any(map(request.has_value, _SERVER_FIELDS)) or reads_results or plan.history_length > 0


@dataclass(frozen=True)
class Continuation:
    """A request that is passed on to the model, with the findings in place of the parts that were read."""

    plan: ReadingPlan
    shortened_request: str
    """The text that replaces the user's latest request if the request itself was read."""

    def make_body(self, result: ReadResult, names: Sequence[str]) -> bytes:
        """Return the body that is passed on to the model: the request's body with the findings of a read.

        Args:
            result: the read.
            names: the names of the texts that were read.
        """
        explanation = f"too long to show, so it was read part by part, with this question in mind: {result.question}"
        findings_text = f"[{', '.join(names)}: {explanation}]\n\n{result.findings()}"
        findings_position = None if self.plan.history_length else self.plan.positions[-1]
        request, messages = self.plan.request, list[dict[str, Any]]()
        read_parts_by_message = defaultdict[int, list[int]](list)
        for position in self.plan.positions:
            read_parts_by_message[position.message].append(position.part)
        has_findings = False
        for index, message in enumerate(request.messages):
            is_system = message.role in {"system", "developer"}
            if self.plan.history_length and not is_system and not has_findings:
                messages.append({"role": "user", "content": f"[Of earlier messages:]\n\n{findings_text}"})
                has_findings = True
            if index < self.plan.history_length and not is_system and index != self.plan.latest_index:
                continue
            if index not in read_parts_by_message:
                messages.append(dict(message.fields))
                continue
            texts = {}
            for part_index in read_parts_by_message[index]:
                text = (
                    findings_text
                    if PartPosition(index, part_index) == findings_position
                    else "[Too long to show; the findings are given separately.]"
                )
                if index == self.plan.latest_index and message.parts[part_index].kind == "text":
                    text = f"{text}\n\n{self.shortened_request}"
                elif is_system and (instructions := message.parts[part_index].text) is not None:
                    text = f"{instructions.decode()[:_MAX_INSTRUCTION_LENGTH]} [...]\n\n{text}"
                texts[part_index] = text
            messages.append({**message.fields, "content": _replace_texts(message, texts)})
        values: dict[str, Any] = {**request.fields, "messages": messages}
        if request.options.stream and not request.options.wants_usage:
            # The server reports the usage of the call at the end of the stream only if it is requested.
            values["stream_options"] = {**(request.options.stream_options or {}), "include_usage": True}
        return msgspec.json.encode(values)


def _replace_texts(message: ChatMessage, texts: dict[int, str]) -> Any:
    if len(message.parts) == 1 and message.parts[0].raw is None:
        return texts[0]
    return [
        {"type": "text", "text": texts[part_index]} if part_index in texts else part.raw
        for part_index, part in enumerate(message.parts)
    ]


def shorten_task(request: ChatRequest, max_tokens: int, tokenizer: Tokenizer) -> bytes:
    """Return the request body with only the system messages and the latest message, truncated in the middle to fit.

    Args:
        request: the request.
        max_tokens: the maximum tokens of the prompt.
        tokenizer: counts the tokens.
    """
    latest_index = find_latest_request(request.messages)
    selected_messages = [
        message
        for index, message in enumerate(request.messages)
        if index == latest_index or message.role in {"system", "developer"}
    ]
    tokens_per_message = max(1, max_tokens // len(selected_messages) - MESSAGE_TOKENS)
    texts = ["\n\n".join(part.text.decode() for part in message.parts if part.text) for message in selected_messages]
    messages = [
        {"role": message.role, "content": shorten_text(text, tokens_per_message, tokenizer.count)}
        for message, text in zip(selected_messages, texts, strict=True)
    ]
    return msgspec.json.encode({**request.fields, "messages": messages})
