"""A checkpoint file that fails during a read: the read stops with an error that says what to do."""

import asyncio
import json
import sqlite3
import sys
from contextlib import closing

import pytest
from support.fake_server import FakeServer
from support.programs import run_program

from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.errors import CheckpointError, MemAgentError
from memagent_graph.policies.scripted import ScriptedPolicy
from memagent_graph.storage import checkpoints, database, database_writer

TEXT = "The tower was built in 1904, and the bridge beside it in 1911. " * 400


def test_a_locked_file_stops_the_read_which_can_be_resumed_later(make_reader, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(database, "TIMEOUT_SECONDS", 0.2)
    path = tmp_path / "checkpoints.sqlite"
    lock_connections = []

    def script(prompt: str) -> str:
        if len(policy.prompts) == 3 and not lock_connections:
            lock_connections.append(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
            lock_connections[0].execute("BEGIN IMMEDIATE")
        return "memory" if "<section>" in prompt else r"\boxed{1904}"

    policy = ScriptedPolicy(script)
    reader = make_reader(policy, checkpoints=path)
    with pytest.raises(CheckpointError, match="locked") as error:
        reader.read(TEXT, "When?", run_id="r")
    assert str(path) in str(error.value)
    with closing(lock_connections[0]):
        lock_connections[0].execute("ROLLBACK")
    result = reader.resume("r")
    assert result.answer == "1904"
    assert result.chunks_read > 3
    assert [update.chunk_index for update in result.updates] == list(range(result.chunks_read))


def test_a_full_disk_is_reported_as_json_with_the_exit_code_of_checkpoints(tmp_path) -> None:
    document = tmp_path / "tower.txt"
    document.write_text(TEXT * 4, "utf-8")

    program = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))\n"
        "runpy.run_module('memagent_graph', run_name='__main__')"
    )
    with FakeServer() as server:
        options = ["--base-url", server.base_url, "--tokenizer", "embedded", "--chunk-tokens", 60, "--no-log", "--json"]
        command = [sys.executable, "-c", program, "read", document, "-q", "When?", *options]
        run = run_program([*command, "--checkpoints", tmp_path / "c.sqlite"], capture_output=True, timeout=120)
    assert "Traceback" not in run.stderr, run.stderr
    assert run.returncode == ExitCode.CHECKPOINTS, (run.returncode, run.stderr)
    assert json.loads(run.stdout)["error"]["type"] == "CheckpointError"


async def test_states_are_saved_in_batches_and_an_invalid_one_fails_no_other(tmp_path, monkeypatch) -> None:
    saver = await checkpoints.open_checkpointer(tmp_path / "checkpoints.sqlite")
    batch_sizes: list[int] = []
    original_run = database_writer._run_jobs

    def record_batch(connection, jobs):
        batch_sizes.append(len(jobs))
        return original_run(connection, jobs)

    monkeypatch.setattr(database_writer, "_run_jobs", record_batch)

    async def save_state(number: int) -> None:
        config = {"configurable": {"thread_id": f"t{number}", "checkpoint_ns": "", "checkpoint_id": "0"}}
        value = "\ud800" if number == 7 else number  # SQLite cannot store a lone surrogate
        await saver.aput_writes(config, [("channel", number)], task_id=str(value))

    outcomes = await asyncio.gather(*map(save_state, range(60)), return_exceptions=True)
    assert [number for number, outcome in enumerate(outcomes) if outcome is not None] == [7]
    assert isinstance(outcomes[7], UnicodeEncodeError)
    assert len(batch_sizes) < 70
    with closing(sqlite3.connect(saver.path)) as connection:
        assert connection.execute("SELECT count(*) FROM writes").fetchone()[0] == 59
    batch_sizes.clear()
    await asyncio.gather(*map(save_state, range(100, 200)))
    assert len(batch_sizes) < 10, "a hundred runs share a few transactions"
    await saver.aclose()


def test_postgresql_without_its_extra_is_refused_before_the_first_call(make_reader, monkeypatch) -> None:
    for name in ("psycopg", "memagent_graph.storage.postgres_saver"):
        monkeypatch.setitem(sys.modules, name, None)
    missing_extra = r'extra "postgres".*pip install .*\[postgres\]'
    for scheme, message in (("postgresql", missing_extra), ("postgresql+psycopg", "Use postgresql://")):
        reader = make_reader(ScriptedPolicy([]), checkpoints=f"{scheme}://reader:secret@127.0.0.1:1/memagent")
        with pytest.raises(MemAgentError, match=message) as error:
            reader.read(TEXT, "When?")
        assert "secret" not in str(error.value) and not reader.policy.prompts
