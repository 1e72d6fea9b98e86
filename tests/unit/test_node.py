"""`memagent_node`: reading as a node of another graph."""

from __future__ import annotations

import json
import operator
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send, TracePolicy, omit_payload
from support.fake_server import FakeServer
from support.programs import Program, kill_after, run_program
from support.scripts import extract, make_document, read_perfectly
from typing_extensions import TypedDict
from unit.test_tracing import RunRecorder

from langchain_memagent.node import memagent_node
from memagent_graph import MemAgent, OpenAICompatiblePolicy, ScriptedPolicy, load_tokenizer
from memagent_graph.errors import MemAgentError, PolicyError

TEXT = make_document({0.5: "The key of harbor is 4711."}, words=1000)
QUESTION = "What is the key of harbor?"
INPUT: Any = {"question": QUESTION, "document": TEXT}
LOW_RECURSION_LIMIT: Any = {"recursion_limit": 25}
THREAD: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict, total=False):
    question: str
    document: Any
    answer: str | None
    notes: str
    run: str
    quotes: list[dict[str, Any]]
    why: str


def build_parent(node: Any, state: Any = State, **options: Any) -> StateGraph:
    builder = StateGraph(state)
    builder.add_node("read", node, **options)
    builder.add_edge(START, "read")
    builder.add_edge("read", END)
    return builder


class TestStateKeys:
    def test_default_keys_are_question_document_and_answer(self, make_reader) -> None:
        assert build_parent(memagent_node(make_reader())).compile().invoke(INPUT) == {**INPUT, "answer": "4711"}

    def test_keys_can_be_renamed_and_more_of_the_result_be_written(self, make_reader) -> None:
        class RenamedState(TypedDict, total=False):
            task: str
            report: str
            result: str

        node = memagent_node(make_reader(), question="task", document="report", answer="result")
        assert build_parent(node, RenamedState).compile().invoke({"task": QUESTION, "report": TEXT})["result"] == "4711"

        node = memagent_node(make_reader(), memory="notes", run_id="run", evidence="quotes", stop_reason="why")
        output = build_parent(node).compile().invoke(INPUT)
        assert output["notes"].endswith("harbor 4711")
        assert output["why"] == "answered" and output["run"]
        [quote] = output["quotes"]
        assert TEXT[quote["start_char"] : quote["end_char"]] == quote["quote"]

    def test_question_and_document_can_be_functions_of_the_state(self, make_reader) -> None:
        node = memagent_node(
            make_reader(),
            question=lambda state: f"{state['question']} Answer at once.",
            document=lambda state: state["document"].upper().replace("THE KEY OF HARBOR IS", "The key of harbor is"),
            answer=None,
            write=lambda state, result: {"answer": f"{state['question']} {result.answer}"},
        )
        assert build_parent(node).compile().invoke(INPUT)["answer"] == f"{QUESTION} 4711"

    @pytest.mark.parametrize("make_node", [memagent_node, MemAgent.graph])
    def test_the_state_can_be_an_object(self, make_reader, make_node) -> None:
        @dataclass
        class ObjectState:
            question: str
            document: str
            answer: str | None = None

        output = build_parent(make_node(make_reader()), ObjectState).compile().invoke(ObjectState(QUESTION, TEXT))
        assert output["answer"] == "4711"

    @pytest.mark.parametrize("options", [{"evidence": "qoutes"}, {"write": lambda state, result: {"qoutes": 1}}])
    async def test_writing_a_key_that_the_state_lacks_is_an_error(self, make_reader, options) -> None:
        parent = build_parent(memagent_node(make_reader(), **options)).compile()
        with pytest.raises(MemAgentError, match='state has no "qoutes"'):
            parent.invoke(INPUT)
        with pytest.raises(MemAgentError, match='state has no "qoutes"'):
            assert [event async for event in parent.astream_events(INPUT)]

    def test_a_node_called_by_another_node_returns_its_keys(self, make_reader) -> None:
        node = memagent_node(make_reader(), answer="result")
        parent = build_parent(lambda state: {"answer": node.invoke(state)["result"]}).compile()
        assert parent.invoke(INPUT)["answer"] == "4711"

    def test_the_graph_of_a_reader_needs_a_key_for_the_answer(self, make_reader) -> None:
        parent = build_parent(make_reader().graph(), TypedDict("Asking", {"question": str, "document": str})).compile()
        with pytest.raises(MemAgentError, match="no key for the answer"):
            parent.invoke(INPUT)

    def test_a_missing_input_is_an_error_that_names_its_key(self, make_reader) -> None:
        with pytest.raises(MemAgentError, match=r'no "document" to take the document from.*document="\.\.\."'):
            build_parent(memagent_node(make_reader())).compile().invoke({"question": QUESTION})


async def test_the_served_model_is_looked_up_at_the_first_call(make_reader) -> None:
    with FakeServer() as server:
        policy = OpenAICompatiblePolicy(base_url=server.base_url)
        parent = build_parent(memagent_node(make_reader(policy))).compile()
        assert policy.name == "the served model"
        assert (await parent.ainvoke(INPUT))["answer"] == "4711"


