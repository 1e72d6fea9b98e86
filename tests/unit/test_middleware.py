"""Over-long tool results and histories in agents of `create_agent`."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler, get_usage_metadata_callback
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import ToolRuntime
from langgraph.types import Command
from support.chat_models import ScriptedChatModel, call_tools, make_chat_model
from support.fake_server import FakeServer
from support.scripts import extract, make_document, read_perfectly
from unit.test_tracing import RunRecorder

from langchain_memagent.middleware import MemAgentMiddleware
from langchain_memagent.transcripts import find_latest_request, find_safe_cuts, format_transcript, make_result_question
from memagent_graph import Limits, MemAgent, OpenAICompatiblePolicy, ScriptedPolicy
from memagent_graph.errors import BudgetError, MissingExtraError, PolicyUnreachableError, make_install_command
from memagent_graph.policies.chat_model import ChatModelPolicy
from memagent_graph.tokenizers import load_tokenizer

LONG = make_document({0.3: "The key of harbor is 4711.", 0.8: "The key of castle is 2222."}, words=1600)
ASK = {"messages": [HumanMessage("What is the key of harbor?")]}


@tool
def fetch(name: str) -> str:
    """Fetch a text."""
    return LONG if name == "long" else "a short text"


BOTH = pytest.mark.parametrize("way", ["invoke", "ainvoke"])
"""One test for each of the middleware's synchronous methods, which run the asynchronous ones."""


async def run(agent: Any, turn: Any, thread: str = "one", way: str = "ainvoke") -> list[AnyMessage]:
    """Call an agent, asynchronously unless a test says otherwise."""
    config = {"configurable": {"thread_id": thread}, "recursion_limit": 25}
    state = agent.invoke(turn, config) if way == "invoke" else await agent.ainvoke(turn, config)
    return list(state["messages"])


def make_agent(
    reader: MemAgent, *replies: AIMessage | str, tools: Sequence[Any] = (fetch,), saver: Any = None, **options: Any
) -> Any:
    """Return an agent with the middleware, whose model gives these replies."""
    middleware = [MemAgentMiddleware(reader, **{"result_tokens": 500, **options})]
    return create_agent(make_chat_model(*replies), list(tools), middleware=middleware, checkpointer=saver)


def fetch_long(*, twice: bool = False) -> AIMessage:
    return call_tools(*[("fetch", {"name": "long"})] * (1 + twice))


def tool_message(messages: list[AnyMessage], index: int = 0) -> ToolMessage:
    return [message for message in messages if isinstance(message, ToolMessage)][index]


def get_reading(message: ToolMessage) -> dict[str, Any]:
    """Return what an application gets of a reading."""
    reading: dict[str, Any] = message.response_metadata["memagent"]
    return reading


class Traced(BaseCallbackHandler):
    """Counts the calls that a tracer sees."""

    calls = 0

    def on_chat_model_start(self, *arguments: Any, **options: Any) -> None:
        self.calls += 1


