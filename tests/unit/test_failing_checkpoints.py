"""A checkpoint file that fails while a document is read: the read stops with an error that says what to do."""

import asyncio
import json
import sqlite3
import sys
from contextlib import closing

import pytest
from support.fake_server import FakeServer
from support.programs import run_program

from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.errors import CheckpointError, MissingExtraError
from memagent_graph.policies.scripted import ScriptedPolicy
from memagent_graph.storage import checkpoints, database, database_writer

TEXT = "The tower was built in 1904, and the bridge beside it in 1911. " * 400


def test_a_locked_file_ends_the_read_and_once_it_is_free_the_run_continues(make_reader, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(database, "TIMEOUT_SECONDS", 0.2)
    path = tmp_path / "checkpoints.sqlite"
    holders = []

    def script(prompt: str) -> str:
        if len(policy.prompts) == 3 and not holders:
            holders.append(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
            holders[0].execute("BEGIN IMMEDIATE")
        return "memory" if "<section>" in prompt else r"\boxed{1904}"

    policy = ScriptedPolicy(script)
    reader = make_reader(policy, checkpoints=path)
    with pytest.raises(CheckpointError, match="locked") as error:
        reader.read(TEXT, "When?", run_id="r")
    assert str(path) in str(error.value)
    with closing(holders[0]):
        holders[0].execute("ROLLBACK")
    result = reader.resume("r")
    assert result.answer == "1904"
    assert result.chunks_read > 3
    assert [update.chunk_index for update in result.updates] == list(range(result.chunks_read))


def test_a_full_disk_is_one_json_object_with_its_own_exit_code(tmp_path) -> None:
    document = tmp_path / "tower.txt"
    document.write_text(TEXT * 4, "utf-8")

    code = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))\n"
        "runpy.run_module('memagent_graph', run_name='__main__')"
    )
    with FakeServer() as server:
        options = ["--base-url", server.base_url, "--tokenizer", "embedded", "--chunk-tokens", 60, "--no-log", "--json"]
        command = [sys.executable, "-c", code, "read", document, "-q", "When?", *options]
        done = run_program([*command, "--checkpoints", tmp_path / "c.sqlite"], capture_output=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == ExitCode.CHECKPOINTS, (done.returncode, done.stderr)
    assert json.loads(done.stdout)["error"]["type"] == "CheckpointError"


async def test_states_of_many_runs_are_saved_together_and_one_that_cannot_be_harms_no_other(
    tmp_path, monkeypatch
) -> None:
    saver = await checkpoints.open_checkpointer(tmp_path / "checkpoints.sqlite")
    batches: list[int] = []
    run = database_writer._run_jobs

    def count(connection, batch):
        batches.append(len(batch))
        return run(connection, batch)

    monkeypatch.setattr(database_writer, "_run_jobs", count)

    async def put(number: int) -> None:
        config = {"configurable": {"thread_id": f"t{number}", "checkpoint_ns": "", "checkpoint_id": "0"}}
        value = "\ud800" if number == 7 else number  # a half surrogate pair is not UTF-8, so SQLite cannot store it
        await saver.aput_writes(config, [("channel", number)], task_id=str(value))

    outcomes = await asyncio.gather(*map(put, range(60)), return_exceptions=True)
    assert [number for number, outcome in enumerate(outcomes) if outcome is not None] == [7]
    assert isinstance(outcomes[7], UnicodeEncodeError)
    assert len(batches) < 70
    with closing(sqlite3.connect(saver.path)) as file:
        assert file.execute("SELECT count(*) FROM writes").fetchone()[0] == 59
    batches.clear()
    await asyncio.gather(*map(put, range(100, 200)))
    assert len(batches) < 10, "a hundred runs share a few transactions"
    await saver.aclose()


def test_a_postgresql_server_without_its_extra_is_refused_before_anything_is_read(make_reader, monkeypatch) -> None:
    for name in ("psycopg", "memagent_graph.storage.postgres_saver"):
        monkeypatch.setitem(sys.modules, name, None)
    reader = make_reader(ScriptedPolicy([]), checkpoints="postgresql://reader:secret@127.0.0.1:1/memagent")
    with pytest.raises(MissingExtraError, match=r'extra "postgres".*pip install .*\[postgres\]') as error:
        reader.read(TEXT, "When?")
    assert "secret" not in str(error.value)
    assert not reader.policy.prompts
