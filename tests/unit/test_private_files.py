"""Files that hold texts are for their owner alone, as they are made and where an earlier version made them for all."""

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
from memagent_graph.storage.private_files import get_data_folder, get_default_checkpoints, get_default_run_log

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no modes here")


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_all_that_a_read_leaves_is_its_owners_alone() -> None:
    read_once()
    files = [path for path in get_data_folder().rglob("*") if path.is_file()]
    assert {get_default_run_log(), get_default_checkpoints()} < set(files)
    assert [path for path in files if mode(path) & 0o077] == []
    assert mode(get_data_folder()) == mode(get_data_folder() / "documents") == 0o700


def test_a_folder_and_a_file_keep_the_modes_that_somebody_gave_them(tmp_path) -> None:
    path = tmp_path / "shared" / "runs.sqlite"
    path.parent.mkdir()
    path.parent.chmod(0o1777)
    RunLog(path).close()
    assert (mode(path.parent), mode(path)) == (0o1777, 0o600)
    path.chmod(0o660)
    RunLog(path).close()
    assert (mode(path.parent), mode(path)) == (0o1777, 0o660)


def read_once() -> None:
    policy = ScriptedPolicy(lambda prompt: r"\boxed{1904}")
    with MemAgent(policy, tokenizer="embedded", checkpoints=get_default_checkpoints()) as reader:
        reader.read("The tower was built in 1904.", "When?", run_id="r")


@pytest.fixture(scope="module")
def whole_home(tmp_path_factory):
    """A data folder with a run."""
    folder = tmp_path_factory.mktemp("whole") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMAGENT_HOME", str(folder))
        read_once()
    return folder


@pytest.fixture
def home(whole_home, monkeypatch):
    """A copy of it where other users may look for files."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    monkeypatch.setenv("MEMAGENT_HOME", str(folder / "home"))
    yield shutil.copytree(whole_home, folder / "home")
    shutil.rmtree(folder)


def set_modes(folder: Path, directories: int, files: int) -> None:
    for path in sorted((folder, *folder.rglob("*")), reverse=True):
        path.chmod(directories if path.is_dir() else files)


def answers(log: Path) -> list[str | None]:
    return [run.answer for run in RunLog(log).runs()] + [step.text for step in RunLog(log).trace("r").calls]


def test_a_log_that_cannot_be_written_is_shown_and_exported_and_refuses_to_be_written(home) -> None:
    expected = answers(get_default_run_log())
    with closing(sqlite3.connect(get_default_run_log())) as connection:
        connection.execute("SELECT * FROM runs")  # SQLite's own files stay beside it until the last one closes it
        set_modes(home, 0o555, 0o444)
        assert call_as_other_user(lambda: answers(get_default_run_log())) == expected
    assert not get_default_run_log().with_name("runs.sqlite-wal").exists()
    assert call_as_other_user(lambda: answers(open_log(None).path)) == expected
    assert call_as_other_user(lambda: len(list(load_run(open_log(None), "r").conversations))) == len(expected) - 1
    with pytest.raises(RuntimeError, match=r"RunLogError.*runs\.sqlite cannot be used.*run_log"):
        call_as_other_user(lambda: RunLog(get_default_run_log()).reward("r", 1.0))


USES = [
    (lambda: open_store(None).add(Document.from_text("x")), "DocumentStoreError.*MEMAGENT_HOME"),
    (lambda: lease(get_data_folder() / "checkpoints.sqlite-reading", "r").__enter__(), "CheckpointError.*elsewhere"),
]
LOG_IN_USE = (lambda: open_log(None), r"RunLogError.*runs\.sqlite cannot be used.*run_log")


@pytest.mark.parametrize(
    ("mode", "use", "error"),
    [(0o700, *LOG_IN_USE), *((mode, *use) for mode in (0o700, 0o555) for use in USES)],
)
def test_a_home_of_another_user_or_without_write_access_is_an_error_with_a_remedy(home, use, error, mode) -> None:
    set_modes(home, mode, 0o600 & mode)
    with pytest.raises(RuntimeError, match=error):
        call_as_other_user(use)


def test_exports_and_results_of_evaluations_are_their_owners_alone(tmp_path) -> None:
    with closing(RunLog(tmp_path / "runs.sqlite")) as log:
        export_runs(log, tmp_path / "runs.parquet")
    with open_results(tmp_path / "results", {"model": "m"}) as journal:
        journal.add_plan(EvaluationPlan.grid(("memagent",), ("keys",), (1024,), 1))
        write_table(journal.results, tmp_path / "results" / TABLE)
    files = [tmp_path / "runs.parquet", *(path for path in (tmp_path / "results").iterdir())]
    assert {path.name for path in files} >= {"runs.parquet", TABLE, JOURNAL}
    assert [path for path in files if mode(path) & 0o077] == []
