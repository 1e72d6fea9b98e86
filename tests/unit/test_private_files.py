"""Files with texts are private to their owner; read-only files and those of other users give errors with hints."""

import os
import shutil
import sqlite3
import stat
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from support.other_user import call_as_other_user

from memagent_evaluation.result_journal import JOURNAL, open_results
from memagent_evaluation.result_table import TABLE, EvaluationPlan, write_table
from memagent_graph import Document, MemAgent
from memagent_graph.cli.run_choice import open_log
from memagent_graph.documents import open_store
from memagent_graph.policies.scripted import ScriptedPolicy
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.exchange import export_runs
from memagent_graph.run_log.exchange.logged_run import load_run
from memagent_graph.storage.file_locks import lease
from memagent_graph.storage.private_files import get_data_folder, get_default_checkpoints_path, get_default_run_log_path

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no file modes")


def get_mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def usual_umask():
    old_umask = os.umask(0o022)
    yield
    os.umask(old_umask)


def test_files_of_a_read_are_private_to_their_owner() -> None:
    read_once()
    files = [path for path in get_data_folder().rglob("*") if path.is_file()]
    assert {get_default_run_log_path(), get_default_checkpoints_path()} < set(files)
    assert [path for path in files if get_mode(path) & 0o077] == []
    assert get_mode(get_data_folder()) == get_mode(get_data_folder() / "documents") == 0o700


def test_existing_modes_of_a_folder_and_a_file_are_kept(tmp_path) -> None:
    path = tmp_path / "shared" / "runs.sqlite"
    path.parent.mkdir()
    path.parent.chmod(0o1777)
    RunLog(path).close()
    assert (get_mode(path.parent), get_mode(path)) == (0o1777, 0o600)
    path.chmod(0o660)
    RunLog(path).close()
    assert (get_mode(path.parent), get_mode(path)) == (0o1777, 0o660)


def read_once() -> None:
    policy = ScriptedPolicy(lambda prompt: r"\boxed{1904}")
    with MemAgent(policy, tokenizer="embedded", checkpoints=get_default_checkpoints_path()) as reader:
        reader.read("The tower was built in 1904.", "When?", run_id="r")


@pytest.fixture(scope="module")
def finished_home(tmp_path_factory):
    """A data folder with a run."""
    folder = tmp_path_factory.mktemp("whole") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMAGENT_HOME", str(folder))
        read_once()
    return folder


@pytest.fixture
def home(finished_home, monkeypatch):
    """A copy of the data folder in a folder that other users can list."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    monkeypatch.setenv("MEMAGENT_HOME", str(folder / "home"))
    yield shutil.copytree(finished_home, folder / "home")
    shutil.rmtree(folder)


def set_modes(folder: Path, folder_mode: int, file_mode: int) -> None:
    for path in sorted((folder, *folder.rglob("*")), reverse=True):
        path.chmod(folder_mode if path.is_dir() else file_mode)


def read_texts(path: Path) -> list[str | None]:
    return [run.answer for run in RunLog(path).runs()] + [call.text for call in RunLog(path).trace("r").calls]


def test_a_read_only_log_can_be_shown_and_exported_but_not_written(home) -> None:
    expected = read_texts(get_default_run_log_path())
    with closing(sqlite3.connect(get_default_run_log_path())) as connection:
        connection.execute("SELECT * FROM runs")  # SQLite keeps its other files until the last connection is closed
        set_modes(home, 0o555, 0o444)
        assert call_as_other_user(lambda: read_texts(get_default_run_log_path())) == expected
    assert not get_default_run_log_path().with_name("runs.sqlite-wal").exists()
    assert call_as_other_user(lambda: read_texts(open_log(None).path)) == expected
    assert call_as_other_user(lambda: len(list(load_run(open_log(None), "r").conversations))) == len(expected) - 1
    with pytest.raises(RuntimeError, match=r"RunLogError.*runs\.sqlite cannot be used.*run_log"):
        call_as_other_user(lambda: RunLog(get_default_run_log_path()).reward("r", 1.0))


WRITING_CALLS = [
    (lambda: open_store(None).add(Document.from_text("x")), "DocumentStoreError.*MEMAGENT_HOME"),
    (lambda: lease(get_data_folder() / "checkpoints.sqlite-reading", "r").__enter__(), "CheckpointError.*elsewhere"),
]
OPENING_THE_LOG = (lambda: open_log(None), r"RunLogError.*runs\.sqlite cannot be used.*run_log")


@pytest.mark.parametrize(
    ("folder_mode", "call", "error"),
    [(0o700, *OPENING_THE_LOG), *((folder_mode, *call) for folder_mode in (0o700, 0o555) for call in WRITING_CALLS)],
)
def test_a_home_of_another_user_or_without_write_access_is_an_error(home, call, error, folder_mode) -> None:
    set_modes(home, folder_mode, 0o600 & folder_mode)
    with pytest.raises(RuntimeError, match=error):
        call_as_other_user(call)


def test_exports_and_results_are_private_to_their_owner(tmp_path) -> None:
    with closing(RunLog(tmp_path / "runs.sqlite")) as log:
        export_runs(log, tmp_path / "runs.parquet")
    with open_results(tmp_path / "results", {"model": "m"}) as journal:
        journal.add_plan(EvaluationPlan.grid(("memagent",), ("keys",), (1024,), 1))
        write_table(journal.results, tmp_path / "results" / TABLE)
    files = [tmp_path / "runs.parquet", *(path for path in (tmp_path / "results").iterdir())]
    assert {path.name for path in files} >= {"runs.parquet", TABLE, JOURNAL}
    assert [path for path in files if get_mode(path) & 0o077] == []
