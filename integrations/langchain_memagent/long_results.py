"""The text and metadata of a tool message that replace a result that is too long to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import ToolMessage

from langchain_memagent.transcripts import block_text
from memagent_graph.errors import MemAgentError
from memagent_graph.results import ReadResult

READING = "memagent"
"""Key in a tool message's `response_metadata` for the application's data on a reading; the artifact is the tool's
own."""

_AROUND_BYTES = 700
"""Reserved for the text around the beginning of a result that could not be read."""
_LONGEST_ERROR = 300


def reading_text(tool: str, tokens: int, result: ReadResult) -> str:
    """Return what the model sees instead of a tool's result of so many tokens that was read."""
    return (
        f"[The result of {tool} has {tokens:,} tokens, too long to show. It was read with this question in mind: "
        f"{result.question}]\n\n{result.findings()}\n\n[{result.extent} The whole result is kept. To learn something "
        f'else from it, call ask_tool_result with run_id="{result.run_id}" and questions.]'
    )


def failure_text(tool: str, text: str, error: Exception, tokens: int, run_id: str, *, is_stored: bool) -> str:
    """Return what the model sees instead of a tool's result that could not be read.

    Args:
        tool: the tool's name.
        text: the result.
        error: why it could not be read.
        tokens: the most bytes that are returned, and so the most tokens.
        run_id: the id under which it can be asked again, if it is stored.
        is_stored: whether it is.
    """
    if is_stored:
        remedy = (
            "The whole result is kept: once that is remedied, call ask_tool_result with "
            f'run_id="{run_id}" and questions.'
        )
    else:
        remedy = "It could not be stored either: call the tool again, for less at once if it can be asked for less."
    head = text.encode(errors="replace")[: max(0, tokens - _AROUND_BYTES)].decode(errors="ignore")
    return (
        f"[The result of {tool} is too long to show, and reading it failed: {str(error)[:_LONGEST_ERROR]} "
        f"{remedy} This is how it begins:]\n\n{head}"
    )


def further_findings(
    questions: Sequence[str], outcomes: Sequence[ReadResult | Exception]
) -> tuple[str, dict[str, Any]]:
    """Return the answers to further questions: for the model, and, under "readings", for the application.

    Raises:
        Exception: every read failed, or one had a defect; the first of these errors.
    """
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    defects = [failure for failure in failures if not isinstance(failure, MemAgentError | OSError)]
    if defects or len(failures) == len(outcomes):
        raise (defects or failures)[0]
    texts: list[str] = []
    readings: list[dict[str, Any]] = []
    for number, (question, outcome) in enumerate(zip(questions, outcomes, strict=True), 1):
        if isinstance(outcome, ReadResult):
            text, values = outcome.findings(), outcome.to_dict()
        else:
            text, values = f"The result could not be read: {outcome}", {"question": question, "error": str(outcome)}
        texts.append(f"Question {number}: {question}\n{text}" if len(questions) > 1 else text)
        readings.append(values)
    return "\n\n".join(texts), {"readings": readings}


def over_long_text(message: ToolMessage, tokens: int) -> str | None:
    """Return a tool message's text if it may have more than `tokens` tokens: every token is at least one byte."""
    text = message.content if isinstance(message.content, str) else "\n".join(_texts(message))
    return text if len(text) * 4 > tokens and len(text.encode(errors="replace")) > tokens else None


def replaced_text(message: ToolMessage, text: str, values: dict[str, Any]) -> ToolMessage:
    """Return the message with another text, and `values` under `READING` in its metadata."""
    content: str | list[str | dict[str, Any]] = text
    if not isinstance(message.content, str):
        others = [block for block in message.content if block_text(block) is None]
        content = [{"type": "text", "text": text}, *others] if others else text
    metadata = {**message.response_metadata, READING: values}
    return message.model_copy(update={"content": content, "response_metadata": metadata})


def _texts(message: ToolMessage) -> list[str]:
    return [text for text in map(block_text, message.content) if text is not None]
