"""A corpus run writes each row once, records errors as rows, continues, adds, replaces, and refuses clearly."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from support.corpus_world import read_rows
from support.made_documents import make_documents
from support.scripts import read_perfectly

from memagent_corpus import CorpusReader, TableFolder, open_inputs
from memagent_corpus.corpus_ledger import CorpusLedger
from memagent_corpus.corpus_run import (
    CorpusLimits,
    CorpusSummary,
    NextTask,
    StopCause,
    StoreRows,
    lock_table,
    run_corpus,
)
from memagent_corpus.source_access import SourceAccess
from memagent_corpus.table_inputs import InputColumns
from memagent_graph import MemAgent, ScriptedPolicy
from memagent_graph.documents import Document, DocumentRef, chunking, store
from memagent_graph.errors import (
    BudgetError,
    CorpusError,
    DocumentError,
    PolicyAuthenticationError,
    PolicyOverloadedError,
    PolicyUnreachableError,
    PromptCutError,
)
from memagent_graph.response_format import ResponseFormatSource
from memagent_graph.storage.private_files import create_private_file, open_atomically

HARBOR, CASTLE = "What is the key of harbor?", "What is the key of castle?"


class KilledError(Exception):
    """Simulates that the process was killed at this point."""


class CorpusFixture:
    """A folder of documents, runs over them, and a policy whose calls are counted."""

    def __init__(self, folder: Path, make_reader: Callable[..., MemAgent]) -> None:
        self.folder, self.out = folder / "in", folder / "out"
        self.folder.mkdir()
        self.calls = 0
        self.prompts = Counter[str]()
        self.answer: Callable[[str], str] = read_perfectly
        self.on_prompt: Callable[[str], None] = lambda prompt: None
        self._make_reader = make_reader

    def write(self, name: str, harbor_key: int, *, word_count: int = 60) -> None:
        text = f"The key of harbor is {harbor_key}. " + " ".join(f"{name}{index}" for index in range(word_count))
        (self.folder / name).write_text(f"{text} The key of castle is {harbor_key + 1}.")

    def write_many(self, document_count: int, *, key_step: int = 1) -> None:
        for number in range(document_count):
            self.write(f"d{number}.txt", key_step * number)

    def _reply(self, prompt: str) -> str:
        self.calls += 1
        self.prompts[prompt] += 1
        self.on_prompt(prompt)
        return self.answer(prompt)

    def agent(self, **options: Any) -> MemAgent:
        work_folder = TableFolder(str(self.out)).work_folder
        return self._make_reader(
            ScriptedPolicy(self._reply),
            **{
                "store": work_folder / "documents",
                "checkpoints": work_folder / "checkpoints.sqlite",
                "run_log": False,
                **options,
            },
        )

    def run(
        self,
        *questions: str,
        source: str | None = None,
        columns: InputColumns | None = None,
        schema: ResponseFormatSource | None = None,
        **options: Any,
    ) -> CorpusSummary:
        async def run_and_close() -> CorpusSummary:
            inputs = open_inputs(source or str(self.folder), columns=columns or InputColumns())
            table = TableFolder(str(self.out))
            with lock_table(table) as work_folder:
                create_private_file(work_folder / "made")
                reader = CorpusReader(self.agent(), questions or (HARBOR,), inputs.access, response_format=schema)
                try:
                    return await run_corpus(inputs, reader, table, **{"documents_in_flight": 3, **options})
                finally:
                    await reader.agent.aclose()

        return asyncio.run(run_and_close())

    @property
    def answers(self) -> dict[tuple[str, str], str | None]:
        rows = read_rows(self.out)
        answers = {(row["document"], row["question"]): row["answer"] for row in rows}
        assert len(answers) == len(rows), "a row is doubled"
        return answers


@pytest.fixture
def corpus(tmp_path: Path, make_reader: Any) -> CorpusFixture:
    return CorpusFixture(tmp_path, make_reader)


def test_every_document_has_a_row_for_every_question_and_is_not_read_again(corpus: CorpusFixture) -> None:
    corpus.write_many(5, key_step=100)
    summary = corpus.run(HARBOR, CASTLE)
    assert (summary.read, summary.rows, summary.failed, summary.ended) == (5, 10, 0, StopCause.DONE)
    assert corpus.answers == {
        (f"d{number}.txt", question): str(100 * number + question_index)
        for number in range(5)
        for question_index, question in enumerate((HARBOR, CASTLE))
    }
    calls_before = corpus.calls
    second_summary = corpus.run(HARBOR, CASTLE)
    assert (second_summary.read, second_summary.skipped, corpus.calls) == (0, 5, calls_before)
    assert not list(corpus.out.glob("_work/checkpoints*")) and not (corpus.out / "_work/documents").exists()


class ReverseEngine:
    """An engine that takes all tasks at once and reads them in reverse order; each sweep calls it again."""

    def __init__(self, corpus: CorpusFixture) -> None:
        self.reader = CorpusReader(corpus.agent(checkpoints=None), (HARBOR,), SourceAccess(root=str(corpus.folder)))

    async def __call__(self, next_task: NextTask, store_rows: StoreRows) -> None:
        tasks = []
        while (task := await next_task()) is not None:
            tasks.append(task)
        for task in tasks[::-1]:
            if not await store_rows(task, await task.read(self.reader)):
                return


def test_another_engine_continues_a_stopped_run_and_writes_the_same_rows(corpus: CorpusFixture) -> None:
    corpus.write_many(6, key_step=100)
    limited_summary = corpus.run(engine=ReverseEngine(corpus), limits=CorpusLimits(max_tokens_total=1))
    assert (limited_summary.read, limited_summary.ended) == (1, StopCause.MAX_TOKENS)
    (corpus.folder / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    summary = corpus.run(engine=ReverseEngine(corpus))
    assert (summary.read, summary.skipped, summary.failed, summary.ended) == (6, 1, 1, StopCause.DONE)
    ids = {row["id"] for row in read_rows(corpus.out)}
    shutil.rmtree(corpus.out)
    assert corpus.run().read == 7 and {row["id"] for row in read_rows(corpus.out)} == ids


def test_new_documents_and_new_questions_are_added(corpus: CorpusFixture) -> None:
    corpus.write("a.txt", 1)
    corpus.run(HARBOR)
    corpus.write("b.txt", 5)
    assert corpus.run(HARBOR).read == 1
    assert corpus.run(HARBOR, CASTLE).rows == 4
    assert corpus.answers == {
        ("a.txt", HARBOR): "1", ("a.txt", CASTLE): "2", ("b.txt", HARBOR): "5", ("b.txt", CASTLE): "6",
    }  # fmt: skip


def test_bad_file_is_a_row_with_an_error_without_local_paths(corpus: CorpusFixture) -> None:
    corpus.write("good.txt", 7)
    (corpus.folder / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    (corpus.folder / "empty.txt").write_text("  \n")
    (mail,) = (document for document in make_documents() if document.name == "attached.eml")  # a part has no text
    (corpus.folder / mail.name).write_bytes(mail.data)
    summary = corpus.run()
    assert (summary.read, summary.failed, summary.failed_rows, summary.incomplete) == (4, 2, 2, 1)
    assert sorted(summary.failures) == ["bad.pdf", "empty.txt"]
    failed_rows = {row["document"]: row for row in read_rows(corpus.out) if row["error"]}
    assert failed_rows["empty.txt"]["error_kind"] == "EmptyDocumentError"
    assert failed_rows["bad.pdf"]["answer"] is None and failed_rows["bad.pdf"]["stop_reason"] is None
    assert not any(str(corpus.folder.parent) in json.dumps(row) for row in read_rows(corpus.out))


def test_retry_failed_replaces_rows_with_errors(corpus: CorpusFixture) -> None:
    corpus.write("a.txt", 7)
    (corpus.folder / "b.txt").write_text(" ")
    corpus.run()
    corpus.write("b.txt", 9)
    assert corpus.run(retry_failed=True).read == 1
    assert corpus.answers == {("a.txt", HARBOR): "7", ("b.txt", HARBOR): "9"}
    assert corpus.run(retry_failed=True).read == 0


def test_only_documents_whose_text_changed_are_read_again(corpus: CorpusFixture) -> None:
    corpus.out = corpus.folder / "answers"  # a table is no document
    corpus.write_many(2, key_step=10)
    corpus.run(HARBOR, CASTLE)
    corpus.write("d0.txt", 30)
    (corpus.folder / "d1.txt").touch()
    assert corpus.run(HARBOR).changed == 2
    assert sorted(filter(None, corpus.answers.values())) == ["1", "10", "11", "30"]
    assert (corpus.run(HARBOR).read, corpus.run(HARBOR, CASTLE).read) == (0, 2)  # the other question about the new text
    assert sorted(filter(None, corpus.answers.values())) == ["10", "11", "30", "31"]
    calls_before = corpus.calls
    assert corpus.run(HARBOR, CASTLE).changed == 0 and corpus.calls == calls_before


def test_output_that_is_a_file_or_not_empty_or_in_use_is_refused(corpus: CorpusFixture) -> None:
    corpus.write("a.txt", 1)
    with lock_table(TableFolder(str(corpus.out))), pytest.raises(CorpusError, match="this process is writing to"):
        corpus.run()
    shutil.rmtree(corpus.out)
    corpus.out.touch()
    with pytest.raises(CorpusError, match="must be a folder, got the file"), lock_table(TableFolder(str(corpus.out))):
        pass
    corpus.out.unlink()
    corpus.out.mkdir()
    (corpus.out / "thesis.docx").write_bytes(b"x")
    with pytest.raises(CorpusError, match=r"is not empty.*thesis\.docx"):
        corpus.run()


def test_run_stops_without_loss_when_another_machine_takes_over_its_table(corpus: CorpusFixture) -> None:
    corpus.write_many(6)
    settings = asyncio.run(CorpusReader(corpus.agent(), (HARBOR,), SourceAccess()).collect_settings())
    takeover_prompts: list[str] = []

    def take_over(prompt: str) -> None:
        if corpus.calls > 6 and not takeover_prompts:
            takeover_prompts.append(prompt)
            TableFolder(str(corpus.out)).take_over(settings, "a folder \udce9")

    corpus.on_prompt = take_over
    with pytest.raises(CorpusError, match="another run is writing to"):
        corpus.run(rows_per_part=2)
    summary = corpus.run()
    assert len(corpus.answers) == 6 and summary.rows == 6
    assert corpus.calls - len(corpus.prompts) <= 3


def test_temporary_policy_failures_leave_no_row_with_an_error(corpus: CorpusFixture) -> None:
    corpus.write_many(4)
    failures = Counter[str]()

    def fail_once(prompt: str) -> None:
        for number in range(4):
            if f"d{number}.txt1 " in prompt and failures[str(number)] < 1:
                failures[str(number)] += 1
                raise PolicyUnreachableError("no connection", hint="Is it running?")

    corpus.on_prompt = fail_once
    summary = corpus.run()
    assert sum(failures.values()) == 4
    assert (summary.failed_rows, summary.rows) == (0, 4)
    assert set(corpus.answers.values()) == {"0", "1", "2", "3"}


def test_policy_failure_on_a_single_document_is_a_row_with_an_error(corpus: CorpusFixture) -> None:
    corpus.write("a.txt", 1)
    corpus.write("b.txt", 2)

    def fail_for_b(prompt: str) -> None:
        if "b.txt1 " in prompt:
            raise PolicyUnreachableError("no connection")

    (corpus.folder / "empty.txt").write_text(" ")
    corpus.on_prompt = fail_for_b
    assert corpus.run().failed_rows == 2
    assert {row["document"]: row["error_kind"] for row in read_rows(corpus.out)} == {
        "a.txt": None, "b.txt": "PolicyUnreachableError", "empty.txt": "EmptyDocumentError",
    }  # fmt: skip
    corpus.on_prompt = Mock(side_effect=[PolicyUnreachableError("no connection"), *[None] * 9])
    assert (corpus.run(retry_failed=True).read, corpus.answers["b.txt", HARBOR]) == (2, "2"), "b in the last pass"


@pytest.mark.parametrize(("error", "failed_rows"), [(PolicyUnreachableError("no"), 0), (PromptCutError("cut"), 11)])
def test_failing_policy_stops_the_run(corpus: CorpusFixture, error: Exception, failed_rows: int) -> None:
    corpus.write_many(20)

    def fail_after_ten_calls(prompt: str) -> None:
        if corpus.calls > 10:
            raise error

    corpus.on_prompt = fail_after_ten_calls
    with pytest.raises(PolicyOverloadedError, match="failed for 12 documents in a row"):
        corpus.run()
    corpus.on_prompt = lambda prompt: None
    assert (corpus.run().failed_rows, len(corpus.answers)) == (failed_rows, 20)


def test_a_refused_key_stops_the_run_at_once(corpus: CorpusFixture) -> None:
    corpus.write_many(40)
    corpus.on_prompt = Mock(side_effect=PolicyAuthenticationError("refused the key"))
    with pytest.raises(PolicyAuthenticationError):
        corpus.run()
    assert corpus.calls < 10 and read_rows(corpus.out) == []


def test_time_limit_cancels_calls_and_the_next_run_continues_at_the_same_chunk(corpus: CorpusFixture) -> None:
    corpus.write("long.txt", 4, word_count=1500)
    calls_by_prompt, delay_s = Counter[str](), 0.04

    def delay(prompt: str) -> None:
        calls_by_prompt[prompt] += 1
        time.sleep(delay_s)

    corpus.on_prompt = delay
    assert corpus.run(limits=CorpusLimits(max_seconds=0.8)).ended is StopCause.MAX_SECONDS
    assert read_rows(corpus.out) == []
    calls_before, delay_s = sum(calls_by_prompt.values()), 0.0
    corpus.run()
    assert calls_before and set(corpus.answers.values()) == {"4"}
    assert sum(calls_by_prompt.values()) - len(calls_by_prompt) <= 1


WRITE_STEPS = [
    ("write_part", TableFolder), ("publish", TableFolder), ("mark_written", CorpusLedger),
    ("replace_part", CorpusLedger), ("remove_unlisted_files", TableFolder),
]  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "step", "keeps_ledger"),  # after one step is the same as before the next
    [*(("before", step, True) for step in range(5)), ("after", 4, True), ("before", 2, False)],
)
def test_kill_at_any_step_of_writing_a_part_loses_and_repeats_no_row(
    corpus: CorpusFixture, monkeypatch: pytest.MonkeyPatch, step: int, moment: str, keeps_ledger: bool
) -> None:
    name, owner = WRITE_STEPS[step]
    original = getattr(owner, name)

    def kill(*arguments: Any) -> Any:
        if moment == "after":
            original(*arguments)
        raise KilledError

    corpus.write_many(5)
    corpus.run(rows_per_part=3)
    corpus.write("d0.txt", 70)
    corpus.write("d5.txt", 5)
    monkeypatch.setattr(owner, name, kill)
    with pytest.raises(KilledError):
        corpus.run(rows_per_part=3)
    monkeypatch.setattr(owner, name, original)
    if not keeps_ledger:
        shutil.rmtree(corpus.out / "_work")
    (corpus.out / ".writing-unfinished").write_bytes(b"PAR1")
    corpus.run(rows_per_part=3)
    expected_keys = {f"d{number}.txt": number for number in range(6)}
    if keeps_ledger or corpus.answers["d0.txt", HARBOR] == "70":  # without a ledger the change may go unnoticed
        expected_keys["d0.txt"] = 70
    assert corpus.answers == {(document, HARBOR): str(number) for document, number in expected_keys.items()}
    manifest = TableFolder(str(corpus.out)).manifest()
    assert manifest is not None and sum(part.rows for part in manifest.parts) == 6
    assert {part.name for part in manifest.parts} == {path.name for path in corpus.out.glob("[!_]*")}
    assert len(list(TableFolder(str(corpus.out)).rows(["id"]))) == 6


@pytest.mark.parametrize(("damage", "keeps_ledger"), [("flipped", True), ("deleted", False), ("another part", False)])
def test_damaged_part_is_an_error_until_retry_failed_replaces_it(
    corpus: CorpusFixture, damage: str, keeps_ledger: bool
) -> None:
    corpus.write_many(6)
    corpus.run(rows_per_part=2)
    answers_before = corpus.answers
    first_part, second_part = sorted(corpus.out.glob("*.parquet"))[:2]
    content = first_part.read_bytes()
    flipped_content = bytes([*content[:200], content[200] ^ 1, *content[201:]])
    if damage == "deleted":
        first_part.unlink()
    else:
        first_part.write_bytes(flipped_content if damage == "flipped" else second_part.read_bytes())
    if not keeps_ledger:
        shutil.rmtree(corpus.out / "_work")
    with pytest.raises(CorpusError, match=rf"1 of the 3 parts.*{first_part.name}.*retry_failed"):
        corpus.run()
    with pytest.raises(CorpusError, match=rf"the part {first_part.name} of .* is (missing|damaged)"):
        list(TableFolder(str(corpus.out)).rows())
    assert corpus.run(retry_failed=True).read == 2 and corpus.answers == answers_before


def test_machine_that_lost_the_table_later_adds_only_missing_rows(corpus: CorpusFixture, monkeypatch: Any) -> None:
    """It had chosen rows for a part; then another machine read the same documents and used the part number."""
    corpus.write_many(6)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(TableFolder, "write_part", Mock(side_effect=KilledError))
        corpus.run(rows_per_part=3)
    shutil.move(corpus.out / "_work", corpus.out.parent / "first-work")
    corpus.run(rows_per_part=2, limits=CorpusLimits(max_documents=4))
    assert len(corpus.answers) == 4
    shutil.rmtree(corpus.out / "_work")
    shutil.move(corpus.out.parent / "first-work", corpus.out / "_work")
    corpus.run()
    assert corpus.answers == {(f"d{number}.txt", HARBOR): str(number) for number in range(6)}
    corpus.write("d0.txt", 70)
    corpus.run()
    assert corpus.answers["d0.txt", HARBOR] == "70"


def test_full_disk_stops_the_run_with_a_hint_and_loses_no_row(corpus: CorpusFixture, monkeypatch: Any) -> None:
    corpus.write_many(6)

    def open_on_full_disk(path: Path) -> Any:
        if path.suffix == ".parquet":
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_atomically(path)

    monkeypatch.setattr("memagent_corpus.table_folder.open_atomically", open_on_full_disk)
    with pytest.raises(CorpusError, match="cannot be written") as error:
        corpus.run()
    assert "Finished rows are not lost" in str(error.value.hint)
    calls_before = corpus.calls
    monkeypatch.undo()
    summary = corpus.run()
    assert len(corpus.answers) == 6 and corpus.calls == calls_before and summary.read == 0


@pytest.mark.parametrize(
    ("function", "error_code", "remedy"),
    [("NamedTemporaryFile", errno.ENOSPC, "free disk space"), ("open", errno.ESTALE, "MEMAGENT_HOME"),
     ("open", errno.EMFILE, "ulimit -n")],
)  # fmt: skip
def test_document_store_error_stops_the_run_without_failed_rows(
    corpus: CorpusFixture, monkeypatch: Any, function: str, error_code: int, remedy: str
) -> None:
    for number in range(3):
        corpus.write(f"{function}{error_code}-{number}.txt", number)  # texts that are in no chunk cache
    original = tempfile.NamedTemporaryFile if function == "NamedTemporaryFile" else Path.open

    def fail_in_store(*arguments: Any, **options: Any) -> Any:
        is_of_store = options.get("prefix") == ".incoming-" or (arguments and arguments[0].parent.name == "texts")
        if not is_of_store:
            return original(*arguments, **options)
        raise OSError(error_code, os.strerror(error_code))

    monkeypatch.setattr(tempfile if function == "NamedTemporaryFile" else Path, function, fail_in_store)
    with pytest.raises(CorpusError, match=rf"the document store .*{os.strerror(error_code)}.*{remedy}.*not lost"):
        corpus.run()
    monkeypatch.undo()
    assert corpus.run().failed_rows == 0


def test_too_many_open_files_stop_the_run_without_failed_rows(corpus: CorpusFixture, monkeypatch: Any) -> None:
    corpus.write("a.txt", 1)
    original = os.open

    def fail_for_document(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith("a.txt"):
            raise OSError(errno.EMFILE, "Too many open files")
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fail_for_document)
    with pytest.raises(CorpusError, match=r"Too many open files.*ulimit -n"):
        corpus.run()


def test_clock_that_runs_backwards_does_not_affect_a_run(corpus: CorpusFixture, monkeypatch: Any) -> None:
    times = iter(range(10**9, 0, -(10**7)))
    monkeypatch.setattr("time.time", lambda: float(next(times)))
    corpus.write_many(3)
    corpus.run()
    assert corpus.run().skipped == 3
    assert all(0 <= row["usage"]["seconds"] < 100 for row in read_rows(corpus.out))


def test_text_is_stored_again_when_another_document_just_removed_it(corpus: CorpusFixture, monkeypatch: Any) -> None:
    added_events, removal_event = {name: threading.Event() for name in ("a.txt", "b.txt")}, threading.Event()
    for name in added_events:
        (corpus.folder / name).write_text("The key of harbor is 1.")
    add, remove = store.DocumentStore.add, store.DocumentStore.remove

    def add_b_during_removal(documents: store.DocumentStore, document: Document, **options: Any) -> DocumentRef:
        assert document.name == "a.txt" or removal_event.wait(60)
        reference = add(documents, document, **options)
        added_events[document.name].set()
        return reference

    def remove_after_b_is_added(documents: store.DocumentStore, reference: DocumentRef) -> None:
        removal_event.set()
        assert added_events["b.txt"].wait(60)
        remove(documents, reference)

    monkeypatch.setattr(store.DocumentStore, "add", add_b_during_removal)
    monkeypatch.setattr(store.DocumentStore, "remove", remove_after_b_is_added)
    monkeypatch.setattr(chunking, "_newest_pieces", deque(maxlen=0))
    corpus.run()
    assert corpus.answers == {("a.txt", HARBOR): "1", ("b.txt", HARBOR): "1"}
    assert len({row["digest"] for row in read_rows(corpus.out)}) == 1


def test_questions_from_a_column_are_asked_only_about_their_row(corpus: CorpusFixture, tmp_path: Path) -> None:
    table_path = tmp_path / "t.jsonl"
    table_rows = [
        {"id": "x", "text": "The key of harbor is 1.", "ask": HARBOR, "year": 2024},
        {"id": "y", "text": "The key of harbor is 2. The key of castle is 3.", "ask": [HARBOR, CASTLE], "year": 2025},
        {"id": "z", "text": 5, "ask": HARBOR, "year": None},
    ]
    table_path.write_text("\n".join(map(json.dumps, table_rows)))
    columns = InputColumns(id="id", questions="ask", copied=("year",))
    corpus.run(source=str(table_path), columns=columns)
    rows = {(row["document"], row["question"]): row for row in read_rows(corpus.out)}
    assert {key: row["answer"] for key, row in rows.items()} == {
        ("x", HARBOR): "1", ("y", HARBOR): "2", ("y", CASTLE): "3", ("z", HARBOR): None,
    }  # fmt: skip
    assert json.loads(rows["x", HARBOR]["metadata"]) == {"year": 2024}


def test_ids_that_are_not_unique_are_refused_before_anything_is_read(corpus: CorpusFixture, tmp_path: Path) -> None:
    table_path = tmp_path / "t.csv"
    table_path.write_text("id,text\na,one\nb,two\na,three\n")
    with pytest.raises(DocumentError, match=r"rows 0 and 2 of the table .* have the same id 'a'"):
        corpus.run(source=str(table_path), columns=InputColumns(id="id"))
    assert corpus.calls == 0


def test_a_question_that_is_too_long_is_refused_or_a_row_with_an_error(corpus: CorpusFixture, tmp_path: Path) -> None:
    corpus.write("a.txt", 1)
    with pytest.raises(BudgetError, match="the question has"):
        corpus.run("why? " * 100)
    table_path = tmp_path / "t.jsonl"
    table_path.write_text(json.dumps({"text": "The key of harbor is 1.", "ask": "why? " * 100}))
    corpus.run(source=str(table_path), columns=InputColumns(questions="ask"))
    assert {row["error_kind"] for row in read_rows(corpus.out)} == {None, "BudgetError"}


def test_progress_watcher_is_called_for_every_document(corpus: CorpusFixture) -> None:
    watcher = Mock()
    for name in ("a.txt", "b.txt"):
        corpus.write(name, 1)
        corpus.run(watcher=watcher)
    (total,) = watcher.on_start.call_args.args
    assert total.documents == 2 and total.size > 0
    assert (watcher.on_document.call_count, watcher.on_skip.call_args_list) == (2, [call(1, total.size // 2)])
