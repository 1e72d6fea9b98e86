import asyncio
import dataclasses
import gc
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from support.conversations import DOCUMENT, make_conversation
from support.scripts import make_completion, make_document, read_perfectly

from memagent_graph import (
    Completion,
    EventKind,
    FinishReason,
    Limits,
    RunLog,
    SamplingParams,
    ScriptedPolicy,
    UpdateRule,
    UpdateRules,
)
from memagent_graph.errors import MemAgentError, PolicyError, RunLogError, RunNotFoundError
from memagent_graph.policy import TokenUsage
from memagent_graph.reading.execution import Recording
from memagent_graph.run_log import Conversation, RunFilter, TextKind
from memagent_graph.run_log.exchange import parquet
from memagent_graph.run_log.tables import connect, pack_numbers, pack_text, unpack_numbers, unpack_text
from memagent_graph.storage import database_writer

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=400)
QUESTION = "What is the key of harbor?"


def complete_perfectly(prompt: str) -> Completion:
    return make_completion(prompt, read_perfectly(prompt))


def make_attempt(position: int, call_id: str = "s", **changes) -> Conversation:
    return make_conversation(position, call_id=call_id, **changes)


def test_every_conversation_is_logged_with_exact_prompt_and_reply(make_reader, log) -> None:
    policy = ScriptedPolicy(complete_perfectly)
    reader = make_reader(policy, run_log=log)
    result = reader.read(TEXT, QUESTION, run_id="r")
    rows = list(log.conversations("r"))
    assert [row.role for row in rows] == ["update"] * result.chunks_read + ["answer"]
    for row, prompt in zip(rows, policy.prompts, strict=True):
        assert bytes(list(row.prompt_token_ids)).decode() == prompt
        assert bytes(list(row.token_ids)).decode() == row.text
        assert list(row.logprobs) == [-0.25] * row.completion_tokens
        assert (row.policy, row.policy_version, row.finish_reason, row.attempt) == ("scripted", "v7", "stop", 0)
        assert row.sampling["max_tokens"] == 60
        assert row.has_ids
    assert {row.tokenizer for row in rows} == {reader.graph().reader_context.tokenizer.fingerprint}
    (template,) = {row.template for row in rows}
    assert log.templates("r")[template]["update"] == reader.graph().reader_context.prompts.update.text
    spans = [(row.reads[0].start_char, row.reads[0].end_char) for row in rows[:-1]]
    assert spans == [(update.start_char, update.end_char) for update in result.updates]
    record = log.get("r")
    assert (record.stop_reason, record.answer, record.question) == ("answered", "4711", QUESTION)
    assert record.settings["objects"] == ["policy", "prompts"], "another process cannot rebuild these"
    assert (record.settings["tokenizer"], record.settings["chunk_tokens"]) == ("embedded", 100)
    assert record.began <= record.ended


def test_logging_is_on_by_default(make_reader, isolated_home) -> None:
    make_reader(run_log=False).read(TEXT, QUESTION)
    assert not (isolated_home / "runs.sqlite").exists()
    result = make_reader().read(TEXT, QUESTION)
    assert RunLog(isolated_home / "runs.sqlite").get(result.run_id).answer == "4711"


def test_a_run_with_the_id_of_an_earlier_run_replaces_it(make_reader, log, tmp_path) -> None:
    reader = make_reader(run_log=log, checkpoints=tmp_path / "c.sqlite")
    reader.read(TEXT, QUESTION, run_id="r")
    began = log.get("r").began
    short_text = make_document({0.5: "The key of castle is 12."}, words=300)
    result = reader.read(short_text, "What is the key of castle?", run_id="r", limits=Limits(max_chunks=2))
    record = log.get("r")
    assert (record.question, record.answer, record.stop_reason) == ("What is the key of castle?", None, "max_chunks")
    assert record.began > began
    assert record.document["size"] == len(short_text)
    assert [row.position for row in log.conversations("r")] == [0, 1]
    assert [update.chunk_index for update in reader.history("r")] == [0, 1], "no chunk of the earlier run"
    assert result.chunks_read == 2
    result = reader.resume("r")
    assert [update.chunk_index for update in result.updates] == list(range(result.chunks_read))
    assert result.answer == "12"


