"""What every way of reading has without doing anything for it: the suite over those that ship, and the example's."""

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
from memagent_graph.storage.private_files import default_run_log
from memagent_graph.strategies.map_reduce import MapReduce
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.page import render_page
from memagent_graph.timeline.terminal import render_timeline
from memagent_graph.timeline.view import load_run_view
from memagent_training.data.replay import load_groups

FACTS = {0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}
TEXT, LONGER = make_document(FACTS, words=800), make_document(FACTS, words=1200)
QUESTION = "What is the key of harbor?"


def exactly(prompt: str) -> Completion:
    return make_completion(prompt, answer_perfectly(prompt))


KILLED = ("overwrite", "parallel", "segments:count=3", "reread", "recall")
"""What a process is killed in at the small size: the paper's, again and again, and one strategy of each other shape.
All are broken off within the process."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "killed" in metafunc.fixturenames:
        strategies = KILLED if metafunc.config.getoption("--soak") is None else ALL_STRATEGIES
        metafunc.parametrize("killed", strategies, ids=short_name)


@pytest.fixture(scope="module", params=ALL_STRATEGIES, ids=short_name)
def strategy(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def finished(strategy, tmp_path_factory) -> Iterator[tuple[MemAgent, RunLog, ReadResult]]:
    """A reader, its log, and the run r, for tests that only look at them."""
    folder = tmp_path_factory.mktemp("finished")
    with (
        closing(RunLog(folder / "runs.sqlite")) as log,
        MemAgent(
            ScriptedPolicy(exactly), strategy=strategy, tokenizer="embedded", budget=SMALL_BUDGET,
            prompts=load_prompts(), store=folder / "documents", run_log=log,
        ) as agent,
    ):  # fmt: skip
        yield agent, log, agent.read(TEXT, QUESTION, run_id="r")


@pytest.fixture
def agent(make_reader, tmp_path, strategy, log) -> MemAgent:
    return make_reader(
        ScriptedPolicy(exactly), strategy=strategy, run_log=log, checkpoints=tmp_path / "checkpoints.sqlite"
    )


def comparable(trace: Trace) -> list[object]:
    """A trace's calls without what the clock says."""
    return [replace(call, seconds=0) for call in trace.calls]


def counted_places(log: RunLog) -> Counter[tuple[str, str, int, int]]:
    """How many conversations of the run r count at each place."""
    return Counter(
        (conversation.branch, conversation.role, conversation.slot, conversation.attempt)
        for conversation in log.conversations("r")
    )


def test_every_strategy_answers_right_and_is_named_in_the_result(finished) -> None:
    agent, log, result = finished
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


def test_every_strategy_is_logged_exactly(finished) -> None:
    _, log, result = finished
    assert sorted(comparable(log.trace("r")), key=lambda call: call.id) == sorted(
        comparable(result.trace), key=lambda call: call.id
    )
    conversations = list(log.conversations("r"))
    assert len(conversations) == result.usage.turns
    assert sum(conversation.prompt_tokens for conversation in conversations) == result.usage.prompt_tokens
    call_ids = {conversation.call_id for conversation in conversations}
    for conversation in conversations:
        assert list(conversation.token_ids) == list(conversation.text.encode())
        assert set(conversation.parents) <= call_ids
        assert all(span.start_char < span.end_char for span in conversation.reads)
    assert len(counted_places(log)) == len(conversations)


def test_every_parent_is_before_its_children_and_all_lead_to_the_answer(finished) -> None:
    _, log, _ = finished
    trace = log.trace("r")
    before: set[str] = set()
    for call in trace.calls:
        assert set(call.parents) <= before
        before.add(call.id)
    (answer,) = trace.answers
    with_news = [call.id for call in trace.calls if call.chunk_index is not None and "harbor" in (call.text or "")]
    ancestors = {answer.id}
    for call in reversed(trace.calls):
        ancestors.update(call.parents if call.id in ancestors else ())
    assert set(with_news) <= ancestors


def test_a_limit_stops_a_strategy_and_a_resume_reads_the_rest_once(agent, log) -> None:
    part = agent.read(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=7))
    assert part.stop_reason is StopReason.MAX_CHUNKS
    assert part.chunks_read == 7
    result = agent.resume("r")
    whole = agent.read(TEXT, QUESTION, run_id="whole")
    assert (result.answer, result.memory, result.chunks_read) == (whole.answer, whole.memory, whole.chunks_read)
    conversations = list(log.conversations("r", superseded=True))
    assert result.usage.turns == len(conversations)
    assert [conversation.role for conversation in conversations] == [
        conversation.role for conversation in log.conversations("whole")
    ]


