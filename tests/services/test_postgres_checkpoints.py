"""Checkpoints on a real PostgreSQL server: runs and corpora that continue on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_line import memagent
from support.corpus_world import QUESTIONS, CountingServer, make_corpus_command, make_text, wait_for_chunks
from support.postgres_server import PASSWORD, PostgresServer
from support.scripts import SMALL_BUDGET, SMALL_OPTIONS, make_document, read_perfectly
from unit.corpus.test_corpus_kills import count_chunks, require_each_row_once

from memagent_corpus import TableFolder
from memagent_graph import Limits, MemAgent, ScriptedPolicy
from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.errors import CheckpointError, RunNotFoundError
from memagent_graph.storage.checkpoints import display_checkpoints, open_checkpointer

TEXT = make_document({0.5: "The key of harbor is 4711."}, words=900)
DOCUMENTS_IN_FLIGHT = 4
TABLES = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")


def make_reader(url: str, home: Path, policy: Any = None) -> MemAgent:
    """Return a reader that shares only the server with other readers, like one on another machine."""
    return MemAgent(
        policy or ScriptedPolicy(read_perfectly), tokenizer="embedded", budget=SMALL_BUDGET, checkpoints=url,
        store=home / "documents", run_log=False,
    )  # fmt: skip


async def test_a_run_continues_on_another_machine(postgres: PostgresServer, tmp_path: Path) -> None:
    async with make_reader(postgres.url, tmp_path / "a") as agent:
        result = await agent.aread(TEXT, QUESTIONS[0], run_id="r", limits=Limits(max_chunks=4))
        assert result.stop_reason.resumable
    async with make_reader(postgres.url, tmp_path / "b") as agent:
        assert len(await agent.ahistory("r")) == 4
        await agent.aedit_memory("r", 1, "Nothing yet.")
        result = await agent.aresume("r", document=TEXT)
        assert result.answer == "4711"
        assert [update.chunk_index for update in result.updates] == list(range(len(result.updates)))
        await (await agent.acheckpointer()).adelete_thread("r")
        with pytest.raises(RunNotFoundError):
            await agent.aresume("r")
    assert [postgres.execute(f"SELECT count(*) FROM {table}") for table in TABLES] == [[(0,)]] * 3


async def test_texts_that_are_not_valid_postgresql_json_are_kept(postgres: PostgresServer, tmp_path: Path) -> None:
    memory = "a\x00b \ud800 " + "long " * 50

    def respond(prompt: str) -> str:
        return "\\boxed{done}" if "<section>" not in prompt else memory

    async with make_reader(postgres.url, tmp_path, ScriptedPolicy(respond)) as agent:
        result = await agent.aread(TEXT, "Which\x00one?", run_id="r", limits=Limits(max_chunks=3))
        history = await agent.ahistory("r")
    assert [update.memory for update in history] == [update.memory for update in result.updates]


async def test_a_restart_of_the_server_during_a_read_repeats_no_call(postgres: PostgresServer, tmp_path: Path) -> None:
    calls = 0

    class RestartingPolicy(ScriptedPolicy):
        async def complete(self, prompt: Any, sampling: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                await asyncio.to_thread(postgres.restart)
            return await super().complete(prompt, sampling)

    async with make_reader(postgres.url, tmp_path, RestartingPolicy(read_perfectly)) as agent:
        result = await agent.aread(TEXT, QUESTIONS[0], run_id="r")
        assert result.answer == "4711" and calls == len(result.updates) + 1
        assert len(await agent.ahistory("r")) == len(result.updates)


async def test_a_restart_of_the_server_leaves_no_dead_connection_in_use(postgres: PostgresServer) -> None:
    """Connections that were idle during the restart are replaced, however many there are."""
    config: Any = {"configurable": {"thread_id": "r", "checkpoint_ns": ""}}
    async with contextlib.aclosing(await open_checkpointer(postgres.url)) as saver:

        async def fill_pool() -> None:
            await asyncio.gather(*(saver.aget_tuple(config) for _ in range(64)))
            assert saver.conn.get_stats()["pool_size"] > 3

        await fill_pool()
        await asyncio.to_thread(postgres.restart)
        assert await saver.aget_tuple(config) is None
        await fill_pool()
        await asyncio.to_thread(postgres.restart)
        assert [state async for state in saver.alist(config)] == []


async def test_concurrent_connections_can_create_the_tables(postgres: PostgresServer) -> None:
    savers = await asyncio.gather(*(open_checkpointer(postgres.url) for _ in range(6)))
    for saver in savers:
        await saver.aclose()
    assert postgres.execute("SELECT count(*) FROM checkpoints") == [(0,)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda url: url.replace("secret", "wrong"), "password authentication failed"),
        (lambda url: url.rpartition("/")[0] + "/missing", "does not exist"),
        (lambda url: url.rsplit(":", 1)[0] + ":1/memagent", "refused"),
    ],
)
async def test_a_server_that_cannot_be_used_is_named_without_its_password(
    postgres: PostgresServer, tmp_path: Path, change: Any, reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason) as error:
        await make_reader(change(postgres.url), tmp_path).aread(TEXT, QUESTIONS[0])
    message = str(error.value)
    assert "postgresql://memagent@127.0.0.1:" in message and "PGPASSWORD" in message
    assert not {"secret", "wrong", PASSWORD} & set(
        message.replace("/", " ").replace(":", " ").replace("@", " ").split()
    )


def test_the_printed_resume_command_has_no_password(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    with CountingServer() as server:
        options = ("--base-url", server.base_url, "--model", "fake", "--tokenizer", "embedded", *SMALL_OPTIONS,
                   "--max-chunks", 2, "--run-id", "r", "--checkpoints", postgres.url)  # fmt: skip
        result = memagent("read", tmp_path / "book.txt", "-q", QUESTIONS[0], *options, code=ExitCode.STOPPED)
        assert f"memagent resume r --checkpoints {postgres.url_without_password}" in result.stderr
        assert "secret" not in result.output
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        assert "4711" in memagent("resume", "r", "--checkpoints", postgres.url_without_password).stdout
    assert display_checkpoints(postgres.url) == postgres.url_without_password


def test_a_killed_corpus_run_continues_on_other_machines(postgres: PostgresServer, bucket: Any, tmp_path: Path) -> None:
    """Input and table are in a bucket, checkpoints in PostgreSQL; all other files are lost with a machine."""
    documents, kills, rng = 30, 4, random.Random(5)
    for number in range(documents):
        bucket.pipe(f"bucket/in/d{number}.txt", make_text(number, int(40 * 12 ** rng.random())).encode())
    options = f"--documents {DOCUMENTS_IN_FLIGHT} --rows-per-part 12 --quiet --checkpoints {postgres.url}".split()
    with CountingServer(faults=0.05, delay=0.02) as server:

        def start(machine: int) -> subprocess.Popen[str]:
            command = make_corpus_command("s3://bucket/in", "s3://bucket/out", server, *options)
            environment = {**os.environ, "MEMAGENT_HOME": str(tmp_path / f"machine-{machine}")}
            return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

        for machine in range(kills):
            with start(machine) as process:
                wait_for_chunks(process, server, 30)
                time.sleep(rng.uniform(0.0, 0.5))
                assert process.poll() is None, "the corpus was read before it could be killed"
                os.kill(process.pid, signal.SIGKILL)
        with start(kills) as process:
            assert process.wait(120) == 0, process.communicate()[1]
        calls = sum(server.answer_counts.values())
        with start(kills + 1) as process:
            assert process.wait(120) == 0, process.communicate()[1]
        assert sum(server.answer_counts.values()) == calls, "a machine with only the table reads nothing again"
    numbers: dict[str, int | None] = {f"d{number}.txt": number for number in range(documents)}
    require_each_row_once(list(TableFolder("s3://bucket/out").rows()), numbers)
    assert count_chunks(server)[1] <= kills * DOCUMENTS_IN_FLIGHT
    assert [postgres.execute(f"SELECT count(*) FROM {table}") for table in TABLES] == [[(0,)]] * 3