def test_calls_repeated_after_a_resume_supersede_the_earlier_calls(log) -> None:
    log.begin("r", QUESTION, DOCUMENT, {})
    for position in range(4):
        log.record(make_attempt(position, f"first {position}", parents=(f"first {position - 1}",)))
    log.wait(log.record(make_attempt(2, "second 2", parents=("first 1",), text="anew")))
    rows = [(row.position, row.text) for row in log.conversations("r")]
    assert rows == [(0, "memory 0"), (1, "memory 1"), (2, "anew")]
    all_rows = list(log.conversations("r", superseded=True))
    assert [(row.position, row.superseded) for row in all_rows] == [
        (0, False), (1, False), (2, True), (2, False), (3, True),
    ]  # fmt: skip


def test_redacted_texts_have_no_token_ids(make_reader, tmp_path) -> None:
    def redact(kind: TextKind, text: str) -> str | None:
        return None if kind is TextKind.DOCUMENT_NAME else text.replace("4711", "[number]")

    log = RunLog(tmp_path / "redacted.sqlite", redact=redact)
    make_reader(ScriptedPolicy(complete_perfectly), run_log=log).read(TEXT, QUESTION + " 4711?", run_id="r")
    assert log.get("r").question.endswith("[number]?")
    assert log.get("r").document["name"] == ""
    rows = list(log.conversations("r"))
    assert all(row.prompt_token_ids is None for row in rows)  # the question is in every prompt
    redacted_rows = [row for row in rows if "[number]" in row.text]
    assert redacted_rows
    assert all(row.token_ids is row.logprobs is None for row in redacted_rows)
    assert all(row.token_ids is not None for row in rows if row not in redacted_rows)
    assert log.get("r").answer == "[number]"
    log.close()
    assert b"4711" not in b"".join(path.read_bytes() for path in tmp_path.glob("redacted.sqlite*"))


def test_a_redaction_that_raises_stops_the_log_but_not_the_read(make_reader, tmp_path) -> None:
    def redact(kind: TextKind, text: str) -> str:
        if kind is TextKind.COMPLETION:
            raise RuntimeError("no such pattern")
        return text

    log = RunLog(tmp_path / "redacted.sqlite", redact=redact)
    result = make_reader(run_log=log).read(TEXT, QUESTION, run_id="r")
    assert result.answer == "4711"
    (event,) = (event for event in result.events if event.kind is EventKind.LOGGING_STOPPED)
    assert "no such pattern" in event.detail
    assert list(log.conversations("r")) == []


def test_all_rewards_are_stored_and_the_newest_of_a_name_counts(log) -> None:
    log.begin("r", QUESTION, DOCUMENT, {})
    row = log.wait(log.record(make_attempt(0)))
    log.reward("r", 0.0, name="exact", source="scorer")
    log.reward("r", 1.0, name="exact", source="scorer", note="relabelled")
    log.reward("r", 1.0, name="thumbs")
    log.reward("r", 0.5, name="step", conversation=row)
    assert log.latest_rewards("r") == {"exact": 1.0, "thumbs": 1.0}
    assert [(reward.name, reward.value, reward.conversation) for reward in log.rewards("r")][-1] == ("step", 0.5, row)
    with pytest.raises(RunNotFoundError):
        log.reward("other", 1.0)
    with pytest.raises(RunNotFoundError, match="no conversation 99"):
        log.reward("r", 1.0, conversation=99)
    with pytest.raises(MemAgentError, match="finite"):
        log.reward("r", float("nan"))