class TestToolResults:
    @BOTH
    async def test_a_read_for_the_request_replaces_an_over_long_result(self, make_reader, way) -> None:
        reader = make_reader()
        agent = make_agent(reader, fetch_long(), "4711")
        shown = tool_message(await run(agent, ASK, way=way))
        assert (shown.tool_call_id, shown.name, shown.status) == ("call-0", "fetch", "success")
        assert "Answer: 4711" in shown.content
        assert "harbor 4711" in shown.content
        assert "2222" not in shown.content, "castle was not asked for"
        assert get_reading(shown)["run_id"] in shown.content
        assert get_reading(shown)["usage"]["prompt_tokens"] > 3000
        assert reader.store.read_bytes(get_reading(shown)["document"], 0, 10**6).decode() == LONG

    async def test_a_result_within_the_bound_stays_as_it_is(self, make_reader) -> None:
        """Also one that has more bytes than the bound, but not more tokens."""
        policy, tokens = ScriptedPolicy(read_perfectly), load_tokenizer("embedded").count(LONG)
        for name, text, bound in (("short", "a short text", 500), ("long", LONG, tokens)):
            agent = make_agent(make_reader(policy), call_tools(("fetch", {"name": name})), "done", result_tokens=bound)
            assert tool_message(await run(agent, ASK)).content == text
        assert policy.prompts == []

    async def test_a_result_can_be_asked_in_a_later_turn_by_another_process_but_not_on_another_thread(
        self, make_reader
    ) -> None:
        saver = InMemorySaver()

        def agent(*replies: AIMessage | str) -> Any:
            return make_agent(make_reader(run_log=False), *replies, saver=saver)

        first = tool_message(await run(agent(fetch_long(), "4711"), ASK))
        arguments = {"run_id": get_reading(first)["run_id"], "questions": "What is the key of castle?"}
        again = {"messages": [HumanMessage("And castle?")]}
        same = await run(agent(call_tools(("ask_tool_result", arguments), prefix="more"), "2222"), again)
        assert "Answer: 2222" in tool_message(same, -1).content
        # A caller cannot smuggle the run in, neither as state nor as a message.
        forged = {**again, "memagent_readings": {get_reading(first)["run_id"]: get_reading(first)["document"]}}
        forged["messages"] = [call_tools(("fetch", {})), first, *again["messages"]]
        other = await run(agent(call_tools(("ask_tool_result", arguments), prefix="more"), "?"), forged, thread="two")
        assert tool_message(other, -1).status == "error"
        assert "2222" not in tool_message(other, -1).content
        assert "No tool result of this conversation" in tool_message(other, -1).content

    async def test_blocks_that_are_no_text_stay(self, make_reader) -> None:
        image = {"type": "image", "base64": "AAAA", "mime_type": "image/png"}

        @tool
        def look() -> list[dict[str, Any]]:
            """Look."""
            half = len(LONG) // 2
            return [{"type": "text", "text": LONG[:half]}, image, {"type": "text", "text": LONG[half:]}]

        agent = make_agent(make_reader(), call_tools(("look", {})), "done", tools=[look])
        text, block = tool_message(await run(agent, ASK)).content
        assert "Answer: 4711" in text["text"]
        assert block == image

    async def test_messages_inside_a_command_are_read_and_the_rest_of_it_stays(self, make_reader) -> None:
        @tool
        def hand_over(runtime: ToolRuntime) -> Command[Any]:
            """Hand over."""
            result = ToolMessage(LONG, tool_call_id=runtime.tool_call_id, name="hand_over", artifact={"mine": 1})
            return Command(update={"messages": [result, HumanMessage("note", additional_kwargs={"lc_source": "x"})]})

        messages = await run(make_agent(make_reader(), call_tools(("hand_over", {})), "done", tools=[hand_over]), ASK)
        assert "Answer: 4711" in tool_message(messages).content
        assert tool_message(messages).artifact == {"mine": 1}
        assert get_reading(tool_message(messages))["answer"] == "4711"
        assert "note" in [message.content for message in messages]

    async def test_several_long_results_of_one_turn_are_all_read_and_all_askable(self, make_reader) -> None:
        saver = InMemorySaver()
        agent = make_agent(make_reader(), fetch_long(twice=True), "done", saver=saver)
        messages = await run(agent, ASK)
        run_ids = {get_reading(tool_message(messages, index))["run_id"] for index in (0, 1)}
        state = (await agent.aget_state({"configurable": {"thread_id": "one"}})).values
        assert run_ids == set(state["memagent_readings"])

    async def test_a_result_that_cannot_be_read_is_kept_and_the_model_is_told(self, make_reader) -> None:
        down, gone = [True], PolicyUnreachableError("no connection", hint="Start the server.")

        def policy(prompt: str) -> Any:
            return gone if down[0] else read_perfectly(prompt)

        saver, reader = InMemorySaver(), make_reader(ScriptedPolicy(policy))
        agent = make_agent(reader, fetch_long(), "later, then", saver=saver, result_tokens=1800)
        notice = tool_message(await run(agent, ASK))
        assert "no connection" in notice.content
        assert "Start the server." in notice.content
        assert LONG[:500] in notice.content
        assert load_tokenizer("embedded").count(notice.content) <= 1800
        down[0] = False
        ask = call_tools(
            ("ask_tool_result", {"run_id": get_reading(notice)["run_id"], "questions": ASK["messages"][0].content})
        )
        agent = make_agent(reader, ask, "4711", saver=saver, result_tokens=1800)
        assert "Answer: 4711" in tool_message(await run(agent, ASK), -1).content

    async def test_a_result_that_cannot_be_stored_stays_in_the_artifact(
        self, make_reader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*arguments: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        @tool
        def hand_over(runtime: ToolRuntime) -> Command[Any]:
            """Hand over."""
            return Command(update={"messages": [ToolMessage(LONG, tool_call_id=runtime.tool_call_id)]})

        reader = make_reader()
        monkeypatch.setattr(reader.store, "add", full)
        both = call_tools(("fetch", {"name": "long"}), ("hand_over", {}))
        messages = await run(make_agent(reader, both, "done", tools=[fetch, hand_over], result_tokens=1800), ASK)
        for index in (0, 1):
            notice = tool_message(messages, index)
            assert "No space left" in notice.content
            assert get_reading(notice)["text"] == LONG

    async def test_a_limit_that_stops_the_reading_is_said(self, make_reader) -> None:
        agent = make_agent(make_reader(), fetch_long(), "done", limits=Limits(max_chunks=3))
        assert "stopped early after 3 parts" in tool_message(await run(agent, ASK)).content

    async def test_an_agent_that_is_stopped_in_a_reading_continues_it_at_its_chunk(self, make_reader) -> None:
        sections: list[str] = []

        def script(prompt: str) -> str:
            sections.append(extract(prompt, "section"))
            if len(sections) == 12:
                raise KeyError("stands for a kill")
            return read_perfectly(prompt)

        agent = make_agent(make_reader(ScriptedPolicy(script)), fetch_long(), "4711", saver=InMemorySaver())
        with pytest.raises(KeyError):
            await run(agent, ASK)
        assert "Answer: 4711" in tool_message(await run(agent, None)).content
        assert len(sections) == len(set(sections)) + 1, "only the chunk at which it was stopped was read twice"

    async def test_progress_is_on_the_custom_stream_and_nothing_of_the_policy_on_the_others(self, make_reader) -> None:
        reads = ScriptedChatModel(script=lambda messages: AIMessage(read_perfectly(messages[-1].text)))
        policy = ChatModelPolicy(reads)
        saver = InMemorySaver()
        for way in ("stream", "astream"):
            agent = make_agent(make_reader(policy), fetch_long(), "done", saver=saver)
            traced = Traced()
            config: Any = {"configurable": {"thread_id": "one"}, "callbacks": [traced]}
            options: Any = {"stream_mode": ["custom", "messages"], "subgraphs": True}
            if way == "stream":
                parts = [part[1:] for part in agent.stream(ASK, config, **options)]
            else:
                parts = [part[1:] async for part in agent.astream(ASK, config, **options)]
            assert traced.calls == 3, "the agent's model twice, and the read as one run"
            progress = [event["progress"] for mode, event in parts if mode == "custom"]
            assert progress == sorted(progress)
            assert progress[-1] == 1.0
            texts = {event[0].text for mode, event in parts if mode == "messages" and isinstance(event[0], AIMessage)}
            assert texts <= {"", "done"}
        assert set(saver.storage) == {"one"}, "no step of the reader was saved in the agent's checkpointer"
        assert set(saver.storage["one"]) == {""}

    async def test_handlers_of_the_config_see_a_read_as_one_run_with_all_its_tokens(self, make_reader) -> None:
        counter, recorder = UsageMetadataCallbackHandler(), RunRecorder()
        agent = make_agent(make_reader(), fetch_long(), "4711").with_config(callbacks=[counter, recorder])
        with get_usage_metadata_callback() as around:
            first = tool_message(await run(agent, ASK))
        usage = get_reading(first)["usage"]
        for handler in (counter, around):
            (total,) = handler.usage_metadata.values()
            assert total["input_tokens"] == usage["prompt_tokens"]
            assert total["output_tokens"] == usage["completion_tokens"]
        (span,) = [run for run in recorder.runs if run.name == "MemAgent"]
        assert span.inputs["run_ids"] == [get_reading(first)["run_id"]]
        assert span.outputs == {"answers": ["4711"]}
        assert span.parent_run_id is not None
        (calls_of_policy,) = [run for run in recorder.runs if run.parent_run_id == span.id]
        assert calls_of_policy.name == "MemAgent policy"
        assert not [run for run in recorder.runs if run.name in {"update_memory", "read_chunk"}]
        assert "word7 and then" not in repr([(run.inputs, run.outputs) for run in (span, calls_of_policy)])

    async def test_the_tokens_of_a_read_that_fails_are_counted_until_then(self, make_reader) -> None:
        def script(prompt: str) -> Any:
            return PolicyUnreachableError("no connection") if len(policy.prompts) == 6 else read_perfectly(prompt)

        policy = ScriptedPolicy(script)
        counter, recorder = UsageMetadataCallbackHandler(), RunRecorder()
        agent = make_agent(make_reader(policy), fetch_long(), "later").with_config(callbacks=[counter, recorder])
        await run(agent, ASK)
        (usage,) = counter.usage_metadata.values()
        assert usage["input_tokens"] > 5 * 100
        (span,) = [run for run in recorder.runs if run.name == "MemAgent"]
        assert "no connection" in (span.error or "")


class TestHistories:
    def agent(self, reader: MemAgent, model: Any, saver: Any = None, **options: Any) -> Any:
        settings = {"result_tokens": None, "history_tokens": 400, "keep_messages": 3, **options}
        middleware = [MemAgentMiddleware(reader, **settings)]
        return create_agent(model, [fetch], middleware=middleware, checkpointer=saver, system_prompt="Be brief.")

    async def dialogue(self, agent: Any, turns: int = 20) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        for turn in range(turns):
            text = f"turn {turn}: " + " ".join(f"word{turn}x{index}" for index in range(12))
            if turn == 1:
                text = "The key of harbor is 4711. Remember it."
            messages = await run(agent, {"messages": [HumanMessage(text)]})
        return messages

    async def test_the_request_is_bounded_and_the_stored_state_is_the_same_as_without(self, make_reader) -> None:
        count = load_tokenizer("embedded").count
        states = []
        for history_tokens in (400, None):
            saver, model = InMemorySaver(), make_chat_model("fine")
            agent = self.agent(make_reader(), model, saver, history_tokens=history_tokens)
            await self.dialogue(agent)
            longest = max(sum(count(message.text) for message in prompt) for prompt in model.prompts)
            assert (longest <= 450) == (history_tokens is not None)
            assert all(prompt[0] == SystemMessage("Be brief.") for prompt in model.prompts)
            config = {"configurable": {"thread_id": "one"}}
            history = [
                [(message.type, message.content, message.additional_kwargs) for message in snapshot.values["messages"]]
                async for snapshot in agent.aget_state_history(config)
                if "messages" in snapshot.values
            ]
            states.append(history)
            assert set(saver.storage["one"]) == {""}
        assert states[0] == states[1]

    def test_a_bound_that_is_too_small_is_told_when_the_middleware_is_made(self, make_reader) -> None:
        with pytest.raises(BudgetError, match="history_tokens must be at least 248"):
            MemAgentMiddleware(make_reader(), history_tokens=200)

    async def test_a_bound_that_is_too_small_for_a_served_policy_is_an_error_of_the_first_call(
        self, make_reader
    ) -> None:
        with FakeServer() as server:
            policy = OpenAICompatiblePolicy(base_url=server.base_url)
            agent = self.agent(make_reader(policy, budget=None), make_chat_model("fine"), history_tokens=200)
            with pytest.raises(BudgetError, match="history_tokens"):
                await run(agent, {"messages": [HumanMessage("hello")]})

    async def test_reading_a_history_shows_its_progress_and_is_counted(self, make_reader) -> None:
        counter, recorder = UsageMetadataCallbackHandler(), RunRecorder()
        messages = [HumanMessage(f"turn {turn}: " + "word " * 60) for turn in range(20)]
        for way in ("stream", "astream"):
            policy = ScriptedPolicy(lambda prompt: "the memory")
            agent = self.agent(make_reader(policy), make_chat_model("fine")).with_config(callbacks=[counter, recorder])
            if way == "stream":
                events = list(agent.stream({"messages": messages}, stream_mode="custom"))
            else:
                events = [event async for event in agent.astream({"messages": messages}, stream_mode="custom")]
            assert {event["type"] for event in events} == {"memagent.history_update"}
            assert len(events) == len(policy.prompts) > 4
            progress = [event["progress"] for event in events]
            assert (progress, progress[-1]) == (sorted(progress), 1.0)
        (usage,) = counter.usage_metadata.values()
        assert usage["input_tokens"] > 2000
        assert [run.name for run in recorder.runs].count("MemAgent") == 2

    @BOTH
    async def test_a_fact_of_the_oldest_messages_reaches_the_model(self, make_reader, way) -> None:
        def keep_every_key(prompt: str) -> str:
            memory, section = extract(prompt, "memory"), extract(prompt, "section")
            return "\n".join([memory, *re.findall(r"key of \w+ is \d+", section)]).strip() or "nothing yet"

        model = make_chat_model("fine")
        agent = self.agent(make_reader(ScriptedPolicy(keep_every_key)), model, InMemorySaver())
        await self.dialogue(agent)
        await run(agent, {"messages": [HumanMessage("What is the key of harbor?")]}, way=way)
        assert "Remember it" not in str(model.prompts[-1]), "the message itself is no longer there"
        assert "key of harbor is 4711" in model.prompts[-1][1].text
        assert model.prompts[-1][-1].content == "What is the key of harbor?"

    async def test_no_message_is_read_twice_and_most_turns_read_nothing(self, make_reader) -> None:
        policy = ScriptedPolicy(lambda prompt: "the memory")
        agent = self.agent(make_reader(policy), make_chat_model("fine"), InMemorySaver())
        await self.dialogue(agent, turns=25)
        sections = [prompt.split("<section>")[1] for prompt in policy.prompts]
        for turn in range(15):
            assert sum(f"word{turn}x5" in section for section in sections) == (turn != 1)
        assert len(sections) < 25

    async def test_another_process_reads_the_older_part_anew(self, make_reader) -> None:
        saver = InMemorySaver()
        await self.dialogue(self.agent(make_reader(), make_chat_model("fine"), saver))
        policy = ScriptedPolicy(read_perfectly)
        model = make_chat_model("4711")
        await run(self.agent(make_reader(policy), model, saver), ASK)
        assert "harbor 4711" in str(model.prompts[-1])

    async def test_calls_stay_with_their_results_and_the_request_stays_in_a_long_loop_of_tools(
        self, make_reader
    ) -> None:
        number = [0]

        def script(messages: list[BaseMessage]) -> AIMessage:
            assert_complete(messages)
            assert "What is the key of harbor?" in [message.content for message in messages]
            number[0] += 1
            if number[0] > 9:
                return AIMessage("4711")
            names = [("fetch", {"name": "word " * 20})] * (number[0] % 3 + 1)
            return call_tools(*names, prefix=f"round{number[0]}")

        model = ScriptedChatModel(script=script)
        await run(self.agent(make_reader(), model), ASK)
        assert any("replaced by this summary" in str(prompt) for prompt in model.prompts)

    async def test_a_policy_that_fails_says_so_and_the_turn_can_be_repeated(self, make_reader) -> None:
        down = [False]

        def policy(prompt: str) -> Any:
            return PolicyUnreachableError("no connection") if down[0] else "the memory"

        agent = self.agent(make_reader(ScriptedPolicy(policy)), make_chat_model("fine"), InMemorySaver())
        down[0] = True
        with pytest.raises(PolicyUnreachableError) as caught:
            await self.dialogue(agent)
        assert any("history_tokens=None" in note for note in caught.value.__notes__)
        down[0] = False
        assert (await run(agent, None))[-1].content == "fine"

    async def test_threads_do_not_share_memories(self, make_reader) -> None:
        policy = ScriptedPolicy(lambda prompt: "the memory")
        model = make_chat_model("fine")
        agent = self.agent(make_reader(policy), model, InMemorySaver())
        messages = [HumanMessage("a " * 100), AIMessage("b " * 100), HumanMessage("c " * 100), AIMessage("d " * 100)]
        for thread in ("one", "two"):
            before = len(policy.prompts)
            await run(agent, {"messages": [*messages, HumanMessage("And now?")]}, thread)
            assert len(policy.prompts) > before

    async def test_a_request_that_alone_fills_the_bound_is_shortened(self, make_reader) -> None:
        model = make_chat_model("fine")
        agent = self.agent(make_reader(), model)
        messages = [
            HumanMessage("a"),
            AIMessage("b"),
            AIMessage("c"),
            HumanMessage("Begin. " + "word " * 500 + "The end."),
        ]
        await run(agent, {"messages": messages})
        shown = model.prompts[-1][-1].text
        assert shown.startswith("Begin.")
        assert " [...] " in shown and shown.endswith("The end.")
        assert load_tokenizer("embedded").count(shown) <= 100

    async def test_half_a_surrogate_pair_is_no_obstacle(self, make_reader) -> None:
        model = make_chat_model("fine")
        messages = [
            HumanMessage("The key of harbor is 4711. \ud800"),
            *(AIMessage(f"word{turn} " * 90) for turn in range(4)),
        ]
        await run(self.agent(make_reader(), model), {"messages": [*messages, *ASK["messages"]]})
        assert "harbor 4711" in str(model.prompts[-1])


class TestTogetherWithOthers:
    @pytest.mark.parametrize("ours_first", [True, False])
    async def test_results_are_read_before_a_summarization(self, make_reader, ours_first: bool) -> None:
        model = make_chat_model(fetch_long(), "4711")
        summary = SummarizationMiddleware(make_chat_model("a summary"), trigger=("tokens", 2000), keep=("messages", 2))
        ours = MemAgentMiddleware(make_reader(), result_tokens=500, history_tokens=400)
        agent = create_agent(model, [fetch], middleware=[ours, summary] if ours_first else [summary, ours])
        messages = await run(agent, ASK)
        assert "Answer: 4711" in tool_message(messages).content
        assert not [message for message in messages if "a summary" in message.text], "nothing was left to summarise"

    async def test_a_summary_counts_as_history_and_not_as_a_request(self, make_reader) -> None:
        model = make_chat_model("fine")
        summary = SummarizationMiddleware(
            make_chat_model("SUMMARY " * 20), trigger=("messages", 16), keep=("messages", 12)
        )
        ours = MemAgentMiddleware(make_reader(), history_tokens=260, keep_messages=2)
        agent = create_agent(model, [fetch], middleware=[summary, ours], checkpointer=InMemorySaver())
        for turn in range(12):
            messages = await run(agent, {"messages": [HumanMessage(f"turn {turn}: " + "word " * 20)]})
        assert any("summary of the conversation" in message.text for message in messages)
        assert any("replaced by this summary" in str(prompt) for prompt in model.prompts)

    async def test_a_deep_agents_results_and_history_are_read(self, make_reader) -> None:
        from deepagents import create_deep_agent

        model = make_chat_model(fetch_long(), "4711")
        middleware = MemAgentMiddleware(make_reader(), result_tokens=500, history_tokens=400)
        agent = create_deep_agent(model, [fetch], middleware=[middleware])
        history = [HumanMessage("The key of mill is 33."), *(AIMessage(f"word{turn} " * 40) for turn in range(12))]
        messages = await run(agent, {"messages": [*history, HumanMessage("What are the keys of harbor and mill?")]})
        assert "Answer: 4711" in tool_message(messages).content
        assert messages[-1].content == "4711"
        assert [message.content for message in messages[:13]] == [message.content for message in history]
        assert "mill 33" in str(model.prompts[0])
        assert "word3 " not in str(model.prompts[0])


class TestQuestions:
    tokenizer = load_tokenizer("embedded")

    def test_the_request_comes_first_and_then_the_call(self) -> None:
        question = make_result_question("Who won?", "search", {"query": "cup"}, 1024, self.tokenizer)
        assert question == 'Who won?\n(The text is the result of search({"query": "cup"}).)'

    def test_a_small_budget_has_the_request_alone(self) -> None:
        assert make_result_question("Who won?", "search", {"query": "cup"}, 96, self.tokenizer) == "Who won?"

    def test_without_a_request_the_call_is_asked_about(self) -> None:
        assert "search" in make_result_question(None, "search", {}, 100, self.tokenizer)

    @given(st.text(max_size=400), st.dictionaries(st.text(max_size=9), st.text(max_size=200)), st.integers(20, 300))
    def test_a_question_always_fits_its_budget(self, request: str, arguments: dict[str, str], tokens: int) -> None:
        question = make_result_question(request, "search", arguments, tokens, self.tokenizer)
        assert 0 < self.tokenizer.count(question) <= tokens

    def test_messages_that_a_middleware_adds_are_not_the_users_request(self) -> None:
        summary = HumanMessage("a summary", additional_kwargs={"lc_source": "summarization"})
        assert find_latest_request([HumanMessage("Who won?"), summary, AIMessage("hm")]) == (0, "Who won?")
        assert find_latest_request([summary]) is None


@st.composite
def histories(draw: st.DrawFn) -> list[BaseMessage]:
    """Any order of speakers and parallel calls; some calls are never answered, some results belong to nothing."""
    messages: list[BaseMessage] = []
    calls_made = 0
    for kind in draw(st.lists(st.sampled_from(["human", "ai", "calls", "orphan"]), max_size=12)):
        if kind == "human":
            messages.append(HumanMessage("question"))
        elif kind == "ai":
            messages.append(AIMessage("text"))
        elif kind == "orphan":
            messages.append(ToolMessage("lost", tool_call_id="nobody"))
        else:
            ids = [f"id{calls_made + index}" for index in range(draw(st.integers(1, 3)))]
            calls_made += len(ids)
            messages.append(AIMessage("", tool_calls=[{"name": "t", "args": {}, "id": id_} for id_ in ids]))
            results = draw(st.lists(st.sampled_from(ids), unique=True))
            messages.extend(ToolMessage("result", tool_call_id=id_) for id_ in results)
    return messages


class TestCuts:
    @given(histories())
    def test_no_cut_parts_a_call_from_a_result(self, messages: list[BaseMessage]) -> None:
        for cut in find_safe_cuts(messages):
            older, recent = messages[:cut], messages[cut:]
            calls = {call["id"] for message in older if isinstance(message, AIMessage) for call in message.tool_calls}
            results = {message.tool_call_id for message in recent if isinstance(message, ToolMessage)}
            assert not calls & results
            if cut:
                assert not (recent and isinstance(recent[0], ToolMessage))

    @given(histories())
    def test_every_cut_that_is_not_offered_would_part_a_call_from_a_result(self, messages: list[BaseMessage]) -> None:
        """All that is not offered begins with a result, parts a call from one, or parts one that is still awaited."""
        for cut in set(range(len(messages) + 1)) - set(find_safe_cuts(messages)):
            older, recent = messages[:cut], messages[cut:]
            calls = {call["id"] for message in older if isinstance(message, AIMessage) for call in message.tool_calls}
            results = {message.tool_call_id for message in recent if isinstance(message, ToolMessage)}
            unanswered = calls - {message.tool_call_id for message in older if isinstance(message, ToolMessage)}
            begins_with_result = bool(recent) and isinstance(recent[0], ToolMessage)
            awaits_more = unanswered and all(isinstance(message, ToolMessage) for message in recent)
            assert calls & results or begins_with_result or awaits_more

    def test_a_call_that_waits_is_on_the_later_side(self) -> None:
        assert find_safe_cuts([HumanMessage("a"), call_tools(("fetch", {}))]) == [0, 1]


def test_a_transcript_shows_speakers_calls_results_and_names_what_is_no_text() -> None:
    picture = {"type": "image", "base64": "AAAA", "mime_type": "image/png"}
    messages = [
        HumanMessage([{"type": "text", "text": "What is this?"}, picture]),
        AIMessage(
            [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "x", "name": "look", "input": {}}],
            tool_calls=[{"name": "look", "args": {"at": "it"}, "id": "x"}],
        ),
        ToolMessage("a cat", tool_call_id="x"),
        ToolMessage("gone", tool_call_id="y", name="find", status="error"),
    ]
    assert format_transcript(messages).split("\n\n") == [
        "User: What is this?\n[image]",
        "Assistant: I look.",
        'Assistant calls look({"at": "it"})',
        "Result of look: a cat",
        "Error of find: gone",
    ]


def test_without_langchain_the_import_says_what_to_install(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "langchain_memagent.middleware")
    monkeypatch.setitem(sys.modules, "langchain.agents.middleware", None)
    with pytest.raises(MissingExtraError, match=re.escape(make_install_command("langchain"))):
        importlib.import_module("langchain_memagent.middleware")


@pytest.mark.parametrize("settings", [{"result_tokens": 0}, {"history_tokens": -1}, {"keep_messages": 0}])
def test_settings_without_sense_are_refused(make_reader, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        MemAgentMiddleware(make_reader(), **settings)


def assert_complete(messages: list[BaseMessage]) -> None:
    """Every result follows its call, and every call has its result, as model servers demand."""
    ids: set[str | None] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            assert message.tool_call_id in ids
            ids.discard(message.tool_call_id)
        elif isinstance(message, AIMessage):
            assert not ids
            ids = {call["id"] for call in message.tool_calls}
    assert not ids
