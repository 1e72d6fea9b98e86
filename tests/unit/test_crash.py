"""A reading process that is killed, again and again, loses at most the chunk it was at."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.fake_server import FakeServer
from support.programs import Program, run_program
from support.scripts import document_with, part, perfect_reader

from memagent_graph import RunLog, load_tokenizer

CHUNK_TOKENS = 40
READ = """
import sys
from pathlib import Path
from memagent_graph import Budget, MemAgent, OpenAICompatiblePolicy, RunLog, load_prompts
from memagent_graph.errors import RunNotFoundError

url, folder, question = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
reader = MemAgent(
    OpenAICompatiblePolicy("fake", base_url=url),
    tokenizer="embedded",
    budget=Budget(context_window=1000, question_tokens=50, memory_tokens=60, chunk_tokens=40, answer_tokens=60),
    prompts=load_prompts(),
    store=folder / "documents",
    checkpoints=folder / "checkpoints.sqlite",
    run_log=RunLog(folder / "runs.sqlite"),
)
with reader:
    print("reading", flush=True)
    try:
        result = reader.resume("r")
    except RunNotFoundError:
        result = reader.read(folder / "book.txt", question, run_id="r")
    print(result.answer, result.chunks_read, len(result.updates), flush=True)
"""


def test_a_read_killed_at_random_moments_ends_with_the_same_answer(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    kills, chunks = size(4, 40), size(100, 300)
    tokenizer = load_tokenizer("embedded")
    text = document_with({0.1: "The key of harbor is 4711.", 0.9: "The key of castle is 12."}, words=15_000)
    text = text[: tokenizer.prefix_chars(text, tokenizer.encode(text), chunks * CHUNK_TOKENS)]
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "read.py").write_text(READ)
    question = "What is the key of harbor?"
    moments = random.Random(5)
    with FakeServer(lambda body, number: perfect_reader(body["messages"][0]["content"]), delay=0.03) as server:
        command = [sys.executable, str(tmp_path / "read.py"), server.base_url, str(tmp_path), question]
        for _ in range(kills):
            with Program(command, stdout=subprocess.PIPE) as process:
                assert process.stdout.readline() == "reading\n"
                time.sleep(moments.uniform(0.0, 0.45))
                assert process.poll() is None, "the read was over before it could be killed"
                os.kill(process.pid, signal.SIGKILL)
        done = run_program(command, stdout=subprocess.PIPE, check=True)
        sections = [part(body["messages"][0]["content"], "section") for body in server.requests]
    answer, chunks_read, updates = done.stdout.split()[1:]
    assert answer == "4711"
    assert int(chunks_read) == int(updates)
    asked = Counter(section for section in sections if section)
    assert len(asked) == int(chunks_read)
    assert sum(asked.values()) <= len(asked) + kills
    record_property("requests asked again per kill", round((sum(asked.values()) - len(asked)) / kills, 3))
    assert int(chunks_read) == -(-tokenizer.count(text) // CHUNK_TOKENS)
    assert RunLog(tmp_path / "runs.sqlite").get("r").answer == "4711"


READERS = """
import asyncio, sys
from pathlib import Path
from memagent_graph import Budget, Completion, FinishReason, MemAgent, MemoryUpdate, ScriptedPolicy, load_prompts
from memagent_graph.errors import RunNotFoundError

folder, name = Path(sys.argv[1]), sys.argv[2]

class Slow(ScriptedPolicy):
    async def complete(self, prompt, sampling):
        await asyncio.sleep(0.002)
        ids = list(prompt[0]["content"].encode())
        return Completion("memory", FinishReason.STOP, "s", None, ids, [1, 2], [-1.0, -2.0])

reader = MemAgent(
    Slow(lambda prompt: ""),
    tokenizer="embedded",
    budget=Budget(context_window=1000, question_tokens=50, memory_tokens=60, chunk_tokens=40, answer_tokens=60),
    prompts=load_prompts(),
    store=folder / "documents",
    checkpoints=folder / f"{name}.sqlite",
    run_log=folder / "runs.sqlite",
)

async def read(run_id):
    try:
        stream = reader.astream_resume(run_id)
        first = await anext(stream)
    except RunNotFoundError:
        stream = reader.astream("some plain words " * 60000, "what?", run_id=run_id)
        first = await anext(stream)
    if isinstance(first, MemoryUpdate):
        print(run_id, first.chunk_index, flush=True)
    async for part in stream:
        if isinstance(part, MemoryUpdate):
            print(run_id, part.chunk_index, flush=True)

async def main():
    print("reading", flush=True)
    await asyncio.gather(*(read(f"{name}-{number}") for number in range(4)))

asyncio.run(main())
"""


def test_the_log_of_readers_killed_at_random_moments_has_every_finished_conversation_once(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    """Two processes of four readers each, both killed in every round; what they printed, they had finished."""
    (tmp_path / "readers.py").write_text(READERS)
    moments = random.Random(11)
    finished: set[tuple[str, int]] = set()
    rounds, wanted = 0, size(5, 100)
    while rounds < wanted or len({run for run, _ in finished}) < 8:
        rounds += 1
        assert rounds <= 4 * wanted, "a reader never finished a conversation"
        command = [sys.executable, str(tmp_path / "readers.py"), str(tmp_path)]
        processes = [Program([*command, name], stdout=subprocess.PIPE) for name in ("a", "b")]
        for process in processes:
            assert process.stdout.readline() == "reading\n"
        time.sleep(moments.uniform(0.0, 0.5))
        for process in processes:
            assert process.poll() is None, "the reads were over before they could be killed"
            os.kill(process.pid, signal.SIGKILL)
            lines = process.communicate()[0].splitlines(keepends=True)
            finished |= {(run, int(chunk)) for run, chunk in (line.split() for line in lines if line.endswith("\n"))}
        log = RunLog(tmp_path / "runs.sqlite")
        with sqlite3.connect(log.path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
        counted = Counter(
            (record.run_id, conversation.position)
            for record in log.runs()
            for conversation in log.conversations(record.run_id)
        )
        assert finished <= set(counted), "a finished conversation is missing"
        assert not counted or max(counted.values()) == 1, "a conversation counts twice"
    for record in log.runs():
        positions = [conversation.position for conversation in log.conversations(record.run_id)]
        assert positions == list(range(len(positions)))
    record_property("conversations finished before a kill", len(finished))


def test_a_process_that_closes_nothing_still_ends(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from memagent_graph import Budget, MemAgent, ScriptedPolicy, load_prompts
budget = Budget(context_window=1000, question_tokens=50, memory_tokens=60, chunk_tokens=40, answer_tokens=60)
reader = MemAgent(ScriptedPolicy(lambda prompt: "x"), tokenizer="embedded", budget=budget, prompts=load_prompts(),
                  store=sys.argv[1], checkpoints=sys.argv[1] + "/c.sqlite")
reader.read("some text", "what?")
asyncio.run(reader.aread("some text", "what?"))
"""
    run_program([sys.executable, "-c", script, str(tmp_path)], timeout=30, check=True)
