"""Processes that are forked after a synchronous call: they read, and write to the same log."""

import copy
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from langchain_memagent import MemAgentMiddleware, ReadLongDocument
from memagent_graph import Limits, MemAgent, ScriptedPolicy

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot fork here"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
TEXT = "The tower was built in 1904. " * 200


@pytest.fixture
def new_reader(make_reader, tmp_path) -> Callable[[], MemAgent]:
    """Readers with one log and one file of checkpoints."""
    places = {"run_log": tmp_path / "runs.sqlite", "checkpoints": tmp_path / "c"}
    return lambda: make_reader(ScriptedPolicy(lambda prompt: r"\boxed{1904}"), **places)


def start(target: Callable[..., None], *arguments: Any) -> Any:
    child = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    child.start()
    return child


def read_in_child(reader: MemAgent, run_id: str) -> None:
    result = reader.read(TEXT, "When?", run_id=run_id)
    reader.close()
    sys.exit(0 if result.answer == "1904" else 1)


def read_some_chunks(reader: MemAgent, resumes: bool) -> None:
    limits = Limits(max_chunks=2)
    result = reader.resume("r", limits=limits) if resumes else reader.read(TEXT, "When?", run_id="r", limits=limits)
    reader.close()
    sys.exit(0 if result.stop_reason == "max_chunks" else 1)


def test_processes_forked_from_one_that_never_read_give_their_calls_different_ids(new_reader, log) -> None:
    """As servers do that load an application before they fork: each went on counting where the parent was."""
    for resumes in (False, True, True):
        child = start(read_some_chunks, new_reader(), resumes)
        child.join(30)
        assert child.exitcode == 0
    call_ids = [conversation.call_id for conversation in log.conversations("r")]
    assert len(call_ids) == len(set(call_ids)) == 6
    assert log.trace("r").update_indices[call_ids[-1]] == 5


def test_a_forked_process_reads_though_its_parent_has_read(new_reader, log) -> None:
    reader = new_reader()
    assert reader.read(TEXT, "When?", run_id="before").answer == "1904"
    children = [start(read_in_child, reader, f"child-{number}") for number in range(3)]
    assert reader.read(TEXT, "When?", run_id="meanwhile").answer == "1904"
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    reader.close()
    assert {record.run_id for record in log.runs()} == {"before", "meanwhile", "child-0", "child-1", "child-2"}
    assert all(record.stop_reason == "answered" for record in log.runs())


def test_objects_with_a_reader_refuse_pickling_with_a_remedy(new_reader) -> None:
    reader = new_reader()
    for item in (reader, ReadLongDocument(agent=reader), MemAgentMiddleware(reader)):
        for attempt in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot be pickled.*in the process that uses it"):
                attempt(item)
        assert type(copy.copy(item)) is type(item)
    result = copy.copy(reader).read(TEXT, "When?")
    assert result.answer == "1904" and pickle.loads(pickle.dumps(result)) == result