async def test_progress_and_callbacks_go_through_the_parent(make_reader, langgraph_dev) -> None:
    class NodeCounter(BaseCallbackHandler):
        def __init__(self) -> None:
            self.node_counts: Counter[str] = Counter()

        def on_chain_start(self, serialized, inputs, **kwargs) -> None:
            self.node_counts[kwargs.get("name") or ""] += 1

    parent = build_parent(memagent_node(make_reader(run_log=False), run_id="run")).compile()
    counter = NodeCounter()
    stream_modes: Any = ["custom", "values"]
    events = [event async for event in parent.astream(INPUT, {"callbacks": [counter]}, stream_mode=stream_modes)]
    updates = [payload for mode, payload in events if mode == "custom"]
    assert {update["type"] for update in updates} == {"memagent.memory_update"}
    assert {update["run_id"] for update in updates} == {events[-1][1]["run"]}
    assert counter.node_counts["update_memory"] == len(updates) > 13
    assert [update["chunk_index"] for update in updates] == list(range(len(updates)))
    assert (updates[-1]["progress"], updates[-1]["memory"]) == (1.0, "nothing yet\nharbor 4711")
    assert len(list(parent.stream(INPUT, stream_mode="custom"))) == len(updates)


def test_the_graph_of_a_reader_can_be_a_node(make_reader) -> None:
    graph = make_reader().graph()
    parent = build_parent(graph).compile()
    assert parent.invoke(INPUT, LOW_RECURSION_LIMIT)["answer"] == "4711"
    events = [event for _, event in parent.stream(INPUT, LOW_RECURSION_LIMIT, stream_mode="custom", subgraphs=True)]
    assert {(event["run_id"], event["question"]) for event in events} == {(events[0]["run_id"], QUESTION)}
    assert [event["chunk_index"] for event in events] == [*range(len(events) - 1), None]
    assert (events[-2]["progress"], events[-2]["memory"]) == (1.0, "nothing yet\nharbor 4711")
    assert {"read:read_chunk", "read:update_memory", "read:answer"} <= set(parent.get_graph(xray=True).nodes)
    with pytest.raises(MemAgentError, match=r"must be a MemAgent, got ReaderGraph.*add_node"):
        memagent_node(graph)


async def test_traced_runs_of_the_package_do_not_show_the_document(make_reader) -> None:
    recorder = RunRecorder()
    policy = TracePolicy(process_inputs=omit_payload, process_outputs=omit_payload)
    parent = build_parent(memagent_node(make_reader()), trace_policy=policy).compile(name="parent")
    config: Any = {"callbacks": [recorder]}
    output = await parent.ainvoke(INPUT, config)
    assert output["answer"] == "4711"
    assert {"parent", "read", "memagent", "MemAgent", "update_memory"} <= {run.name for run in recorder.runs}
    assert [run.name for run in recorder.runs if "word7 and then" in repr(run.inputs)] == ["parent"]


class Report(TypedDict, total=False):
    findings: Annotated[list[tuple[str, str | None]], operator.add]


@pytest.mark.parametrize("is_sync", [True, False])
async def test_only_the_document_that_failed_is_resumed(make_reader, is_sync) -> None:
    is_broken = True

    def script(prompt: str) -> Any:
        return PolicyError("gone") if is_broken and "4712" in extract(prompt, "section") else read_perfectly(prompt)

    policy = ScriptedPolicy(script)
    node = memagent_node(
        make_reader(policy), document="text", answer=None, write=lambda state, result: {"findings": [result.answer]}
    )
    builder = StateGraph(Report)
    builder.add_node("read", node)
    texts = [TEXT.replace("4711", f"471{number}") for number in range(4)]
    builder.add_conditional_edges(
        START, lambda state: [Send("read", {"question": QUESTION, "text": text}) for text in texts]
    )
    parent = builder.compile(checkpointer=InMemorySaver())
    empty_report: Report = {"findings": []}
    with pytest.raises(PolicyError):
        parent.invoke(empty_report, THREAD) if is_sync else await parent.ainvoke(empty_report, THREAD)
    is_broken, first_call_count = False, len(policy.prompts)
    output = parent.invoke(None, THREAD) if is_sync else await parent.ainvoke(None, THREAD)
    assert output["findings"] == ["4710", "4711", "4712", "4713"]
    calls = len(texts) * (make_reader().read(texts[0], QUESTION).chunks_read + 1)
    assert calls < len(policy.prompts) <= calls + len(texts), "at most one chunk of a document is read twice"
    assert first_call_count < calls


