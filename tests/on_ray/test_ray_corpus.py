"""A corpus on a cluster of two nodes is the corpus of one machine: the same rows, rules and refusals."""

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


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what differs from one read to the next: seconds, and which requests had to be sent again."""
    values = [{name: value for name, value in row.items() if name not in {"usage", "events"}} for row in rows]
    return sorted(values, key=lambda row: (row["document"], row["question"]))


class SessionsServer(CountingServer):
    """Keeps the sessions that its clients name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sessions: set[tuple[str | None, str]] = set()

    async def _serve_completion(self, request: web.Request) -> web.StreamResponse:
        words = (await request.json())["messages"][-1]["content"].split()
        matches = (match for word in words if (match := re.fullmatch(r"(d\d+)w\d+", word)))
        if (first := next(matches, None)) is not None:
            self.sessions.add((request.headers.get("X-Session-Id"), first[1]))
        return await super()._serve_completion(request)


def test_the_rows_are_those_of_one_machine_and_no_actor_is_idle(cluster: RayWorld, tmp_path: Path) -> None:
    made = write_corpus(tmp_path / "in", DOCUMENTS, max_words=600)
    with SessionsServer(delay=0.05) as server:
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
        assert set(actors.values()) == {0, 1}, "one node reads nothing"
        assert sum(server.answer_counts.values()) == 2 * calls
        by_document: dict[str, set[str | None]] = {}
        for session, document in server.sessions:
            by_document.setdefault(document, set()).add(session)
        assert all(len(sessions) == 1 and None not in sessions for sessions in by_document.values())
        assert len(set().union(*by_document.values())) == len(by_document)

        again = run_corpus_command(tmp_path / "in", tmp_path / "out", server, *options[:4])
        assert again.returncode == 0 and sum(server.answer_counts.values()) == 2 * calls, "nothing is read again"
        other = run_corpus_command(tmp_path / "in", tmp_path / "out", server, *options[:4], "--temperature", "0.5")
        assert other.returncode == 7 and "temperature: 0.0 in the table, 0.5 now" in other.stderr

    rows = read_rows(tmp_path / "out")
    assert comparable(rows) == comparable(read_rows(tmp_path / "core"))
    assert len(rows) == DOCUMENTS * len(QUESTIONS)
    assert {row["document"] for row in rows if row["error"]} == {
        name for name, number in made.items() if number is None
    }
    log = RunLog(tmp_path / "log.sqlite")
    logged = {run.run_id: run for run in log.runs()}
    assert set(logged) == {row["id"] for row in rows if not row["error"]}
    for row in rows:
        if not row["error"]:
            assert logged[row["id"]].answer == row["answer"]
            assert len(list(log.conversations(row["id"]))) == row["usage"]["calls"]
    assert not list(tmp_path.glob("log.sqlite-actors")) and not list((tmp_path / "out").glob("_work/checkpoints*"))


def test_an_interrupt_ends_a_read_and_the_same_command_continues_at_its_chunks(
    cluster: RayWorld, tmp_path: Path
) -> None:
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
        done = run_corpus_command(tmp_path / "in", tmp_path / "out", server, *options)
        assert done.returncode == 0, done.stderr
        assert max(server.answer_counts.values()) <= 2
        assert sum(count - 1 for count in server.answer_counts.values()) <= 4 * len(QUESTIONS)
    assert {(row["document"], row["answer"]) for row in read_rows(tmp_path / "out")} == {
        (f"d{number}.txt", make_key(number, name)) for number in range(4) for name in NAMES
    }


def test_an_error_that_every_document_would_meet_ends_the_run_with_its_remedy(
    cluster: RayWorld, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "d.txt").write_text(make_text(1, 100))
    options = ("--ray", cluster.address, "--checkpoints", "postgresql://nobody:a-secret@127.0.0.1:9/none")
    with CountingServer() as server:
        done = run_corpus_command(tmp_path / "in", tmp_path / "out", server, *options)
    assert done.returncode == 10 and "127.0.0.1:9/none cannot be used" in done.stderr
    assert "a-secret" not in done.stderr
