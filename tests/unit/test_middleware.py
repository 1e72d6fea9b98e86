"""The middleware in agents of `create_agent`: too long tool results and histories are read."""

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
from support.chat_models import ScriptedChatModel, make_chat_model, make_tool_calls
from support.fake_server import FakeServer
from support.scripts import extract, make_document, read_perfectly
from unit.test_tracing import RunRecorder

from langchain_memagent.middleware import MemAgentMiddleware
from langchain_memagent.transcripts import find_latest_request, find_safe_cuts, format_transcript, make_result_question
from memagent_graph import Limits, MemAgent, OpenAICompatiblePolicy, ScriptedPolicy
from memagent_graph.errors import BudgetError, MissingExtraError, PolicyUnreachableError, make_install_command
from memagent_graph.policies.chat_model import ChatModelPolicy
from memagent_graph.tokenizers import load_tokenizer

LONG_TEXT = make_document({0.3: "The key of harbor is 4711.", 0.8: "The key of castle is 2222."}, words=1600)
REQUEST = {"messages": [HumanMessage("What is the key of harbor?")]}


@tool
def fetch(name: str) -> str:
    """Fetch a text."""
    return LONG_TEXT if name == "long" else "a short text"


SYNC_AND_ASYNC = pytest.mark.parametrize("method", ["invoke", "ainvoke"])
"""The synchronous methods of the middleware run the asynchronous ones; some tests call both."""


async def ask(agent: Any, state_input: Any, thread: str = "one", method: str = "ainvoke") -> list[AnyMessage]:
    """Call an agent on a thread, by default asynchronously; return its messages."""
    config = {"configurable": {"thread_id": thread}, "recursion_limit": 25}
    state = agent.invoke(state_input, config) if method == "invoke" else await agent.ainvoke(state_input, config)
    return list(state["messages"])


def make_agent(
    reader: MemAgent, *replies: AIMessage | str, tools: Sequence[Any] = (fetch,), saver: Any = None, **options: Any
) -> Any:
    """Return an agent with the middleware, whose model gives these replies."""
    middleware = [MemAgentMiddleware(reader, **{"result_tokens": 500, **options})]
    return create_agent(make_chat_model(*replies), list(tools), middleware=middleware, checkpointer=saver)


def make_fetch_call(*, twice: bool = False) -> AIMessage:
    return make_tool_calls(*[("fetch", {"name": "long"})] * (1 + twice))


def get_tool_message(messages: list[AnyMessage], index: int = 0) -> ToolMessage:
    return [message for message in messages if isinstance(message, ToolMessage)][index]


def get_reading(message: ToolMessage) -> dict[str, Any]:
    """Return the data of a read that the middleware attaches to the result for applications."""
    reading: dict[str, Any] = message.response_metadata["memagent"]
    return reading


class ModelCallCounter(BaseCallbackHandler):
    """A callback handler that counts the calls of chat models."""

    calls = 0

    def on_chat_model_start(self, *arguments: Any, **options: Any) -> None:
        self.calls += 1


