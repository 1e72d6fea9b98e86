"""`memagent corpus` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from support.command_line import memagent
from support.corpus_world import QUESTIONS, CountingServer, corpus_command, rows_in, text_of
from support.programs import Program

from memagent_graph.cli.exit_codes import ExitCode


def options_of(source: Path | str, out: Path, server: CountingServer, *options: str) -> list[str]:
    return corpus_command(source, out, server, *options)[3:]


def folder_of(path: Path, documents: int) -> Path:
    path.mkdir()
    for number in range(documents):
        (path / f"d{number}.txt").write_text(text_of(number, 60))
    return path


def test_an_estimate_reads_nothing_and_bounds_what_the_run_then_takes(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", 5)
    with CountingServer() as server:
        estimate = options_of(source, tmp_path / "out", server, "--estimate", "--price-in", "1", "--price-out", "2",
                         "--tokens-per-second", "100", "--json")  # fmt: skip
        values = json.loads(memagent(*estimate).stdout)
        assert not server.read and not (tmp_path / "out").exists()
        assert (values["documents"], values["questions"], values["counted"]) == (5, 15, 5)
        assert values["price"] > 0 and values["seconds"] > 0
        words = memagent(*[argument for argument in estimate if argument != "--json"]).stdout
        assert "5 documents, 15 rows" in words and "price: " in words and "time: " in words
        summary = json.loads(memagent(*options_of(source, tmp_path / "out", server, "--json")).stdout)
    assert (summary["read"], summary["rows"], summary["ended"]) == (5, 15, "done")
    rows = rows_in(tmp_path / "out")
    assert sum(row["usage"]["calls"] for row in rows) == values["calls"]
    assert sum(row["usage"]["completion_tokens"] for row in rows) <= values["completion_tokens"]


def test_questions_from_a_file_and_progress_in_words(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", 3)
    (tmp_path / "q.txt").write_text("\n".join(QUESTIONS))
    with CountingServer() as server:
        command = options_of(source, tmp_path / "out", server)
        command = [argument for argument in command if argument not in {"-q", *QUESTIONS}]
        errors = memagent(*command, "--questions", f"@{tmp_path / 'q.txt'}").stderr
    assert "3 documents read" in errors and "9 rows in" in errors
    assert len(rows_in(tmp_path / "out")) == 9


def test_a_row_of_a_table_without_a_question_is_counted_as_that(tmp_path: Path) -> None:
    table = tmp_path / "questions.jsonl"
    rows = [
        {"id": "a", "text": "One.", "ask": "What?"},
        {"id": "b", "text": "Two.", "ask": ""},
        {"id": "c", "text": "Three."},
    ]
    table.write_text("\n".join(map(json.dumps, rows)))
    with CountingServer() as server:
        command = [
            argument for argument in options_of(table, tmp_path / "out", server) if argument not in {"-q", *QUESTIONS}
        ]
        errors = memagent(*command, "--question-column", "ask").stderr
    assert "1 document read" in errors and "2 without a question" in errors and "skipped" not in errors


def test_a_limit_ends_with_its_exit_code_and_says_how_to_continue(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", 6)
    with CountingServer() as server:
        options = options_of(source, tmp_path / "out", server, "--max-documents", "2")
        assert "stopped by --max-documents" in memagent(*options, code=ExitCode.STOPPED).stderr
        memagent(*options_of(source, tmp_path / "out", server))
    assert len(rows_in(tmp_path / "out")) == 18


def test_an_interrupt_writes_what_is_done_and_the_same_command_continues(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", 8)
    with CountingServer(delay=0.02) as server:
        command = corpus_command(source, tmp_path / "out", server, "--documents", "2", "--quiet")
        with Program(command, stderr=subprocess.PIPE) as process:
            while not server.read:
                assert process.poll() is None
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGINT)
            errors = process.communicate()[1]
        assert process.returncode == ExitCode.INTERRUPTED, errors
        assert "finished rows are kept" in errors and "Traceback" not in errors
        memagent(*options_of(source, tmp_path / "out", server))
    rows = rows_in(tmp_path / "out")
    assert len(rows) == 24 == len({row["id"] for row in rows})


def test_what_is_wrong_is_said_with_an_exit_code(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", 1)
    with CountingServer() as server:
        memagent(*options_of(tmp_path / "missing", tmp_path / "o", server), code=ExitCode.DOCUMENT)
        memagent(*options_of(source, tmp_path / "out", server))
        other = options_of(source, tmp_path / "out", server, "--memory-tokens", "70")
        assert "memory_tokens: 60 in the table, 70 now" in memagent(*other, code=ExitCode.SETTINGS).stderr
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad/x.pdf").write_bytes(b"%PDF-1 no")
        errors = memagent(*options_of(tmp_path / "bad", tmp_path / "out2", server), code=ExitCode.DOCUMENT).stderr
        assert "1 document read" in errors and "3 rows in" in errors and "--retry-failed" in errors
    none = memagent("corpus", source, "--out", tmp_path / "o3", "--model", "embedded", code=ExitCode.USAGE)
    assert "there is no question" in none.stderr


def test_texts_stay_in_a_named_folder_under_the_digests_of_their_rows(tmp_path: Path) -> None:
    source, store = folder_of(tmp_path / "in", 3), tmp_path / "texts-of-the-corpus"
    with CountingServer() as server:
        memagent(*options_of(source, tmp_path / "out", server, "--quiet", "--store", store))
    for row in rows_in(tmp_path / "out"):
        assert row["evidence"][0]["quote"] in (store / f"texts/{row['digest']}.txt").read_text()
