"""A bounded memory of a dialogue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore
from langgraph.store.sqlite import SqliteStore
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


async def test_additions_at_once_are_done_one_after_the_other_in_the_order_of_their_calls(
    make_reader: MakeReader,
) -> None:
    policy = ScriptedPolicy(perfect_reader, delay=0.01)
    memory = MemAgentConversationMemory(make_reader(policy), question="Which keys, of gate and harbor?")
    turns = [[HumanMessage(f"The key of gate is {turn}{turn}.")] for turn in range(6)]
    results = await asyncio.gather(
        *map(memory.aadd, turns[:4]), *(asyncio.to_thread(memory.add, each) for each in turns[4:])
    )
    assert memory.messages_read == 6
    assert len(policy.prompts) == 6
    assert set(memory.text.splitlines()[-6:]) == {f"gate {turn}{turn}" for turn in range(6)}
    assert [result.splitlines()[-1] for result in results[:4]] == [f"gate {turn}{turn}" for turn in range(4)]


async def test_an_addition_that_is_cancelled_while_it_waits_lets_nobody_in_before_their_turn(
    make_reader: MakeReader,
) -> None:
    policy = ScriptedPolicy(perfect_reader, delay=0.1)
    memory = MemAgentConversationMemory(make_reader(policy), question="Which key of harbor?")
    first, second, third = (asyncio.create_task(memory.aadd(TURN)) for _ in range(3))
    await asyncio.sleep(0.02)
    second.cancel()
    outcomes = await asyncio.gather(first, second, third, return_exceptions=True)
    assert [type(each) for each in outcomes] == [str, asyncio.CancelledError, str]
    assert memory.messages_read == 4
    assert "harbor 4711" in part(policy.prompts[-1], "memory"), "the third began with what the first had written"


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "The key of harbor is 4711."), ("assistant", "Noted.")],
        [{"role": "user", "content": "The key of harbor is 4711."}],
        "The key of harbor is 4711.",
        ("user", "The key of harbor is 4711."),
        HumanMessage("The key of harbor is 4711."),
    ],
)
def test_messages_are_whatever_langchain_takes_for_messages(make_reader: MakeReader, messages: Any) -> None:
    policy = ScriptedPolicy(perfect_reader)
    memory = MemAgentConversationMemory(make_reader(policy), question="Which key of harbor?")
    assert memory.add(messages).splitlines()[-1] == "harbor 4711"
    assert part(policy.prompts[0], "section").startswith("User: The key")


@pytest.mark.parametrize("messages", [[object()], [{"content": "who says that?"}], [("nobody", "x")], 3])
def test_what_is_not_a_message_is_refused(make_reader: MakeReader, messages: Any) -> None:
    memory = MemAgentConversationMemory(make_reader())
    with pytest.raises(MemAgentError, match="not a message"):
        memory.add(messages)
    assert memory.messages_read == 0


def test_short_turns_may_wait_and_then_cost_no_more_calls_than_all_at_once(make_reader: MakeReader) -> None:
    turns = [[HumanMessage(f"turn {turn} of many"), AIMessage("fine")] for turn in range(40)]
    turns[3] = [*TURN]

    def added(unread_tokens: int, *, at_once: bool = False) -> tuple[MemAgentConversationMemory, int]:
        policy = ScriptedPolicy(perfect_reader)
        memory = MemAgentConversationMemory(
            make_reader(policy), question="Which key of harbor?", unread_tokens=unread_tokens
        )
        for said in [[message for turn in turns for message in turn]] if at_once else turns:
            memory.add(said)
            memory.add([])
        return memory, len(policy.prompts)

    memory, calls = added(100)
    assert calls <= added(0, at_once=True)[1] + 1 < added(0)[1] == 40
    shown = memory.as_messages
    assert "harbor 4711" in shown[0].text
    assert shown[1:] == memory.unread != []
    assert memory.messages_read + len(memory.unread) == 80
    memory.flush()
    assert (memory.messages_read, memory.unread) == (80, [])


def test_what_waits_survives_as_json(make_reader: MakeReader) -> None:
    reader = make_reader()
    memory = MemAgentConversationMemory(reader, unread_tokens=1000)
    memory.add(TURN)
    values = json.loads(json.dumps(memory.to_dict()))
    again = MemAgentConversationMemory.from_dict(reader, values, unread_tokens=1000)
    assert (again.text, again.as_messages) == ("", TURN)


@pytest.mark.parametrize("sync", [True, False])
async def test_in_a_store_it_is_kept_for_whoever_continues_it(
    make_reader: MakeReader, tmp_path: Path, sync: bool
) -> None:
    async def add(memory: MemAgentConversationMemory, text: str) -> str:
        return memory.add(text) if sync else await memory.aadd(text)

    with (
        SqliteStore.from_conn_string(str(tmp_path / "store.sqlite")) if sync else nullcontext(InMemoryStore()) as store
    ):
        if isinstance(store, SqliteStore):
            store.setup()
        question = "Which keys, of harbor and castle?"
        options: Any = {"question": question, "store": store, "key": "thread-1"}
        await add(MemAgentConversationMemory(make_reader(), **options), "The key of harbor is 4711.")
        elsewhere = MemAgentConversationMemory(make_reader(), **options)
        assert elsewhere.text == ""
        await (asyncio.to_thread(elsewhere.load) if sync else elsewhere.aload())
        assert elsewhere.text.splitlines()[-1] == "harbor 4711"
        third = MemAgentConversationMemory(make_reader(), **options)
        await add(third, "The key of castle is 2222.")
        assert third.text.splitlines()[-2:] == ["harbor 4711", "castle 2222"]
        await add(elsewhere, "That was all.")
        assert elsewhere.text.splitlines()[-2:] == ["harbor 4711", "castle 2222"], "what others added is not lost"
        other = MemAgentConversationMemory(make_reader(), **{**options, "key": "thread-2"})
        await add(other, "Hello.")
        assert "4711" not in other.text


def test_a_store_needs_a_key(make_reader: MakeReader) -> None:
    with pytest.raises(MemAgentError, match="key=thread_id"):
        MemAgentConversationMemory(make_reader(), store=InMemoryStore())


def test_what_a_store_cannot_keep_is_not_taken_into_the_memory(make_reader: MakeReader) -> None:
    class Full(InMemoryStore):
        def put(self, *arguments: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

    memory = MemAgentConversationMemory(make_reader(), store=Full(), key="one")
    with pytest.raises(OSError, match="No space"):
        memory.add(TURN)
    assert (memory.text, memory.messages_read) == ("", 0)


def test_handlers_of_the_graph_around_learn_what_it_cost(make_reader: MakeReader) -> None:
    memory = MemAgentConversationMemory(make_reader(), question="Which key of harbor?")
    counted = UsageMetadataCallbackHandler()
    RunnableLambda(memory.add).invoke(TURN, {"callbacks": [counted]})
    (usage,) = counted.usage_metadata.values()
    assert usage["input_tokens"] > 50


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
