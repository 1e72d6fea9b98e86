"""One call of `ReadLongDocument`, as its parts hand it to each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import ToolMessage

from langchain_memagent.tool.readings import Reading
from memagent_graph import MemAgent
from memagent_graph.documents import DocumentRef
from memagent_graph.reading.state import Limits
from memagent_graph.results import MemoryUpdate, StopReason


@dataclass(frozen=True)
class ReadCall:
    """What to read, with which questions, and whom to tell."""

    agent: MemAgent
    questions: tuple[str, ...]
    store_document: Callable[[], Awaitable[DocumentRef]]
    """Opens and stores the document. Not called again when a read in an agent's checkpoints goes on."""
    report: Callable[[str, str, MemoryUpdate], None]
    """Told (run id, question, update) at every chunk."""
    limits: Limits | None = None
    raises: bool = False
    """Whether a failed read is raised; otherwise it becomes a reading that says so."""
    key: str | None = None
    """Tells an agent's tool call from the others of its task; None outside an agent."""
    unfinished: Mapping[tuple[str, str], Reading] = field(default_factory=dict)
    """Earlier readings of this agent that could go on, by the document's key and the question."""

    @property
    def keeps_own(self) -> bool:
        """Whether the reader saves its runs itself."""
        return self.agent.keeps_checkpoints

    def earlier(self, document: DocumentRef, question: str) -> Reading | None:
        """The reading that was left unfinished when the same was asked before."""
        return self.unfinished.get((document["key"], question))


@dataclass(frozen=True)
class Outcome:
    """The document's reference and the readings, by question."""

    document: DocumentRef
    readings: list[Reading]


def unfinished_readings(state: Any, tool_name: str) -> dict[tuple[str, str], Reading]:
    """What earlier calls of a tool left unfinished, from the artifacts among an agent's messages."""
    found: dict[tuple[str, str], Reading] = {}
    for message in (state.get("messages") if isinstance(state, Mapping) else None) or ():
        if not isinstance(message, ToolMessage) or message.name != tool_name or not isinstance(message.artifact, dict):
            continue
        document = message.artifact.get("document", {})
        for reading in message.artifact.get("readings", ()):
            key = (document.get("key", ""), reading["question"])
            found.pop(key, None)
            if reading["goes_on"] and is_unfinished(reading):
                found[key] = reading
    return found


def is_unfinished(reading: Reading) -> bool:
    """Whether a read failed or stopped at a limit."""
    return reading["stop_reason"] is None or StopReason(reading["stop_reason"]).resumable
