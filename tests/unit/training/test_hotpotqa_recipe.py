"""The paper's recipe from end to end: published data format, filter, training loop, and evaluation."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

pytest.importorskip("trl")

from pyarrow import parquet
from typer.testing import CliRunner

from benchmarks import hotpotqa_recipe
from memagent_graph import RunLog
from memagent_graph.cli import app

COLUMNS = {"data_source", "prompt", "context", "ability", "reward_model", "extra_info"}


def test_published_data_is_filtered_trained_on_and_evaluated_with_ruler_hqa(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hotpotqa_recipe, "PASSAGES", 3)
    hotpotqa_recipe.write_data(tmp_path, training=4, held_out=2)
    rows = parquet.read_table(tmp_path / "hotpotqa_train.parquet").to_pylist()
    assert set(rows[0]) == COLUMNS
    assert all(row["context"].count("Document ") == row["extra_info"]["num_docs"] for row in rows)
    assert all(row["reward_model"]["ground_truth"][0] in row["context"] for row in rows)

    commands = hotpotqa_recipe.build_commands(tmp_path, iterations=1, groups=2, rollouts=2, count=1)
    for name in ("no_document", "rl", "after"):
        outcome = CliRunner().invoke(app, commands[name])
        assert outcome.exit_code == 0, outcome.output
    state = json.loads((tmp_path / "policy" / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["global_step"] == 1
    with closing(RunLog(tmp_path / "policy" / "runs.sqlite")) as log:
        questions = {record.question for record in log.runs()}
    assert questions <= {row["extra_info"]["question"] for row in rows}
    results = parquet.read_table(tmp_path / "after" / "results.parquet").to_pylist()
    assert [result["task"] for result in results] == ["ruler_hqa"]
