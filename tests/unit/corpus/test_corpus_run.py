"""What a run of a corpus promises: rows once, errors as rows, continuing, adding, replacing, and clear refusals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
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
)
from memagent_graph.response_format import ResponseFormatSource
from memagent_graph.storage.private_files import create_private_file, open_atomically

HARBOR, CASTLE = "What is the key of harbor?", "What is the key of castle?"


class KilledError(Exception):
    """Stands for a process that ends here."""


class World:
    """A folder of documents, a policy whose calls are counted, and runs over them."""

    def __init__(self, folder: Path, make_reader: Callable[..., MemAgent]) -> None:
        self.folder, self.out = folder / "in", folder / "out"
        self.folder.mkdir()
        self.calls = 0
        self.prompts = Counter[str]()
        self.script: Callable[[str], str] = read_perfectly
        self.fails: Callable[[str], None] = lambda prompt: None
        self._make_reader = make_reader

    def write(self, name: str, harbor: int, *, words: int = 60) -> None:
        text = f"The key of harbor is {harbor}. " + " ".join(f"{name}{n}" for n in range(words))
        (self.folder / name).write_text(f"{text} The key of castle is {harbor + 1}.")

    def write_many(self, documents: int, *, step: int = 1) -> None:
        for number in range(documents):
            self.write(f"d{number}.txt", step * number)

    def _reply(self, prompt: str) -> str:
        self.calls += 1
        self.prompts[prompt] += 1
        self.fails(prompt)
        return self.script(prompt)

    def agent(self, **options: Any) -> MemAgent:
        work = TableFolder(str(self.out)).work
        return self._make_reader(
            ScriptedPolicy(self._reply),
            **{
                "store": work / "documents",
                "checkpoints": work / "checkpoints.sqlite",
                "run_log": False,
                **options,
            },
        )

    def run(
        self,
        *questions: str,
        source: str | None = None,
        columns: InputColumns | None = None,
        form: ResponseFormatSource | None = None,
        **options: Any,
    ) -> CorpusSummary:
        async def read() -> CorpusSummary:
            corpus = open_inputs(source or str(self.folder), columns=columns or InputColumns())
            table = TableFolder(str(self.out))
            with lock_table(table) as work:
                create_private_file(work / "made")
                agent = self.agent()
                one = CorpusReader(agent, questions or (HARBOR,), corpus.access, response_format=form)
                try:
                    return await run_corpus(corpus, one, table, **{"documents_in_flight": 3, **options})
                finally:
                    await one.aclose()

        return asyncio.run(read())

    @property
    def answers(self) -> dict[tuple[str, str], str | None]:
        rows = read_rows(self.out)
        answers = {(row["document"], row["question"]): row["answer"] for row in rows}
        assert len(answers) == len(rows), "a row is doubled"
        return answers


@pytest.fixture
def world(tmp_path: Path, make_reader: Any) -> World:
    return World(tmp_path, make_reader)


def test_every_document_has_a_row_for_every_question_and_is_not_read_again(world: World) -> None:
    world.write_many(5, step=100)
    summary = world.run(HARBOR, CASTLE)
    assert (summary.read, summary.rows, summary.failed, summary.ended) == (5, 10, 0, StopCause.DONE)
    assert world.answers == {
        (f"d{number}.txt", question): str(100 * number + place)
        for number in range(5)
        for place, question in enumerate((HARBOR, CASTLE))
    }
    calls = world.calls
    again = world.run(HARBOR, CASTLE)
    assert (again.read, again.skipped, world.calls) == (0, 5, calls)
    assert not list(world.out.glob("_work/checkpoints*")) and not (world.out / "_work/documents").exists()


class Windows:
    """An engine that takes all work at once, and reads it backwards; it is begun again in each sweep."""

    def __init__(self, world: World) -> None:
        access = SourceAccess(root=str(world.folder))
        self.reader = CorpusReader(world.agent(checkpoints=None), (HARBOR,), access)
        self.names: list[str] = []

    async def __call__(self, next_task: NextTask, store_rows: StoreRows) -> None:
        window = []
        while (task := await next_task()) is not None:
            window.append(task)
        self.names += [task.document.name for task in window]
        for task in window[::-1]:
            if not await store_rows(task, await task.read(self.reader)):
                return


def test_another_engine_reads_the_same_rows_and_is_told_when_it_is_enough(world: World) -> None:
    world.write_many(6, step=100)
    engine = Windows(world)
    stopped = world.run(engine=engine, limits=CorpusLimits(max_tokens_total=1))
    assert (stopped.read, stopped.ended, len(engine.names)) == (1, StopCause.MAX_TOKENS, 6)
    (world.folder / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    done = world.run(engine=engine)
    assert (done.read, done.skipped, done.failed, done.ended) == (6, 1, 1, StopCause.DONE)
    ids = {row["id"] for row in read_rows(world.out)}
    shutil.rmtree(world.out)
    assert world.run().read == 7 and {row["id"] for row in read_rows(world.out)} == ids


def test_new_documents_and_new_questions_are_added(world: World) -> None:
    world.write("a.txt", 1)
    world.run(HARBOR)
    world.write("b.txt", 5)
    assert world.run(HARBOR).read == 1
    assert world.run(HARBOR, CASTLE).rows == 4
    assert world.answers == {
        ("a.txt", HARBOR): "1", ("a.txt", CASTLE): "2", ("b.txt", HARBOR): "5", ("b.txt", CASTLE): "6",
    }  # fmt: skip


def test_one_bad_file_is_a_row_with_an_error_that_does_not_show_this_machine(world: World) -> None:
    world.write("good.txt", 7)
    (world.folder / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    (world.folder / "empty.txt").write_text("  \n")
    (made,) = (document for document in make_documents() if document.name == "attached.eml")  # it is not wholly text
    (world.folder / made.name).write_bytes(made.data)
    summary = world.run()
    assert (summary.read, summary.failed, summary.failed_rows, summary.incomplete) == (4, 2, 2, 1)
    assert sorted(summary.failures) == ["bad.pdf", "empty.txt"]
    errors = {row["document"]: row for row in read_rows(world.out) if row["error"]}
    assert errors["empty.txt"]["error_kind"] == "EmptyDocumentError"
    assert errors["bad.pdf"]["answer"] is None and errors["bad.pdf"]["stop_reason"] is None
    assert not any(str(world.folder.parent) in json.dumps(row) for row in read_rows(world.out))


def test_rows_with_errors_are_read_again_when_that_is_asked_for_and_replaced(world: World) -> None:
    world.write("a.txt", 7)
    (world.folder / "b.txt").write_text(" ")
    world.run()
    world.write("b.txt", 9)
    assert world.run(retry_failed=True).read == 1
    assert world.answers == {("a.txt", HARBOR): "7", ("b.txt", HARBOR): "9"}
    assert world.run(retry_failed=True).read == 0


def test_a_document_that_changed_is_read_again_and_one_that_was_only_touched_is_not(world: World) -> None:
    world.write("a.txt", 1)
    world.write("b.txt", 2)
    world.run()
    calls = world.calls
    world.write("a.txt", 30)
    text = (world.folder / "b.txt").read_text()
    (world.folder / "b.txt").write_text(text)
    summary = world.run()
    assert summary.changed == 2 and world.calls > calls
    assert world.answers == {("a.txt", HARBOR): "30", ("b.txt", HARBOR): "2"}
    calls = world.calls
    assert world.run().changed == 0 and world.calls == calls


def test_a_file_a_folder_with_other_files_and_one_that_is_written_to_are_refused(world: World) -> None:
    world.write("a.txt", 1)
    with lock_table(TableFolder(str(world.out))), pytest.raises(CorpusError, match="this process is writing to"):
        world.run()
    shutil.rmtree(world.out)
    world.out.touch()
    with pytest.raises(CorpusError, match="must be a folder, got the file"), lock_table(TableFolder(str(world.out))):
        pass
    world.out.unlink()
    world.out.mkdir()
    (world.out / "thesis.docx").write_bytes(b"x")
    with pytest.raises(CorpusError, match=r"is not empty.*thesis\.docx"):
        world.run()


def test_a_run_whose_table_another_machine_has_taken_over_stops_and_loses_nothing(world: World) -> None:
    world.write_many(6)
    settings = asyncio.run(CorpusReader(world.agent(), (HARBOR,), SourceAccess()).settings())
    elsewhere: list[str] = []

    def take_over(prompt: str) -> None:
        if world.calls > 6 and not elsewhere:
            elsewhere.append(prompt)
            TableFolder(str(world.out)).take_over(settings, "elsewhere")

    world.fails = take_over
    with pytest.raises(CorpusError, match="another run is writing to"):
        world.run(rows_per_part=2)
    summary = world.run()
    assert len(world.answers) == 6 and summary.rows == 6
    assert world.calls - len(world.prompts) <= 3


def test_a_policy_that_fails_for_a_while_leaves_no_row_with_an_error(world: World) -> None:
    world.write_many(4)
    failing = Counter[str]()

    def fail_once(prompt: str) -> None:
        for number in range(4):
            if f"d{number}.txt1 " in prompt and failing[str(number)] < 1:
                failing[str(number)] += 1
                raise PolicyUnreachableError("no connection", hint="Is it running?")

    world.fails = fail_once
    summary = world.run()
    assert sum(failing.values()) == 4
    assert (summary.failed_rows, summary.rows) == (0, 4)
    assert set(world.answers.values()) == {"0", "1", "2", "3"}


def test_a_policy_that_fails_for_one_document_alone_is_a_row_with_an_error(world: World) -> None:
    world.write("a.txt", 1)
    world.write("b.txt", 2)

    def fail(prompt: str) -> None:
        if "b.txt1 " in prompt:
            raise PolicyUnreachableError("no connection")

    world.fails = fail
    assert world.run().failed_rows == 1
    assert {row["document"]: row["error_kind"] for row in read_rows(world.out)} == {
        "a.txt": None, "b.txt": "PolicyUnreachableError",
    }  # fmt: skip


def test_an_unreachable_policy_stops_the_run_without_errors_of_documents(world: World) -> None:
    world.write_many(20)

    def gone(prompt: str) -> None:
        if world.calls > 10:
            raise PolicyUnreachableError("no connection", hint="Is it running?")

    world.fails = gone
    with pytest.raises(PolicyOverloadedError, match="failed for 12 documents in a row"):
        world.run()
    world.fails = lambda prompt: None
    assert world.run().failed_rows == 0
    assert len(world.answers) == 20


def test_a_refused_key_stops_the_run_at_once(world: World) -> None:
    world.write_many(40)
    world.fails = Mock(side_effect=PolicyAuthenticationError("refused the key"))
    with pytest.raises(PolicyAuthenticationError):
        world.run()
    assert world.calls < 10 and read_rows(world.out) == []


def test_a_time_limit_cancels_calls_in_flight_and_the_read_continues_at_its_chunk(world: World) -> None:
    world.write("long.txt", 4, words=1500)
    sections, seconds = Counter[str](), 0.04

    def slow(prompt: str) -> None:
        sections[prompt] += 1
        time.sleep(seconds)

    world.fails = slow
    assert world.run(limits=CorpusLimits(max_seconds=0.8)).ended is StopCause.MAX_SECONDS
    assert read_rows(world.out) == []
    before, seconds = sum(sections.values()), 0.0
    world.run()
    assert before and set(world.answers.values()) == {"4"}
    assert sum(sections.values()) - len(sections) <= 1


STEPS = [
    ("write_part", TableFolder), ("publish", TableFolder), ("mark_written", CorpusLedger),
    ("replace_part", CorpusLedger), ("remove_unlisted", TableFolder),
]  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "step", "keeps_ledger"),  # after one step is before the next
    [*(("before", step, True) for step in range(len(STEPS))), ("after", len(STEPS) - 1, True), ("before", 2, False)],
)
def test_a_kill_at_any_step_of_writing_a_part_changes_no_row(
    world: World, monkeypatch: pytest.MonkeyPatch, step: int, moment: str, keeps_ledger: bool
) -> None:
    name, owner = STEPS[step]
    original = getattr(owner, name)

    def kill(*arguments: Any) -> Any:
        if moment == "after":
            original(*arguments)
        raise KilledError

    world.write_many(5)
    world.run(rows_per_part=3)
    world.write("d0.txt", 70)
    world.write("d5.txt", 5)
    monkeypatch.setattr(owner, name, kill)
    with pytest.raises(KilledError):
        world.run(rows_per_part=3)
    monkeypatch.setattr(owner, name, original)
    if not keeps_ledger:
        shutil.rmtree(world.out / "_work")
    (world.out / ".part-000009.parquet-unfinished").write_bytes(b"PAR1")
    world.run(rows_per_part=3)
    numbers = {f"d{number}.txt": number for number in range(6)}
    if keeps_ledger or world.answers["d0.txt", HARBOR] == "70":  # a lost ledger does not know what has changed
        numbers["d0.txt"] = 70
    assert world.answers == {(document, HARBOR): str(number) for document, number in numbers.items()}
    manifest = TableFolder(str(world.out)).manifest()
    assert manifest is not None and sum(part.rows for part in manifest.parts) == 6
    assert {part.name for part in manifest.parts} == {path.name for path in world.out.glob("*part-*")}
    assert len(list(TableFolder(str(world.out)).rows(["id"]))) == 6


@pytest.mark.parametrize(
    ("damage", "keeps_ledger"),
    [("bits flipped", True), ("deleted", False), ("another part", False)],
)
def test_a_damaged_part_is_an_error_of_the_same_command_with_its_remedy(
    world: World, damage: str, keeps_ledger: bool
) -> None:
    world.write_many(6)
    world.run(rows_per_part=2)
    before = world.answers
    first, second = sorted(world.out.glob("*.parquet"))[:2]
    content = first.read_bytes()
    flipped = bytes([*content[:200], content[200] ^ 1, *content[201:]])
    if damage == "deleted":
        first.unlink()
    else:
        first.write_bytes(flipped if damage == "bits flipped" else second.read_bytes())
    if not keeps_ledger:
        shutil.rmtree(world.out / "_work")
    with pytest.raises(CorpusError, match=rf"1 of the 3 parts.*{first.name}.*retry_failed"):
        world.run()
    with pytest.raises(CorpusError, match=rf"the part {first.name} of .* is (missing|damaged)"):
        list(TableFolder(str(world.out)).rows())
    assert world.run(retry_failed=True).read == 2
    assert world.answers == before


def test_a_machine_that_was_overtaken_adds_only_what_the_table_lacks(world: World, monkeypatch: Any) -> None:
    """It had chosen rows for a part, and another machine has read these documents and taken that number since."""
    world.write_many(6)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(TableFolder, "write_part", Mock(side_effect=KilledError))
        world.run(rows_per_part=3)
    shutil.move(world.out / "_work", world.out.parent / "overtaken")
    world.run(rows_per_part=2, limits=CorpusLimits(max_documents=4))
    assert len(world.answers) == 4
    shutil.rmtree(world.out / "_work")
    shutil.move(world.out.parent / "overtaken", world.out / "_work")
    world.run()
    assert world.answers == {(f"d{number}.txt", HARBOR): str(number) for number in range(6)}
    world.write("d0.txt", 70)
    world.run()
    assert world.answers["d0.txt", HARBOR] == "70"


def test_a_full_disk_stops_the_run_with_a_remedy_and_nothing_is_lost(world: World, monkeypatch: Any) -> None:
    world.write_many(6)

    def full(path: Path) -> Any:
        if path.suffix == ".parquet":
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_atomically(path)

    monkeypatch.setattr("memagent_corpus.table_folder.open_atomically", full)
    with pytest.raises(CorpusError, match="cannot be written") as caught:
        world.run()
    assert "Finished rows are not lost" in str(caught.value.hint)
    calls = world.calls
    monkeypatch.undo()
    summary = world.run()
    assert len(world.answers) == 6 and world.calls == calls and summary.read == 0


@pytest.mark.parametrize(
    ("place", "code", "remedy"),
    [("NamedTemporaryFile", errno.ENOSPC, "free disk space"), ("open", errno.ESTALE, "MEMAGENT_HOME"),
     ("open", errno.EMFILE, "ulimit -n")],
)  # fmt: skip
def test_an_error_of_the_store_is_not_an_error_of_the_documents(
    world: World, monkeypatch: Any, place: str, code: int, remedy: str
) -> None:
    for number in range(3):
        world.write(f"{place}{code}-{number}.txt", number)  # texts that no chunk cache has
    unbroken = tempfile.NamedTemporaryFile if place == "NamedTemporaryFile" else Path.open

    def broken(*arguments: Any, **options: Any) -> Any:
        is_of_store = options.get("prefix") == ".incoming-" or (arguments and arguments[0].parent.name == "texts")
        if not is_of_store:
            return unbroken(*arguments, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile if place == "NamedTemporaryFile" else Path, place, broken)
    with pytest.raises(CorpusError, match=rf"the document store .*{os.strerror(code)}.*{remedy}.*not lost"):
        world.run()
    monkeypatch.undo()
    assert world.run().failed_rows == 0


def test_too_many_open_files_are_not_an_error_of_the_documents(world: World, monkeypatch: Any) -> None:
    world.write("a.txt", 1)
    unbroken = os.open

    def broken(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith("a.txt"):
            raise OSError(errno.EMFILE, "Too many open files")
        return unbroken(path, *arguments, **options)

    monkeypatch.setattr(os, "open", broken)
    with pytest.raises(CorpusError, match=r"Too many open files.*ulimit -n"):
        world.run()


def test_a_clock_that_jumps_changes_nothing(world: World, monkeypatch: Any) -> None:
    times = iter(range(10**9, 0, -(10**7)))
    monkeypatch.setattr("time.time", lambda: float(next(times)))
    world.write_many(3)
    world.run()
    assert world.run().skipped == 3
    assert all(0 <= row["usage"]["seconds"] < 100 for row in read_rows(world.out))


def test_a_text_that_another_document_just_removes_is_stored_again(world: World, monkeypatch: Any) -> None:
    added, removing = {name: threading.Event() for name in ("a.txt", "b.txt")}, threading.Event()
    for name in added:
        (world.folder / name).write_text("The key of harbor is 1.")
    add, remove = store.DocumentStore.add, store.DocumentStore.remove

    def add_when_the_other_is_removed(texts: store.DocumentStore, document: Document, **options: Any) -> DocumentRef:
        assert document.name == "a.txt" or removing.wait(60)
        reference = add(texts, document, **options)
        added[document.name].set()
        return reference

    def remove_when_the_other_is_added(texts: store.DocumentStore, reference: DocumentRef) -> None:
        removing.set()
        assert added["b.txt"].wait(60)
        remove(texts, reference)

    monkeypatch.setattr(store.DocumentStore, "add", add_when_the_other_is_removed)
    monkeypatch.setattr(store.DocumentStore, "remove", remove_when_the_other_is_added)
    monkeypatch.setattr(chunking._PieceCache, "put", lambda *_: None)
    world.run()
    assert world.answers == {("a.txt", HARBOR): "1", ("b.txt", HARBOR): "1"}
    assert len({row["digest"] for row in read_rows(world.out)}) == 1


def test_questions_of_a_column_are_asked_about_their_document_alone(world: World, tmp_path: Path) -> None:
    table = tmp_path / "t.jsonl"
    lines = [
        {"id": "x", "text": "The key of harbor is 1.", "ask": HARBOR, "year": 2024},
        {"id": "y", "text": "The key of harbor is 2. The key of castle is 3.", "ask": [HARBOR, CASTLE], "year": 2025},
        {"id": "z", "text": 5, "ask": HARBOR, "year": None},
    ]
    table.write_text("\n".join(map(json.dumps, lines)))
    columns = InputColumns(id="id", questions="ask", copied=("year",))
    world.run(source=str(table), columns=columns)
    rows = {(row["document"], row["question"]): row for row in read_rows(world.out)}
    assert {key: row["answer"] for key, row in rows.items()} == {
        ("x", HARBOR): "1", ("y", HARBOR): "2", ("y", CASTLE): "3", ("z", HARBOR): None,
    }  # fmt: skip
    assert json.loads(rows["x", HARBOR]["metadata"]) == {"year": 2024}


def test_ids_that_are_not_unique_are_refused_before_anything_is_read(world: World, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("id,text\na,one\nb,two\na,three\n")
    with pytest.raises(DocumentError, match=r"rows 0 and 2 of the table .* have the same id 'a'"):
        world.run(source=str(table), columns=InputColumns(id="id"))
    assert world.calls == 0


def test_a_question_that_is_too_long_is_refused_or_a_row_with_an_error(world: World, tmp_path: Path) -> None:
    world.write("a.txt", 1)
    with pytest.raises(BudgetError, match="the question has"):
        world.run("why? " * 100)
    table = tmp_path / "t.jsonl"
    table.write_text(json.dumps({"text": "The key of harbor is 1.", "ask": "why? " * 100}))
    world.run(source=str(table), columns=InputColumns(questions="ask"))
    assert {row["error_kind"] for row in read_rows(world.out)} == {None, "BudgetError"}


def test_progress_hears_of_every_document(world: World) -> None:
    watcher = Mock()
    for name in ("a.txt", "b.txt"):
        world.write(name, 1)
        world.run(watcher=watcher)
    (total,) = watcher.on_start.call_args.args
    assert total.documents == 2 and total.size > 0
    assert (watcher.on_document.call_count, watcher.on_skip.call_args_list) == (2, [call(1, total.size // 2)])
