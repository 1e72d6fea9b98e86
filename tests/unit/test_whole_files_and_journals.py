"""Files that are written atomically, and journals of durable rows."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from memagent_graph.errors import EvaluationError
from memagent_graph.storage.journal import open_journal, read_journal
from memagent_graph.storage.private_files import open_atomically, write_atomically


def test_a_file_or_link_is_replaced_and_only_its_owner_can_open_it(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("link", "link", "new"):
        write_atomically(tmp_path / name, "new: é")
        assert (tmp_path / name).read_text("utf-8") == "new: é"
        assert stat.S_IMODE((tmp_path / name).lstat().st_mode) == 0o600
    assert (tmp_path / "target").read_text() == "old"
    assert {file.name for file in tmp_path.iterdir()} == {"link", "new", "target"}


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text("old")
    with pytest.raises(KeyError), open_atomically(path) as file:
        file.write(b"half of the n")
        raise KeyError
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["page"]


def test_a_row_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path, error=EvaluationError) as journal:
        journal.append({"a": 1})
        assert read_journal(path, error=EvaluationError) == [{"a": 1}]
        journal.append({"b": [2]}, {"c": None}, sync=False)
        assert journal.rows == read_journal(path, error=EvaluationError) == [{"a": 1}, {"b": [2]}, {"c": None}]


@pytest.mark.parametrize("last_line", ["{", '{"b": 2', '{"b": 2}'])
def test_an_incomplete_last_line_is_removed(tmp_path: Path, last_line: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"a": 1}\n' + last_line)
    with open_journal(path, error=EvaluationError) as journal:
        assert journal.rows == [{"a": 1}]
        journal.append({"c": 3})
    assert path.read_text() == '{"a": 1}\n{"c": 3}\n'


@pytest.mark.parametrize(
    "content", ["my own notes", '{"a": 1}\nmy own notes', '{"a": 1}\n[2]\n', '{"a": 1\n{"b": 2}\n']
)
def test_a_file_that_is_not_a_journal_is_refused_and_unchanged(tmp_path: Path, content: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(content)
    with pytest.raises(EvaluationError, match=r"journal\.jsonl"):
        open_journal(path, error=EvaluationError)
    assert path.read_text() == content


def test_only_one_process_at_a_time_can_open_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path, error=EvaluationError), pytest.raises(EvaluationError, match="another process"):
        open_journal(path, error=EvaluationError)
    open_journal(path, error=EvaluationError).close()


def test_a_journal_over_the_size_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"a": 1}\n')
    os.truncate(path, 5 << 30)
    with pytest.raises(EvaluationError, match="more than 4,294,967,296 bytes"):
        read_journal(path, error=EvaluationError)