def test_rewards_belong_to_their_attempt_even_if_the_clock_is_set_back(log, monkeypatch) -> None:
    times = iter([1000.0, 2000.0, 1500.0, 1200.0])
    monkeypatch.setattr("memagent_graph.run_log.log.time.time", lambda: next(times))
    log.wait(log.begin("r", QUESTION, DOCUMENT, {}))
    log.reward("r", 0.0, name="first")
    log.wait(log.begin("r", QUESTION, DOCUMENT, {}))
    assert log.latest_rewards("r") == {}
    log.reward("r", 1.0, name="second")
    assert log.latest_rewards("r") == {"second": 1.0}
    assert [reward.name for reward in log.rewards("r", earlier=True)] == ["first", "second"]


def test_runs_are_found_by_filters_and_deleted_with_all_their_rows(log) -> None:
    for index, name in enumerate(("a.txt", "b.txt", "c.txt")):
        log.begin(f"r{index}", f"Question {index}?", {**DOCUMENT, "name": name}, {})
        log.record(make_attempt(0, run_id=f"r{index}", policy=f"policy {index}"))
    log.wait(log.end("r1", "answered", "yes"))
    log.reward("r2", 1.0)

    def find(**terms) -> list[str]:
        return [record.run_id for record in log.runs(RunFilter(**terms))]

    assert find() == ["r2", "r1", "r0"]
    assert find(newest=1) == ["r2"]
    assert find(question="QUESTION 1") == find(document="B.txt") == find(policy="Policy 1") == ["r1"]
    assert find(stop_reason="answered") == ["r1"]
    assert find(stop_reason="unfinished") == ["r2", "r0"]
    assert find(reward="reward") == ["r2"]
    assert find(run_ids=["r0", "r9"]) == ["r0"]
    assert find(until=0.0) == []
    start = time.monotonic()
    assert sum(log.delete([run.run_id, "r9"]) for run in log.runs() if run.run_id != "r1") == 2
    assert time.monotonic() - start < 20, "a deletion waits for the query around it"
    assert find() == ["r1"]
    with closing(sqlite3.connect(log.path)) as connection:
        tables = ("conversations", "rewards")
        row_counts = [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
    assert row_counts == [1, 0]


def test_values_that_sqlite_cannot_store_are_errors_with_a_remedy(log) -> None:
    log.wait(log.begin("r", QUESTION, DOCUMENT, {}))
    for call in (
        lambda: log.reward("r", 1.0, conversation=10**20),
        lambda: log.reward("r", 1.0, note="half \ud800"),
        lambda: list(log.runs(RunFilter(question="\ud800"))),
        lambda: log.get("\ud800"),
        lambda: log.wait(log.begin("\ud800", QUESTION, DOCUMENT, {})),
    ):
        with pytest.raises(RunLogError, match=r"cannot store a value.*64 bits.*surrogate"):
            call()
    assert log.rewards("r") == []


def test_a_row_that_fails_does_not_affect_others_and_a_slot_has_one_call(log) -> None:
    log.wait(log.begin("r", QUESTION, DOCUMENT, {}))
    futures = [log.record(make_attempt(index, "one", run_id=run)) for index, run in enumerate(("r", "unknown", "r"))]
    with pytest.raises(RunLogError, match="FOREIGN KEY"):
        log.wait(futures[1])
    with pytest.raises(RunLogError, match="UNIQUE"):
        log.wait(log.record(make_attempt(0, "one")))
    assert [row.position for row in log.conversations("r")] == [0, 2]
    recording = Recording(log)
    for call_id in ("one", "two"):
        recording.record(make_attempt(3, call_id, slot=3), ())
    assert "twice with slot 3" in str(recording.failure)


def test_calls_are_logged_before_their_checkpoint(make_reader, log, monkeypatch) -> None:
    """A reader that is killed at any moment therefore leaves no gap in the log."""
    write, log_reader = database_writer._run_jobs, RunLog(log.path)  # a log waits for its own entries
    monkeypatch.setattr(database_writer, "_run_jobs", lambda *batch: time.sleep(0.05) or write(*batch))
    counts: list[tuple[int, int]] = []
    checkpointed_chunks: list[int] = []

    class RecordingSaver(InMemorySaver):
        async def aput(self, config, checkpoint, *arguments):
            chunks = checkpoint["channel_values"].get("chunks_read", 0)
            counts.append((chunks, len(list(log_reader.conversations("r")))))
            await asyncio.sleep(0.005)
            self.chunks = chunks
            return await super().aput(config, checkpoint, *arguments)

    def reply(prompt: str) -> str:
        checkpointed_chunks.append(saver.chunks)
        return read_perfectly(prompt)

    saver = RecordingSaver()
    result = make_reader(ScriptedPolicy(reply), run_log=log, checkpoints=saver).read(TEXT, QUESTION, run_id="r")
    assert max(counts)[0] == result.chunks_read
    assert all(chunks <= logged_calls for chunks, logged_calls in counts)
    assert checkpointed_chunks == list(range(result.chunks_read + 1)), "a step waits for the checkpoint before it"
    policy = ScriptedPolicy(["a", "", PolicyError("broken")])
    reader = make_reader(policy, rules=UpdateRules(empty=UpdateRule.RETRY), run_log=log)
    with pytest.raises(PolicyError, match="broken"):
        reader.read(TEXT, QUESTION, run_id="failed")
    assert len(list(log_reader.conversations("failed"))) == 2


async def test_a_log_can_be_read_while_it_is_written(make_reader, log) -> None:
    reader = make_reader(run_log=log)
    counts: list[int] = []
    is_done = threading.Event()

    def count_rows() -> None:
        while not is_done.is_set():
            counts.append(sum(len(list(log.conversations(record.run_id))) for record in log.runs()))

    thread = threading.Thread(target=count_rows)
    thread.start()
    results = await asyncio.gather(*(reader.aread(TEXT, QUESTION) for _ in range(12)))
    is_done.set()
    thread.join()
    assert counts == sorted(counts)
    assert all(len(list(log.conversations(result.run_id))) == result.chunks_read + 1 for result in results)


def test_a_full_disk_stops_the_log_but_not_the_read(make_reader, log, monkeypatch) -> None:
    def connect_with_limit() -> sqlite3.Connection:
        connection = connect(log.path)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        return connection

    monkeypatch.setattr(log._writer, "_connect", connect_with_limit)
    noise = "".join(chr(0x4E00 + index * 7919 % 20000) for index in range(3000))
    policy = ScriptedPolicy(
        lambda prompt: Completion(
            read_perfectly(prompt), FinishReason.STOP, "s", TokenUsage(1, 1), list(noise.encode()), [1], [-1.0]
        )
    )
    result = make_reader(policy, run_log=log).read(TEXT, QUESTION, run_id="r")
    assert result.answer == "4711"
    (event,) = [event for event in result.events if event.kind is EventKind.LOGGING_STOPPED]
    assert "full" in event.detail
    positions = [row.position for row in log.conversations("r")]
    assert positions == list(range(len(positions)))
    assert len(positions) < result.chunks_read


def test_an_empty_reply_is_logged_with_the_text_that_the_trace_has(make_reader, log) -> None:
    def script(prompt: str) -> str:
        if "<section>" not in prompt and "boxed" in prompt:
            return "\\boxed{4711}"
        return "" if "<section>" in prompt and "a note" in prompt else "a note"

    reader = make_reader(ScriptedPolicy(script), strategy="parallel", run_log=log)
    result = reader.read(TEXT, QUESTION, run_id="r")
    texts = [(call.branch, call.role, call.text) for call in result.trace.calls]
    assert "" in {text for _, role, text in texts if role == "extract"}
    assert sorted(texts) == sorted((call.branch, call.role, call.text) for call in log.trace("r").calls)


def test_a_text_over_the_size_limit_is_refused(log) -> None:
    with pytest.raises(ValueError, match="more than 16,777,216 bytes"):
        log.record(make_attempt(1, text="a" * (2**24 + 1)))


@pytest.mark.parametrize("column", ["text", "prompt_token_ids", "reads", "writes", "sampling"])
def test_a_damaged_row_is_an_error_that_names_the_file(log, column) -> None:
    log.begin("r", QUESTION, DOCUMENT, {})
    log.wait(log.record(make_attempt(0, prompt_token_ids=[1, 2, 3])))
    damaged_value = {"text": b"\2\xff\xff", "prompt_token_ids": b""}.get(column, "[1")
    with closing(sqlite3.connect(log.path)) as connection:
        connection.execute(f"UPDATE conversations SET {column} = ?", (damaged_value,))
        connection.commit()
    with pytest.raises(RunLogError, match=r"runs.sqlite cannot be used.*Restore it"):
        list(log.conversations("r"))


def test_every_field_of_a_conversation_is_a_column_of_the_log_and_of_exports(log) -> None:
    with closing(sqlite3.connect(log.path)) as connection:
        columns = {row[1] for row in connection.execute("PRAGMA table_info(conversations)")}
    fields = {field.name for field in dataclasses.fields(Conversation)}
    assert columns == fields
    assert fields - {"id"} <= parquet.COLUMNS.keys()


def test_a_path_that_cannot_be_written_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunLogError, match="cannot be used as a run log"):
        RunLog(tmp_path / "file" / "runs.sqlite")
    with pytest.raises(RunLogError, match="unable to open"):
        RunLog(tmp_path)


