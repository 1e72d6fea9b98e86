"""A log, an export and checkpoints of an earlier version are refused with the remedy, and are not changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from promises.scenarios import Workspace, dump_error, isolate_home, run_memagent
from support.scripts import read_perfectly

from memagent_graph import RunLog, RunLogError, ScriptedPolicy
from memagent_graph.run_log.exchange import import_runs

EARLIER_FILES = Path(__file__).parent / "present_version"


def test_a_log_of_an_earlier_version_is_refused(tmp_path) -> None:
    path = Path(shutil.copy(EARLIER_FILES / "runs.sqlite", tmp_path))
    with pytest.raises(RunLogError, match=r"runs\.sqlite.*another version.*Choose another file"):
        RunLog(path)
    with isolate_home(tmp_path / "home"):
        code, out, errors = run_memagent("runs", "--log", path)
    assert (code, out) == (6, "") and "another version" in errors
    assert (
        path.read_bytes()[100:] == (EARLIER_FILES / "runs.sqlite").read_bytes()[100:]
    )  # the header has the journal mode


def test_an_export_of_an_earlier_version_is_refused(tmp_path) -> None:
    log = RunLog(tmp_path / "runs.sqlite")
    with pytest.raises(RunLogError, match=r"runs\.parquet was exported by another version.*Export the runs again"):
        import_runs(log, EARLIER_FILES / "runs.parquet")
    assert list(log.runs()) == []


def test_checkpoints_of_an_earlier_version_are_refused(tmp_path) -> None:
    shutil.copy(EARLIER_FILES / "checkpoints.sqlite", tmp_path)
    workspace = Workspace(tmp_path)
    with isolate_home(tmp_path / "home"), workspace.make_reader(ScriptedPolicy(read_perfectly)) as reader:
        history, resume = (lambda: reader.history("stopped"), lambda: reader.resume("stopped"))
        errors = [dump_error(call) for call in (history, resume, lambda: reader.edit_memory("answered", 1, "x"))]
    for error in errors:
        assert error["type"] == "RunMismatchError"
        assert "earlier version" in error["message"] and "Read the document again" in error["hint"]
    assert list(RunLog(workspace.log).runs()) == []
