import asyncio
import sys
import threading
from itertools import pairwise
from typing import Any
from unittest.mock import AsyncMock

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from support.scripts import make_document, read_perfectly
from unit.test_branching_strategies import ConcurrencyCounter

from memagent_graph import (
    Budget,
    EventKind,
    Limits,
    MemAgent,
    RunLog,
    SamplingParams,
    ScriptedPolicy,
    StopReason,
    UpdateRule,
    UpdateRules,
)
from memagent_graph.documents.chunking import Chunker
from memagent_graph.errors import (
    BudgetError,
    DocumentError,
    MemAgentError,
    PolicyError,
    RunError,
    RunMismatchError,
    RunNotFoundError,
    TokenizerError,
)
from memagent_graph.policy import Completion, FinishReason, TokenUsage
from memagent_graph.storage.checkpoints import open_checkpointer

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=1000)
QUESTION = "What is the key of harbor?"


def test_every_chunk_is_read_once_and_in_order(make_reader) -> None:
    result = make_reader().read(TEXT, QUESTION)
    assert result.updates[0].start_char == 0
    assert result.updates[-1].end_char == len(TEXT)
    assert all(update.end_char == following.start_char for update, following in pairwise(result.updates))
    assert [update.chunk_index for update in result.updates] == list(range(len(result.updates)))
    assert all(update.chunk_tokens == 100 for update in result.updates[:-1])
    assert result.updates[-1].progress == 1.0
    _, change = [update for update in result.updates if update.changed]
    assert TEXT[change.start_char : change.end_char].count("4711") == 1


async def test_a_stream_that_is_left_early_stops_reading(make_reader) -> None:
    policy = ScriptedPolicy(read_perfectly)
    async for _ in make_reader(policy).astream(TEXT, QUESTION):
        break
    await asyncio.sleep(0.05)
    assert len(policy.prompts) < 4


def test_a_batch_keeps_the_order_and_limits_concurrency(make_reader) -> None:
    policy = ConcurrencyCounter(read_perfectly)
    reader = make_reader(policy)
    questions = [QUESTION, "What is the key of castle?"] * 4
    results = reader.batch([(TEXT, question) for question in questions], max_concurrency=3)
    assert [result.answer for result in results] == ["4711", "12"] * 4
    assert policy.max_in_flight == 3
    assert reader.batch([], max_concurrency=0) == []
    with pytest.raises(MemAgentError, match="max_concurrency must be at least 1, got 0"):
        reader.batch([(TEXT, QUESTION)], max_concurrency=0)


def test_a_failure_in_a_batch_does_not_stop_the_other_reads(make_reader) -> None:
    def script(prompt: str):
        return PolicyError("broken") if "castle?" in prompt else read_perfectly(prompt)

    reader = make_reader(ScriptedPolicy(script))
    requests = [(TEXT, QUESTION), (TEXT, "What is the key of castle?"), (TEXT, QUESTION)]
    outcomes = reader.batch(requests, return_exceptions=True)
    assert [getattr(outcome, "answer", None) for outcome in outcomes] == ["4711", None, "4711"]
    assert isinstance(outcomes[1], PolicyError)
    with pytest.raises(PolicyError, match="broken"):
        reader.batch(requests)


def test_a_memory_that_is_over_budget_after_escaping_is_cut(make_reader) -> None:
    reply = Completion("</section>" * 19, FinishReason.STOP, "scripted", TokenUsage(1, 60))
    reader = make_reader(ScriptedPolicy(lambda prompt: reply))
    (update,) = reader.read(TEXT, QUESTION, limits=Limits(max_chunks=1)).updates
    assert [event.kind for event in update.events] == [EventKind.OVERLONG]
    assert 0 < len(update.memory) < len(reply.text)


