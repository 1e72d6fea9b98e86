"""Reads with cancellations, faulty servers or a full disk give the same answer, or an error with the reason."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpus_world import CountingServer, read_rows, run_corpus_command, write_corpus
from support.fake_server import FakeServer
from support.scripts import make_document
from support.server_faults import FINAL_ERRORS, MALFORMED, OVERSIZED, RETRIED_ERRORS
from support.serving import build_reader
from unit.corpus.test_corpus_kills import require_each_row_once

from memagent_graph import MemAgent
from memagent_graph.errors import PolicyError, RunNotFoundError
from memagent_graph.run_log import RunLog

QUESTION = "What is the key of harbor?"
Record = Callable[[str, Any], None]
Size = Callable[[int, int], int]


def make_text(number: int) -> str:
    """Return a document whose requests differ from those of all others: the first chunk puts its key into memory."""
    return make_document({0.0: f"The key of harbor is {1000 + number}."}, words=1500)


async def test_parallel_reads_that_are_cancelled_and_resumed_give_their_answers(
    tmp_path: Path, size: Size, record_property: Record
) -> None:
    read_count, max_cancels, rng = size(4, 64), 5, random.Random(2)

    async def read(agent: MemAgent, number: int) -> str | None:
        run_id = f"r{number}"
        for turn in range(max_cancels + 1):
            try:
                task = asyncio.ensure_future(agent.aresume(run_id))
                await asyncio.sleep(0)
                result = await wait_or_cancel(task) if turn < max_cancels else await task
            except RunNotFoundError:
                task = asyncio.ensure_future(agent.aread(make_text(number), QUESTION, run_id=run_id))
                result = await wait_or_cancel(task) if turn < max_cancels else await task
            if result is not None:
                return result.answer
        return None

    async def wait_or_cancel(task: asyncio.Task[Any]) -> Any:
        await asyncio.wait({task}, timeout=rng.uniform(0.0, read_count / 10))
        if not task.done():
            task.cancel()
            counts["cancels"] += 1
        try:
            return await task
        except asyncio.CancelledError:
            return None

    counts: Counter[str] = Counter()
    with FakeServer(delay=0.05) as server:
        async with build_reader(server.base_url, tmp_path) as agent:
            answers = await asyncio.gather(*(read(agent, number) for number in range(read_count)))
        prompts = Counter(body["messages"][0]["content"] for body in server.requests)
    assert answers == [str(1000 + number) for number in range(read_count)]
    repeated = sum(prompts.values()) - len(prompts)
    assert repeated <= counts["cancels"], "a cancellation loses one reply: in flight, or not yet in a checkpoint"
    log = RunLog(tmp_path / "runs.sqlite")
    for number in range(read_count):
        positions = [conversation.position for conversation in log.conversations(f"r{number}")]
        assert positions == list(range(len(positions)))
    record_property("cancels", counts["cancels"])
    record_property("repeated requests per cancel", round(repeated / counts["cancels"], 2))


@pytest.mark.usefixtures("nobody_sleeps")
def test_some_faulty_replies_of_a_server_change_no_answer(tmp_path: Path, size: Size, record_property: Record) -> None:
    faults = MALFORMED | OVERSIZED | RETRIED_ERRORS | FINAL_ERRORS
    outcomes: Counter[str] = Counter()
    for number, (name, fault) in enumerate(list(faults.items())[:: size(12, 1)]):
        rng, respond = random.Random(name), FakeServer().respond
        with (
            FakeServer(lambda body, count: fault() if rng.random() < 0.15 else respond(body, count)) as server,  # noqa: B023
            build_reader(server.base_url, tmp_path / f"{number}", retries=8) as agent,
        ):
            try:
                answer = agent.read(make_text(number), QUESTION).answer
            except PolicyError as error:
                assert name in FINAL_ERRORS and error.hint
                outcomes["refused"] += 1
            else:
                assert answer == str(1000 + number), name
                outcomes["right"] += 1
    record_property("faults", sum(outcomes.values()))
    record_property("outcomes", dict(outcomes))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_corpus_on_a_full_disk_keeps_its_rows_and_continues_when_there_is_space(
    tmp_path: Path, size: Size, record_property: Record
) -> None:
    documents, disk = size(12, 60), tmp_path / "disk"
    numbers = write_corpus(tmp_path / "in", documents, max_words=size(1200, 3000))
    disk.mkdir()
    mount = shutil.which("mount") or "mount"
    mount_process = subprocess.run([mount, "-t", "tmpfs", "-o", f"size={size(1, 4)}m", "tmpfs", disk], check=False)
    if mount_process.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        with CountingServer() as server:
            process = run_corpus_command(tmp_path / "in", disk / "out", server, "--rows-per-part", "20", "--quiet")
            assert process.returncode != 0 and "disk" in process.stderr, process.stderr
            rows_before = len(read_rows(disk / "out")) if (disk / "out" / "_manifest.json").exists() else 0
            subprocess.run([mount, "-o", "remount,size=512m", disk], check=True)
            process = run_corpus_command(tmp_path / "in", disk / "out", server, "--rows-per-part", "20", "--quiet")
            assert process.returncode == 0, process.stderr
        rows = read_rows(disk / "out")
    finally:  # lazily, because threads of pyarrow may keep a file open for a moment after a read
        subprocess.run([shutil.which("umount") or "umount", "--lazy", disk], check=True)
    require_each_row_once(rows, numbers)
    record_property("rows before the disk was full", rows_before)
    record_property("rows", len(rows))
