"""An existing agent gets a tool that reads long documents: `python examples/agent_with_tool.py FILE QUESTION`.

The reader's policy is on the server in OPENAI_BASE_URL, or named by MEMAGENT_MODEL (`embedded` finds numbers).
The agent's chat model is a script here, so that this runs anywhere; put `init_chat_model("...")` in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from langchain_memagent import ReadLongDocument


class ScriptedChatModel(GenericFakeChatModel):
    """A chat model that asks for the document to be read, then ends its turn."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        """Tools do not change what it says."""
        return self


def script(path: Path, question: str) -> Iterator[AIMessage]:
    """What the chat model says, turn by turn."""
    arguments = {"path": path.name, "questions": [question]}
    yield AIMessage("", tool_calls=[{"name": "read_long_document", "args": arguments, "id": "1", "type": "tool_call"}])
    yield AIMessage("That is what the document says.")


def main(path: Path, question: str) -> None:
    """Print the progress of the read, what the model got, and what else the program can know."""
    agent = create_agent(
        ScriptedChatModel(messages=script(path, question)),
        tools=[ReadLongDocument(roots=[path.parent])],  # the line that an existing agent gains
    )
    messages = []
    for mode, part in agent.stream({"messages": [("user", question)]}, stream_mode=["custom", "values"]):
        if mode == "custom" and part["type"] == "memagent.memory_update":
            print(f"chunk {part['chunk_index']}: {part['progress']:.0%} read")
        elif mode == "values":
            messages = part["messages"]
    for message in messages:
        print(f"{message.type}: {message.text}")
    reading = messages[-2].artifact["readings"][0]
    print(f"run {reading['run_id']}: {reading['chunks_read']} chunks, {reading['usage']['total_tokens']:,} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
