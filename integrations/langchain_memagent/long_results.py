"""The text and metadata of a tool message that replace a result that is too long to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import ToolMessage

from langchain_memagent.transcripts import block_text
from memagent_graph.documents import DocumentRef
from memagent_graph.errors import MemAgentError
from memagent_graph.events import StopReason
from memagent_graph.results import ReadResult

READING = "memagent"
"""Key in a tool message's `response_metadata` for the application's data on a reading; the artifact is the tool's
own."""

_AROUND_BYTES = 700
"""Reserved for the text around the beginning of a result that could not be read."""
_LONGEST_ERROR = 300


@dataclass(frozen=True, slots=True)
class Reading:
    """A result that was read. `tokens` is its length, or None."""

    tool: str
    tokens: int | None
    result: ReadResult

    def content(self) -> str:
        """What the model sees instead."""
        return (
            f"[The result of {self.tool} has {self.tokens:,} tokens, too long to show. It was read from "
            f"{'its beginning' if self.result.stop_reason.resumable else 'beginning to end'} with this question in "
            f"mind: {self.result.question}]\n\n{self.findings()}\n\n[The whole result is kept. To learn something "
            f'else from it, call ask_tool_result with run_id="{self.result.run_id}" and questions.]'
        )

    def findings(self) -> str:
        """The answer, and the memory that it is based on."""
        result = self.result
        if result.stop_reason.resumable:
            answer = f"Not known: reading stopped early after {result.chunks_read} parts ({result.stop_reason.value})."
        elif result.stop_reason is StopReason.NO_ANSWER or not result.answer:
            answer = "none was found."
        else:
            answer = result.answer
        return f"Answer: {answer}\n\nNoted while reading:\n{result.memory.strip() or '(nothing)'}"

    def values(self) -> dict[str, Any]:
        """The application's data: ids and figures."""
        result = self.result
        return {
            "run_id": result.run_id,
            "document": dict(result.document),
            "question": result.question,
            "answer": result.answer,
            "memory": result.memory,
            "stop_reason": result.stop_reason.value,
            "chunks_read": result.chunks_read,
            "usage_metadata": {
                "input_tokens": result.usage.prompt_tokens,
                "output_tokens": result.usage.completion_tokens,
                "total_tokens": result.usage.total_tokens,
            },
        }


@dataclass(frozen=True, slots=True)
class Unread:
    """A result that could not be read, or, without `document`, not even stored."""

    tool: str
    run_id: str
    document: DocumentRef | None
    error: str
    text: str

    def content(self, tokens: int) -> str:
        """What went wrong, what to do, and the text's beginning; at most `tokens` bytes, so at most as many tokens."""
        if self.document is not None:
            remedy = (
                "The whole result is kept: once that is remedied, call ask_tool_result with "
                f'run_id="{self.run_id}" and questions.'
            )
        else:
            remedy = "It could not be stored either: call the tool again, for less at once if it can be asked for less."
        head = self.text.encode(errors="replace")[: max(0, tokens - _AROUND_BYTES)].decode(errors="ignore")
        return (
            f"[The result of {self.tool} is too long to show, and reading it failed: {self.error[:_LONGEST_ERROR]} "
            f"{remedy} This is how it begins:]\n\n{head}"
        )

    def values(self) -> dict[str, Any]:
        """Like `Reading.values`; with the whole text if it is stored nowhere else."""
        kept: dict[str, Any] = {"document": dict(self.document)} if self.document else {"text": self.text}
        return {"run_id": self.run_id, **kept, "error": self.error}


def further_findings(
    questions: Sequence[str], outcomes: Sequence[ReadResult | Exception]
) -> tuple[str, dict[str, Any]]:
    """The answers to further questions: for the model, and, under "readings", for the application.

    Raises:
        Exception: every read failed, or one had a defect; the first of these errors.
    """
    told = [each for each in outcomes if isinstance(each, MemAgentError | OSError)]
    defects = [each for each in outcomes if isinstance(each, Exception) and each not in told]
    if defects or len(told) == len(outcomes):
        raise (defects or told)[0]
    texts: list[str] = []
    readings: list[dict[str, Any]] = []
    for number, (question, outcome) in enumerate(zip(questions, outcomes, strict=True), 1):
        if isinstance(outcome, ReadResult):
            reading = Reading("", None, outcome)
            text, values = reading.findings(), reading.values()
        else:
            text, values = f"The result could not be read: {outcome}", {"question": question, "error": str(outcome)}
        texts.append(f"Question {number}: {question}\n{text}" if len(questions) > 1 else text)
        readings.append(values)
    return "\n\n".join(texts), {"readings": readings}


def over_long_text(message: ToolMessage, tokens: int) -> str | None:
    """A tool message's text if it may have more than `tokens` tokens: every token is at least one byte."""
    text = message.content if isinstance(message.content, str) else "\n".join(_texts(message))
    return text if len(text) * 4 > tokens and len(text.encode(errors="replace")) > tokens else None


def replaced_text(message: ToolMessage, text: str, values: dict[str, Any]) -> ToolMessage:
    """The message with another text, and `values` under `READING` in its metadata; the rest is unchanged."""
    content: str | list[str | dict[str, Any]] = text
    if not isinstance(message.content, str):
        others = [block for block in message.content if block_text(block) is None]
        content = [{"type": "text", "text": text}, *others] if others else text
    metadata = {**message.response_metadata, READING: values}
    return message.model_copy(update={"content": content, "response_metadata": metadata})


def _texts(message: ToolMessage) -> list[str]:
    return [text for text in map(block_text, message.content) if text is not None]