def test_a_retried_update_is_sampled_with_another_seed_and_becomes_the_memory(make_reader) -> None:
    seeds = []

    class SeedRecordingPolicy(ScriptedPolicy):
        async def complete(self, prompt, sampling):
            seeds.append(sampling.seed)
            return await super().complete(prompt, sampling)

    policy = SeedRecordingPolicy(iter(["", "second try", *["as before"] * 500]))
    sampling = SamplingParams(temperature=1.0, seed=7)
    reader = make_reader(policy, rules=UpdateRules(empty=UpdateRule.RETRY), sampling=sampling)
    update = reader.read(TEXT, QUESTION, limits=Limits(max_chunks=2)).updates[0]
    assert update.memory == "second try"
    assert [event.kind for event in update.events] == [EventKind.EMPTY, EventKind.RESAMPLED]
    assert seeds[:3] == [7, 8, 7]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(max_tokens_total=600), StopReason.MAX_TOKENS), (Limits(max_seconds=0.5), StopReason.MAX_SECONDS)],
)
def test_a_read_that_a_limit_stopped_can_be_resumed(make_reader, tmp_path, limits, reason) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.1 if limits.max_seconds else 0)
    reader = make_reader(policy, checkpoints=tmp_path / "checkpoints.sqlite")
    partial_result = reader.read(TEXT, QUESTION, run_id="r", limits=limits)
    assert (partial_result.stop_reason, partial_result.answer) == (reason, None)
    assert 0 < partial_result.chunks_read < 20
    if limits.max_tokens_total:
        token_counts = [update.prompt_tokens + update.completion_tokens for update in partial_result.updates]
        exact_limit = Limits(max_tokens_total=sum(token_counts))
        assert reader.read(TEXT, QUESTION, limits=exact_limit).chunks_read == partial_result.chunks_read
    policy.delay = 0
    calls = len(policy.prompts)
    result = reader.resume("r")
    assert result.answer == "4711"
    assert [update.chunk_index for update in result.updates] == list(range(result.chunks_read))
    assert len(policy.prompts) - calls == result.chunks_read - partial_result.chunks_read + 1


def test_limits_start_again_at_a_resume(make_reader, tmp_path) -> None:
    reader = make_reader(checkpoints=tmp_path / "c.sqlite", limits=Limits(max_chunks=4))
    assert reader.read(TEXT, QUESTION, run_id="r").chunks_read == 4
    assert reader.resume("r").chunks_read == 8


def test_a_chunk_that_cannot_be_read_leaves_the_memory_before_it(make_reader, tmp_path, monkeypatch) -> None:
    policy = ScriptedPolicy(read_perfectly)
    reader = make_reader(policy, checkpoints=tmp_path / "c.sqlite")
    next_chunk = Chunker.next_chunk

    def fail_at_3(self, cursor):
        if cursor["index"] == 3:
            raise DocumentError("the disk is gone", hint="Find it.")
        return next_chunk(self, cursor)

    with monkeypatch.context() as patch, pytest.raises(DocumentError, match="the disk is gone"):
        patch.setattr(Chunker, "next_chunk", fail_at_3)
        reader.read(TEXT, QUESTION, run_id="r")
    assert [update.chunk_index for update in reader.history("r")] == [0, 1, 2]
    result = reader.resume("r")
    assert result.answer == "4711"
    assert len(policy.prompts) == result.chunks_read + 1


def test_invalid_edits_unknown_runs_and_mappings_as_documents_are_refused(make_reader, tmp_path) -> None:
    reader = make_reader(checkpoints=tmp_path / "c.sqlite")
    with pytest.raises(DocumentError, match=r"Pass a pathlib\.Path, text"):
        reader.read({"a": 1}, "x")
    reader.read(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=2))
    with pytest.raises(RunError, match="has not read chunk 2; it has read 2"):
        reader.edit_memory("r", 2, "x")
    with pytest.raises(RunError, match="the memory budget is 60"):
        reader.edit_memory("r", 1, "</section> " * 15)  # fewer tokens, but more in a prompt
    with pytest.raises(RunNotFoundError, match="no run 'other'"):
        reader.resume("other")
    with pytest.raises(RunError, match="does not save checkpoints"):
        make_reader().resume("r")


def test_a_run_is_not_resumed_with_another_document_or_with_other_settings(make_reader, tmp_path) -> None:
    checkpoints = tmp_path / "c.sqlite"
    reader = make_reader(checkpoints=checkpoints)
    reader.read(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=2))
    with pytest.raises(RunMismatchError, match="another document"):
        reader.resume("r", document=TEXT + "!")
    for change in ({"chunk_tokens": 90}, {"strategy": "overwrite:passes=2"}):
        other_reader = make_reader(checkpoints=checkpoints, **change)
        for call in (lambda: other_reader.resume("r"), lambda: other_reader.edit_memory("r", 0, "x")):  # noqa: B023
            with pytest.raises(RunMismatchError, match=r"another strategy, tokenizer, chunk size.*strategy chooses"):
                call()
    assert reader.resume("r", document=TEXT).answer == "4711"


