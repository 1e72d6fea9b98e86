"""The command `memagent corpus`: estimates, limits, interrupts, exit codes and options."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.command_line import memagent
from support.corpus_world import QUESTIONS, CountingServer, make_corpus_command, make_text, read_rows, wait_for_chunks
from support.programs import Program

from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.errors import make_install_command


class CorpusCommandRunner:
    """A folder of documents, and the command that reads it through a server."""

    def __init__(self, folder: Path, server: CountingServer) -> None:
        self.folder, self.out, self.server = folder / "in", folder / "out", server
        self.folder.mkdir()

    def write(self, document_count: int) -> None:
        for number in range(document_count):
            (self.folder / f"d{number}.txt").write_text(make_text(number, 60))

    def run(self, *options: str, source: Path | None = None, code: int = 0) -> Result:
        return memagent(*make_corpus_command(source or self.folder, self.out, self.server, *options)[3:], code=code)

    def run_without_questions(self, *options: str, source: Path | None = None) -> Result:
        command = make_corpus_command(source or self.folder, self.out, self.server, *options)[3:]
        return memagent(*(argument for argument in command if argument not in {"-q", *QUESTIONS}))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.out)


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[CorpusCommandRunner]:
    with CountingServer() as server:
        yield CorpusCommandRunner(tmp_path, server)


def test_estimate_reads_nothing_and_is_an_upper_bound_for_the_run(corpus: CorpusCommandRunner) -> None:
    corpus.write(5)
    estimate_options = ("--estimate", "--price-in", "1", "--price-out", "2", "--tokens-per-second", "100")
    estimate = json.loads(corpus.run(*estimate_options, "--json").stdout)
    assert not corpus.server.answer_counts and not corpus.out.exists()
    assert (estimate["documents"], estimate["questions"], estimate["counted"]) == (5, 15, 5)
    assert estimate["price"] > 0 and estimate["seconds"] > 0
    printed_estimate = corpus.run(*estimate_options).stdout
    assert "5 documents, 15 rows" in printed_estimate and "price: " in printed_estimate and "time: " in printed_estimate
    summary = json.loads(corpus.run("--json").stdout)
    assert (summary["read"], summary["rows"], summary["ended"]) == (5, 15, "done")
    assert sum(row["usage"]["calls"] for row in corpus.rows) == estimate["calls"]
    assert sum(row["usage"]["completion_tokens"] for row in corpus.rows) <= estimate["completion_tokens"]


def test_questions_are_read_from_a_file_and_progress_is_printed(corpus: CorpusCommandRunner, tmp_path: Path) -> None:
    corpus.write(3)
    (tmp_path / "q.txt").write_text("\n".join(QUESTIONS))
    stderr = corpus.run_without_questions("--questions", f"@{tmp_path / 'q.txt'}").stderr
    assert "3 documents read" in stderr and "9 rows in" in stderr
    assert len(corpus.rows) == 9


def test_table_rows_without_a_question_are_counted_separately(corpus: CorpusCommandRunner, tmp_path: Path) -> None:
    rows = [
        {"id": "a", "text": "One.", "ask": "What?"},
        {"id": "b", "text": "Two.", "ask": ""},
        {"id": "c", "text": "Three."},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    stderr = corpus.run_without_questions("--question-column", "ask", source=tmp_path / "t.jsonl").stderr
    assert "1 document read" in stderr and "2 without a question" in stderr and "skipped" not in stderr


def test_limit_stops_with_its_exit_code_and_a_second_run_continues(corpus: CorpusCommandRunner) -> None:
    corpus.write(6)
    assert "stopped by --max-documents" in corpus.run("--max-documents", "2", code=ExitCode.STOPPED).stderr
    corpus.run()
    assert len(corpus.rows) == 18


def test_interrupt_keeps_finished_rows_and_the_same_command_continues(corpus: CorpusCommandRunner) -> None:
    corpus.write(8)
    corpus.server.delay = 0.02
    command = make_corpus_command(corpus.folder, corpus.out, corpus.server, "--documents", "2", "--quiet")
    with Program(command, stderr=subprocess.PIPE) as process:
        wait_for_chunks(process, corpus.server)
        os.kill(process.pid, signal.SIGINT)
        stderr = process.communicate()[1]
    assert process.returncode == ExitCode.INTERRUPTED, stderr
    assert "finished rows are kept" in stderr and "Traceback" not in stderr
    corpus.run()
    assert len(corpus.rows) == 24 == len({row["id"] for row in corpus.rows})


def test_each_kind_of_error_has_its_own_exit_code(corpus: CorpusCommandRunner, tmp_path: Path) -> None:
    corpus.run(source=tmp_path / "missing", code=ExitCode.DOCUMENT)
    (corpus.folder / "x.pdf").write_bytes(b"%PDF-1 no")
    stderr = corpus.run(code=ExitCode.DOCUMENT).stderr
    assert "1 document read" in stderr and "3 rows in" in stderr and "--retry-failed" in stderr
    stderr = corpus.run("--memory-tokens", "70", code=ExitCode.SETTINGS).stderr
    assert "memory_tokens: 60 in the table, 70 now" in stderr and not list(corpus.out.glob("_work/checkpoints*"))
    stderr = memagent("corpus", corpus.folder, "--out", tmp_path, "--model", "embedded", code=ExitCode.USAGE).stderr
    assert "there is no question" in stderr


def test_store_and_checkpoint_options_choose_the_paths(corpus: CorpusCommandRunner, tmp_path: Path) -> None:
    corpus.write(3)
    checkpoint_path, store_folder = tmp_path / "states" / "c.sqlite", tmp_path / "texts-of-the-corpus"
    corpus.run("--quiet", "--store", str(store_folder), "--checkpoints", str(checkpoint_path))
    for row in corpus.rows:
        assert row["evidence"][0]["quote"] in (store_folder / f"texts/{row['digest']}.txt").read_text()
    assert checkpoint_path.is_file() and not list(corpus.out.glob("_work/checkpoints*"))


def test_schema_option_takes_a_json_file_or_a_pydantic_model(corpus: CorpusCommandRunner, tmp_path: Path) -> None:
    corpus.write(1)
    key_schema = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}
    (tmp_path / "form.json").write_text(json.dumps(key_schema))
    (tmp_path / "form.py").write_text("from pydantic import BaseModel\nclass Key(BaseModel):\n    key: int\n")
    respond_in_text = corpus.server.respond
    corpus.server.respond = lambda body, n: '{"key": 1}' if "response_format" in body else respond_in_text(body, n)
    budget_options = ("--context-window", "2000", "--question-tokens", "200", "--retry-failed")
    for exit_code, schema_source, message in (
        (ExitCode.ANSWERED, tmp_path / "form.json", "3 rows in"),
        (ExitCode.SETTINGS, f"{tmp_path / 'form.py'}:Key", "has other settings: response_format.schema."),
        (ExitCode.SETTINGS, tmp_path / "none.json", "Pass a file with a JSON schema"),
    ):
        assert message in corpus.run("--schema", str(schema_source), *budget_options, code=exit_code).stderr
    assert [row["key"] for row in corpus.rows] == [1] * 3


def test_missing_ray_names_the_install_command(corpus: CorpusCommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    corpus.write(1)
    for exit_code, message, *options in (
        (ExitCode.SETTINGS, make_install_command("ray"), "--ray", "auto"),
        (ExitCode.USAGE, "--ray-actors", "--ray", "auto", "--ray-actors", "0"),
        (ExitCode.USAGE, "Choose one with --ray", "--ray-actors", "2"),
    ):
        assert message in corpus.run(*options, code=exit_code).stderr
    assert not corpus.server.answer_counts
