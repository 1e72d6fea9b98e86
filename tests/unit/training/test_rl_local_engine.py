"""A whole loop in this process: ids and log-probs as with a server, and other weights after each iteration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import write_tables

pytest.importorskip("trl")

from support.rl_loops import SETTINGS, StatusRecorder, make_job

from memagent_graph import LocalPolicy, RunLog, SamplingParams
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_training.data.rollouts import Rollout, RolloutGroup
from memagent_training.job.collect import CollectSettings
from memagent_training.job.job_options import Engine
from memagent_training.rl import run
from memagent_training.rl.collecting import Collector
from memagent_training.rl.loop_journal import LoopJournal

_NAMES = [name for names in write_tables.METRICS for name in names.split(", ")]
IN_TABLE = re.compile("|".join(re.sub(r"NAME|ROLE|LENGTH|TASK|WAY", r"\\w+", name) for name in _NAMES))


CREDIT = [{"reward": "outcome"}, {"reward": "evidence_f2", "weight": 0.2}, {"reward": "format", "weight": 0.1}]


def test_a_loop_runs_in_this_process_at_any_temperature_with_rewards_for_more_than_outcomes(
    tmp_path, monkeypatch
) -> None:
    rollouts: list[Rollout] = []
    load = Collector._load

    def load_and_remember(*args: Any) -> list[RolloutGroup]:
        groups = load(*args)
        rollouts.extend(rollout for group in groups for rollout in group.rollouts_G)
        return groups

    monkeypatch.setattr(Collector, "_load", load_and_remember)
    job = make_job(
        tmp_path / "rl", engine=Engine.LOCAL, iterations=2, preset="memagent-paper", temperature=1.3, lengths=(300,),
        collect=CollectSettings(rollouts=3, groups=2, max_questions=2, concurrency=16),
        measure_every=2, measure_lengths=(300,), measure_count=2,
        settings=SETTINGS | {"learning_rate": 1e-3, "beta": 0.0, "credit": CREDIT},
    )  # fmt: skip
    recorder = StatusRecorder()
    result = run(job, recorder)
    assert result.steps == 2
    assert rollouts and all(set(rollout.term_rewards) == {"evidence_f2", "format"} for rollout in rollouts)
    assert [(iteration, phase.value) for iteration, phase in recorder.phases] == [
        (0, "sync"), (0, "measure"), (0, "collect"), (0, "train"),
        (1, "sync"), (1, "collect"), (1, "train"),
        (2, "sync"), (2, "measure"),
    ]  # fmt: skip
    card = (job.out / "README.md").read_text()
    for words in ("| base | embedded", "| reward | exact_match |", "niah_multikey_2", "after 2 iterations"):
        assert words in card, words
    assert "None" not in card
    log = RunLog(job.out / "runs.sqlite")
    versions = {
        conversation.policy_version for record in log.runs() for conversation in log.conversations(record.run_id)
    }
    assert versions == {"iteration-0", "iteration-1"}
    state = json.loads((job.out / "checkpoint-2" / "trainer_state.json").read_text())
    gaps = [entry["sampling/sampling_logp_difference/mean"] for entry in state["log_history"] if "loss" in entry]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    assert {name for entry in state["log_history"] for name in entry if not IN_TABLE.fullmatch(name)} == set()
    ways = [
        (measurement.iteration, measurement.as_deployed)
        for measurement in LoopJournal(job.out / "journal.jsonl").measurements
    ]
    assert ways == [(0, True), (0, False), (2, True), (2, False)]


def test_a_sampler_of_another_number_format_is_seen_and_corrected(tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "rl", engine=Engine.LOCAL, iterations=1, preset="dapo", temperature=2.0, lengths=(300,),
        collect=CollectSettings(rollouts=2, groups=1, max_questions=1, concurrency=16),
        settings=SETTINGS | {"save_dtype": "bfloat16", "drop_zero_variance": False},
    )  # fmt: skip
    run(job)
    log = json.loads((job.out / "checkpoint-1" / "trainer_state.json").read_text())["log_history"][0]
    assert log["sampling/sampling_logp_difference/mean"] > 1e-4  # in float32 it is about 1e-6
    assert log["sampling/importance_sampling_ratio/min"] < 1 < log["sampling/importance_sampling_ratio/max"]
    assert log["importance/mean"] != 1


async def test_log_probs_are_those_before_temperature_unless_those_after_it_are_asked_for() -> None:
    sampling = SamplingParams(max_tokens=6, temperature=2.0, seed=1, logprobs=True)
    before, after = [
        await LocalPolicy(EMBEDDED_FOLDER, processed_logprobs=after).complete([1, 2, 3], sampling)
        for after in (False, True)
    ]
    assert before.token_ids == after.token_ids
    assert before.logprobs != after.logprobs


def test_the_page_of_training_tables_is_up_to_date() -> None:
    page = (write_tables.REFERENCE / "training_tables.md").read_text("utf-8")
    assert page == write_tables.render_training_page(), "run python scripts/write_tables.py"


def test_each_metric_in_the_table_is_one_of_the_code_s() -> None:
    root = write_tables.REFERENCE.parents[1] / "training/memagent_training"
    code = "".join(path.read_text("utf-8") for path in root.rglob("*.py"))
    of_trl = {"grad_norm", "learning_rate", "epoch", "step", "loss"}
    parts = {part for name in _NAMES if name not in of_trl for part in re.split(r"/|_?[A-Z]+", name) if part}
    assert {part for part in parts if part not in code} == set()
