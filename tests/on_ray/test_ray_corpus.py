"""A corpus run on a Ray cluster of two nodes has the rows, rules and refusals of a run on one machine."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from aiohttp import web
from support.corpus_world import (
    NAMES,
    QUESTIONS,
    CountingServer,
    make_corpus_command,
    make_key,
    make_text,
    read_rows,
    run_corpus_command,
    wait_for_chunks,
    write_corpus,
)
from support.ray_world import RayWorld

from memagent_graph.run_log import RunLog

DOCUMENTS = 40


def make_comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows in a fixed order, without times and retries, which differ between reads."""
    values = [{name: value for name, value in row.items() if name not in {"usage", "events"}} for row in rows]
    return sorted(values, key=lambda row: (row["document"], row["question"]))


class SessionRecordingServer(CountingServer):
    """Records the session ids of its clients, by document."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sessions: set[tuple[str | None, str]] = set()

    async def _serve_completion(self, request: web.Request) -> web.StreamResponse:
        words = (await request.json())["messages"][-1]["content"].split()
        matches = (match for word in words if (match := re.fullmatch(r"(d\d+)w\d+", word)))
        if (match := next(matches, None)) is not None:
            self.sessions.add((request.headers.get("X-Session-Id"), match[1]))
        return await super()._serve_completion(request)


def test_the_rows_equal_those_of_one_machine_and_all_actors_read(cluster: RayWorld, tmp_path: Path) -> None:
    numbers = write_corpus(tmp_path / "in", DOCUMENTS, max_words=600)
    with SessionRecordingServer(delay=0.05) as server:
        assert run_corpus_command(tmp_path / "in", tmp_path / "core", server).returncode == 0
        calls = sum(server.answer_counts.values())
        server.sessions.clear()
        options = ("--ray", cluster.address, "--ray-actors", "2", "--documents", "8", "--rows-per-part", "50",
                   "--session-header", "X-Session-Id", "--log", str(tmp_path / "log.sqlite"))  # fmt: skip
        command = make_corpus_command(tmp_path / "in", tmp_path / "out", server, *options)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            actors = cluster.wait_for_actors(2)
            _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert set(actors.values()) == {0, 1}, "each node has an actor"
        assert sum(server.answer_counts.values()) == 2 * calls
        sessions_by_document: dict[str, set[str | None]] = {}
        for session, document in server.sessions:
            sessions_by_document.setdefault(document, set()).add(session)
        assert all(len(sessions) == 1 and None not in sessions for sessions in sessions_by_document.values())
        assert len(set().union(*sessions_by_document.values())) == len(sessions_by_document)

        process = run_corpus_command(tmp_path / "in", tmp_path / "out", server, *options[:4])
        assert process.returncode == 0 and sum(server.answer_counts.values()) == 2 * calls, "nothing is read again"
        process = run_corpus_command(tmp_path / "in", tmp_path / "out", server, *options[:4], "--temperature", "0.5")
        assert process.returncode == 7 and "temperature: 0.0 in the table, 0.5 now" in process.stderr

    rows = read_rows(tmp_path / "out")
    assert make_comparable(rows) == make_comparable(read_rows(tmp_path / "core"))
    assert len(rows) == DOCUMENTS * len(QUESTIONS)
    assert {row["document"] for row in rows if row["error"]} == {
        name for name, number in numbers.items() if number is None
    }
    log = RunLog(tmp_path / "log.sqlite")
    runs = {run.run_id: run for run in log.runs()}
    assert set(runs) == {row["id"] for row in rows if not row["error"]}
    for row in rows:
        if not row["error"]:
            assert runs[row["id"]].answer == row["answer"]
            assert len(list(log.conversations(row["id"]))) == row["usage"]["calls"]
    assert not list(tmp_path.glob("log.sqlite-actors")) and not list((tmp_path / "out").glob("_work/checkpoints*"))


def test_after_an_interrupt_the_same_command_continues_at_its_chunks(cluster: RayWorld, tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / "in" / f"d{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(make_text(number, 2000))
    options = ("--ray", cluster.address, "--ray-actors", "1", "--documents", "4")
    with CountingServer(delay=0.1) as server:
        command = make_corpus_command(tmp_path / "in", tmp_path / "out", server, *options)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            wait_for_chunks(process, server, 40)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
        assert process.returncode == 130 and "Traceback" not in errors, errors
        final_run = run_corpus_command(tmp_path / "in", tmp_path / "out", server, *options)
        assert final_run.returncode == 0, final_run.stderr
        assert max(server.answer_counts.values()) <= 2
        assert sum(count - 1 for count in server.answer_counts.values()) <= 4 * len(QUESTIONS)
    assert {(row["document"], row["answer"]) for row in read_rows(tmp_path / "out")} == {
        (f"d{number}.txt", make_key(number, name)) for number in range(4) for name in NAMES
    }


def test_an_error_that_affects_every_document_ends_the_run_with_its_remedy(cluster: RayWorld, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "d.txt").write_text(make_text(1, 100))
    options = ("--ray", cluster.address, "--checkpoints", "postgresql://nobody:a-secret@127.0.0.1:9/none")
    with CountingServer() as server:
        process = run_corpus_command(tmp_path / "in", tmp_path / "out", server, *options)
    assert process.returncode == 10 and "127.0.0.1:9/none cannot be used" in process.stderr
    assert "a-secret" not in process.stderr
