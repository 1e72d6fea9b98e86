"""One pass over a document for many questions: each question has its own run, and all read the same chunk."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from typing import Any

import pytest
from support.scripts import extract, make_document, read_perfectly
from unit.test_questions_in_graphs import UnevenPolicy

from memagent_graph import Limits, ScriptedPolicy, StopReason
from memagent_graph.concurrency.shared_pass import SharedPass
from memagent_graph.errors import BudgetError, MemAgentError, PolicyError

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=800)
HARBOR, CASTLE, TOWER = (f"What is the key of {name}?" for name in ("harbor", "castle", "tower"))


@pytest.mark.parametrize("strategy", ["overwrite", "refine", "gated", "map_reduce:width=4", "segments:count=3"])
def test_all_questions_finish_a_chunk_before_any_starts_the_next(make_reader, strategy) -> None:
    def script(prompt: str) -> str:
        is_gate = prompt.rstrip().endswith("KEEP or REWRITE:")
        return "KEEP" if is_gate else read_perfectly(prompt.replace("draft>", "memory>"))

    policy = UnevenPolicy(script)
    results = make_reader(policy, strategy=strategy).read(TEXT, questions=[HARBOR, CASTLE, TOWER])
    assert len({result.chunks_read for result in results}) == 1
    if strategy in {"overwrite", "refine", "gated"}:
        assert policy.has_shared_one_pass(3)


def test_each_question_has_its_own_result_run_and_reward(make_reader, log) -> None:
    results = make_reader(run_log=log).read(TEXT, questions=[HARBOR, CASTLE, TOWER, HARBOR], run_id="r")
    assert [result.answer for result in results[:2]] == ["4711", "12"]
    assert results[3] is results[0]
    assert [result.run_id for result in results] == ["r-0", "r-1", "r-2", "r-0"]
    for result in results[:3]:
        assert log.get(result.run_id).question == result.question
        assert log.trace(result.run_id).final_memory == result.memory
    log.reward("r-1", 1.0)
    assert [log.latest_rewards(f"r-{number}") for number in range(2)] == [{}, {"reward": 1.0}]


def test_a_failed_question_does_not_stop_the_others_and_can_be_resumed(make_reader, tmp_path) -> None:
    is_failing = True

    def script(prompt: str):
        return PolicyError("gone") if is_failing and "castle" in extract(prompt, "problem") else read_perfectly(prompt)

    reader = make_reader(ScriptedPolicy(script), checkpoints=tmp_path / "checkpoints.sqlite")
    outcomes = reader.read(TEXT, questions=[HARBOR, CASTLE], run_id="r", return_exceptions=True)
    assert outcomes[0].answer == "4711"
    assert isinstance(outcomes[1], PolicyError) and outcomes[1].run_id == "r-1"
    with pytest.raises(PolicyError, match="gone"):
        reader.read(TEXT, questions=[HARBOR, CASTLE])
    is_failing = False
    assert reader.resume("r-1").answer == "12"


def test_a_question_that_stops_early_does_not_hold_up_the_others(make_reader) -> None:
    def script(prompt: str) -> str:
        if "<section>" not in prompt:
            return read_perfectly(prompt)
        if "castle" in extract(prompt, "problem"):
            return "STOP"
        return f"REWRITE\n{read_perfectly(prompt)}"

    reader = make_reader(ScriptedPolicy(script), strategy="gated:stop=yes")
    harbor, castle = reader.read(TEXT, questions=[HARBOR, CASTLE])
    assert (castle.stop_reason, castle.chunks_read) == (StopReason.ENOUGH, 1)
    assert (harbor.stop_reason, harbor.answer) == (StopReason.ANSWERED, "4711")


def test_limits_apply_to_each_question(make_reader) -> None:
    results = make_reader().read(TEXT, questions=[HARBOR, CASTLE], limits=Limits(max_chunks=3))
    assert [(result.stop_reason, result.chunks_read) for result in results] == [(StopReason.MAX_CHUNKS, 3)] * 2


def test_questions_over_max_concurrency_are_read_in_several_passes(make_reader) -> None:
    policy = ScriptedPolicy(read_perfectly)
    text = make_document({0.5: "The key of k7 is 4711."}, words=60)
    questions = [f"What is the key of k{number}?" for number in range(30)]
    results = make_reader(policy).read(text, questions=questions, max_concurrency=10)
    assert len(results) == 30
    passes = [int(re.findall(r"k(\d+)\?", extract(prompt, "problem"))[0]) // 10 for prompt in policy.prompts]
    assert passes == sorted(passes)


@pytest.mark.parametrize(
    ("question", "kind", "words"),
    [
        (" ", MemAgentError, "the question is empty"),
        ("why " * 200, BudgetError, "its budget is 50"),
        ("caf\udce9?", MemAgentError, "not valid Unicode"),
        (3, MemAgentError, "of type int"),
    ],
)
def test_invalid_questions_are_refused_before_a_run_begins(make_reader, log, question, kind, words) -> None:
    policy = ScriptedPolicy(read_perfectly)
    reader = make_reader(policy, run_log=log)
    for request in ({"question": question}, {"questions": [HARBOR, question]}):
        with pytest.raises(kind, match=words):
            reader.read(TEXT, **request)
    assert (policy.prompts, log.counts()) == ([], (0, 0))


def test_on_update_gets_each_update_with_its_question(make_reader) -> None:
    chunks = defaultdict(list)
    results = make_reader().read(
        TEXT,
        questions=[HARBOR, CASTLE],
        on_update=lambda question, update: chunks[question].append(update.chunk_index),
    )
    assert {len(indexes) for indexes in chunks.values()} == {results[0].chunks_read}


async def test_a_shared_pass_does_not_wait_for_readers_that_left_or_were_cancelled() -> None:
    shared_pass, progress = SharedPass(), []

    async def read(name: str, chunks: int) -> None:
        with shared_pass.join() as wait:
            for chunk in range(chunks):
                await wait(chunk)
                progress.append((name, chunk))

    await asyncio.gather(read("short", 2), read("long", 5))
    assert [chunk for name, chunk in progress if name == "long"] == list(range(5))

    async def join_and_block() -> None:
        with shared_pass.join():
            await asyncio.Event().wait()

    blocked_reader = asyncio.create_task(join_and_block())
    await asyncio.sleep(0)
    reader = asyncio.create_task(read("second", 3))
    await asyncio.sleep(0.01)
    assert not reader.done()
    blocked_reader.cancel()
    await reader


def test_question_arguments_that_conflict_are_refused(make_reader) -> None:
    reader: Any = make_reader()
    for arguments, words in (
        ({}, "there is no question"),
        ({"questions": []}, "Pass at least one"),
        ({"questions": [HARBOR], "max_concurrency": 0}, "max_concurrency must be at least 1, got 0"),
        ({"question": HARBOR, "questions": [CASTLE]}, "both question and questions"),
        ({"question": HARBOR, "return_exceptions": True}, "are for several questions"),
        ({"question": HARBOR, "on_update": print}, "use stream"),
        ({"questions": [HARBOR, None]}, "a question is of type NoneType"),
    ):
        with pytest.raises(MemAgentError, match=words):
            reader.read(TEXT, **arguments)
    assert [result.question for result in reader.read(TEXT, questions=HARBOR)] == [HARBOR]
