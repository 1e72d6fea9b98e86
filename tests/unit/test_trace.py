"""The one reading of a run: memories along branches, from traces made by hand and from a log."""

from __future__ import annotations

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from pyarrow import parquet
from support.conversations import make_conversation
from support.fake_server import FakeServer
from support.traces import make_answer, make_call, make_fan_out, make_spans, make_trace

from memagent_graph import MemAgent, OpenAICompatiblePolicy, RunFilter
from memagent_graph.calls import Writes
from memagent_graph.events import EventKind
from memagent_graph.run_log.exchange import export_runs
from memagent_graph.run_log.logged_trace import build_trace
from memagent_graph.run_log.records import LoggedEvent
from memagent_graph.trace import Trace

FIRST, SECOND = make_spans(["one ", "two "])


def test_the_final_path_has_all_branches_that_were_merged_and_no_other() -> None:
    whole = make_fan_out([["a", "b"], ["c", "d"]], "b d", ["w", "x", "y", "z"])
    stray = make_call("stray", "e", reads=FIRST, branch="9")
    trace = Trace((stray, *whole.calls))
    assert [update.memory for update in trace.final_path] == ["a", "c", "b", "d", "b d"]
    assert trace.final_memory == "b d"
    assert trace.memory_before("merge") == "b\nd"
    assert [trace.updates[place].memory for place in trace.source_indices(trace.updates[-1])] == ["b", "d"]
    assert [trace.updates[place].memory for place in trace.final_sources] == ["b d"]


def test_an_answer_from_several_branches_has_their_memories_below_each_other() -> None:
    left, right = make_call("l", "a", reads=FIRST, branch="l"), make_call("r", "b", reads=SECOND, branch="r")
    trace = Trace((left, right, make_answer("l", "r")))
    assert trace.final_memory == "a\nb"
    assert trace.final_sources == (0, 1)


def test_a_chunks_steps_on_a_branch_are_one_update_that_began_from_the_memory_before_the_first() -> None:
    gate = make_call("g", "update", "t", reads=SECOND, role="gate", writes=Writes.DECISION)
    trace = Trace((make_call("t", "a", reads=FIRST), gate, make_call("u", "b", "g", reads=SECOND), make_answer("u")))
    assert [(update.memory, update.changed, update.prompt_tokens) for update in trace.updates] == [
        ("a", True, 100),
        ("b", True, 200),
    ]
    assert (trace.memory_before("g"), trace.memory_after("g")) == ("a", "a")
    assert (trace.memory_before("u"), trace.memory_after("u")) == ("a", "b")
    assert trace.update_indices["g"] == trace.update_indices["u"] == 1
    with pytest.raises(KeyError):
        trace.update_indices["answer"]


def test_a_chunk_that_is_read_again_later_is_an_update_of_its_own() -> None:
    again = make_call("again", "a b c", "u", reads=FIRST, role="reread")
    trace = Trace((make_call("t", "a", reads=FIRST), make_call("u", "a b", "t", reads=SECOND), again))
    assert [(update.chunk_index, update.memory) for update in trace.updates] == [(0, "a"), (1, "a b"), (0, "a b c")]
    assert trace.memory_before("u") == "a"


def test_a_line_of_chunks_is_its_own_final_path() -> None:
    trace = make_trace(["a", "a", "b"], ["x", "y", "z"], answer=make_answer("2"))
    assert trace.final_path == trace.updates
    assert [update.changed for update in trace.updates] == [True, False, True]


@pytest.mark.parametrize("writes", [Writes.MEMORY, Writes.DECISION], ids=["a memory", "what a gate had kept"])
def test_an_edit_on_a_branch_replaces_its_memory_and_no_others(writes: Writes) -> None:
    conversations = [
        make_conversation(call_id="0", text="a", branch="left", reads=(FIRST,), id=0),
        make_conversation(call_id="1", text="b", branch="right", reads=(FIRST,), id=1),
        make_conversation(1, text="keep", parents=("1",), branch="right", reads=(SECOND,), writes=writes, id=2),
    ]
    edit = LoggedEvent(9.0, EventKind.MEMORY_EDITED, "a person replaced the memory", 1, text="by hand", call_id="s1")
    trace = build_trace(conversations, [edit])
    assert [(update.branch, update.memory) for update in trace.updates] == [
        ("left", "a"),
        ("right", "b"),
        ("right", "by hand"),
    ]
    assert [event.kind for event in trace.updates[2].events] == [EventKind.MEMORY_EDITED]
    assert trace.final_memory == "by hand"


def test_the_server_s_name_of_a_request_is_in_result_log_export_and_callbacks(tmp_path, log) -> None:
    request_ids = []

    class Recorder(BaseCallbackHandler):
        def on_llm_end(self, response, **_) -> None:
            request_ids.append(response.generations[0][0].message.response_metadata["request_id"])

    with FakeServer() as fake:
        policy = OpenAICompatiblePolicy("fake", base_url=fake.base_url)
        with MemAgent(policy, tokenizer="embedded", store=tmp_path / "store", run_log=log) as reader:
            result = reader.read("Anna built the harbor.", "Who?", run_id="r")
            question = {"question": "Who?", "document": "Anna built the harbor."}
            reader.graph().invoke(question, {"callbacks": [Recorder()]})
    assert [call.completion.request_id for call in result.trace.calls] == ["x", "x"]
    assert [call.completion.request_id for call in log.trace("r").calls] == ["x", "x"]
    assert [row.request_id for row in log.conversations("r")] == ["x", "x"]
    assert request_ids == ["x", "x"]
    export_runs(log, tmp_path / "runs.parquet", selection=RunFilter(run_ids=("r",)))
    assert parquet.read_table(tmp_path / "runs.parquet").column("request_id").to_pylist() == ["x", "x"]


def test_a_decision_takes_a_turn_though_no_prompt_holds_it() -> None:
    probe, first = make_call("probe", "?", "0", role="probe", writes=Writes.DECISION), make_call("0", "m", reads=FIRST)
    assert Trace((first, probe, make_call("1", "m", "0", reads=SECOND))).critical_path_length == 3
    assert make_trace(["m"] * 4, ["a ", "b ", "c ", "d "], answer=make_answer("3")).critical_path_length == 5
    merged = make_fan_out([["m"] * 3, ["n"]], "both", ["a ", "b ", "c ", "d "])
    assert merged.critical_path_length == 5, "three chunks, the merge, the answer"
    assert Trace().critical_path_length == 0
