"""A corpus run that is killed repeatedly, with a faulty server: every row once, hardly a chunk read twice."""

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

DOCUMENTS_IN_FLIGHT = 8


def test_corpus_run_killed_at_random_moments_writes_every_row_once(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    document_count, kill_count = size(40, 2000), size(2, 30)
    expected_numbers = write_corpus(tmp_path / "in", document_count, max_words=size(600, 8000))
    out, random_delays = tmp_path / "out", random.Random(7)
    options = ("--documents", str(DOCUMENTS_IN_FLIGHT), "--rows-per-part", "40", "--quiet")
    with CountingServer(faults=0.1, delay=0.02) as server:
        for _ in range(kill_count):
            with Program(make_corpus_command(tmp_path / "in", out, server, *options)) as process:
                wait_for_chunks(process, server)
                time.sleep(random_delays.uniform(0.0, size(400, 30_000) / 1000))
                assert process.poll() is None, "the corpus was read before it could be killed"
                os.kill(process.pid, signal.SIGKILL)
        final_run = run_corpus_command(tmp_path / "in", out, server, *options)
        assert final_run.returncode == 0, final_run.stderr
        answer_count = sum(server.answer_counts.values())
        repeated_run = run_corpus_command(tmp_path / "in", out, server, *options)
        assert repeated_run.returncode == 0 and sum(server.answer_counts.values()) == answer_count
    rows = read_rows(out)
    require_each_row_once(rows, expected_numbers)
    chunk_count, repeated_chunk_count = count_chunks(server)
    assert repeated_chunk_count <= kill_count * DOCUMENTS_IN_FLIGHT
    record_property("rows", len(rows))
    record_property("chunks", chunk_count)
    record_property("chunks read again per kill", round(repeated_chunk_count / kill_count, 2))
    record_property("documents in flight", DOCUMENTS_IN_FLIGHT)


def require_each_row_once(rows: list[dict[str, Any]], expected_numbers: dict[str, int | None]) -> None:
    """Check that each document and question has one row, with the right answer, or an error if the file is broken."""
    counts = Counter((row["document"], row["question"]) for row in rows)
    assert counts == {(name, question): 1 for name in expected_numbers for question in QUESTIONS}
    for row in rows:
        number = expected_numbers[row["document"]]
        if number is None:
            assert row["error_kind"] == "DocumentError" and row["answer"] is None
        else:
            assert row["answer"] == make_key(number, NAMES[QUESTIONS.index(row["question"])]), row
            assert row["error"] is None and row["stop_reason"] == "answered" and row["evidence"]


def count_chunks(server: CountingServer) -> tuple[int, int]:
    """Return how many chunks were read, and how many repeated reads there were."""
    reads_by_chunk: dict[str, int] = {}
    for (section, _), count in server.answer_counts.items():
        reads_by_chunk[section] = max(count, reads_by_chunk.get(section, 0))
    return len(reads_by_chunk), sum(reads_by_chunk.values()) - len(reads_by_chunk)
