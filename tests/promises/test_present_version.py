"""A log, an export and checkpoints of an earlier version are refused with the remedy, and stay as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from promises.scenarios import Place, home, refusal, run
from support.scripts import read_perfectly

from memagent_graph import RunLog, RunLogError, ScriptedPolicy
from memagent_graph.run_log.exchange import import_runs

WRITTEN = Path(__file__).parent / "present_version"


def test_a_log_of_an_earlier_version_is_refused(tmp_path) -> None:
    path = Path(shutil.copy(WRITTEN / "runs.sqlite", tmp_path))
    with pytest.raises(RunLogError, match=r"runs\.sqlite.*another version.*Choose another file"):
        RunLog(path)
    with home(tmp_path / "home"):
        code, out, errors = run("runs", "--log", path)
    assert (code, out) == (6, "") and "another version" in errors
    assert path.read_bytes()[100:] == (WRITTEN / "runs.sqlite").read_bytes()[100:]  # behind the journal's kind


def test_an_export_of_an_earlier_version_is_refused(tmp_path) -> None:
    log = RunLog(tmp_path / "runs.sqlite")
    with pytest.raises(RunLogError, match=r"runs\.parquet was exported by another version.*Export the runs again"):
        import_runs(log, WRITTEN / "runs.parquet")
    assert list(log.runs()) == []


def test_checkpoints_of_an_earlier_version_are_refused(tmp_path) -> None:
    shutil.copy(WRITTEN / "checkpoints.sqlite", tmp_path)
    place = Place(tmp_path)
    with home(tmp_path / "home"), place.reader(ScriptedPolicy(read_perfectly)) as reader:
        history, resume = (lambda: reader.history("stopped"), lambda: reader.resume("stopped"))
        errors = [refusal(call) for call in (history, resume, lambda: reader.edit_memory("answered", 1, "x"))]
    for error in errors:
        assert error["type"] == "RunMismatchError"
        assert "earlier version" in error["message"] and "Read the document again" in error["hint"]
    assert list(RunLog(place.log).runs()) == []
