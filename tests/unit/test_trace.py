"""Traces, made by hand and from a log: memories along branches, updates, and the final path."""

from __future__ import annotations

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from pyarrow import parquet
from support.conversations import make_conversation
from support.fake_server import FakeServer
from support.traces import make_answer, make_call, make_fan_out, make_spans, make_trace

from memagent_graph import MemAgent, OpenAICompatiblePolicy, RunFilter
from memagent_graph.events import EventKind
from memagent_graph.run_log.exchange import export_runs
from memagent_graph.run_log.records import LoggedEvent, build_trace
from memagent_graph.trace import Trace, Writes

SPAN_0, SPAN_1 = make_spans(["one ", "two "])


def test_the_final_path_has_all_merged_branches_and_no_other() -> None:
    merged = make_fan_out([["a", "b"], ["c", "d"]], "b d", ["w", "x", "y", "z"])
    trace = Trace((make_call("unmerged", "e", reads=SPAN_0, branch="9"), *merged.calls))
    assert [update.memory for update in trace.final_path] == ["a", "c", "b", "d", "b d"]
    assert (trace.memory_before("merge"), trace.final_memory) == ("b\nd", "b d")
    assert [trace.updates[index].memory for index in trace.source_indices(trace.updates[-1])] == ["b", "d"]
    assert [trace.updates[index].memory for index in trace.final_sources] == ["b d"]


def test_the_final_memory_of_unmerged_branches_is_their_memories_line_by_line() -> None:
    left, right = (make_call("l", "a", reads=SPAN_0, branch="l"), make_call("r", "b", reads=SPAN_1, branch="r"))
    trace = Trace((left, right, make_answer("l", "r")))
    assert (trace.final_memory, trace.final_sources) == ("a\nb", (0, 1))
    trace = Trace((left, right, make_call("t", "c", reads=SPAN_0), make_answer("l", "t")))
    assert (trace.final_memory, trace.final_sources) == ("c", (2,)), "the answer's branch has a memory of its own"


def test_all_steps_of_a_chunk_on_a_branch_are_one_update() -> None:
    gate = make_call("g", "update", "t", reads=SPAN_1, role="gate", writes=Writes.DECISION)
    trace = Trace((make_call("t", "a", reads=SPAN_0), gate, make_call("u", "b", "g", reads=SPAN_1), make_answer("u")))
    updates = [(update.memory, update.changed, update.prompt_tokens) for update in trace.updates]
    assert updates == [("a", True, 100), ("b", True, 200)]
    assert (trace.memory_before("g"), trace.memory_after("g")) == ("a", "a")
    assert (trace.memory_before("u"), trace.memory_after("u")) == ("a", "b")
    assert trace.update_indices["g"] == trace.update_indices["u"] == 1
    with pytest.raises(KeyError):
        trace.update_indices["answer"]


def test_a_chunk_that_is_read_again_later_has_a_second_update() -> None:
    rereading = make_call("rereading", "a b c", "u", reads=SPAN_0, role="reread")
    trace = Trace((make_call("t", "a", reads=SPAN_0), make_call("u", "a b", "t", reads=SPAN_1), rereading))
    assert [(update.chunk_index, update.memory) for update in trace.updates] == [(0, "a"), (1, "a b"), (0, "a b c")]
    assert trace.memory_before("u") == "a"


def test_the_final_path_without_branches_is_all_updates() -> None:
    trace = make_trace(["a", "a", "b"], ["x", "y", "z"], answer=make_answer("2"))
    assert trace.final_path == trace.updates
    assert [update.changed for update in trace.updates] == [True, False, True]


@pytest.mark.parametrize("writes", [Writes.MEMORY, Writes.DECISION], ids=["a memory", "a gate that keeps it"])
def test_an_edit_on_a_branch_replaces_only_the_memory_of_this_branch(writes: Writes) -> None:
    conversations = [
        make_conversation(call_id="0", text="a", branch="left", reads=(SPAN_0,), id=0),
        make_conversation(call_id="1", text="b", branch="right", reads=(SPAN_0,), id=1),
        make_conversation(1, text="keep", parents=("1",), branch="right", reads=(SPAN_1,), writes=writes, id=2),
    ]
    edit = LoggedEvent(9.0, EventKind.MEMORY_EDITED, "a person replaced the memory", 1, text="by hand", call_id="s1")
    trace = build_trace(conversations, [edit])
    memories = [(update.branch, update.memory) for update in trace.updates]
    assert memories == [("left", "a"), ("right", "b"), ("right", "by hand")]
    assert [event.kind for event in trace.updates[2].events] == [EventKind.MEMORY_EDITED]
    assert trace.final_memory == "by hand"


def test_the_servers_request_id_is_in_result_log_export_and_callbacks(tmp_path, log) -> None:
    request_ids = []

    class RequestIdRecorder(BaseCallbackHandler):
        def on_llm_end(self, response, **_) -> None:
            request_ids.append(response.generations[0][0].message.response_metadata["request_id"])

    with FakeServer() as fake:
        policy = OpenAICompatiblePolicy("fake", base_url=fake.base_url)
        with MemAgent(policy, tokenizer="embedded", store=tmp_path / "store", run_log=log) as reader:
            result = reader.read("Anna built the harbor.", "Who?", run_id="r")
            request = {"question": "Who?", "document": "Anna built the harbor."}
            reader.graph().invoke(request, {"callbacks": [RequestIdRecorder()]})
    assert [call.completion.request_id for call in result.trace.calls] == ["x", "x"]
    assert [call.completion.request_id for call in log.trace("r").calls] == ["x", "x"]
    assert [row.request_id for row in log.conversations("r")] == ["x", "x"]
    assert request_ids == ["x", "x"]
    export_runs(log, tmp_path / "runs.parquet", selection=RunFilter(run_ids=("r",)))
    assert parquet.read_table(tmp_path / "runs.parquet").column("request_id").to_pylist() == ["x", "x"]


def test_a_decision_counts_on_the_critical_path() -> None:
    first, second = make_call("0", "m", reads=SPAN_0), make_call("1", "m", "0", reads=SPAN_1)
    probe = make_call("probe", "?", "0", role="probe", writes=Writes.DECISION)
    assert Trace((first, probe, second)).critical_path_length == 3
    assert make_trace(["m"] * 4, ["a ", "b ", "c ", "d "], answer=make_answer("3")).critical_path_length == 5
    merged = make_fan_out([["m"] * 3, ["n"]], "both", ["a ", "b ", "c ", "d "])
    assert merged.critical_path_length == 5, "three chunks, the merge, the answer"
    assert Trace().critical_path_length == 0
