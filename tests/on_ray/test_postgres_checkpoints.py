"""Checkpoints in a real PostgreSQL server: reads that another machine continues; nothing is left when they are done."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.corpus_world import CountingServer, run_corpus_command, write_corpus
from support.postgres_server import PostgresServer
from support.scripts import document_with, perfect_reader

from memagent_graph import Budget, MemAgent, ScriptedPolicy, load_prompts
from memagent_graph.errors import CheckpointError
from memagent_graph.reading.state import Limits
from memagent_graph.storage.checkpoints import CompressedSerializer, open_saver

TEXT = document_with({0.2: "The key of harbor is 4711."}, words=2000)
QUESTION = "What is the key of harbor?"
SMALL = Budget(context_window=1000, question_tokens=50, memory_tokens=60, chunk_tokens=100, answer_tokens=60)


def agent(folder: Path, url: str, calls: list[str], **options: Any) -> MemAgent:
    """A reader as on a machine of its own: only the database is shared."""

    def reply(prompt: str) -> str:
        calls.append(prompt)
        return perfect_reader(prompt)

    return MemAgent(
        ScriptedPolicy(reply), tokenizer="embedded", budget=SMALL, prompts=load_prompts(), store=folder,
        checkpoints=url, run_log=False, **options,
    )  # fmt: skip


async def test_a_read_continues_on_another_machine_at_its_chunk(postgres: PostgresServer, tmp_path: Path) -> None:
    here: list[str] = []
    there: list[str] = []
    whole: list[str] = []
    first = agent(tmp_path / "a", postgres.url, here)
    stopped = await first.aread(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=5))
    assert stopped.stop_reason.resumable
    await first.aclose()
    second = agent(tmp_path / "b", postgres.url, there)
    done = await second.aresume("r", document=TEXT)
    assert done.answer == "4711"
    one = agent(tmp_path / "c", postgres.url, whole)
    assert (await one.aread(TEXT, QUESTION)).memory == done.memory
    assert len(here) == 5 and len(here) + len(there) == len(whole) and not set(here) & set(there)
    await second.aclose()
    await one.aclose()


async def test_many_processes_may_be_the_first(tmp_path: Path, postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE fresh")
    url = postgres.url.removesuffix("postgres") + "fresh"
    savers = await asyncio.gather(*(open_saver(url) for _ in range(5)))
    for saver in savers:
        await saver.conn.close()
    assert isinstance(savers[0].serde, CompressedSerializer)


def test_nothing_is_left_in_the_database_when_a_corpus_is_read(postgres: PostgresServer, tmp_path: Path) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE corpus")
    url = postgres.url.removesuffix("postgres") + "corpus"
    write_corpus(tmp_path / "in", 12, most_words=400)
    with CountingServer() as server:
        done = run_corpus_command(tmp_path / "in", tmp_path / "out", server, "--checkpoints", url)
    assert done.returncode == 0, done.stderr
    assert "a-secret" not in done.stderr + (tmp_path / "out" / "_manifest.json").read_text()
    with psycopg.connect(url) as connection:
        for table in ("checkpoints", "checkpoint_writes", "checkpoint_blobs"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


async def test_a_database_that_refuses_is_told_without_its_password(postgres: PostgresServer) -> None:
    with pytest.raises(CheckpointError, match=r'database "none" does not exist') as raised:
        await open_saver(postgres.url.removesuffix("postgres") + "none")
    assert "a-secret" not in str(raised.value) and raised.value.__cause__ is None
