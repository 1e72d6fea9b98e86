"""A complete loop in this process: ids and log-probs as with a server, and new weights after each iteration."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import write_tables

pytest.importorskip("trl")

from support.fake_server import HELLO
from support.rl_loops import SETTINGS, StatusRecorder, make_job

from memagent_graph import LocalPolicy, RunLog, SamplingParams
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_training.data.rollouts import Rollout, RolloutGroup
from memagent_training.job.collect import CollectSettings
from memagent_training.job.job_options import Engine
from memagent_training.rl import run
from memagent_training.rl.collector import Collector
from memagent_training.rl.loop_journal import LoopJournal

_METRIC_NAMES = [name for names in write_tables.METRICS for name in names.split(", ")]
METRIC_PATTERN = re.compile("|".join(re.sub(r"NAME|ROLE|LENGTH|TASK|WAY", r"\\w+", name) for name in _METRIC_NAMES))


CREDIT_TERMS = [{"reward": "outcome"}, {"reward": "evidence_f2", "weight": 0.2}, {"reward": "format", "weight": 0.1}]


def test_loop_runs_in_process_with_temperature_and_several_rewards(tmp_path, monkeypatch) -> None:
    rollouts: list[Rollout] = []
    load = Collector._load

    def load_and_record(*args: Any) -> list[RolloutGroup]:
        groups = load(*args)
        rollouts.extend(rollout for group in groups for rollout in group.rollouts_G)
        return groups

    monkeypatch.setattr(Collector, "_load", load_and_record)
    models: weakref.WeakSet[Any] = weakref.WeakSet()
    model_counts: list[int] = []

    def load_policy_and_count(*args: Any, **options: Any) -> LocalPolicy:
        model_counts.append(len(models))
        policy = LocalPolicy(*args, **options)
        models.add(policy._engine._model)
        return policy

    load_policy = Mock(side_effect=load_policy_and_count)
    monkeypatch.setattr("memagent_training.rl.policy_serving.LocalPolicy", load_policy)
    job = make_job(
        tmp_path / "rl", engine=Engine.LOCAL, iterations=2, preset="memagent-paper", temperature=1.3, lengths=(300,),
        collect_settings=CollectSettings(rollouts=3, groups=2, max_questions=2, concurrency=16),
        measure_every=2, measure_lengths=(300,), measure_count=2,
        settings=SETTINGS | {"learning_rate": 1e-3, "beta": 0.0, "credit": CREDIT_TERMS},
    )  # fmt: skip
    recorder = StatusRecorder()
    assert run(job, recorder).steps == 2
    assert [call.args[0].name for call in load_policy.call_args_list] == ["0", "1", "2"]  # the base may be on the hub
    assert model_counts == [0, 1, 1]  # weights of the version before only
    assert rollouts and all(set(rollout.term_rewards) == {"evidence_f2", "format"} for rollout in rollouts)
    assert [(iteration, phase.value) for iteration, phase in recorder.phases] == [
        (0, "sync"), (0, "measure"), (0, "collect"), (0, "train"),
        (1, "sync"), (1, "collect"), (1, "train"),
        (2, "sync"), (2, "measure"),
    ]  # fmt: skip
    card = (job.out / "README.md").read_text()
    for expected_text in ("| base | embedded", "| reward | exact_match |", "niah_multikey_2", "after 2 iterations"):
        assert expected_text in card, expected_text
    assert "None" not in card
    log = RunLog(job.out / "runs.sqlite")
    versions = {
        conversation.policy_version for record in log.runs() for conversation in log.conversations(record.run_id)
    }
    assert versions == {"iteration-0", "iteration-1"}
    state = json.loads((job.out / "checkpoint-2" / "trainer_state.json").read_text())
    gaps = [entry["sampling/sampling_logp_difference/mean"] for entry in state["log_history"] if "loss" in entry]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    assert {name for entry in state["log_history"] for name in entry if not METRIC_PATTERN.fullmatch(name)} == set()
    measured = [
        (measurement.iteration, measurement.as_deployed)
        for measurement in LoopJournal(job.out / "journal.jsonl").measurements
    ]
    assert measured == [(0, True), (0, False), (2, True), (2, False)]


def test_sampling_in_another_number_format_is_measured_and_corrected(tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "rl", engine=Engine.LOCAL, iterations=1, preset="dapo", temperature=2.0, lengths=(300,),
        collect_settings=CollectSettings(rollouts=2, groups=1, max_questions=1, concurrency=16),
        settings=SETTINGS | {"save_dtype": "bfloat16", "drop_zero_variance": False},
    )  # fmt: skip
    run(job)
    log = json.loads((job.out / "checkpoint-1" / "trainer_state.json").read_text())["log_history"][0]
    assert log["sampling/sampling_logp_difference/mean"] > 1e-4  # in float32 it is about 1e-6
    assert log["sampling/importance_sampling_ratio/min"] < 1 < log["sampling/importance_sampling_ratio/max"]
    assert log["importance/mean"] != 1


async def test_log_probs_are_before_temperature_unless_processed_ones_are_requested() -> None:
    sampling = SamplingParams(max_tokens=6, temperature=2.0, seed=1, logprobs=True)
    raw, processed = [
        await LocalPolicy(EMBEDDED_FOLDER, processed_logprobs=processed).complete(HELLO, sampling)
        for processed in (False, True)
    ]
    assert raw.token_ids == processed.token_ids
    assert raw.logprobs != processed.logprobs


def test_training_tables_page_is_up_to_date() -> None:
    page = (write_tables.REFERENCE / "training_tables.md").read_text("utf-8")
    assert page == write_tables.render_training_page(), "run python scripts/write_tables.py"


def test_each_metric_in_the_table_occurs_in_the_code() -> None:
    root = write_tables.REFERENCE.parents[1] / "training/memagent_training"
    code = "".join(path.read_text("utf-8") for path in root.rglob("*.py"))
    trl_metrics = {"grad_norm", "learning_rate", "epoch", "step", "loss"}
    names = [name for name in _METRIC_NAMES if name not in trl_metrics]
    parts = {part for name in names for part in re.split(r"/|_?[A-Z]+", name) if part}
    assert {part for part in parts if part not in code} == set()
