"""What LangChain's tracers and usage counters get from a read."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers import BaseTracer, Run
from langchain_core.tracers.context import tracing_v2_enabled
from langchain_core.tracers.langchain import wait_for_all_tracers
from langsmith import Client
from support.chat_models import ScriptedChatModel
from support.fake_server import FakeServer
from support.scripts import extract, make_document, read_perfectly

from memagent_graph import ChatModelPolicy, Completion, FinishReason, OpenAICompatiblePolicy, ScriptedPolicy
from memagent_graph.errors import PolicyError
from memagent_graph.policy import TokenUsage
from memagent_graph.reading.tracing import TRACE_TEXTS, observe_policy

TEXT = make_document({0.5: "The key of harbor is 4711."}, words=600)
QUESTION = "What is the key of harbor?"
INPUT: Any = {"question": QUESTION, "document": TEXT}
FILLER = "and then word"


class RunRecorder(BaseTracer):
    """Records all runs that LangChain reports."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []

    def _persist_run(self, run: Run) -> None:
        pass

    def _end_trace(self, run: Run) -> None:
        self.runs.append(run)
        super()._end_trace(run)

    @property
    def models(self) -> list[Run]:
        return [run for run in self.runs if run.run_type in {"llm", "chat_model"}]

    @property
    def words(self) -> str:
        return repr([(run.inputs, run.outputs, run.extra, run.events, run.error, run.serialized) for run in self.runs])


def reply_perfectly(messages: list[BaseMessage]) -> AIMessage:
    """Reply perfectly, with usage in the format of LangChain's chat models."""
    prompt = str(messages[-1].content)
    text = read_perfectly(prompt)
    usage = {"input_tokens": len(prompt), "output_tokens": len(text), "total_tokens": len(prompt) + len(text)}
    return AIMessage(text, usage_metadata=usage, response_metadata={"model_name": "perfect-1"})


@contextmanager
def make_policy(kind: str) -> Any:
    if kind == "server":
        with FakeServer() as server:
            yield OpenAICompatiblePolicy("fake", base_url=server.base_url)
    elif kind == "chat model":
        yield ChatModelPolicy(ScriptedChatModel(script=reply_perfectly))
    else:
        yield ScriptedPolicy(read_perfectly)


KINDS = ["server", "chat model", "script without usage"]


