"""A reading process that is killed, again and again, loses at most the chunk it was at."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from support.fake_server import FakeServer
from support.scripts import document_with, part, perfect_reader

from memagent_graph import RunLog, load_tokenizer

CHUNKS = 300
CHUNK_TOKENS = 40
KILLS = 20
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


def test_a_read_killed_at_twenty_random_moments_ends_with_the_same_answer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("embedded")
    text = document_with({0.2: "The key of harbor is 4711.", 0.9: "The key of castle is 12."}, words=15_000)
    text = text[: tokenizer.prefix_chars(text, tokenizer.encode(text), CHUNKS * CHUNK_TOKENS)]
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "read.py").write_text(READ)
    question = "What is the key of harbor?"
    moments = random.Random(5)
    with FakeServer(lambda body, number: perfect_reader(body["messages"][0]["content"]), delay=0.03) as server:
        command = [sys.executable, str(tmp_path / "read.py"), server.base_url, str(tmp_path), question]
        for _ in range(KILLS):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout.readline() == "reading\n"
                time.sleep(moments.uniform(0.0, 0.45))
                assert process.poll() is None, "the read was over before it could be killed"
                os.kill(process.pid, signal.SIGKILL)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        sections = [part(body["messages"][0]["content"], "section") for body in server.requests]
    answer, chunks_read, updates = done.stdout.split()[1:]
    assert answer == "4711"
    assert int(chunks_read) == int(updates)
    asked = Counter(section for section in sections if section)
    assert len(asked) == int(chunks_read)
    assert sum(asked.values()) <= len(asked) + KILLS
    assert int(chunks_read) == -(-tokenizer.count(text) // CHUNK_TOKENS)
    assert RunLog(tmp_path / "runs.sqlite").get("r").answer == "4711"


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
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=30, check=True)