def test_a_strategy_that_is_broken_off_reads_at_most_the_open_chunks_again(
    make_reader, tmp_path, strategy, log
) -> None:
    calls, breaks, branches = itertools.count(1), {4, 7, 12}, 4

    def gone_now_and_then(prompt: str) -> Completion | PolicyError:
        return PolicyUnreachableError("gone") if next(calls) in breaks else exactly(prompt)

    policy = ScriptedPolicy(gone_now_and_then)
    reader = make_reader(
        policy, strategy=strategy, run_log=log, checkpoints=tmp_path / "checkpoints.sqlite", branches=branches
    )
    result, broken_off = None, 0
    while result is None:
        try:
            result = reader.resume("r") if broken_off else reader.read(TEXT, QUESTION, run_id="r")
        except PolicyUnreachableError:
            broken_off += 1
    assert broken_off >= 2
    assert result.answer == log.get("r").answer == "4711"
    sections = [prompt for prompt in policy.prompts if "<section>" in prompt]
    assert len(sections) - len(set(sections)) <= broken_off * 2 * branches
    assert max(counted_places(log).values()) == 1
    assert {span.index for conversation in log.conversations("r") for span in conversation.reads} == {
        update.chunk_index for update in result.updates if update.chunk_index is not None
    }


def test_an_edited_memory_is_read_on_from(agent, log) -> None:
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


def test_every_strategy_is_shown_in_a_terminal_and_on_a_page(finished) -> None:
    agent, log, _ = finished
    timeline = build_timeline(load_run_view(log, "r", agent.store))
    out = io.StringIO()
    rich.console.Console(file=out, width=100).print(render_timeline(timeline))
    assert "4711" in out.getvalue()
    assert agent.strategy.name in out.getvalue() or agent.strategy.name == "overwrite"
    assert "harbor 4711" in render_page(timeline)
    assert timeline.provenance.evidence[0].quote
    assert timeline.totals.completion_tokens == sum(
        conversation.completion_tokens for conversation in log.conversations("r")
    )


def test_runs_of_two_ways_of_reading_are_no_group(make_reader, log) -> None:
    for width in (2, 3):  # in the same words
        reader = make_reader(ScriptedPolicy(exactly), strategy=MapReduce(width=width), run_log=log)
        reader.read(TEXT, QUESTION, run_id=f"r{width}")
        log.reward(f"r{width}", 1.0)
    assert not load_groups(log).groups


AT_ONCE = 4
SMALL_CHUNKS = ("--concurrency", str(AT_ONCE), "--model", "fake", "--tokenizer", "embedded", *SMALL_OPTIONS,
                "--chunk-tokens", "40")  # fmt: skip


def test_a_strategy_that_is_killed_reads_at_most_the_open_chunks_again(
    tmp_path: Path, killed: str, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    is_line = killed == "overwrite"
    chunks, tokenizer = size(48 if is_line else 24, 600), load_tokenizer("embedded")
    text = make_document({0.12: "The key of harbor is 4711.", 0.38: "The key of castle is 12."}, words=60 * chunks)
    text = text[: tokenizer.tokenize(text).prefix_chars(chunks * 40)]
    (tmp_path / "book.txt").write_text(text)
    moments, most = random.Random(f"{killed[-9:]}"), size(4, 40) if is_line else size(1, 12)
    is_finished = False
    kills = 0
    with FakeServer(lambda body, number: answer_perfectly(body["messages"][0]["content"]), delay=0.02) as server:
        options = ("--base-url", server.base_url, "--strategy", killed, "--json")
        program = [sys.executable, "-m", "memagent_graph"]
        read = [*program, "read", tmp_path / "book.txt", "-q", QUESTION, "--run-id", "r", *SMALL_CHUNKS, *options]
        resume = [*program, "resume", "r", *options]
        while kills < most and not is_finished:
            with Program(resume if kills else read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                is_finished = not kill_after(process, server.requests, len(server.requests) + moments.randrange(3, 12))
                kills += not is_finished
        result = json.loads(run_program(resume, capture_output=True, check=True).stdout)
        prompts = [body["messages"][0]["content"] for body in server.requests]
    assert kills >= 1
    assert result["answer"] == "4711"
    log = RunLog(default_run_log())
    reads = sum(bool(conversation.reads) for conversation in log.conversations("r"))
    repetitions = sum("<section>" in prompt for prompt in prompts) - reads
    # A chunk is open until its reply is in the file. While some wait for that, as many others may be asked for.
    assert repetitions <= kills * (1 if is_line else 2 * AT_ONCE)
    record_property("kills", kills)
    record_property("requests asked again per kill", round(repetitions / kills, 2))
    assert max(counted_places(log).values()) == 1
    assert {span.index for conversation in log.conversations("r") for span in conversation.reads} == set(range(chunks))
    assert result["chunks_read"] % chunks == 0, "each pass reads every chunk"
    trace = log.trace("r")
    assert {parent for call in trace.calls for parent in call.parents} <= {call.id for call in trace.calls}
    assert log.get("r").answer == "4711"
