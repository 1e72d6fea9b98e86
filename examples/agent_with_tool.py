"""Add a tool that reads long documents to an agent: `python examples/agent_with_tool.py FILE QUESTION`.

The reader's policy is on the server in OPENAI_BASE_URL, or named by MEMAGENT_MODEL (`embedded` finds numbers).
The agent's chat model is scripted, so that no key is needed; use `init_chat_model("...")` instead.
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
    """A scripted chat model that calls the tool, then ends its turn."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        """Return this model: the script does not depend on the tools."""
        return self


def write_messages(path: Path, question: str) -> Iterator[AIMessage]:
    """Yield the messages of the chat model."""
    arguments = {"path": path.name, "questions": [question]}
    yield AIMessage("", tool_calls=[{"name": "read_long_document", "args": arguments, "id": "1", "type": "tool_call"}])
    yield AIMessage("That is what the document says.")


def main(path: Path, question: str) -> None:
    """Print the progress of the read, the messages, and the size of the read."""
    agent = create_agent(
        ScriptedChatModel(messages=write_messages(path, question)),
        tools=[ReadLongDocument(roots=[path.parent])],  # the only line to add to an existing agent
    )
    messages = []
    for mode, payload in agent.stream({"messages": [("user", question)]}, stream_mode=["custom", "values"]):
        if mode == "custom" and payload["type"] == "memagent.memory_update":
            print(f"chunk {payload['chunk_index']}: {payload['progress']:.0%} read")
        elif mode == "values":
            messages = payload["messages"]
    for message in messages:
        print(f"{message.type}: {message.text}")
    reading = messages[-2].artifact["readings"][0]
    print(f"run {reading['run_id']}: {reading['chunks_read']} chunks, {reading['usage']['total_tokens']:,} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
