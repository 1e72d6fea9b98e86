"""Files and texts of keys on disk: common quotas, and no traces of uploads that were not completed."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from memagent_graph.converters import Block
from memagent_graph.documents import Document, DocumentRef, DocumentStore, SourceMark
from memagent_serve import uploads
from memagent_serve.api_errors import APIError
from memagent_serve.keys import LOCAL, Owner
from memagent_serve.ledger import Ledger
from memagent_serve.uploads import Uploads

ALICE, BOB = Owner("alice"), Owner("bob")


def make_uploads(folder: Path, *, quota: int = 10_000, total_quota: int = 100_000, **options: Any) -> Uploads:
    values = folder / "files", Ledger(folder / "reads.sqlite"), DocumentStore(folder / "documents")
    return Uploads(*values, quota=quota, total_quota=total_quota, **options)


def list_text_keys(files: Uploads, owner: Owner) -> set[str]:
    rows = files.ledger.execute("SELECT ref FROM texts WHERE owner = ?", (owner.name,))
    return {json.loads(row["ref"])["key"] for row in rows}


def count_files(folder: Path) -> int:
    return len([path for path in folder.rglob("*") if path.is_file()])


def test_failed_or_killed_upload_leaves_no_file(tmp_path: Path, monkeypatch) -> None:
    files = make_uploads(tmp_path)
    kept_file = files.add(LOCAL, "kept.txt", "user_data", io.BytesIO(b"a text"))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(shutil, "copyfileobj", Mock(side_effect=OSError(errno.ENOSPC, "no space left on device")))
        files.add(LOCAL, "lost.txt", "user_data", io.BytesIO(b"another"))
    assert (files.list_files(LOCAL), count_files(tmp_path / "files")) == ([kept_file], 1)
    (tmp_path / "files" / LOCAL.name / f"file-{'0' * 32}.bin").write_bytes(b"half")
    assert (make_uploads(tmp_path).list_files(LOCAL), count_files(tmp_path / "files")) == ([kept_file], 1)


def test_concurrent_uploads_stay_within_both_quotas(tmp_path: Path) -> None:
    files = make_uploads(tmp_path, quota=50, total_quota=70)

    def upload_status(owner: Owner) -> int:
        try:
            return len(files.add(owner, "a.txt", "user_data", io.BytesIO(b"x" * 20)).id) and 200
        except APIError as error:
            return error.status

    with ThreadPoolExecutor(10) as pool:
        assert sorted(pool.map(upload_status, [ALICE] * 10)) == [200] * 2 + [413] * 8
        assert sorted(pool.map(upload_status, [BOB] * 3)) == [200, 507, 507]
    assert count_files(tmp_path / "files") == 3


async def test_texts_count_for_their_key_and_the_oldest_unused_are_removed(tmp_path: Path) -> None:
    in_use: list[DocumentRef] = []
    files = make_uploads(tmp_path, quota=70, total_quota=110, texts_in_use=lambda: in_use)
    blocks = [Block(letter * 20, "page 1") for letter in "abc"]
    first, second, third = [await files.add_text(ALICE, Document("a", "text/plain", (block,))) for block in blocks]
    assert list_text_keys(files, ALICE) == {second["key"], third["key"]} != {first["key"]}
    assert files.store.sections(second) == [SourceMark(0, "page 1")], "the first text had the same label"
    in_use += [second, third]
    with pytest.raises(APIError, match="exceed their limit") as error:
        await files.add_text(ALICE, Document.from_text("d" * 20, "d"))
    assert (error.value.status, error.value.headers) == (413, None), "a retry would not help"
    assert count_files(tmp_path / "documents") == 4
    with pytest.raises(APIError, match="delete some"):
        files.add(ALICE, "a.txt", "user_data", io.BytesIO(b"x" * 20))
    shared_text = await files.add_text(BOB, Document.from_text("b" * 20, "the same text"))
    in_use.clear()
    with pytest.raises(APIError, match="delete some"):
        files.add(BOB, "too-large.txt", "user_data", io.BytesIO(b"x" * 71))
    assert shared_text["key"] in list_text_keys(files, BOB), "a refused file removes no text"
    await files.add_text(BOB, Document.from_text("e" * 60, "e"))
    assert shared_text["key"] not in list_text_keys(files, BOB)
    assert count_files(tmp_path / "documents") == 3, "bob's, and alice's with its labels; one is no longer bob's too"
    assert files.add(BOB, "a.txt", "user_data", io.BytesIO(b"x" * 60)).bytes and not list_text_keys(files, BOB)


async def test_a_text_counts_again_with_other_labels_which_are_removed_with_it(tmp_path: Path) -> None:
    in_use: list[DocumentRef] = []
    files = make_uploads(tmp_path, quota=120, texts_in_use=lambda: in_use)

    async def add_labels(owner: Owner, labels: str) -> list[DocumentRef]:
        blocks = [Block("a" * 20, letter * 20, ("H",)) for letter in labels]
        return [await files.add_text(owner, Document("a", "text/plain", (block,))) for block in blocks]

    (bobs_text,) = await add_labels(BOB, "b")
    in_use += (await add_labels(ALICE, "cdef"))[2:]
    with pytest.raises(APIError, match="delete some"):
        await add_labels(ALICE, "g")
    marks = [*files.store.sections(bobs_text), *files.store.headings(bobs_text)]
    assert marks == [SourceMark(0, "b" * 20), SourceMark(0, "H")]
    assert count_files(tmp_path / "documents") == 9, "a text and two lists for each of b, e and f"


@pytest.mark.parametrize("operator_is_first", [True, False])
async def test_texts_that_the_operator_stored_too_are_kept(tmp_path: Path, operator_is_first: bool) -> None:
    files, text = make_uploads(tmp_path, quota=50), Document.from_bytes(b"<h1>A</h1>a", name="a.html")
    operator_store = DocumentStore(tmp_path / "documents")
    for store in [operator_store, files.store] if operator_is_first else [files.store, operator_store]:
        store.add(text)
    own_text = await files.add_text(ALICE, text)
    for letter in "bc":
        client_text = await files.add_text(ALICE, Document.from_text(letter * 40, letter))
    assert list_text_keys(files, ALICE) == {client_text["key"]}
    assert (operator_store.has_text(own_text), operator_store.headings(own_text)[0].label) == (True, "A")
    assert count_files(tmp_path / "documents") == 3, "the operator's with its labels, and the client's newest"
    operator_store.remove(own_text)
    assert not operator_store.has_text(own_text) and operator_store.read(client_text, 0, 1) == "c"
    await operator_store.reattach(own_text, text)  # as when a run of the server is resumed elsewhere
    assert operator_store.headings(own_text)[0].label == "A"


async def test_texts_to_remove_are_listed_once_however_many_they_are(tmp_path: Path, monkeypatch) -> None:
    files = make_uploads(tmp_path, quota=100)
    for number in range(10):
        await files.add_text(ALICE, Document.from_text(f"{number}" * 10, "small"))
    statements, execute = list[str](), files.ledger.execute
    monkeypatch.setattr(files.ledger, "execute", lambda *values: statements.append(values[0]) or execute(*values))
    with files.holding_texts():
        await files.add_text(ALICE, Document.from_text("0" * 10, "small"))
        large_text = await files.add_text(ALICE, Document.from_text("x" * 100, "all in one"), replaces_held=True)
    assert list_text_keys(files, ALICE) == {large_text["key"]}
    assert sum("ORDER BY used" in statement for statement in statements) == 3, "before both, after the large one"


async def test_conversions_are_limited_to_two_and_need_room_in_the_quota(tmp_path: Path, monkeypatch) -> None:
    files, running_count, highest_count = make_uploads(tmp_path, quota=50), 0, 0
    add, two_are_running = files.store.add_async, asyncio.Event()

    async def add_and_count(document: Document) -> DocumentRef:
        nonlocal running_count, highest_count
        running_count += 1
        highest_count = max(highest_count, running_count)
        if running_count == 2:
            two_are_running.set()
        await asyncio.wait_for(two_are_running.wait(), 60)
        reference = await add(document)
        running_count -= 1
        return reference

    monkeypatch.setattr(files.store, "add_async", add_and_count)
    await asyncio.gather(*(files.add_text(ALICE, Document.from_text(letter, letter)) for letter in "abcdef"))
    assert highest_count == 2
    files.add(BOB, "a.txt", "user_data", io.BytesIO(b"x" * 50))
    monkeypatch.setattr(files.store, "add_async", None)
    with pytest.raises(APIError, match="delete some"):
        await files.add_text(BOB, Document.from_bytes(b"PK not converted", name="a.docx"))


def test_number_of_files_of_a_key_is_limited(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(uploads, "_MAX_FILES", 2)
    files = make_uploads(tmp_path)
    for _ in range(2):
        files.add(ALICE, "a.txt", "user_data", io.BytesIO(b"x"))
    with pytest.raises(APIError, match="delete some"):
        files.add(ALICE, "a.txt", "user_data", io.BytesIO(b"x"))
    assert files.add(BOB, "a.txt", "user_data", io.BytesIO(b"x")).bytes == 1