class TestToolResults:
    @SYNC_AND_ASYNC
    async def test_the_answer_of_a_read_replaces_a_too_long_result(self, make_reader, method) -> None:
        reader = make_reader()
        agent = make_agent(reader, make_fetch_call(), "4711")
        result = get_tool_message(await ask(agent, REQUEST, method=method))
        assert (result.tool_call_id, result.name, result.status) == ("call-0", "fetch", "success")
        assert "Answer: 4711" in result.content
        assert "harbor 4711" in result.content
        assert "2222" not in result.content, "the request is not about castle"
        assert get_reading(result)["run_id"] in result.content
        assert get_reading(result)["usage"]["prompt_tokens"] > 3000
        assert reader.store.read_bytes(get_reading(result)["document"], 0, 10**6).decode() == LONG_TEXT

    async def test_a_result_within_the_limit_is_unchanged(self, make_reader) -> None:
        """The limit is in tokens: a result may have more bytes."""
        policy, tokens = ScriptedPolicy(read_perfectly), load_tokenizer("embedded").count(LONG_TEXT)
        for name, text, limit in (("short", "a short text", 500), ("long", LONG_TEXT, tokens)):
            script = make_tool_calls(("fetch", {"name": name})), "done"
            agent = make_agent(make_reader(policy), *script, result_tokens=limit)
            assert get_tool_message(await ask(agent, REQUEST)).content == text
        assert policy.prompts == []

    async def test_a_result_can_be_asked_by_another_process_but_not_on_another_thread(self, make_reader) -> None:
        saver = InMemorySaver()

        def new_agent(*replies: AIMessage | str) -> Any:
            return make_agent(make_reader(run_log=False), *replies, saver=saver)

        first_result = get_tool_message(await ask(new_agent(make_fetch_call(), "4711"), REQUEST))
        arguments = {"run_id": get_reading(first_result)["run_id"], "questions": "What is the key of castle?"}
        follow_up = {"messages": [HumanMessage("And castle?")]}
        messages = await ask(new_agent(make_tool_calls(("ask_tool_result", arguments), prefix="b"), "2222"), follow_up)
        assert "Answer: 2222" in get_tool_message(messages, -1).content
        # A caller cannot add the run to another thread, neither as state nor as a message.
        reading = get_reading(first_result)
        forged_state = {**follow_up, "memagent_readings": {reading["run_id"]: reading["document"]}}
        forged_state["messages"] = [make_tool_calls(("fetch", {})), first_result, *follow_up["messages"]]
        new_call = make_tool_calls(("ask_tool_result", arguments), prefix="b")
        other_messages = await ask(new_agent(new_call, "?"), forged_state, thread="two")
        assert get_tool_message(other_messages, -1).status == "error"
        assert "2222" not in get_tool_message(other_messages, -1).content
        assert "No tool result of this conversation" in get_tool_message(other_messages, -1).content

    async def test_blocks_without_text_are_kept(self, make_reader) -> None:
        image = {"type": "image", "base64": "AAAA", "mime_type": "image/png"}

        @tool
        def take_picture() -> list[dict[str, Any]]:
            """Take a picture."""
            middle = len(LONG_TEXT) // 2
            return [{"type": "text", "text": LONG_TEXT[:middle]}, image, {"type": "text", "text": LONG_TEXT[middle:]}]

        agent = make_agent(make_reader(), make_tool_calls(("take_picture", {})), "done", tools=[take_picture])
        text, block = get_tool_message(await ask(agent, REQUEST)).content
        assert "Answer: 4711" in text["text"]
        assert block == image

    @pytest.mark.parametrize("is_list", [False, True])
    async def test_messages_of_commands_are_read_and_other_updates_are_kept(self, make_reader, is_list: bool) -> None:
        @tool
        def hand_over(runtime: ToolRuntime) -> Any:
            """Hand over."""
            result = ToolMessage(f"{LONG_TEXT}\ud800", tool_call_id=runtime.tool_call_id, artifact={"mine": 1})
            command = Command(update={"messages": [result, HumanMessage("note", additional_kwargs={"lc_source": "x"})]})
            return [command, Command()] if is_list else command

        agent = make_agent(make_reader(), make_tool_calls(("hand_over", {})), "done", tools=[hand_over])
        messages = await ask(agent, REQUEST)
        assert "Answer: 4711" in get_tool_message(messages).content
        assert get_tool_message(messages).artifact == {"mine": 1}
        assert get_reading(get_tool_message(messages))["answer"] == "4711"
        assert "note" in [message.content for message in messages]

    async def test_every_long_result_of_a_turn_is_read_and_can_be_asked(self, make_reader, langgraph_dev) -> None:
        saver = InMemorySaver()
        agent = make_agent(make_reader(run_log=False), make_fetch_call(twice=True), "done", saver=saver)
        messages = await ask(agent, REQUEST)
        run_ids = {get_reading(get_tool_message(messages, index))["run_id"] for index in (0, 1)}
        state = (await agent.aget_state({"configurable": {"thread_id": "one"}})).values
        assert run_ids == set(state["memagent_readings"])

    async def test_a_result_that_cannot_be_read_is_kept_and_can_be_asked_later(self, make_reader) -> None:
        is_down, error = [True], PolicyUnreachableError("no connection", hint="Start the server.")

        def reply_or_fail(prompt: str) -> Any:
            return error if is_down[0] else read_perfectly(prompt)

        saver, reader = InMemorySaver(), make_reader(ScriptedPolicy(reply_or_fail))
        agent = make_agent(reader, make_fetch_call(), "later, then", saver=saver, result_tokens=1800)
        notice = get_tool_message(await ask(agent, REQUEST))
        assert "no connection" in notice.content
        assert "Start the server." in notice.content
        assert LONG_TEXT[:500] in notice.content
        assert load_tokenizer("embedded").count(notice.content) <= 1800
        is_down[0] = False
        tool_call = make_tool_calls(
            ("ask_tool_result", {"run_id": get_reading(notice)["run_id"], "questions": REQUEST["messages"][0].content})
        )
        agent = make_agent(reader, tool_call, "4711", saver=saver, result_tokens=1800)
        assert "Answer: 4711" in get_tool_message(await ask(agent, REQUEST), -1).content

    async def test_a_result_that_cannot_be_stored_stays_in_the_artifact(
        self, make_reader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def raise_disk_full(*arguments: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        @tool
        def hand_over(runtime: ToolRuntime) -> Command[Any]:
            """Hand over."""
            return Command(update={"messages": [ToolMessage(LONG_TEXT, tool_call_id=runtime.tool_call_id)]})

        reader = make_reader()
        monkeypatch.setattr(reader.store, "add", raise_disk_full)
        tool_calls = make_tool_calls(("fetch", {"name": "long"}), ("hand_over", {}))
        agent = make_agent(reader, tool_calls, "done", tools=[fetch, hand_over], result_tokens=1800)
        messages = await ask(agent, REQUEST)
        for index in (0, 1):
            notice = get_tool_message(messages, index)
            assert "No space left" in notice.content
            assert get_reading(notice)["text"] == LONG_TEXT

    async def test_the_result_says_that_a_limit_stopped_the_read(self, make_reader) -> None:
        agent = make_agent(make_reader(), make_fetch_call(), "done", limits=Limits(max_chunks=3))
        assert "stopped early after 3 parts" in get_tool_message(await ask(agent, REQUEST)).content

    async def test_an_agent_that_stops_during_a_read_resumes_it_at_its_chunk(self, make_reader) -> None:
        sections: list[str] = []

        def script(prompt: str) -> str:
            sections.append(extract(prompt, "section"))
            if len(sections) == 12:
                raise KeyError("in place of a kill")
            return read_perfectly(prompt)

        agent = make_agent(make_reader(ScriptedPolicy(script)), make_fetch_call(), "4711", saver=InMemorySaver())
        with pytest.raises(KeyError):
            await ask(agent, REQUEST)
        assert "Answer: 4711" in get_tool_message(await ask(agent, None)).content
        assert len(sections) == len(set(sections)) + 1, "only the chunk at which it was stopped was read twice"

    async def test_only_progress_of_a_read_is_streamed(self, make_reader) -> None:
        chat_model = ScriptedChatModel(script=lambda messages: AIMessage(read_perfectly(messages[-1].text)))
        policy = ChatModelPolicy(chat_model)
        saver = InMemorySaver()
        for method in ("stream", "astream"):
            agent = make_agent(make_reader(policy), make_fetch_call(), "done", saver=saver)
            counter = ModelCallCounter()
            config: Any = {"configurable": {"thread_id": "one"}, "callbacks": [counter]}
            options: Any = {"stream_mode": ["custom", "messages"], "subgraphs": True}
            if method == "stream":
                events = [event[1:] for event in agent.stream(REQUEST, config, **options)]
            else:
                events = [event[1:] async for event in agent.astream(REQUEST, config, **options)]
            assert counter.calls == 3, "the agent's model twice, and the read as one run"
            progress = [payload["progress"] for mode, payload in events if mode == "custom"]
            assert progress == sorted(progress)
            assert progress[-1] == 1.0
            messages = [payload[0] for mode, payload in events if mode == "messages"]
            texts = {message.text for message in messages if isinstance(message, AIMessage)}
            assert texts <= {"", "done"}
        assert set(saver.storage) == {"one"}, "no step of the reader was saved in the agent's checkpointer"
        assert set(saver.storage["one"]) == {""}

    async def test_callback_handlers_see_a_read_as_one_run_with_all_its_tokens(self, make_reader) -> None:
        counter, recorder = UsageMetadataCallbackHandler(), RunRecorder()
        agent = make_agent(make_reader(), make_fetch_call(), "4711").with_config(callbacks=[counter, recorder])
        with get_usage_metadata_callback() as context_counter:
            result = get_tool_message(await ask(agent, REQUEST))
        usage = get_reading(result)["usage"]
        for handler in (counter, context_counter):
            (total,) = handler.usage_metadata.values()
            assert total["input_tokens"] == usage["prompt_tokens"]
            assert total["output_tokens"] == usage["completion_tokens"]
        (read_run,) = [run for run in recorder.runs if run.name == "MemAgent"]
        assert read_run.inputs["run_ids"] == [get_reading(result)["run_id"]]
        assert read_run.outputs == {"answers": ["4711"]}
        assert read_run.parent_run_id is not None
        (policy_run,) = [run for run in recorder.runs if run.parent_run_id == read_run.id]
        assert policy_run.name == "MemAgent policy"
        assert not [run for run in recorder.runs if run.name in {"update_memory", "read_chunk"}]
        assert "word7 and then" not in repr([(run.inputs, run.outputs) for run in (read_run, policy_run)])

    async def test_the_tokens_of_a_failed_read_are_counted(self, make_reader) -> None:
        def script(prompt: str) -> Any:
            return PolicyUnreachableError("no connection") if len(policy.prompts) == 6 else read_perfectly(prompt)

        policy = ScriptedPolicy(script)
        counter, recorder = UsageMetadataCallbackHandler(), RunRecorder()
        agent = make_agent(make_reader(policy), make_fetch_call(), "later").with_config(callbacks=[counter, recorder])
        await ask(agent, REQUEST)
        (usage,) = counter.usage_metadata.values()
        assert usage["input_tokens"] > 5 * 100
        (read_run,) = [run for run in recorder.runs if run.name == "MemAgent"]
        assert "no connection" in (read_run.error or "")


class TestHistories:
    def make_agent(self, reader: MemAgent, model: Any, saver: Any = None, **options: Any) -> Any:
        settings = {"result_tokens": None, "history_tokens": 400, "keep_messages": 3, **options}
        middleware = [MemAgentMiddleware(reader, **settings)]
        return create_agent(model, [fetch], middleware=middleware, checkpointer=saver, system_prompt="Be brief.")

    async def hold_dialogue(self, agent: Any, turns: int = 20) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        for turn in range(turns):
            text = f"turn {turn}: " + " ".join(f"word{turn}x{index}" for index in range(12))
            if turn == 1:
                text = "The key of harbor is 4711. Remember it."
            messages = await ask(agent, {"messages": [HumanMessage(text)]})
        return messages

    async def test_prompts_are_limited_and_the_stored_state_is_unchanged(self, make_reader) -> None:
        count_tokens = load_tokenizer("embedded").count
        histories = []
        for history_tokens in (400, None):
            saver, model = InMemorySaver(), make_chat_model("fine")
            agent = self.make_agent(make_reader(), model, saver, history_tokens=history_tokens)
            await self.hold_dialogue(agent)
            max_prompt_tokens = max(sum(count_tokens(message.text) for message in prompt) for prompt in model.prompts)
            assert (max_prompt_tokens <= 450) == (history_tokens is not None)
            assert all(prompt[0] == SystemMessage("Be brief.") for prompt in model.prompts)
            config = {"configurable": {"thread_id": "one"}}
            history = [
                [(message.type, message.content, message.additional_kwargs) for message in snapshot.values["messages"]]
                async for snapshot in agent.aget_state_history(config)
                if "messages" in snapshot.values
            ]
            histories.append(history)
            assert set(saver.storage["one"]) == {""}
        assert histories[0] == histories[1]

    def test_a_too_small_limit_is_an_error_when_the_middleware_is_made(self, make_reader) -> None:
        with pytest.raises(BudgetError, match="history_tokens must be at least 248"):
            MemAgentMiddleware(make_reader(), history_tokens=200)

    async def test_a_limit_too_small_for_a_served_policy_is_an_error_of_the_first_call(self, make_reader) -> None:
        with FakeServer() as server:
            policy = OpenAICompatiblePolicy(base_url=server.base_url)
            agent = self.make_agent(make_reader(policy, budget=None), make_chat_model("fine"), history_tokens=200)
            with pytest.raises(BudgetError, match="history_tokens"):
                await ask(agent, {"messages": [HumanMessage("hello")]})

    async def test_reading_a_history_streams_progress_and_counts_tokens(self, make_reader) -> None:
        counter, recorder = UsageMetadataCallbackHandler(), RunRecorder()
        messages = [HumanMessage(f"turn {turn}: " + "word " * 60) for turn in range(20)]
        for method in ("stream", "astream"):
            policy = ScriptedPolicy(lambda prompt: "the memory")
            agent = self.make_agent(make_reader(policy), make_chat_model("fine")).with_config(
                callbacks=[counter, recorder]
            )
            if method == "stream":
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

    @SYNC_AND_ASYNC
    async def test_a_fact_of_the_oldest_messages_reaches_the_model(self, make_reader, method) -> None:
        def keep_every_key(prompt: str) -> str:
            memory, section = extract(prompt, "memory"), extract(prompt, "section")
            return "\n".join([memory, *re.findall(r"key of \w+ is \d+", section)]).strip() or "nothing yet"

        model = make_chat_model("fine")
        agent = self.make_agent(make_reader(ScriptedPolicy(keep_every_key)), model, InMemorySaver())
        await self.hold_dialogue(agent)
        await ask(agent, {"messages": [HumanMessage("What is the key of harbor?")]}, method=method)
        assert "Remember it" not in str(model.prompts[-1]), "the message is no longer in the prompt"
        assert "key of harbor is 4711" in model.prompts[-1][1].text
        assert model.prompts[-1][-1].content == "What is the key of harbor?"

    async def test_no_message_is_read_twice_and_most_turns_read_none(self, make_reader, langgraph_dev) -> None:
        policy = ScriptedPolicy(lambda prompt: "the memory")
        agent = self.make_agent(make_reader(policy, run_log=False), make_chat_model("fine"), InMemorySaver())
        await self.hold_dialogue(agent, turns=25)
        sections = [prompt.split("<section>")[1] for prompt in policy.prompts]
        for turn in range(15):
            assert sum(f"word{turn}x5" in section for section in sections) == (turn != 1)
        assert len(sections) < 25

    async def test_another_process_reads_the_older_messages_again(self, make_reader) -> None:
        saver = InMemorySaver()
        await self.hold_dialogue(self.make_agent(make_reader(), make_chat_model("fine"), saver))
        policy = ScriptedPolicy(read_perfectly)
        model = make_chat_model("4711")
        await ask(self.make_agent(make_reader(policy), model, saver), REQUEST)
        assert "harbor 4711" in str(model.prompts[-1])

    async def test_a_long_tool_loop_keeps_the_request_and_pairs_calls_with_results(self, make_reader) -> None:
        call_count = [0]

        def script(messages: list[BaseMessage]) -> AIMessage:
            assert_complete(messages)
            assert "What is the key of harbor?" in [message.content for message in messages]
            call_count[0] += 1
            if call_count[0] > 9:
                return AIMessage("4711")
            names = [("fetch", {"name": "word " * 20})] * (call_count[0] % 3 + 1)
            return make_tool_calls(*names, prefix=f"round{call_count[0]}")

        model = ScriptedChatModel(script=script)
        await ask(self.make_agent(make_reader(), model), REQUEST)
        assert any("replaced by this summary" in str(prompt) for prompt in model.prompts)

    async def test_after_a_policy_error_the_turn_can_be_repeated(self, make_reader) -> None:
        is_down = [False]

        def reply_or_fail(prompt: str) -> Any:
            return PolicyUnreachableError("no connection") if is_down[0] else "the memory"

        agent = self.make_agent(make_reader(ScriptedPolicy(reply_or_fail)), make_chat_model("fine"), InMemorySaver())
        is_down[0] = True
        with pytest.raises(PolicyUnreachableError) as error:
            await self.hold_dialogue(agent)
        assert any("history_tokens=None" in note for note in error.value.__notes__)
        is_down[0] = False
        assert (await ask(agent, None))[-1].content == "fine"

    async def test_threads_do_not_share_memories(self, make_reader) -> None:
        policy = ScriptedPolicy(lambda prompt: "the memory")
        agent = self.make_agent(make_reader(policy), make_chat_model("fine"), InMemorySaver())
        messages = [HumanMessage("a " * 100), AIMessage("b " * 100), HumanMessage("c " * 100), AIMessage("d " * 100)]
        for thread in ("one", "two"):
            prompt_count = len(policy.prompts)
            await ask(agent, {"messages": [*messages, HumanMessage("And now?")]}, thread)
            assert len(policy.prompts) > prompt_count

    async def test_a_request_longer_than_the_limit_is_shortened(self, make_reader) -> None:
        model = make_chat_model("fine")
        agent = self.make_agent(make_reader(), model)
        image = {"type": "image", "base64": "aGk=", "mime_type": "image/png"}
        request_blocks: Any = [{"type": "text", "text": "Begin. " + "word " * 500 + "The end."}, image]
        messages = [HumanMessage("a"), AIMessage("b"), AIMessage("c"), HumanMessage(request_blocks)]
        await ask(agent, {"messages": messages})
        request = model.prompts[-1][-1].text
        assert request.startswith("Begin.") and model.prompts[-1][-1].content[1:] == [image]
        assert " [...] " in request and request.endswith("The end.")
        assert load_tokenizer("embedded").count(request) <= 100

    async def test_a_history_with_a_lone_surrogate_is_read(self, make_reader) -> None:
        model = make_chat_model("fine")
        messages = [
            HumanMessage("The key of harbor is 4711. \ud800"),
            *(AIMessage(f"word{turn} " * 90) for turn in range(4)),
        ]
        await ask(self.make_agent(make_reader(), model), {"messages": [*messages, *REQUEST["messages"]]})
        assert "harbor 4711" in str(model.prompts[-1])


class TestOtherMiddleware:
    @pytest.mark.parametrize("reading_first", [True, False])
    async def test_results_are_read_before_a_summarization(self, make_reader, reading_first: bool) -> None:
        model = make_chat_model(make_fetch_call(), "4711")
        summary = SummarizationMiddleware(make_chat_model("a summary"), trigger=("tokens", 2000), keep=("messages", 2))
        reading = MemAgentMiddleware(make_reader(), result_tokens=500, history_tokens=400)
        agent = create_agent(model, [fetch], middleware=[reading, summary] if reading_first else [summary, reading])
        messages = await ask(agent, REQUEST)
        assert "Answer: 4711" in get_tool_message(messages).content
        assert not [message for message in messages if "a summary" in message.text], "nothing was left to summarise"

    async def test_a_summary_counts_as_history_and_not_as_a_request(self, make_reader) -> None:
        model = make_chat_model("fine")
        summary = SummarizationMiddleware(
            make_chat_model("SUMMARY " * 20), trigger=("messages", 16), keep=("messages", 12)
        )
        reading = MemAgentMiddleware(make_reader(), history_tokens=260, keep_messages=2)
        agent = create_agent(model, [fetch], middleware=[summary, reading], checkpointer=InMemorySaver())
        for turn in range(12):
            messages = await ask(agent, {"messages": [HumanMessage(f"turn {turn}: " + "word " * 20)]})
        assert any("summary of the conversation" in message.text for message in messages)
        assert any("replaced by this summary" in str(prompt) for prompt in model.prompts)

    async def test_a_deep_agents_results_and_history_are_read(self, make_reader) -> None:
        from deepagents import create_deep_agent

        model = make_chat_model(make_fetch_call(), "4711")
        middleware = MemAgentMiddleware(make_reader(), result_tokens=500, history_tokens=400)
        agent = create_deep_agent(model, [fetch], middleware=[middleware])
        history = [HumanMessage("The key of mill is 33."), *(AIMessage(f"word{turn} " * 40) for turn in range(12))]
        messages = await ask(agent, {"messages": [*history, HumanMessage("What are the keys of harbor and mill?")]})
        assert "Answer: 4711" in get_tool_message(messages).content
        assert messages[-1].content == "4711"
        assert [message.content for message in messages[:13]] == [message.content for message in history]
        assert "mill 33" in str(model.prompts[0])
        assert "word3 " not in str(model.prompts[0])


class TestQuestions:
    tokenizer = load_tokenizer("embedded")

    def test_a_question_has_the_request_and_then_the_call(self) -> None:
        question = make_result_question("Who won?", "search", {"query": "cup"}, 1024, self.tokenizer)
        assert question == 'Who won?\n(The text is the result of search({"query": "cup"}).)'

    def test_a_question_of_a_small_budget_has_only_the_request(self) -> None:
        assert make_result_question("Who won?", "search", {"query": "cup"}, 96, self.tokenizer) == "Who won?"

    def test_a_question_without_a_request_names_the_tool(self) -> None:
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
    """Draw a history with any order of messages and parallel calls; some calls and results are unpaired."""
    messages: list[BaseMessage] = []
    call_count = 0
    for message_kind in draw(st.lists(st.sampled_from(["human", "ai", "calls", "orphan"]), max_size=12)):
        if message_kind == "human":
            messages.append(HumanMessage("question"))
        elif message_kind == "ai":
            messages.append(AIMessage("text"))
        elif message_kind == "orphan":
            messages.append(ToolMessage("lost", tool_call_id="nobody"))
        else:
            ids = [f"id{call_count + index}" for index in range(draw(st.integers(1, 3)))]
            call_count += len(ids)
            messages.append(AIMessage("", tool_calls=[{"name": "t", "args": {}, "id": id_} for id_ in ids]))
            results = draw(st.lists(st.sampled_from(ids), unique=True))
            messages.extend(ToolMessage("result", tool_call_id=id_) for id_ in results)
    return messages


class TestCuts:
    @given(histories())
    def test_no_cut_separates_a_call_from_its_result(self, messages: list[BaseMessage]) -> None:
        for cut in find_safe_cuts(messages):
            older, recent = messages[:cut], messages[cut:]
            calls = {call["id"] for message in older if isinstance(message, AIMessage) for call in message.tool_calls}
            results = {message.tool_call_id for message in recent if isinstance(message, ToolMessage)}
            assert not calls & results
            if cut:
                assert not (recent and isinstance(recent[0], ToolMessage))

    @given(histories())
    def test_every_other_cut_would_separate_a_call_from_its_result(self, messages: list[BaseMessage]) -> None:
        """Every other cut precedes a result, or separates a call from a result that exists or is still to come."""
        for cut in set(range(len(messages) + 1)) - set(find_safe_cuts(messages)):
            older, recent = messages[:cut], messages[cut:]
            calls = {call["id"] for message in older if isinstance(message, AIMessage) for call in message.tool_calls}
            results = {message.tool_call_id for message in recent if isinstance(message, ToolMessage)}
            unanswered = calls - {message.tool_call_id for message in older if isinstance(message, ToolMessage)}
            begins_with_result = bool(recent) and isinstance(recent[0], ToolMessage)
            awaits_more = unanswered and all(isinstance(message, ToolMessage) for message in recent)
            assert calls & results or begins_with_result or awaits_more

    def test_no_cut_follows_an_unanswered_call(self) -> None:
        assert find_safe_cuts([HumanMessage("a"), make_tool_calls(("fetch", {}))]) == [0, 1]


def test_a_transcript_shows_messages_calls_results_and_block_types() -> None:
    image = {"type": "image", "base64": "AAAA", "mime_type": "image/png"}
    messages = [
        HumanMessage([{"type": "text", "text": "What is this?"}, image]),
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


def test_the_import_error_without_langchain_names_the_extra(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "langchain_memagent.middleware")
    monkeypatch.setitem(sys.modules, "langchain.agents.middleware", None)
    with pytest.raises(MissingExtraError, match=re.escape(make_install_command("langchain"))):
        importlib.import_module("langchain_memagent.middleware")


@pytest.mark.parametrize("settings", [{"result_tokens": 0}, {"history_tokens": -1}, {"keep_messages": 0}])
def test_invalid_settings_are_refused(make_reader, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        MemAgentMiddleware(make_reader(), **settings)


def assert_complete(messages: list[BaseMessage]) -> None:
    """Assert that every result follows its call and every call has a result, as model servers require."""
    ids: set[str | None] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            assert message.tool_call_id in ids
            ids.discard(message.tool_call_id)
        elif isinstance(message, AIMessage):
            assert not ids
            ids = {call["id"] for call in message.tool_calls}
    assert not ids
