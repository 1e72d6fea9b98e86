"""Processes that are forked after a synchronous call: they read, and write to the same log."""

import copy
import multiprocessing
import os
import pickle
import sys

import pytest

from langchain_memagent import (
    MemAgentMiddleware,
    ReadLongDocument,
)
from memagent_graph import Budget, Limits, MemAgent, load_prompts
from memagent_graph.policies.scripted import ScriptedPolicy
from memagent_graph.run_log import RunLog

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot fork here"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
TEXT = "The tower was built in 1904. " * 200


def scripted() -> ScriptedPolicy:
    return ScriptedPolicy(lambda prompt: r"\boxed{1904}")


def read_in_child(reader: MemAgent, run_id: str) -> None:
    result = reader.read(TEXT, "When?", run_id=run_id)
    reader.close()
    sys.exit(0 if result.answer == "1904" else 1)


def read_some_chunks(reader: MemAgent, resumed: bool) -> None:
    limits = Limits(max_chunks=2)
    result = reader.resume("r", limits=limits) if resumed else reader.read(TEXT, "When?", run_id="r", limits=limits)
    reader.close()
    sys.exit(0 if result.stop_reason == "max_chunks" else 1)


def test_processes_forked_from_one_that_never_read_give_their_steps_different_ids(tmp_path) -> None:
    """As servers do that load an application before they fork: each went on counting where the parent was."""
    places = {"store": tmp_path / "store", "run_log": tmp_path / "runs.sqlite", "checkpoints": tmp_path / "c"}
    budget = Budget(context_window=1000, question_tokens=50, memory_tokens=60, chunk_tokens=100, answer_tokens=60)
    for resumed in (False, True, True):
        reader = MemAgent(scripted(), tokenizer="embedded", budget=budget, prompts=load_prompts(), **places)
        child = multiprocessing.get_context("fork").Process(target=read_some_chunks, args=(reader, resumed))
        child.start()
        child.join(30)
        assert child.exitcode == 0
    log = RunLog(tmp_path / "runs.sqlite")
    steps = [conversation.step for conversation in log.conversations("r")]
    assert len(steps) == len(set(steps)) == 6
    assert log.trace("r").update_index(steps[-1]) == 5


def test_a_forked_process_reads_though_its_parent_has_read(tmp_path) -> None:
    reader = MemAgent(
        scripted(),
        tokenizer="embedded",
        store=tmp_path / "store",
        run_log=tmp_path / "runs.sqlite",
        checkpoints=tmp_path / "c",
    )
    assert reader.read(TEXT, "When?", run_id="before").answer == "1904"
    children = [
        multiprocessing.get_context("fork").Process(target=read_in_child, args=(reader, f"child-{number}"))
        for number in range(3)
    ]
    for child in children:
        child.start()
    assert reader.read(TEXT, "When?", run_id="meanwhile").answer == "1904"
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    reader.close()
    log = RunLog(tmp_path / "runs.sqlite")
    assert {record.run_id for record in log.runs()} == {"before", "meanwhile", "child-0", "child-1", "child-2"}
    assert all(record.stop_reason == "answered" for record in log.runs())


def test_what_holds_a_reader_says_how_to_use_it_in_another_process_instead_of_being_pickled(tmp_path) -> None:
    with MemAgent(scripted(), tokenizer="embedded", store=tmp_path / "store", run_log=False) as reader:
        held = (
            reader,
            ReadLongDocument(agent=reader),
            MemAgentMiddleware(reader),
        )
        for item in held:
            with pytest.raises(TypeError, match=r"cannot be pickled.*in the process that uses it"):
                pickle.dumps(item)
            with pytest.raises(TypeError, match=r"cannot be pickled.*in the process that uses it"):
                copy.deepcopy(item)
            assert type(copy.copy(item)) is type(item)
        result = copy.copy(reader).read(TEXT, "When?")
        assert result.answer == "1904" and pickle.loads(pickle.dumps(result)) == result
