"""A document store for several machines: each machine is a folder of its own here, and all have one URL."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from support.document_files import docx
from support.programs import Program
from support.scripts import document_with

from memagent_graph import Limits, StopReason
from memagent_graph.documents import Document, DocumentRef, DocumentStore, SharedDocumentStore, open_store
from memagent_graph.errors import DocumentError, MissingExtraError

TEXT = "# One\n\nFirst line.\r\nnaïve café, 日本語, 😀\n\n# Two\n\nThe end."


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path / 'shared'}"
    else:
        name = f"memory://{uuid.uuid4().hex}"
        yield name
        fsspec.filesystem("memory").rm(name, recursive=True)


@pytest.fixture
def machine(url: str, tmp_path: Path):
    def make(name: str) -> SharedDocumentStore:
        return SharedDocumentStore(url, tmp_path / name)

    return make


def whole(store: DocumentStore, ref: DocumentRef) -> str:
    return store.read(ref, 0, ref["size"])


def files_at(url: str) -> dict[str, bytes]:
    filesystem, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root).lstrip("/"): filesystem.cat_file(path) for path in filesystem.find(root)}


def test_what_one_machine_adds_another_reads(machine, url: str) -> None:
    ref = json.loads(json.dumps(machine("a").add(Document.from_text(TEXT, name="notes.md"))))
    assert whole(machine("b"), ref) == TEXT
    assert machine("b").headings(ref) == machine("a").headings(ref)
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert files_at(url) == {f"texts/{digest}.txt": TEXT.encode()}


def test_pages_and_sections_come_with_a_text(machine, tmp_path: Path) -> None:
    sources = [Document.from_text("one", name="a.txt"), Document.from_text("two", name="b.txt")]
    ref = machine("a").add([each.content for each in sources])
    (tmp_path / "t.docx").write_bytes(docx("A text. " * 20))
    other = machine("a").add(tmp_path / "t.docx")
    for each in (ref, other):
        assert machine("b").sections(each) == machine("a").sections(each)
        assert whole(machine("b"), each) == whole(machine("a"), each)


def test_a_text_that_is_there_is_neither_uploaded_nor_fetched_again(tmp_path: Path) -> None:
    url, shared = f"file://{tmp_path / 'shared'}", tmp_path / "shared"
    ref = SharedDocumentStore(url, tmp_path / "a").add(TEXT)
    [path] = (shared / "texts").iterdir()
    before = path.stat()
    assert SharedDocumentStore(url, tmp_path / "b").add(TEXT) == ref
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    path.unlink()
    assert whole(SharedDocumentStore(url, tmp_path / "b"), ref) == TEXT


def test_a_damaged_text_is_not_read(machine, url: str, tmp_path: Path) -> None:
    ref = machine("a").add(TEXT)
    filesystem, root = fsspec.core.url_to_fs(url)
    [name] = files_at(url)
    filesystem.pipe_file(f"{root}/{name}", TEXT.encode().replace(b"First", b"Other"))
    with pytest.raises(DocumentError, match="is damaged") as raised:
        whole(machine("b"), ref)
    assert name in raised.value.message and "pass the document again" in raised.value.hint
    assert not [path for path in (tmp_path / "b").rglob("*") if path.is_file()]


def test_a_text_that_was_cut_off_is_replaced_when_the_document_is_added_again(machine, url: str) -> None:
    ref = machine("a").add(TEXT)
    filesystem, root = fsspec.core.url_to_fs(url)
    [name] = files_at(url)
    filesystem.pipe_file(f"{root}/{name}", TEXT.encode()[:10])
    with pytest.raises(DocumentError, match="is damaged"):
        whole(machine("b"), ref)
    machine("c").add(TEXT)
    assert whole(machine("b"), ref) == TEXT


async def test_a_removed_text_is_gone_at_the_url_and_can_be_attached_again(machine, url: str) -> None:
    ref = machine("a").add(TEXT)
    machine("b").remove(ref)
    assert files_at(url) == {}
    with pytest.raises(DocumentError, match="not in the document store") as raised:
        whole(machine("c"), ref)
    assert url in raised.value.message and "pass the document again" in raised.value.hint
    await machine("b").reattach(ref, Document.from_text(TEXT))
    assert whole(machine("c"), ref) == TEXT


async def test_a_text_is_fetched_without_blocking_the_event_loop(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = machine("a").add(TEXT)
    there, threads = machine("b"), []
    fetch = there._fetch
    monkeypatch.setattr(there, "_fetch", lambda *of: (threads.append(threading.current_thread()), fetch(*of)))
    await there.fetch_async(ref)
    await there.fetch_async(ref)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_a_read_that_stopped_on_one_machine_is_resumed_on_another(machine, make_reader) -> None:
    text, saver = document_with({0.2: "The key of harbor is 4711."}, words=900), InMemorySaver()
    first = make_reader(store=machine("a"), checkpoints=saver, run_log=False)
    stopped = first.read(text, "What is the key of harbor?", run_id="r", limits=Limits(max_chunks=2))
    assert stopped.stop_reason is StopReason.MAX_CHUNKS
    second = make_reader(store=machine("b"), checkpoints=saver, run_log=False)
    result = second.resume("r")
    assert result.answer == "4711" and result.chunks_read > 2
    assert result.evidence[0].quote in text


def test_many_machines_add_and_fetch_at_once(machine, url: str) -> None:
    texts = [f"Text {number}. " * 500 for number in range(6)]
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            store, order = machine(name), random.Random(name).sample(texts, len(texts))
            for text in order:
                assert whole(machine("reads"), store.add(text)) == text
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"m{number}",)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    assert sorted(files_at(url).values()) == sorted(text.encode() for text in texts)


_ADDS_MANY = """
import sys
from pathlib import Path
from memagent_graph.documents import SharedDocumentStore
store = SharedDocumentStore(sys.argv[1], Path(sys.argv[2]))
for number in range(100_000):
    store.add(f"{number} " * 200_000)
    print(number, flush=True)