def get_tokens(counter: Any) -> tuple[int, int]:
    [usage] = counter.usage_metadata.values()
    return usage["input_tokens"], usage["output_tokens"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sync", [True, False])
async def test_langchains_usage_counter_agrees_with_the_result(make_reader, kind, sync) -> None:
    with make_policy(kind) as policy:
        agent = make_reader(policy)
        with get_usage_metadata_callback() as counter:
            result = agent.read(TEXT, QUESTION) if sync else await agent.aread(TEXT, QUESTION)
        assert get_tokens(counter) == (result.usage.prompt_tokens, result.usage.completion_tokens)
        assert result.answer == "4711"
        await agent.aclose()


async def test_discarded_completions_and_cached_tokens_are_counted(make_reader) -> None:
    def script(prompt: str) -> Any:
        text = "" if "<section>" not in prompt else read_perfectly(prompt)
        return Completion(text, FinishReason.STOP, "s", TokenUsage(10, 1, 4))

    with get_usage_metadata_callback() as counter:
        result = await make_reader(ScriptedPolicy(script)).aread(TEXT, QUESTION)
    assert result.usage.turns == result.chunks_read + 3
    usage = counter.usage_metadata["s"]
    assert usage["input_tokens"] == 10 * result.usage.turns
    assert usage["input_token_details"]["cache_read"] == result.usage.cached_tokens == 4 * result.usage.turns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sync", [True, False])
async def test_no_traced_run_has_text_of_the_document(make_reader, kind, sync) -> None:
    with make_policy(kind) as policy:
        agent, recorder = make_reader(policy), RunRecorder()
        graph = await agent.agraph()
        config: Any = {"callbacks": [recorder]}
        out = graph.invoke(INPUT, config) if sync else await graph.ainvoke(INPUT, config)
        await agent.aclose()
    assert out["answer"] == "4711"
    assert len(recorder.models) == out["chunks_read"] + 1, "one run per completion, not two"
    assert FILLER in TEXT
    assert FILLER not in recorder.words
    assert "characters, kept out of traces" in recorder.words


async def test_a_read_in_a_chain_inherits_the_option_to_trace_texts(make_reader) -> None:
    agent, recorder = make_reader(), RunRecorder()
    chain = RunnableLambda(lambda question: agent.read(TEXT, question).answer)
    config: Any = {"callbacks": [recorder], "metadata": {TRACE_TEXTS: True}}
    assert await chain.ainvoke(QUESTION, config) == "4711"
    assert FILLER in recorder.words


async def test_langsmith_gets_no_text_of_the_document(make_reader, monkeypatch) -> None:
    """LangSmith's tracer comes from the environment or a context manager, not from the config."""
    monkeypatch.setenv("LANGSMITH_TRACING", "true")
    session = MagicMock()
    client = Client(api_url="http://localhost:1", api_key="none", session=session, auto_batch_tracing=False)
    with tracing_v2_enabled(client=client):
        assert (await make_reader().aread(TEXT, QUESTION)).answer == "4711"
    wait_for_all_tracers()
    requests = repr(session.request.call_args_list)
    assert "characters, kept out of traces" in requests
    assert "update_memory" in requests
    assert FILLER not in requests


async def test_a_traced_call_is_a_child_of_its_node_and_names_its_model(make_reader) -> None:
    recorder = RunRecorder()
    await (await make_reader().agraph()).ainvoke(INPUT, {"callbacks": [recorder]})
    runs_by_id = {run.id: run for run in recorder.runs}
    run = recorder.models[0]
    assert run.parent_run_id in runs_by_id
    assert runs_by_id[run.parent_run_id].name == "update_memory"
    assert run.extra["metadata"]["ls_model_name"] == "scripted"
    assert extract(repr(recorder.models[-1].outputs), "section") == ""


async def test_a_failed_call_is_a_failed_run(make_reader) -> None:
    recorder = RunRecorder()
    graph = await make_reader(ScriptedPolicy(lambda prompt: PolicyError("gone"))).agraph()
    with pytest.raises(PolicyError):
        await graph.ainvoke(INPUT, {"callbacks": [recorder]})
    [run] = recorder.models
    assert "gone" in run.error


async def test_reasoning_that_quotes_a_chunk_is_not_traced(make_reader) -> None:
    def script(prompt: str) -> str:
        return f"<think>{extract(prompt, 'section')}</think>{read_perfectly(prompt)}"

    recorder = RunRecorder()
    graph = await make_reader(ScriptedPolicy(script)).agraph()
    async for _ in graph.astream(INPUT, {"callbacks": [recorder]}, stream_mode="updates"):
        pass
    assert FILLER not in repr([run.outputs for run in recorder.models])


async def test_a_message_stream_contains_no_memories(make_reader) -> None:
    graph = await make_reader(ChatModelPolicy(ScriptedChatModel(script=reply_perfectly))).agraph()
    assert [message async for message in graph.astream(INPUT, stream_mode="messages")] == []


async def test_a_policy_is_called_with_the_configurable_settings(make_reader) -> None:
    configs: list[Any] = []

    def script(prompt: str) -> str:
        config: Any = var_child_runnable_config.get()
        configs.append((config["configurable"].get("model"), config["callbacks"]))
        return read_perfectly(prompt)

    config: Any = {"callbacks": [RunRecorder()], "configurable": {"model": "large"}}
    await (await make_reader(ScriptedPolicy(script)).agraph()).ainvoke(INPUT, config)
    assert set(configs) == {("large", None)}


def test_without_callbacks_the_context_is_unchanged(make_reader) -> None:
    context = make_reader().graph().reader_context
    for config in (None, {}, {"callbacks": None}, {"callbacks": []}):
        assert observe_policy(context, config) is context
