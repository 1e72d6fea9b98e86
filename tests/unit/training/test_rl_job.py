"""Invalid loops are refused before anything is served or trained, with a hint; derived settings; resuming."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from support.conversations import write_run
from support.rl_loops import SETTINGS, make_job, make_record

from memagent_graph import MemAgentError, RunLog
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_graph.settings import WordingSettings
from memagent_graph.storage.journal import open_journal
from memagent_training.job.collect import CollectSettings
from memagent_training.job.job_options import Engine
from memagent_training.job.training_output import write_record
from memagent_training.rl import RLJob, run
from memagent_training.rl.curriculum import HELD_OUT_START
from memagent_training.rl.loop_journal import LoopJournal
from memagent_training.rl.rl_job import prepare
from memagent_training.training_errors import TrainingError


def make_settings(**changes: Any) -> dict[str, Any]:
    return {"settings": SETTINGS | changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ()}, r"\(none\).*Give a task"),
        ({"tasks": ("niah_multikey_9",)}, r"niah_multikey_9"),
        ({"lengths": ()}, r"lengths \[\].*lengths that grow"),
        ({"lengths": (500, 500)}, r"lengths that grow"),
        ({"lengths": (20,)}, r"20"),
        ({"iterations": 0}, r"iterations must be at least 1, got 0.*Change iterations"),
        ({"steps_behind": 2}, r"steps_behind must be 0 or 1, got 2"),
        ({"steps_behind": 1} | make_settings(importance_cap=None), r"need importance weights.*importance_cap=2"),
        ({"temperature": float("nan")}, r"temperature must be above 0, got nan"),
        ({"lora_rank": 0}, r"lora_rank must be at least 1, got 0"),
        ({"serve_merged": True}, r"no effect: no server gets adapters. Leave out serve_merged, or .*lora"),
        (
            {"held_out": 0.2, "drop_answered_without": Path("results")},
            r"no effect: no file of questions.*held_out, drop_answered_without.*data",
        ),
        ({"api_key": "k", "served_name": "mine"}, r"no effect.*served_name, api_key.*base_url"),
        ({"engine": Engine.LOCAL, "sync_tolerance": 0.1}, r"sync_tolerance can have no effect.*in this process"),
        ({"server_timeout": 0.0}, r"server_timeout must be above 0 seconds, got 0"),
        ({"base_url": "http://x/v1", "server_options": ("--no",)}, r"no effect.*server_option, or leave out base_url"),
        ({"reward": "kindness"}, r"'kindness'.*exact_match, boxed_exact_match, lenient_match, token_f1"),
        ({"model": "nowhere"}, r"no model 'nowhere'"),
        (make_settings(seed=1), r"seed cannot be set this way.*has its own option"),
        (make_settings(temperature=1.0), r"temperature cannot be set this way"),
        (make_settings(max_steps=9), r"max_steps cannot be set this way"),
        (make_settings(save_steps=9), r"save_steps cannot be set this way.*The loop decides it"),
        (make_settings(num_train_epochs=2), r"num_train_epochs cannot be set this way"),
        (make_settings(warmup_steps=3), r"warms up over 3 optimizer steps, and the training has 3.*warmup_steps lower"),
        ({"measure_every": -1}, r"measure_every must be at least 0, got -1"),
        (
            {"measure_temperatures": (1.0, -0.5)},
            r"measure_temperatures must be one or more, none below 0, got \(1.0, -0.5\)",
        ),
        ({"measure_temperatures": ()}, r"measure_temperatures must be one or more"),
        ({"temperature": 0.7, "base_url": "http://x/v1"}, r"before temperature.*importance_cap"),
        ({"haystack": Path("nowhere"), "tasks": ("niah_single_2",)}, r"nowhere"),
        ({"measure_every": 2, "measure_lengths": (20,)}, r"20"),  # at once, not after the server has started
        (make_settings(save_dtype="int8"), r"save_dtype must be one of .*bfloat16.*got 'int8'"),
        ({"reading": WordingSettings(chunk_tokens=0)}, r"chunk_tokens must be at least 1, got 0"),
        ({"reading": WordingSettings(chunk_tokens=5000)}, r"a memory update needs .* 1024.*Use chunk_tokens "),
        ({"reading": WordingSettings(profile="nowhere")}, r"nowhere has no memagent.json.*embedded"),
        ({"reading": WordingSettings(update_template="nowhere.txt")}, r"nowhere.txt"),
    ],
    ids=str,
)
def test_invalid_job_is_refused_before_its_folder_is_created(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MemAgentError, match=message):
        prepare(make_job(tmp_path / "rl", **changes))
    assert not (tmp_path / "rl").exists()


def test_own_server_logs_log_probs_after_temperature(tmp_path: Path) -> None:
    config = prepare(make_job(tmp_path / "own", temperature=1.3)).config
    assert (config.temperature, config.logged_after_temperature, config.importance_cap) == (1.3, True, 2.0)
    remote_job = make_job(tmp_path / "other", temperature=1.3, base_url="http://x/v1")
    settings = {**remote_job.settings, "logged_after_temperature": True}
    config = prepare(dataclasses.replace(remote_job, settings=settings)).config
    assert config.logged_is_sampled


def test_task_with_too_few_questions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text(
        "from memagent_graph.errors import EvaluationError\n"
        "from memagent_evaluation.samples import LengthUnit, Metric, Sample\n"
        "class Few:\n"
        "    name, metric, unit, answer_tokens = 'few', Metric.ALL, LengthUnit.TOKENS, 8\n"
        "    def sample(self, length, index):\n"
        "        if index >= 5:\n"
        "            raise EvaluationError(f'there are 5 questions, and no {index}')\n"
        "        return Sample(self, length, index, 'What?', ('it',), lambda: iter(['it']))\n"
    )
    with pytest.raises(TrainingError, match=rf"few has too few questions.*no {HELD_OUT_START}.*niah_multikey_2"):
        prepare(make_job(tmp_path / "rl", tasks=(f"{tmp_path / 'few.py'}:Few",)))


def test_model_folder_is_refused_as_output() -> None:
    with pytest.raises(TrainingError, match=r"folder of the model to train.*out"):
        prepare(make_job(EMBEDDED_FOLDER))


def test_tied_embeddings_on_a_remote_server_need_adapters(tmp_path: Path) -> None:
    model = tmp_path / "tied"
    shutil.copytree(EMBEDDED_FOLDER, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    job = make_job(tmp_path / "rl", model=str(model), base_url="http://x/v1")
    with pytest.raises(TrainingError, match=r"tied embeddings.*lora.*base_url"):
        prepare(job)
    prepare(dataclasses.replace(job, lora_rank=4))
    prepare(dataclasses.replace(job, lora_rank=4, serve_merged=True))
    prepare(dataclasses.replace(job, base_url=None))


# Derived settings


@pytest.mark.parametrize(("groups", "groups_per_step", "steps"), [(4, 32, 1), (4, 2, 2), (5, 2, 3), (4, 1, 4)])
def test_groups_of_an_iteration_are_split_into_steps_with_one_checkpoint(
    groups: int, groups_per_step: int, steps: int, tmp_path: Path
) -> None:
    collect_settings = CollectSettings(rollouts=4, groups=groups)
    settings = make_settings(groups_per_step=groups_per_step)
    prepared = prepare(make_job(tmp_path, collect_settings=collect_settings, iterations=7, **settings))
    assert prepared.steps_per_iteration == steps
    assert (prepared.config.max_steps, prepared.config.save_steps) == (7 * steps, steps)


def test_processes_wait_a_day_for_the_collecting_one(tmp_path: Path) -> None:
    """The default of torch is half an hour."""
    assert prepare(make_job(tmp_path)).config.ddp_timeout == 24 * 3600
    assert prepare(make_job(tmp_path, **make_settings(ddp_timeout=60))).config.ddp_timeout == 60


def test_measured_lengths_include_four_times_the_longest_training_length(tmp_path: Path) -> None:
    job = make_job(tmp_path, lengths=(500, 1000))
    assert prepare(job).measured_lengths == (500, 1000, 4000)
    assert prepare(dataclasses.replace(job, measure_lengths=(800,))).measured_lengths == (800,)
    prepare(make_job(tmp_path, measure_every=0, measure_lengths=(20,)))


# Presets of credit terms

PRESETS = [("gru-mem", "gated:stop=yes"), ("rememr1", "recall"), ("longrlvr", None)]
READING = WordingSettings(chunk_tokens=200, memory_tokens=100, question_tokens=100, answer_tokens=40)


@pytest.mark.parametrize(("preset", "strategy"), PRESETS)
def test_loop_accepts_each_preset(preset: str, strategy: str | None, plain_model: Path, tmp_path: Path) -> None:
    job = make_job(tmp_path / "rl", preset=preset, strategy=strategy, model=str(plain_model), reading=READING)
    prepared = prepare(job)
    assert prepared.decisive_inputs["settings"]["credit"] == prepared.config.credit
    if strategy is not None:
        with pytest.raises(MemAgentError, match=r"no prompt for the role .* templates/.*follows instructions"):
            prepare(make_job(tmp_path / "rl", preset=preset, strategy=strategy, model="embedded"))


# Folders


def make_killed_loop(out: Path, **changes: Any) -> RLJob:
    """Make the folder of a loop that was killed after its first collection."""
    job = make_job(out, iterations=3, **changes)
    prepared = prepare(job)
    write_record(out, prepared.decisive_inputs)
    LoopJournal(out / "journal.jsonl").add(make_record())
    return job


@pytest.fixture(scope="module")
def killed_job(tmp_path_factory: pytest.TempPathFactory) -> RLJob:
    """A killed loop, shared by all tests."""
    return make_killed_loop(tmp_path_factory.mktemp("begun"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("niah_multikey_1",)}, r"tasks was \['niah_multikey_2'\] and is \['niah_multikey_1'\]"),
        ({"lengths": (600,)}, r"lengths was \[500\] and is \[600\]"),
        ({"reward": "lenient"}, "reward was 'exact_match' and is 'lenient'"),
        ({"reward": lambda *_: 1.0}, "reward was 'exact_match' and is '<lambda>-"),
        ({"seed": 1}, "loop_seed was 0 and is 1"),
        ({"steps_behind": 1}, "steps_behind was 0 and is 1"),
        ({"advance_at": 0.9}, "advance_at was 0.8 and is 0.9"),
        ({"small": False}, "small was True and is False"),
        ({"lora_rank": 8}, "lora_rank was None and is 8"),
        ({"temperature": 0.9} | make_settings(importance_cap=None), "sampled_at was 1.0 and is 0.9"),
        ({"collect_settings": CollectSettings(rollouts=8, groups=4)}, "rollouts was 4 and is 8"),
        ({"collect_settings": CollectSettings(rollouts=4, groups=5)}, "groups was 4 and is 5"),
        ({"collect_settings": CollectSettings(rollouts=4, groups=4, max_questions=9)}, "max_questions was 64 and is 9"),
        (make_settings(learning_rate=1e-5), "learning_rate was 0.0001 and is 1e-05"),
        (make_settings(groups_per_step=2), "groups_per_step was 4 and is 2"),
        ({"reading": WordingSettings(chunk_tokens=64)}, "read_with was None and is "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_resuming_with_other_settings_is_refused_with_their_names(
    changes: dict[str, Any], message: str, killed_job: RLJob
) -> None:
    with pytest.raises(TrainingError, match=rf"started with different inputs: .*{message}.*Resume with the same"):
        prepare(dataclasses.replace(killed_job, resume=True, **changes))


def test_settings_that_do_not_affect_the_weights_may_change(tmp_path: Path) -> None:
    job = make_killed_loop(tmp_path)
    collect_settings = dataclasses.replace(job.collect_settings, concurrency=1)
    changes: dict[str, Any] = {"measure_every": 1, "collect_settings": collect_settings, "base_url": "http://x/v1"}
    prepare(dataclasses.replace(job, resume=True, **changes, **make_settings(token_budget=4096)))


def test_iterations_can_be_added_only_with_a_constant_learning_rate(tmp_path: Path) -> None:
    settings_by_name = {name: make_settings(lr_scheduler_type=name) for name in ("constant", "cosine")}
    killed_jobs = [make_killed_loop(tmp_path / name, **settings) for name, settings in settings_by_name.items()]
    constant_job, cosine_job = (dataclasses.replace(job, resume=True, iterations=30) for job in killed_jobs)
    assert prepare(constant_job).config.max_steps == 30
    with pytest.raises(TrainingError, match="iterations was 3 and is 30"):
        prepare(cosine_job)


def test_folder_with_a_loop_is_refused_without_resume_or_while_it_runs(tmp_path: Path) -> None:
    job = make_killed_loop(tmp_path)
    with pytest.raises(TrainingError, match=r"already has a loop.*resume.*out"):
        prepare(job)
    job = dataclasses.replace(job, resume=True, engine=Engine.LOCAL)
    with open_journal(job.out / ".lock", error=TrainingError), pytest.raises(TrainingError, match="another process"):
        run(job)


def test_loop_killed_in_its_first_collection_is_refused_without_resume(tmp_path: Path) -> None:
    """Another loop would take the runs for its own, because it would give them the same names."""
    job = make_job(tmp_path)
    write_record(job.out, prepare(job).decisive_inputs)
    log = RunLog(tmp_path / "runs.sqlite")
    prepare(job)  # the log is still empty
    write_run(log, "collection-0-0-0", 0, stop_reason=None)
    log.close()
    with pytest.raises(TrainingError, match="already has a loop"):
        prepare(job)
    with pytest.raises(TrainingError, match="lengths was"):
        prepare(dataclasses.replace(job, resume=True, lengths=(600,)))
    prepare(dataclasses.replace(job, resume=True))


@pytest.mark.parametrize("resume", [False, True])
def test_folder_of_another_training_is_refused(resume: bool, tmp_path: Path) -> None:
    job = make_job(tmp_path, resume=resume)
    record = prepare(job).decisive_inputs
    (tmp_path / "training.json").write_text(json.dumps({key: record[key] for key in ("settings", "model")}))
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(TrainingError, match="already holds checkpoint-4"):
        prepare(job)


def test_empty_folder_can_be_resumed(tmp_path: Path) -> None:
    prepare(make_job(tmp_path / "new", resume=True))


@pytest.mark.parametrize(
    ("changes", "visible_devices", "message"),
    [
        ({"server_gpus": "6,7"}, "4,5,6", r"cannot share the GPUs 6.*CUDA_VISIBLE_DEVICES"),
        ({"server_gpus": "0", "engine": Engine.LOCAL}, "1", r"no effect.*server_gpus"),
        ({"chat_template_kwargs": "thinking"}, "", r"'thinking' is not a JSON object.*enable_thinking"),
    ],
    ids=["both", "no server", "template"],
)
def test_invalid_devices_and_chat_templates_are_refused_before_loading(
    changes: dict[str, Any], visible_devices: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
    with pytest.raises(MemAgentError, match=message):
        prepare(make_job(tmp_path / "rl", **changes))