"""


def test_a_machine_that_is_killed_leaves_no_part_of_a_text_at_the_url(tmp_path: Path) -> None:
    shared, moments = tmp_path / "shared", random.Random(5)
    for attempt in range(3):
        command = [sys.executable, "-c", _ADDS_MANY, f"file://{shared}", str(tmp_path / f"m{attempt}")]
        with Program(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(moments.uniform(0.0, 0.1))
            os.kill(process.pid, signal.SIGKILL)
    left = shared / ".incoming-0"
    left.write_bytes(b"part")
    os.utime(left, (time.time() - 2 * 86_400,) * 2)
    SharedDocumentStore(f"file://{shared}", tmp_path / "last").add(TEXT)
    assert not left.exists()
    paths = list((shared / "texts").iterdir())
    assert len(paths) > 1
    for path in paths:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem


def test_a_store_is_opened_by_its_place(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_HOME", str(tmp_path / "home"))
    shared, folder, own = open_store(url, tmp_path / "here"), open_store(str(tmp_path / "texts")), open_store(None)
    assert isinstance(shared, SharedDocumentStore) and shared.root == tmp_path / "here"
    assert whole(open_store(url, tmp_path / "there"), shared.add(TEXT)) == TEXT
    assert (type(folder), folder.root) == (DocumentStore, tmp_path / "texts")
    assert (type(own), own.root) == (DocumentStore, tmp_path / "home" / "documents")
    assert open_store(None, tmp_path / "work").root == tmp_path / "work"


def test_what_is_wrong_with_a_url_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("x")
    with pytest.raises(DocumentError, match="cannot be written") as raised:
        SharedDocumentStore(f"file://{tmp_path}/a file/texts", tmp_path / "a").add(TEXT)
    assert "Check the URL" in raised.value.hint
    with pytest.raises(DocumentError, match="cannot be opened") as raised:
        SharedDocumentStore("nowhere://me:secret@host/texts")
    assert "secret" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError):
        SharedDocumentStore("memory://texts")
