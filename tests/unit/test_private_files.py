"""Files that hold texts are for their owner alone, as they are made and where an earlier version made them for all."""

import os
import stat

import pytest

from memagent_graph import MemAgent
from memagent_graph.policies import ScriptedPolicy
from memagent_graph.run_log import RunLog
from memagent_graph.storage.paths import data_folder, default_checkpoints, default_run_log, default_store
from memagent_graph.storage.private_files import private_file, private_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no modes here")


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_all_that_a_read_leaves_is_its_owners_alone() -> None:
    policy = ScriptedPolicy(lambda prompt: r"\boxed{1904}")
    with MemAgent(policy, tokenizer="embedded", checkpoints=default_checkpoints()) as reader:
        reader.read("The tower was built in 1904.", "When?")
    left = [path for path in data_folder().rglob("*") if path.is_file()]
    assert {default_run_log(), default_checkpoints()} < set(left)
    assert [path for path in left if mode(path) & 0o077] == []
    assert mode(data_folder()) == mode(default_store()) == 0o700


def test_a_folder_that_the_user_named_keeps_its_mode(tmp_path, monkeypatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("MEMAGENT_HOME", str(shared))
    RunLog(default_run_log()).close()
    RunLog(default_run_log()).close()
    assert (mode(shared), mode(default_run_log())) == (0o1777, 0o600)


def test_a_file_elsewhere_keeps_the_mode_that_someone_gave_it(tmp_path) -> None:
    path = tmp_path / "shared" / "runs.sqlite"
    RunLog(path).close()
    assert mode(path) == 0o600
    path.chmod(0o660)
    RunLog(path).close()
    assert mode(path) == 0o660


def test_a_folder_is_made_with_those_above_it(tmp_path) -> None:
    private_folder(tmp_path / "a" / "b")
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        private_file(tmp_path / "file" / "runs.sqlite")
