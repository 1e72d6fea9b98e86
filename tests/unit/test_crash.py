"""Processes of readers that are killed, again and again, lose nothing that they had finished."""

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

from support.programs import Program

from memagent_graph import RunLog

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

async def parts(run_id):
    try:
        async for part in reader.astream_resume(run_id):
            yield part
    except RunNotFoundError:
        async for part in reader.astream("some plain words " * 60000, "what?", run_id=run_id):
            yield part

async def read(run_id):
    async for part in parts(run_id):
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
    outputs: set[tuple[str, int]] = set()
    rounds, least = 0, size(5, 100)
    while rounds < least or len({run for run, _ in outputs}) < 8:
        rounds += 1
        assert rounds <= 4 * least, "a reader never finished a conversation"
        command = [sys.executable, str(tmp_path / "readers.py"), str(tmp_path)]
        processes = [Program([*command, name], stdout=subprocess.PIPE) for name in ("a", "b")]
        for process in processes:
            assert process.stdout.readline() == "reading\n"
        time.sleep(moments.uniform(0.0, 0.5))
        for process in processes:
            assert process.poll() is None, "the reads were over before they could be killed"
            os.kill(process.pid, signal.SIGKILL)
            lines = process.communicate()[0].splitlines(keepends=True)
            outputs |= {(run, int(chunk)) for run, chunk in (line.split() for line in lines if line.endswith("\n"))}
        log = RunLog(tmp_path / "runs.sqlite")
        with sqlite3.connect(log.path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
        places = Counter(
            (record.run_id, conversation.position)
            for record in log.runs()
            for conversation in log.conversations(record.run_id)
        )
        assert outputs <= set(places), "a finished conversation is missing"
        assert not places or max(places.values()) == 1, "a conversation counts twice"
    for record in log.runs():
        positions = [conversation.position for conversation in log.conversations(record.run_id)]
        assert positions == list(range(len(positions)))
    record_property("conversations finished before a kill", len(outputs))