async def test_evidence_is_found_if_only_the_node_failed_after_its_read(make_reader) -> None:
    is_broken, policy = True, ScriptedPolicy(read_perfectly)

    def write(state: Any, result: Any) -> dict[str, Any]:
        if is_broken:
            raise KeyError("a defect somewhere")
        return {"why": result.stop_reason.value}

    node = memagent_node(make_reader(policy), evidence="quotes", write=write)
    parent = build_parent(node).compile(checkpointer=InMemorySaver())
    with pytest.raises(KeyError):
        await parent.ainvoke(INPUT, THREAD)
    is_broken, call_count = False, len(policy.prompts)
    output = await parent.ainvoke(None, THREAD)
    assert [quote["line"] for quote in output["quotes"]] == ["harbor 4711"]
    assert (output["why"], len(policy.prompts)) == ("answered", call_count)


async def test_the_memory_of_a_subgraph_can_be_edited_through_the_parent(make_reader) -> None:
    is_broken = True

    def script(prompt: str) -> Any:
        return PolicyError("gone") if is_broken and "4711" in prompt else read_perfectly(prompt)

    class WithMemory(State, total=False):
        memory: str

    graph = make_reader(ScriptedPolicy(script)).graph()
    parent = build_parent(graph, WithMemory).compile(checkpointer=InMemorySaver())
    with pytest.raises(PolicyError):
        await parent.ainvoke(INPUT, THREAD)
    [task] = (await parent.aget_state(THREAD, subgraphs=True)).tasks
    assert task.state.values["memory"] == "nothing yet"
    is_broken = False
    await parent.aupdate_state(task.state.config, {"memory": "castle 99"}, as_node="update_memory")
    assert (await parent.ainvoke(None, THREAD))["memory"] == "castle 99\nharbor 4711"


CHUNK_COUNT = 60
PARENT_PROGRAM = """
import json, operator, sqlite3, sys
from pathlib import Path
from typing import Annotated, TypedDict
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langchain_memagent.node import memagent_node
from memagent_graph import Budget, MemAgent, OpenAICompatiblePolicy, load_prompts

url, folder, question = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
agent = MemAgent(
    OpenAICompatiblePolicy("fake", base_url=url),
    tokenizer="embedded",
    budget=Budget(context_window=1000, question_tokens=50, memory_tokens=60, chunk_tokens=40, answer_tokens=60),
    prompts=load_prompts(),
    store=folder / "documents",
    run_log=folder / "runs.sqlite",
)

class State(TypedDict, total=False):
    question: str | list[str]
    path: str
    answer: str | list[str]
    done: Annotated[list[str], operator.add]

builder = StateGraph(State)
builder.add_node("prepare", lambda state: {"done": ["prepare"]})
builder.add_node("read", memagent_node(agent, document=lambda state: Path(state["path"])))
builder.add_node("finish", lambda state: {"done": ["finish"]})
for left, right in zip((START, "prepare", "read", "finish"), ("prepare", "read", "finish", END)):
    builder.add_edge(left, right)
with SqliteSaver.from_conn_string(str(folder / "parent.sqlite")) as saver:
    parent = builder.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "t"}, "recursion_limit": 25}
    is_resumed = bool(parent.get_state(config).values)
    print("reading", flush=True)
    out = parent.invoke(None if is_resumed else {"question": question, "path": str(folder / "book.txt")}, config)
    print(json.dumps(out["answer"]), *out["done"], flush=True)
"""


@pytest.mark.parametrize("questions", [1, 3])
def test_a_parent_that_is_killed_and_resumed_reads_at_most_one_chunk_twice(tmp_path: Path, questions: int) -> None:
    """The parent sets no durability, so LangGraph's default "async" would apply to it."""
    tokenizer = load_tokenizer("embedded")
    text = make_document({0.2: "The key of harbor is 4711."}, words=3_000)
    text = text[: tokenizer.tokenize(text).prefix_chars(CHUNK_COUNT * 40)]
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "parent.py").write_text(PARENT_PROGRAM)
    with FakeServer(lambda body, number: read_perfectly(body["messages"][0]["content"])) as server:
        question = QUESTION if questions == 1 else [QUESTION, "Where is the key of harbor?", "Which is harbor's key?"]
        command = [sys.executable, str(tmp_path / "parent.py"), server.base_url, str(tmp_path), json.dumps(question)]
        kill_points = [questions * request_count for request_count in (10, 25, 45)]
        for request_count in kill_points:
            with Program(command, stdout=subprocess.PIPE) as process:
                assert process.stdout.readline() == "reading\n"
                assert kill_after(process, server.requests, request_count), "the read ended before the kill"
        run = run_program(command, stdout=subprocess.PIPE, check=True)
        prompts = [body["messages"][0]["content"] for body in server.requests]
    answer = "4711" if questions == 1 else ["4711"] * 3
    assert run.stdout.splitlines()[1] == f"{json.dumps(answer)} prepare finish"
    prompts = [prompt for prompt in prompts if "<section>" in prompt]
    reads = Counter((extract(prompt, "problem"), extract(prompt, "section")) for prompt in prompts)
    assert len(reads) == questions * CHUNK_COUNT
    assert sum(reads.values()) <= questions * (CHUNK_COUNT + len(kill_points))
