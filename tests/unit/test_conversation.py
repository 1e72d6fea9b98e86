"""A bounded memory of a dialogue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from support.scripts import part, perfect_reader

from langchain_memagent.conversation import MemAgentConversationMemory
from memagent_graph import MemAgent, ScriptedPolicy
from memagent_graph.errors import MemAgentError, PolicyUnreachableError
from memagent_graph.tokenizers import load_tokenizer

MakeReader = Callable[..., MemAgent]
TURN = [HumanMessage("The key of harbor is 4711. Keep it for me."), AIMessage("Noted.")]


def test_turns_are_read_into_the_memory_one_after_the_other(make_reader: MakeReader) -> None:
    policy = ScriptedPolicy(perfect_reader)
    memory = MemAgentConversationMemory(make_reader(policy), question="Which keys, of harbor and castle?")
    memory.add(TURN)
    assert memory.add([HumanMessage("The key of castle is 2222."), AIMessage("Fine.")]) == memory.text
    assert memory.text.splitlines()[-2:] == ["harbor 4711", "castle 2222"]
    assert memory.messages_read == 4
    assert len(policy.prompts) == 2, "a short turn is one update, and the first turn is not read again"
    assert "User: The key of castle is 2222.\n\nAssistant: Fine." in policy.prompts[1]
    assert "harbor 4711" in part(policy.prompts[1], "memory")


async def test_asynchronously_it_does_the_same(make_reader: MakeReader) -> None:
    memory = MemAgentConversationMemory(make_reader(), question="Which key of harbor?")
    assert (await memory.aadd(TURN)).splitlines()[-1] == "harbor 4711"


def test_it_stays_within_the_readers_memory_budget_however_long_the_dialogue(make_reader: MakeReader) -> None:
    reader = make_reader(ScriptedPolicy(lambda prompt: part(prompt, "memory") + " and so much more was said" * 5))
    memory = MemAgentConversationMemory(reader)
    for turn in range(30):
        memory.add([HumanMessage(f"turn {turn}"), AIMessage("word " * 300)])
    assert memory.messages_read == 60
    assert 0 < load_tokenizer("embedded").count(memory.text) <= 60


def test_a_long_turn_is_read_in_chunks_and_shows_what_tools_gave(make_reader: MakeReader) -> None:
    policy = ScriptedPolicy(perfect_reader)
    memory = MemAgentConversationMemory(make_reader(policy), question="Which key of harbor?")
    call = AIMessage("", tool_calls=[{"name": "find", "args": {"what": "key"}, "id": "1"}])
    memory.add([HumanMessage("find it"), call, ToolMessage("word " * 500 + TURN[0].text, tool_call_id="1")])
    assert len(policy.prompts) > 4
    assert "Assistant calls find" in policy.prompts[0]
    assert memory.text.splitlines()[-1] == "harbor 4711"


def test_as_messages_it_begins_a_prompt(make_reader: MakeReader) -> None:
    memory = MemAgentConversationMemory(make_reader(), question="Which key of harbor?")
    assert memory.as_messages == []
    memory.add(TURN)
    (message,) = memory.as_messages
    assert isinstance(message, HumanMessage)
    assert "harbor 4711" in message.text
    assert "2 messages" in message.text


def test_it_survives_as_json(make_reader: MakeReader) -> None:
    reader = make_reader()
    memory = MemAgentConversationMemory(reader, question="Which key, of harbor or castle?")
    memory.add(TURN)
    again = MemAgentConversationMemory.from_dict(reader, json.loads(json.dumps(memory.to_dict())))
    assert (again.text, again.messages_read) == (memory.text, 2)
    again.add([HumanMessage("The key of castle is 2222.")])
    assert again.text.splitlines()[-2:] == ["harbor 4711", "castle 2222"]


@pytest.mark.parametrize("values", [{}, {"format": 2}, {"format": 1, "text": None, "messages_read": 0}])
def test_other_values_are_refused(make_reader: MakeReader, values: dict[str, object]) -> None:
    with pytest.raises(MemAgentError, match="to_dict"):
        MemAgentConversationMemory.from_dict(make_reader(), values)


def test_nothing_of_the_dialogue_is_stored(make_reader: MakeReader, tmp_path: Path, own_home: Path) -> None:
    reader = make_reader()
    MemAgentConversationMemory(reader).add(TURN)
    assert reader.run_log is not None
    assert list(reader.run_log.runs()) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"4711" in path.read_bytes()]


def test_what_holds_no_text_changes_nothing_and_asks_nothing(make_reader: MakeReader) -> None:
    policy = ScriptedPolicy([])
    memory = MemAgentConversationMemory(make_reader(policy))
    assert memory.add([AIMessage("")]) == ""
    assert policy.prompts == []


def test_a_failure_leaves_the_memory_as_it_was(make_reader: MakeReader) -> None:
    replies = ["first", PolicyUnreachableError("no connection"), "second"]
    memory = MemAgentConversationMemory(make_reader(ScriptedPolicy(replies)))
    memory.add(TURN)
    with pytest.raises(PolicyUnreachableError):
        memory.add(TURN)
    assert (memory.text, memory.messages_read) == ("first", 2)
    assert memory.add(TURN) == "second"


async def test_two_additions_at_once_are_refused_as_one_would_be_lost(make_reader: MakeReader) -> None:
    memory = MemAgentConversationMemory(make_reader(ScriptedPolicy(perfect_reader, delay=0.05)))
    outcomes = await asyncio.gather(memory.aadd(TURN), memory.aadd(TURN), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [str, MemAgentError]
    assert memory.messages_read == 2


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_inside_a_graphs_node_it_leaves_the_graphs_checkpoints_alone(make_reader: MakeReader, way: str) -> None:
    memory = MemAgentConversationMemory(make_reader(), question="Which key of harbor?")

    def node(state: MessagesState) -> dict[str, object]:
        memory.add(state["messages"])
        return {"messages": []}

    saver = InMemorySaver()
    builder = StateGraph(MessagesState)
    builder.add_node("remember", node)
    builder.set_entry_point("remember")
    graph = builder.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "one"}}
    given = {"messages": TURN}
    await graph.ainvoke(given, config) if way == "ainvoke" else graph.invoke(given, config)
    assert memory.text.splitlines()[-1] == "harbor 4711"
    assert set(saver.storage) == {"one"}
    assert set(saver.storage["one"]) == {""}
