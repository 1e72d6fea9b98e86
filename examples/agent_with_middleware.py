"""Use the middleware for a tool result of 500,000 tokens: `python examples/agent_with_middleware.py [TOKENS]`.

The embedded policy reads, or the server in OPENAI_BASE_URL. The agent's model is a
script that calls the tool once, so no key is needed; put your own model there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool

from langchain_memagent import MemAgentMiddleware
from memagent_evaluation.demo_document import make_number_document
from memagent_graph import LocalPolicy, MemAgent, OpenAICompatiblePolicy, load_tokenizer


class ScriptedModel(GenericFakeChatModel):
    """A scripted chat model that calls tools."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        """Return this model: the script does not depend on the tools."""
        return self


def main(tokens: int) -> None:
    """Ask the agent for a fact in the tool's result, and print the text that the model gets instead of that result."""
    tokenizer = load_tokenizer("embedded")
    archive = make_number_document(tokenizer, tokens=tokens, questions=1)

    @tool
    def fetch_archive() -> str:
        """Fetch the whole archive."""
        return archive.text

    call = AIMessage("", tool_calls=[{"name": "fetch_archive", "args": {}, "id": "1"}])
    model = ScriptedModel(messages=iter([call, AIMessage("Done.")]))
    policy = OpenAICompatiblePolicy() if "OPENAI_BASE_URL" in os.environ else LocalPolicy.embedded()
    with MemAgent(policy) as reader:
        agent = create_agent(model, [fetch_archive], middleware=[MemAgentMiddleware(reader, result_tokens=2_000)])
        state = agent.invoke({"messages": [HumanMessage(archive.questions[0].question)]})
    print(f"The tool returned {tokenizer.count(archive.text):,} tokens. The model was shown this text instead:\n")
    print(state["messages"][2].text)
    print(f"\nThe fact was {archive.questions[0].answer}, at {archive.questions[0].depth:.0%} of the text.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 500_000)
