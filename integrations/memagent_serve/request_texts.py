"""The document that is read for a request: its long parts one after the other, each with its name, as a stream."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.plain_text import in_one_line
from memagent_serve.chat_requests import ChatMessage, ChatRequest, Part
from memagent_serve.long_parts import Place, Plan, speaker

_READ_BYTES: Final = 1 << 20
_LONGEST_NAME: Final = 120

Pieces: TypeAlias = Iterator[tuple[str | None, str]]
Files: TypeAlias = Mapping[Place, DocumentRef]
"""The text of each attached file, from the store."""


@dataclass(frozen=True, slots=True)
class Source:
    """One of the texts that are read, with its name."""

    name: str
    pieces: Callable[[], Pieces]
    """Its text, with the names of its own sections."""
    stored: DocumentRef | None = None
    """Set if it is in the store already."""


def sources_of(request: ChatRequest, plan: Plan, files: Files, store: DocumentStore) -> list[Source]:
    """The texts that a plan reads, in order."""
    found = []
    if plan.history:
        found.append(Source("the earlier conversation", lambda: _transcript(request, plan, files, store)))
    for place in plan.places:
        message = request.messages[place.message]
        part = message.parts[place.part]
        stored = files.get(place)
        found.append(Source(_name(request, message, place, stored), _pieces_of(part, stored, store), stored))
    return found


def document_of(sources: Sequence[Source]) -> Document:
    """All of them as one document; if there are several, each has a heading and is a section with its name."""
    if len(sources) == 1:
        return Document.from_pieces(sources[0].pieces, sources[0].name)
    return Document.from_pieces(lambda: _joined(sources), f"{len(sources)} texts: {_names(sources)}")


def _names(sources: Iterable[Source]) -> str:
    return in_one_line(", ".join(source.name for source in sources), _LONGEST_NAME)


def _joined(sources: Sequence[Source]) -> Pieces:
    for number, source in enumerate(sources, 1):
        yield source.name, f"{'' if number == 1 else _BREAK}[{number} of {len(sources)}: {source.name}]{_BREAK}"
        for label, text in source.pieces():
            yield f"{source.name}, {label}" if label else None, text


_BREAK: Final = "\n\n"


def _pieces_of(part: Part, stored: DocumentRef | None, store: DocumentStore) -> Callable[[], Pieces]:
    if stored is not None:
        return lambda: stored_pieces(store, stored)
    text = part.text
    assert text is not None  # noqa: S101  a plan names texts and files
    return lambda: ((None, piece) for piece in text.pieces())


def stored_pieces(store: DocumentStore, ref: DocumentRef) -> Pieces:
    """A stored text, with the names of its sections where they begin."""
    marks = [(mark.start_char, mark.label) for mark in store.sections(ref)]
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = store.size(ref) or 0
    position = 0
    for start in range(0, size, _READ_BYTES):
        text = decoder.decode(store.read_bytes(ref, start, start + _READ_BYTES), final=start + _READ_BYTES >= size)
        label = None
        while marks and marks[0][0] < position + len(text):
            begins, following = marks.pop(0)
            yield label, text[: begins - position]
            label, text, position = following, text[begins - position :], begins
        yield label, text
        position += len(text)


def _transcript(request: ChatRequest, plan: Plan, files: Files, store: DocumentStore) -> Pieces:
    """The older messages as a dialogue, one paragraph each, without system messages and the latest request."""
    for number, message in enumerate(request.messages[: plan.history]):
        if message.role in {"system", "developer"} or number == plan.asked:
            continue
        yield None, f"{speaker(message)}: "
        for place, part in enumerate(message.parts):
            if part.kind in {"text", "file"}:
                yield from ((None, text) for _, text in _pieces_of(part, files.get(Place(number, place)), store)())
            else:
                yield None, f"[{part.kind}]"
        if (calls := message.fields.get("tool_calls")) is not None:
            yield None, f"{_BREAK}Assistant calls {bytes(calls).decode(errors='replace')}"
        yield None, _BREAK


def _name(request: ChatRequest, message: ChatMessage, place: Place, stored: DocumentRef | None) -> str:
    if stored is not None:
        return in_one_line(stored["name"], _LONGEST_NAME)
    if message.role in {"tool", "function"}:
        return f"the result of {in_one_line(_tool(request, message), _LONGEST_NAME)}"
    if message.role in {"system", "developer"}:
        return "the system message"
    return f"message {place.message + 1} ({message.role})" if len(request.messages) > 1 else "the message"


def _tool(request: ChatRequest, message: ChatMessage) -> str:
    """The tool of the call that a tool message answers; "a tool" if no message has that call."""
    if isinstance(name := message.field("name"), str) and name:
        return name
    call_id = message.field("tool_call_id")
    for other in request.messages:
        for call in _calls(other):
            if call.id == call_id and call.function is not None:
                return call.function.name
    return "a tool"


class _Function(msgspec.Struct):
    name: str


class _Call(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


_decoder: Final = msgspec.json.Decoder(list[_Call] | None)


def _calls(message: ChatMessage) -> list[_Call]:
    if "tool_calls" not in message.fields:
        return []
    try:
        return _decoder.decode(message.fields["tool_calls"]) or []
    except msgspec.DecodeError:
        return []