def test_the_error_for_an_unknown_run_names_the_newest_runs(log) -> None:
    with pytest.raises(RunNotFoundError, match="There are no runs in it yet"):
        log.get("s")
    log.wait(log.begin("r", QUESTION, DOCUMENT, {}))
    with pytest.raises(RunNotFoundError, match="The newest are r"):
        log.get("s")


def test_rows_have_langchains_run_ids_if_callbacks_trace_the_read(make_reader, log) -> None:
    ids: set[str] = set()

    class RunIdRecorder(BaseCallbackHandler):
        def on_chain_start(self, serialized, inputs, *, run_id, **options) -> None:
            ids.add(str(run_id))

    graph = make_reader(run_log=log).graph()
    state = graph.invoke({"question": QUESTION, "document": TEXT}, {"callbacks": [RunIdRecorder()]})
    rows = list(log.conversations(state["run_id"]))
    assert {row.trace["langchain_run_id"] for row in rows} <= ids
    assert len({row.trace["langchain_run_id"] for row in rows}) == len(rows)
    parallel_graph = make_reader(
        ScriptedPolicy(complete_perfectly, delay=0.01), strategy="map_reduce", run_log=log
    ).graph()
    state = parallel_graph.invoke({"question": QUESTION, "document": TEXT}, {"callbacks": [RunIdRecorder()]})
    rows = list(log.conversations(state["run_id"]))
    assert len({row.trace["langchain_run_id"] for row in rows}) == len(rows)
    make_reader(run_log=log).read(TEXT, QUESTION, run_id="untraced")
    assert all(not row.trace for row in log.conversations("untraced"))


