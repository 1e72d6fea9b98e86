"""A corpus whose process is killed again and again, on a server with faults: every row once, hardly a chunk twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.corpus_world import (
    NAMES,
    QUESTIONS,
    CountingServer,
    make_corpus_command,
    make_key,
    read_rows,
    run_corpus_command,
    wait_for_chunks,
    write_corpus,
)
from support.programs import Program

IN_FLIGHT = 8


def test_a_corpus_killed_at_random_moments_ends_with_every_row_once(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    documents, kills = size(40, 2000), size(2, 30)
    made = write_corpus(tmp_path / "in", documents, max_words=size(600, 8000))
    out, moments = tmp_path / "out", random.Random(7)
    options = ("--documents", str(IN_FLIGHT), "--rows-per-part", "40", "--quiet")
    with CountingServer(faults=0.1, delay=0.02) as server:
        for _ in range(kills):
            with Program(make_corpus_command(tmp_path / "in", out, server, *options)) as process:
                wait_for_chunks(process, server)
                time.sleep(moments.uniform(0.0, size(400, 30_000) / 1000))
                assert process.poll() is None, "the corpus was read before it could be killed"
                os.kill(process.pid, signal.SIGKILL)
        done = run_corpus_command(tmp_path / "in", out, server, *options)
        assert done.returncode == 0, done.stderr
        calls = sum(server.answer_counts.values())
        again = run_corpus_command(tmp_path / "in", out, server, *options)
        assert again.returncode == 0 and sum(server.answer_counts.values()) == calls, "nothing is read again"
    rows = read_rows(out)
    require_each_row_once(rows, made)
    chunks, repeated = count_chunks(server)
    assert repeated <= kills * IN_FLIGHT
    record_property("rows", len(rows))
    record_property("chunks", chunks)
    record_property("chunks read again per kill", round(repeated / kills, 2))
    record_property("documents in flight", IN_FLIGHT)


def require_each_row_once(rows: list[dict[str, Any]], made: dict[str, int | None]) -> None:
    """A row for each document and question, with the right answer, or with an error where the document is broken."""
    counts = Counter((row["document"], row["question"]) for row in rows)
    assert counts == {(name, question): 1 for name in made for question in QUESTIONS}
    for row in rows:
        number = made[row["document"]]
        if number is None:
            assert row["error_kind"] == "DocumentError" and row["answer"] is None
        else:
            assert row["answer"] == make_key(number, NAMES[QUESTIONS.index(row["question"])]), row
            assert row["error"] is None and row["stop_reason"] == "answered" and row["evidence"]


def count_chunks(server: CountingServer) -> tuple[int, int]:
    """How many chunks were read, and how often one was read again."""
    chunks: dict[str, int] = {}
    for (section, _), count in server.answer_counts.items():
        chunks[section] = max(count, chunks.get(section, 0))
    return len(chunks), sum(chunks.values()) - len(chunks)