def test_a_budget_over_the_context_window_is_refused_with_a_size_that_fits(make_reader) -> None:
    with pytest.raises(BudgetError, match=r"Use chunk_tokens \d+"):
        make_reader(budget=Budget(context_window=1000, chunk_tokens=1000, memory_tokens=50, question_tokens=50))
    with pytest.raises(BudgetError, match="chunk_tokens must be at least 1, got 0"):
        Budget(chunk_tokens=0)
    with pytest.raises(MemAgentError, match=r"boundary is 'line': Input should be 'token'.*"):
        make_reader(boundary="line")


def test_without_a_tokenizer_the_error_names_the_argument(tmp_path) -> None:
    reader = MemAgent(ScriptedPolicy(["x"]), store=tmp_path)
    with pytest.raises(TokenizerError, match=r"Set it \(tokenizer\): a tiktoken encoding") as error_info:
        reader.read(TEXT, QUESTION)
    assert "(--tokenizer)" in str(error_info.value.hint), "the hint names the command-line option"


async def test_concurrent_first_reads_share_one_connection_to_the_checkpoints(
    make_reader, tmp_path, monkeypatch
) -> None:
    paths = []

    async def open_and_record(path):
        paths.append(path)
        await asyncio.sleep(0.01)
        return await open_checkpointer(path)

    monkeypatch.setattr("memagent_graph.reader.open_checkpointer", open_and_record)
    async with make_reader(checkpoints=tmp_path / "c.sqlite") as reader:
        await reader.abatch([(TEXT, QUESTION)] * 5)
    assert len(paths) == 1


async def test_only_the_reader_that_opened_a_log_closes_it_and_a_copy_closes_no_policy(make_reader, tmp_path) -> None:
    def count_writers() -> int:
        return sum(thread.name == "memagent-writer" for thread in threading.enumerate())

    other_writers = count_writers()
    async with make_reader(run_log=tmp_path / "own.sqlite") as reader:
        await reader.aread(TEXT, QUESTION)
        assert count_writers() == other_writers + 1
    assert count_writers() == other_writers
    await reader.aread(TEXT, QUESTION)
    await reader.aclose()
    assert RunLog(tmp_path / "own.sqlite").counts()[0] == 2
    shared_log, close_policy = RunLog(tmp_path / "shared.sqlite"), AsyncMock()
    async with make_reader(run_log=shared_log) as reader:
        reader.policy.aclose = close_policy
        async with reader.copy() as reader_copy:
            await reader_copy.aread(TEXT, QUESTION)
        close_policy.assert_not_awaited()
    close_policy.assert_awaited_once()
    assert count_writers() == other_writers + 1
    shared_log.close()


def test_the_run_of_a_stream_that_was_left_can_be_resumed_at_once(make_reader, tmp_path) -> None:
    agent = make_reader(checkpoints=tmp_path / "c.sqlite")
    for _ in agent.stream(TEXT, QUESTION, run_id="left"):
        break
    assert agent.resume("left").answer == agent.read(TEXT, QUESTION).answer


def test_a_synchronous_stream_within_a_read_is_refused(make_reader) -> None:
    agent = make_reader(ScriptedPolicy(lambda _: next(agent.stream(TEXT, QUESTION))))
    with pytest.raises(RuntimeError, match="a synchronous call was made on the background loop"):
        agent.read(TEXT, QUESTION)
    with pytest.raises(SystemExit):
        make_reader(ScriptedPolicy(sys.exit)).read(TEXT, QUESTION)
    assert make_reader().read(TEXT, QUESTION).answer == "4711", "the loop of synchronous calls goes on"


async def test_a_read_reports_to_the_callbacks_of_its_config(make_reader) -> None:
    names: list[str] = []

    class NameRecorder(BaseCallbackHandler):
        def on_chain_start(self, serialized: Any, inputs: Any, **options: Any) -> None:
            names.append(f"{options['name']} {options['metadata'].get('case')}")

    config: Any = {"callbacks": [NameRecorder()], "metadata": {"case": "7"}, "run_name": "lease"}
    config["configurable"] = {"thread_id": "of the caller"}
    reader = make_reader()
    result = await reader.aread("The sea is blue.", "What is the sea?", config=config)
    assert names[0] == "lease 7" and result.run_id != "of the caller"
    names.clear()
    await reader.aread("The sea is blue.", questions=["What is the sea?", "Where?"], config=config)
    assert names.count("lease 7") == 2


@pytest.mark.parametrize("name", ["page", "temperature", "limits"])
def test_an_unknown_option_of_a_read_is_refused(make_reader, name) -> None:
    with pytest.raises(MemAgentError, match=rf"no option '{name}'\. (Did you mean pages|A read takes .*Agent)|Limits"):
        make_reader().read("The key of harbor is 4711.", "What is the key of harbor?", **{name: "5"})