def test_the_user_decides_whether_logprobs_are_requested(make_reader, log) -> None:
    requests: list[bool | None] = []

    class RequestRecorder(ScriptedPolicy):
        async def complete(self, prompt, sampling):
            requests.append(sampling.logprobs)
            return await super().complete(prompt, sampling)

    for logprobs in (True, False, None):
        sampling = SamplingParams(logprobs=logprobs)
        make_reader(RequestRecorder(read_perfectly), run_log=log, sampling=sampling).read("short", QUESTION)
    assert requests == [True, True, False, False, False, False]


@given(
    st.lists(st.integers(0, 2**32 - 1)),
    st.lists(st.floats(width=32, allow_nan=False)),
    st.text(st.characters(exclude_categories=())),
)
def test_packed_values_are_unpacked_unchanged(ids, logprobs, text) -> None:
    for kind, numbers in (("I", ids), ("I", ids * 900), ("f", logprobs)):
        assert unpack_numbers(kind, pack_numbers(kind, numbers)).tolist() == numbers
    assert unpack_text(pack_text(text)) == text


def test_a_log_may_be_closed_while_threads_write(log) -> None:
    log.begin("r", QUESTION, DOCUMENT, {})
    is_done = threading.Event()

    def close_repeatedly() -> None:
        while not is_done.is_set():
            log.close()

    threads = [threading.Thread(target=close_repeatedly, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    entries = [log.record(make_attempt(position, f"text {position}")) for position in range(200)]
    for entry in entries:
        entry.result(20)
    is_done.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [row.position for row in log.conversations("r")] == list(range(200))
    is_free = threading.Event()
    slow_job = log._writer.submit(lambda _: is_free.wait(5))
    threading.Thread(target=log.close, daemon=True).start()
    while log._writer._thread is not None:
        time.sleep(0.001)
    entry = log.record(make_attempt(200, "more"))
    assert not slow_job.done(), "a log that is being closed takes entries at once"
    is_free.set()
    log.wait(entry)


@pytest.mark.skipif(os.name != "posix", reason="an open file cannot be moved there")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_log_that_is_moved_during_a_read_stops_and_the_read_continues(
    make_reader, log, tmp_path, is_replaced
) -> None:
    calls = 0

    def reply(prompt: str) -> str:
        nonlocal calls
        calls += 1
        if calls == 3:
            for path in tmp_path.glob(f"{log.path.name}*"):
                path.rename(path.with_name("moved-" + path.name))
            if is_replaced:
                shutil.copy(tmp_path / f"moved-{log.path.name}", log.path)
        return f"memory {calls}" if "<section>" in prompt else r"\boxed{1904}"

    result = make_reader(ScriptedPolicy(reply), run_log=log).read(TEXT, "When?", run_id="moved")
    (event,) = (event for event in result.events if event.kind is EventKind.LOGGING_STOPPED)
    assert "was moved, deleted or replaced" in event.detail
    assert result.answer == "1904"
    make_reader(ScriptedPolicy(reply), run_log=log).read(TEXT, "When?", run_id="next")
    assert log.get("next").answer == "1904"
    log.wait(log.end("next", "answered", "1905"))
    log.path.rename(tmp_path / "moved-again.sqlite")
    with pytest.raises(RunLogError, match="Put the file back before its runs continue"):
        log.wait(log.end("next", "answered", "1906"))


def test_conversations_of_a_run_are_a_snapshot(log) -> None:
    log.begin("r", QUESTION, DOCUMENT, {})
    log.wait(log.record(make_attempt(0)))
    rows = log.conversations("r")
    row = next(rows)
    log.wait(log.record(replace(make_attempt(1), parents=(row.call_id,))))
    assert list(rows) == []
    assert [conversation.parents for conversation in log.conversations("r")] == [row.parents, (row.call_id,)]


def test_a_log_that_could_not_be_opened_is_opened_by_the_next_entry(tmp_path, monkeypatch) -> None:
    log = RunLog(tmp_path / "runs.sqlite")
    with monkeypatch.context() as patch:
        patch.setattr(log._writer, "_connect", lambda: (_ for _ in ()).throw(sqlite3.OperationalError("locked")))
        with pytest.raises(RunLogError, match="locked"):
            log.wait(log.begin("a", QUESTION, DOCUMENT, {}))
    log.wait(log.begin("b", QUESTION, DOCUMENT, {}))
    assert [run.run_id for run in log.runs()] == ["b"]
    thread = log._writer._thread
    del log
    gc.collect()
    thread.join(20)
    assert not thread.is_alive(), "the thread of a log ends when nobody uses the log"
    code = f"""from memagent_graph.run_log import RunLog
log = RunLog({str(tmp_path / "late.sqlite")!r})
for index in range(3000):
    log.begin(str(index), "?", {DOCUMENT!r}, {{}})
del log"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert RunLog(tmp_path / "late.sqlite").counts() == (3000, 0), "the process writes its entries before it ends"
