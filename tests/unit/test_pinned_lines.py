"""Pinned lines of memory: the function that puts them back, and reads with them."""

from __future__ import annotations

import pytest
from support.scripts import document_with

from memagent_graph import ScriptedPolicy
from memagent_graph.events import EventKind
from memagent_graph.reading.pinned_lines import with_pins
from memagent_graph.run_log import RunLog

TEXT = document_with({0.3: "The key of harbor is 4711."}, words=600)
QUESTION = "What is the key of harbor?"


@pytest.mark.parametrize(
    ("memory", "pins", "expected"),
    [
        ("one\ntwo", ["two"], "one\ntwo"),
        ("one", ["two"], "two\none"),
        ("", ["two"], "two"),
        # A memory is stripped, so its first line has lost its indentation.
        ("- two\none", ["  - two"], "- two\none"),
        ("one\n    two", ["two"], "one\n    two"),
    ],
)
def test_a_pinned_line_is_put_back_once(memory: str, pins: list[str], expected: str) -> None:
    for _ in range(3):
        memory = with_pins(memory, pins, lambda text: len(text) < 40, lambda text: text[:40]).strip()
    assert memory == expected


def test_where_there_is_no_room_pinned_lines_go_first_and_the_end_is_cut() -> None:
    memory = with_pins("- two\n" + "x" * 40, ["  - two", "one"], lambda text: len(text) < 40, lambda text: text[:40])
    assert memory == "  - two\none\n" + "x" * 28


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path / "runs.sqlite")
    yield log
    log.close()


def test_a_pin_holds_within_the_budget_and_is_told_in_result_and_log(make_reader, log) -> None:
    policy = ScriptedPolicy(lambda prompt: "word " * 55 if "<section>" in prompt else "\\boxed{x}")
    reader = make_reader(policy, run_log=log)
    budget = reader.graph().reader_context.budget.memory_tokens
    count = reader.graph().reader_context.tokenizer.count
    result = list(reader.stream(TEXT, QUESTION, run_id="r", pins=lambda branch: ["harbor 4711"]))[-1]
    assert all(update.memory.startswith("harbor 4711\n") for update in result.updates)
    assert max(count(update.memory) for update in result.updates) <= budget
    assert {event.kind for event in result.updates[0].events} == {EventKind.PINNED}
    assert log.trace("r").updates[0].memory == result.updates[0].memory
    assert next(iter(log.conversations("r"))).text == "word " * 55


def test_decisions_and_answers_get_no_pinned_line(make_reader) -> None:
    reader = make_reader()
    result = list(reader.stream(TEXT, QUESTION, pins=lambda branch: ["pinned"]))[-1]
    assert (result.answer, result.memory.splitlines()[0]) == ("4711", "pinned")


def test_an_answer_so_far_leaves_the_run_as_it_is(make_reader, log, tmp_path) -> None:
    from memagent_graph.reading.state import Limits

    reader = make_reader(run_log=log, checkpoints=tmp_path / "c.sqlite")
    reader.read(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=5))
    before = list(log.conversations("r", superseded=True))
    said = reader.answer_so_far("r")
    assert (said.answer, said.memory) == ("4711", "nothing yet\nharbor 4711")
    assert list(log.conversations("r", superseded=True)) == before
    assert reader.resume("r").answer == "4711"
