"""What a person changes in memories: who did it, and pairs to learn preferences from."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet
import pytest
from support.scripts import document_with, perfect_reader
from typer.testing import CliRunner

from memagent_graph import ScriptedPolicy
from memagent_graph.cli import app
from memagent_graph.errors import RunLogError
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.edits import author_of, edited_by
from memagent_graph.run_log.exchange import export_edits

TEXT = document_with({0.3: "The key of harbor is 4711."}, words=600)
QUESTION = "What is the key of harbor?"


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path / "runs.sqlite")
    yield log
    log.close()


def test_an_answer_so_far_leaves_the_run_as_it_is(make_reader, log, tmp_path) -> None:
    from memagent_graph.reading.state import Limits

    reader = make_reader(run_log=log, checkpoints=tmp_path / "c.sqlite")
    reader.read(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=5))
    before = list(log.conversations("r", superseded=True))
    said = reader.answer_so_far("r")
    assert (said.answer, said.memory) == ("4711", "nothing yet\nharbor 4711")
    assert list(log.conversations("r", superseded=True)) == before
    assert reader.resume("r").answer == "4711"


# Authors


@pytest.mark.parametrize("author", ["alice", None, "x replaced the memory"])
def test_an_edits_detail_says_who_did_it(author: str | None) -> None:
    assert author_of(edited_by(author)) == author


def test_details_of_older_logs_name_nobody() -> None:
    assert author_of("a person replaced the memory") is None
    assert author_of("something else") is None


# Pairs


def edited_run(make_reader, log, tmp_path) -> list[str]:
    """Edit two memories of a run, the earlier one last; gives the prompts that the policy was shown."""
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return perfect_reader(prompt)

    reader = make_reader(ScriptedPolicy(script), run_log=log, checkpoints=tmp_path / "c.sqlite")
    reader.read(TEXT, QUESTION, run_id="r")
    reader.edit_memory("r", 4, "harbor 99", author="alice")
    reader.resume("r")
    reader.edit_memory("r", 1, "begins anew", author="bob")
    reader.edit_memory("r", 1, "begins otherwise", author="bob")
    reader.resume("r")
    return prompts


@pytest.mark.parametrize("name", ["edits.parquet", "edits.jsonl"])
def test_edits_are_exported_as_preference_pairs(make_reader, log, tmp_path, name: str) -> None:
    prompts = edited_run(make_reader, log, tmp_path)
    reader = make_reader(run_log=log)
    report = export_edits(log, tmp_path / name, lambda document: reader.store)
    assert (report.pairs, report.left_out) == (2, 0)
    rows: list[dict[str, Any]] = (
        pyarrow.parquet.read_table(tmp_path / name).to_pylist()
        if name.endswith("parquet")
        else [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    )
    by_chunk = {row["chunk"]: row for row in rows}
    assert {(chunk, row["author"]) for chunk, row in by_chunk.items()} == {(4, "alice"), (1, "bob")}
    assert by_chunk[4]["chosen"] == [{"role": "assistant", "content": "harbor 99"}]
    assert by_chunk[1]["chosen"] == [{"role": "assistant", "content": "begins otherwise"}]
    for row in rows:
        # What the policy had been asked, to the letter, and what it had said to it.
        (message,) = row["prompt"]
        assert message["content"] in prompts
        assert message["role"] == "user"
        assert row["rejected"] == [{"role": "assistant", "content": perfect_reader(message["content"])}]


def test_edits_whose_document_is_gone_are_counted_and_left_out(make_reader, log, tmp_path) -> None:
    edited_run(make_reader, log, tmp_path)
    reader = make_reader(run_log=log)
    reader.store.remove(log.get("r").document)
    report = export_edits(log, tmp_path / "edits.jsonl", lambda document: reader.store)
    assert (report.pairs, report.left_out, report.bytes) == (0, 2, 0)
    with pytest.raises(RunLogError, match="exists"):
        export_edits(log, tmp_path / "edits.jsonl", lambda document: reader.store)


def test_a_memory_that_a_person_put_back_is_no_preference(make_reader, log, tmp_path) -> None:
    reader = make_reader(run_log=log, checkpoints=tmp_path / "c.sqlite")
    first = reader.read(TEXT, QUESTION, run_id="r")
    reader.edit_memory("r", 2, "otherwise")
    reader.edit_memory("r", 2, first.updates[2].memory)
    assert export_edits(log, tmp_path / "edits.jsonl", lambda document: reader.store).pairs == 0


def test_the_command_writes_them(make_reader, log, tmp_path) -> None:
    edited_run(make_reader, log, tmp_path)
    log.close()
    command = ["export", str(tmp_path / "e.parquet"), "--edits", "--log", str(log.path)]
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, "2 pairs in " in done.output) == (0, True), done.output
    assert CliRunner().invoke(app, [*command, "--for-training"]).exit_code == 2
