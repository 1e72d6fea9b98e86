"""What every strategy gets from the framework: tests of all strategies of the package and of the example."""

from __future__ import annotations

import io
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rich.console
from support.fake_server import FakeServer
from support.programs import Program, kill_after, run_program
from support.scripts import SMALL_BUDGET, SMALL_OPTIONS, make_completion, make_document
from support.strategies import ALL_STRATEGIES, answer_perfectly, short_name

from memagent_graph import (
    Completion,
    Limits,
    MemAgent,
    ReadResult,
    RunLog,
    ScriptedPolicy,
    StopReason,
    Trace,
    load_prompts,
    load_tokenizer,
)
from memagent_graph.errors import PolicyError, PolicyUnreachableError
from memagent_graph.storage.private_files import get_default_run_log_path
from memagent_graph.strategies.map_reduce import MapReduce
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.terminal import render_timeline
from memagent_graph.timeline.view import load_run_view
from memagent_training.data.replay import load_groups

FACTS = {0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}
TEXT = make_document(FACTS, words=800)
QUESTION = "What is the key of harbor?"


def answer_with_ids(prompt: str) -> Completion:
    return make_completion(prompt, answer_perfectly(prompt))


KILLED_STRATEGIES = ("overwrite", "parallel", "segments:count=3", "reread", "recall")
"""The strategies whose process is killed at the small size, one of each shape. Calls fail in all strategies."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "killed_strategy" in metafunc.fixturenames:
        strategies = KILLED_STRATEGIES if metafunc.config.getoption("--soak") is None else ALL_STRATEGIES
        metafunc.parametrize("killed_strategy", strategies, ids=short_name)


@pytest.fixture(scope="module", params=ALL_STRATEGIES, ids=short_name)
def strategy(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def finished_run(strategy, tmp_path_factory) -> Iterator[tuple[MemAgent, RunLog, ReadResult]]:
    """A reader, its log, and the result of the run r, for tests that change none of them."""
    folder = tmp_path_factory.mktemp("finished")
    with (
        closing(RunLog(folder / "runs.sqlite")) as log,
        MemAgent(
            ScriptedPolicy(answer_with_ids), strategy=strategy, tokenizer="embedded", budget=SMALL_BUDGET,
            prompts=load_prompts(), store=folder / "documents", run_log=log,
        ) as agent,
    ):  # fmt: skip
        yield agent, log, agent.read(TEXT, QUESTION, run_id="r")


@pytest.fixture
def agent(make_reader, tmp_path, strategy, log) -> MemAgent:
    return make_reader(
        ScriptedPolicy(answer_with_ids), strategy=strategy, run_log=log, checkpoints=tmp_path / "checkpoints.sqlite"
    )


def remove_times(trace: Trace) -> list[object]:
    """Return the calls of a trace with their durations set to 0."""
    return [replace(call, seconds=0) for call in trace.calls]


def count_attempts(log: RunLog) -> Counter[tuple[str, str, int, int]]:
    """Count the conversations of the run r by branch, role, slot and attempt; superseded ones are left out."""
    return Counter(
        (conversation.branch, conversation.role, conversation.slot, conversation.attempt)
        for conversation in log.conversations("r")
    )


def test_every_strategy_answers_correctly_and_is_named_in_the_result(finished_run) -> None:
    agent, log, result = finished_run
    assert result.answer == "4711"
    assert result.stop_reason is StopReason.ANSWERED
    chunks = [update.chunk_index for update in result.updates if update.chunk_index is not None]
    assert len(chunks) == result.chunks_read
    assert set(chunks) == set(range(max(chunks) + 1))
    assert len(set(Counter(chunks).values())) == 1, "each pass reads every chunk"
    assert result.strategy == log.get("r").strategy == agent.strategy.name
    assert result.to_dict()["strategy"] == agent.strategy.name
    assert result.strategy_fingerprint == log.get("r").strategy_fingerprint == result.to_dict()["strategy_fingerprint"]
    assert len(result.strategy_fingerprint) == 16


def test_the_log_of_every_strategy_equals_its_trace_and_usage(finished_run) -> None:
    _, log, result = finished_run
    assert sorted(remove_times(log.trace("r")), key=lambda call: call.id) == sorted(
        remove_times(result.trace), key=lambda call: call.id
    )
    conversations = list(log.conversations("r"))
    assert len(conversations) == result.usage.turns
    assert sum(conversation.prompt_tokens for conversation in conversations) == result.usage.prompt_tokens
    call_ids = {conversation.call_id for conversation in conversations}
    for conversation in conversations:
        assert list(conversation.token_ids) == list(conversation.text.encode())
        assert set(conversation.parents) <= call_ids
        assert all(span.start_char < span.end_char for span in conversation.reads)
    assert len(count_attempts(log)) == len(conversations)


def test_parents_precede_their_children_and_lead_to_the_answer(finished_run) -> None:
    _, log, _ = finished_run
    trace = log.trace("r")
    earlier_ids: set[str] = set()
    for call in trace.calls:
        assert set(call.parents) <= earlier_ids
        earlier_ids.add(call.id)
    (answer,) = trace.answers
    fact_ids = [call.id for call in trace.calls if call.chunk_index is not None and "harbor" in (call.text or "")]
    ancestors = {answer.id}
    for call in reversed(trace.calls):
        ancestors.update(call.parents if call.id in ancestors else ())
    assert set(fact_ids) <= ancestors


def test_a_limit_stops_a_strategy_and_a_resume_reads_the_rest_once(agent, log) -> None:
    partial_result = agent.read(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=7))
    assert partial_result.stop_reason is StopReason.MAX_CHUNKS
    assert partial_result.chunks_read == 7
    result = agent.resume("r")
    expected = agent.read(TEXT, QUESTION, run_id="expected")
    assert (result.answer, result.memory) == (expected.answer, expected.memory)
    assert result.chunks_read == expected.chunks_read
    conversations = list(log.conversations("r", superseded=True))
    assert result.usage.turns == len(conversations)
    assert [conversation.role for conversation in conversations] == [
        conversation.role for conversation in log.conversations("expected")
    ]


def test_after_failures_at_most_the_open_chunks_are_read_again(make_reader, tmp_path, strategy, log) -> None:
    call_numbers, failing_calls, branches = itertools.count(1), {4, 7, 12}, 4

    def fail_sometimes(prompt: str) -> Completion | PolicyError:
        return PolicyUnreachableError("gone") if next(call_numbers) in failing_calls else answer_with_ids(prompt)

    policy = ScriptedPolicy(fail_sometimes)
    reader = make_reader(
        policy, strategy=strategy, run_log=log, checkpoints=tmp_path / "checkpoints.sqlite", branches=branches
    )
    result, failure_count = None, 0
    while result is None:
        try:
            result = reader.resume("r") if failure_count else reader.read(TEXT, QUESTION, run_id="r")
        except PolicyUnreachableError:
            failure_count += 1
    assert failure_count >= 2
    assert result.answer == log.get("r").answer == "4711"
    sections = [prompt for prompt in policy.prompts if "<section>" in prompt]
    assert len(sections) - len(set(sections)) <= failure_count * 2 * branches
    assert max(count_attempts(log).values()) == 1
    assert {span.index for conversation in log.conversations("r") for span in conversation.reads} == {
        update.chunk_index for update in result.updates if update.chunk_index is not None
    }


def test_a_resumed_run_continues_from_an_edited_memory(agent, log) -> None:
    agent.read(TEXT, QUESTION, run_id="r")
    agent.edit_memory("r", 2, "harbor 99")
    result = agent.resume("r")
    assert "harbor 99" in result.trace.final_path[-1].memory or "harbor 99" in result.memory
    assert [event.kind.value for event in result.events] == ["memory_edited"]
    trace = log.trace("r")
    assert trace.final_memory == result.memory
    assert {call.id for call in trace.calls} == {call.id for call in result.trace.calls}
    assert [(update.chunk_index, update.branch, update.memory) for update in trace.updates] == [
        (update.chunk_index, update.branch, update.memory) for update in agent.resume("r").updates
    ]


def test_every_strategy_is_shown_in_a_terminal_and_on_a_page(finished_run) -> None:
    agent, log, _ = finished_run
    timeline = build_timeline(load_run_view(log, "r", agent.store))
    output = io.StringIO()
    rich.console.Console(file=output, width=100).print(render_timeline(timeline))
    assert "4711" in output.getvalue()
    assert agent.strategy.name in output.getvalue() or agent.strategy.name == "overwrite"
    assert "harbor 4711" in render_page(timeline)
    assert timeline.view.provenance.evidence[0].quote
    assert timeline.completion_tokens == sum(conversation.completion_tokens for conversation in log.conversations("r"))


def test_runs_with_different_strategies_are_not_grouped(make_reader, log) -> None:
    for width in (2, 3):  # with the same prompts
        reader = make_reader(ScriptedPolicy(answer_with_ids), strategy=MapReduce(width=width), run_log=log)
        reader.read(TEXT, QUESTION, run_id=f"r{width}")
        log.reward(f"r{width}", 1.0)
    assert not load_groups(log).groups


CONCURRENCY = 4
SMALL_CHUNKS = ("--concurrency", str(CONCURRENCY), "--model", "fake", "--tokenizer", "embedded", *SMALL_OPTIONS,
                "--chunk-tokens", "40")  # fmt: skip


def test_after_kills_at_most_the_open_chunks_are_read_again(
    tmp_path: Path, killed_strategy: str, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    is_sequential = killed_strategy == "overwrite"
    chunk_count, tokenizer = size(48 if is_sequential else 24, 600), load_tokenizer("embedded")
    text = make_document({0.12: "The key of harbor is 4711.", 0.38: "The key of castle is 12."}, words=60 * chunk_count)
    text = text[: tokenizer.tokenize(text).prefix_chars(chunk_count * 40)]
    (tmp_path / "book.txt").write_text(text)
    rng, max_kills = random.Random(f"{killed_strategy[-9:]}"), size(4, 40) if is_sequential else size(1, 12)
    is_finished, kill_count = False, 0
    with FakeServer(lambda body, number: answer_perfectly(body["messages"][0]["content"]), delay=0.02) as server:
        options = ("--base-url", server.base_url, "--strategy", killed_strategy, "--json")
        program = [sys.executable, "-m", "memagent_graph"]
        command = [*program, "read", tmp_path / "book.txt", "-q", QUESTION, "--run-id", "r", *SMALL_CHUNKS, *options]
        resume_command = [*program, "resume", "r", *options]
        while kill_count < max_kills and not is_finished:
            with Program(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                is_finished = not kill_after(process, server.requests, len(server.requests) + rng.randrange(3, 12))
                kill_count += not is_finished
            command = resume_command
        result = json.loads(run_program(resume_command, capture_output=True, check=True).stdout)
        prompts = [body["messages"][0]["content"] for body in server.requests]
    assert kill_count >= 1
    assert result["answer"] == "4711"
    log = RunLog(get_default_run_log_path())
    read_count = sum(bool(conversation.reads) for conversation in log.conversations("r"))
    repetitions = sum("<section>" in prompt for prompt in prompts) - read_count
    # A chunk is open until its reply is in the file. While some wait to be written, as many others may be requested.
    assert repetitions <= kill_count * (1 if is_sequential else 2 * CONCURRENCY)
    record_property("kills", kill_count)
    record_property("requests asked again per kill", round(repetitions / kill_count, 2))
    assert max(count_attempts(log).values()) == 1
    indices_read = {span.index for conversation in log.conversations("r") for span in conversation.reads}
    assert indices_read == set(range(chunk_count))
    assert result["chunks_read"] % chunk_count == 0, "each pass reads every chunk"
    trace = log.trace("r")
    assert {parent for call in trace.calls for parent in call.parents} <= {call.id for call in trace.calls}
    assert log.get("r").answer == "4711"
