"""Files and texts of keys on disk: bounded together, and what was not written whole is not there."""

from __future__ import annotations

import asyncio
import errno
import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_serve import uploads as module
from memagent_serve.api_errors import ApiError
from memagent_serve.keys import LOCAL, Owner
from memagent_serve.ledger import Ledger
from memagent_serve.uploads import Uploads

ALICE, BOB = Owner("alice"), Owner("bob")


def uploads(folder: Path, *, quota: int = 10_000, total_quota: int = 100_000, **options: Any) -> Uploads:
    store = DocumentStore(folder / "documents")
    ledger = Ledger(folder / "reads.sqlite")
    return Uploads(folder / "files", ledger, store, quota=quota, total_quota=total_quota, **options)


def text_keys(files: Uploads, owner: Owner) -> set[str]:
    return {row["key"] for row in files.ledger.execute("SELECT key FROM texts WHERE owner = ?", (owner.name,))}


def files_in(folder: Path) -> int:
    return len([path for path in folder.rglob("*") if path.is_file()])


def test_an_upload_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    files = uploads(tmp_path)
    first = files.add(LOCAL, "kept.txt", "user_data", io.BytesIO(b"a text"))

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", full)
        with pytest.raises(OSError, match="no space"):
            files.add(LOCAL, "lost.txt", "user_data", io.BytesIO(b"another"))
    assert files.list_files(LOCAL) == [first]
    assert files_in(tmp_path / "files") == 1


def test_remains_of_a_killed_upload_are_removed_at_the_next_start(tmp_path: Path) -> None:
    first = uploads(tmp_path).add(ALICE, "kept.txt", "user_data", io.BytesIO(b"a text"))
    (tmp_path / "files" / "alice" / f"file-{'0' * 32}.bin").write_bytes(b"half")
    assert uploads(tmp_path).list_files(ALICE) == [first]
    assert files_in(tmp_path / "files") == 1


def test_uploads_at_once_stay_within_the_limits_of_the_key_and_of_all(tmp_path: Path) -> None:
    files = uploads(tmp_path, quota=50, total_quota=70)

    def status(owner: Owner) -> int:
        try:
            return len(files.add(owner, "a.txt", "user_data", io.BytesIO(b"x" * 20)).id) and 200
        except ApiError as error:
            return error.status

    with ThreadPoolExecutor(10) as pool:
        assert sorted(pool.map(status, [ALICE] * 10)) == [200] * 2 + [413] * 8
        assert sorted(pool.map(status, [BOB] * 3)) == [200, 507, 507]
    assert files_in(tmp_path / "files") == 3


async def test_texts_count_for_their_key_and_the_oldest_that_no_read_uses_go(tmp_path: Path) -> None:
    in_use: list[str] = []
    files = uploads(tmp_path, quota=50, total_quota=70, texts_in_use=lambda: in_use)
    one, two, three = [await files.add_text(ALICE, Document.from_text(letter * 20, letter)) for letter in "abc"]
    assert text_keys(files, ALICE) == {two["key"], three["key"]} != {one["key"]}
    in_use += [two["key"], three["key"]]
    with pytest.raises(ApiError, match="exceed their limit") as refusal:
        await files.add_text(ALICE, Document.from_text("d" * 20, "d"))
    assert (refusal.value.status, refusal.value.headers) == (413, None), "it is no use to try again"
    assert files_in(tmp_path / "documents" / "texts") == 2
    with pytest.raises(ApiError, match="delete some"):
        files.add(ALICE, "a.txt", "user_data", io.BytesIO(b"x" * 20))
    shared = await files.add_text(BOB, Document.from_text("b" * 20, "the same text"))
    in_use.clear()
    await files.add_text(BOB, Document.from_text("e" * 40, "e"))
    assert shared["key"] not in text_keys(files, BOB)
    assert files_in(tmp_path / "documents" / "texts") == 2, "alice's, of which one was bob's too, was removed"


async def test_nothing_is_converted_for_a_key_without_room_nor_many_files_at_once(tmp_path: Path, monkeypatch) -> None:
    files, running, highest = uploads(tmp_path, quota=50), 0, 0
    add, second = files.store.add_async, asyncio.Event()

    async def add_and_count(document: Document) -> DocumentRef:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        if running == 2:
            second.set()
        await asyncio.wait_for(second.wait(), 60)
        ref = await add(document)
        running -= 1
        return ref

    monkeypatch.setattr(files.store, "add_async", add_and_count)
    await asyncio.gather(*(files.add_text(ALICE, Document.from_text(letter, letter)) for letter in "abcdef"))
    assert highest == 2
    files.add(BOB, "a.txt", "user_data", io.BytesIO(b"x" * 50))
    monkeypatch.setattr(files.store, "add_async", None)
    with pytest.raises(ApiError, match="delete some"):
        await files.add_text(BOB, Document.from_bytes(b"PK not converted", name="a.docx"))


def test_the_files_and_texts_of_a_key_have_a_number(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_FILES", 2)
    files = uploads(tmp_path)
    for _ in range(2):
        files.add(ALICE, "a.txt", "user_data", io.BytesIO(b"x"))
    with pytest.raises(ApiError, match="delete some"):
        files.add(ALICE, "a.txt", "user_data", io.BytesIO(b"x"))
    assert files.add(BOB, "a.txt", "user_data", io.BytesIO(b"x")).bytes == 1
