"""Forked processes with readers: they read, and write to the same log."""

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
def make_shared_reader(make_reader, tmp_path) -> Callable[[], MemAgent]:
    """A factory of readers that share a log and a checkpoint file."""
    files = {"run_log": tmp_path / "runs.sqlite", "checkpoints": tmp_path / "c"}
    return lambda: make_reader(ScriptedPolicy(lambda prompt: r"\boxed{1904}"), **files)


def start_child(target: Callable[..., None], *arguments: Any) -> Any:
    child = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    child.start()
    return child


def read_and_exit(reader: MemAgent, run_id: str) -> None:
    result = reader.read(TEXT, "When?", run_id=run_id)
    reader.close()
    sys.exit(0 if result.answer == "1904" else 1)


def read_two_chunks_and_exit(reader: MemAgent, should_resume: bool) -> None:
    limits = Limits(max_chunks=2)
    result = (
        reader.resume("r", limits=limits) if should_resume else reader.read(TEXT, "When?", run_id="r", limits=limits)
    )
    reader.close()
    sys.exit(0 if result.stop_reason == "max_chunks" else 1)


def test_processes_forked_from_a_parent_that_never_read_give_calls_different_ids(make_shared_reader, log) -> None:
    """Servers load an application before they fork; an inherited counter of calls would give equal ids."""
    for should_resume in (False, True, True):
        child = start_child(read_two_chunks_and_exit, make_shared_reader(), should_resume)
        child.join(30)
        assert child.exitcode == 0
    call_ids = [conversation.call_id for conversation in log.conversations("r")]
    assert len(call_ids) == len(set(call_ids)) == 6
    assert log.trace("r").update_indices[call_ids[-1]] == 5


def test_forked_processes_read_after_their_parent_has_read(make_shared_reader, log) -> None:
    reader = make_shared_reader()
    assert reader.read(TEXT, "When?", run_id="before-fork").answer == "1904"
    children = [start_child(read_and_exit, reader, f"child-{number}") for number in range(3)]
    assert reader.read(TEXT, "When?", run_id="after-fork").answer == "1904"
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    reader.close()
    assert {record.run_id for record in log.runs()} == {"before-fork", "after-fork", "child-0", "child-1", "child-2"}
    assert all(record.stop_reason == "answered" for record in log.runs())


def test_objects_with_a_reader_cannot_be_pickled(make_shared_reader) -> None:
    reader = make_shared_reader()
    for holder in (reader, ReadLongDocument(agent=reader), MemAgentMiddleware(reader)):
        for copy_object in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot be pickled.*in the process that uses it"):
                copy_object(holder)
        assert type(copy.copy(holder)) is type(holder)
    result = copy.copy(reader).read(TEXT, "When?")
    assert result.answer == "1904" and pickle.loads(pickle.dumps(result)) == result
