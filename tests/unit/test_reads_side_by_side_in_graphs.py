"""Branches side by side, read as a part of somebody else's graph: evidence and progress, also after a failure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from support.scripts import document_with, part
from support.strategies import reads_perfectly
from unit.test_node import parent_of
from unit.test_tool import asking

from langchain_memagent.node import memagent_node
from langchain_memagent.read_long_document import ReadLongDocument
from memagent_graph import ScriptedPolicy
from memagent_graph.errors import PolicyError
from memagent_graph.strategies.map_reduce import MapReduce

QUESTION = "What is the key of harbor?"
TEXT = document_with({0.1: "The key of harbor is 12.", 0.7: "The key of harbor is 4711."}, words=3000)
ANSWER = "12, then 4711"
FOUND = {"harbor is 12", "harbor is 4711"}
CONFIG: Any = {"configurable": {"thread_id": "t"}, "recursion_limit": 25}


class Breaking(ScriptedPolicy):
    """Reads perfectly, but not the second fact, until it is mended; answers with both."""

    def __init__(self) -> None:
        self.broken = True
        super().__init__(self._reply)

    def _reply(self, prompt: str) -> str | PolicyError:
        if self.broken and "is 4711." in prompt:
            return PolicyError("gone")
        reply = reads_perfectly(prompt)
        return f"\\boxed{{{ANSWER}}}" if reply == "\\boxed{4711}" else reply

    @property
    def sections(self) -> Counter[str]:
        return Counter(part(prompt, "section") for prompt in self.prompts if "<section>" in prompt)


async def run(graph: Any, given: Any, told: list[Any]) -> Any:
    """The graph's last state; what it puts on its custom stream is added to `told`, also where it fails."""
    modes: Any = ["custom", "values"]
    state = None
    async for mode, value in graph.astream(given, CONFIG, stream_mode=modes):
        if mode == "custom":
            told.append(value)
        else:
            state = value
    return state


async def test_a_node_has_the_evidence_of_all_branches_also_of_those_read_before_a_failure(make_reader) -> None:
    policy = Breaking()
    reader = make_reader(policy, strategy=MapReduce(width=8), run_log=False)
    parent = parent_of(memagent_node(reader, evidence="quotes", memory="notes")).compile(checkpointer=InMemorySaver())
    with pytest.raises(PolicyError):
        await run(parent, {"question": QUESTION, "document": TEXT}, [])
    policy.broken = False
    out = await run(parent, None, [])
    assert out["answer"] == ANSWER
    assert {quote["quote"] for quote in out["quotes"]} == FOUND
    assert sum(policy.sections.values()) == len(policy.sections) + 1, "only the chunk that failed was asked twice"


async def test_the_tools_progress_never_falls_and_counts_what_was_read_before_a_failure(make_reader) -> None:
    policy = Breaking()
    reader = make_reader(policy, strategy=MapReduce(width=8), run_log=False, branches=3)
    tool = ReadLongDocument(agent=reader, on_failure="raise")
    agent = create_agent(asking({"questions": [QUESTION], "text": TEXT}), [tool], checkpointer=InMemorySaver())
    told, again = [], []
    with pytest.raises(PolicyError):
        await run(agent, {"messages": [("user", "?")]}, told)
    policy.broken = False
    out = await run(agent, None, again)
    (message,) = [message for message in out["messages"] if message.type == "tool"]
    (reading,) = message.artifact["readings"]
    assert (reading["answer"], reading["chunks_read"]) == (ANSWER, len(policy.sections))
    assert {item["quote"] for item in reading["evidence"]} == FOUND
    for reports in (told, again):
        shares = [report["progress"] for report in reports]
        assert shares == sorted(shares)
        assert len({report["run_id"] for report in reports}) == 1
    assert told[-1]["progress"] > 0.5
    assert again[0]["progress"] > 0.5, "what was read before counts"
    assert again[-1]["progress"] == 1.0
    chunks = [report["chunk_index"] for report in (*told, *again) if report["chunk_index"] is not None]
    assert set(chunks) == set(range(reading["chunks_read"]))
