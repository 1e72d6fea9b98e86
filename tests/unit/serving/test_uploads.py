"""Uploaded files on a disk that fails: what was not written whole is not there."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from memagent_serve.keys import LOCAL
from memagent_serve.uploads import Uploads


def test_an_upload_whose_description_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    uploads = Uploads(tmp_path, quota=10_000)
    kept = uploads.add(LOCAL, "kept.txt", "user_data", io.BytesIO(b"a text"))

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="no space"):
            uploads.add(LOCAL, "lost.txt", "user_data", io.BytesIO(b"another"))
    assert uploads.all(LOCAL) == [kept]
    later = uploads.add(LOCAL, "later.txt", "user_data", io.BytesIO(b"a third"))
    assert {file.id for file in uploads.all(LOCAL)} == {kept.id, later.id}
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4


def test_a_file_that_is_deleted_while_all_are_listed_is_left_out(tmp_path, monkeypatch) -> None:
    uploads = Uploads(tmp_path, quota=10_000)
    kept, gone = (uploads.add(LOCAL, f"{name}.txt", "user_data", io.BytesIO(b"text")) for name in ("kept", "gone"))
    read = Path.read_text

    def deleted_just_before(path: Path, **options) -> str:
        if gone.id in path.name:
            path.unlink()
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", deleted_just_before)
    assert uploads.all(LOCAL) == [kept]
