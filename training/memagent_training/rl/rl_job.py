"""Prepares a loop: its settings, and all checks that need neither a server nor a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any, Final

import torch
from transformers.trainer_utils import SaveStrategy

from memagent_evaluation.data_files import detect_data_task
from memagent_evaluation.planning import OwnLengths
from memagent_evaluation.samples import Task
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_graph.budget import Budget
from memagent_graph.errors import EvaluationError
from memagent_graph.policies.profile import Profile, load_profile, require_profile
from memagent_graph.policy_registry import parse_template_arguments
from memagent_graph.prompts import load_prompts
from memagent_graph.roles import ANSWER, UPDATE, Role, complete_prompts, require_room
from memagent_graph.run_log import RunLog
from memagent_graph.settings import WordingSettings
from memagent_graph.strategies import choose_strategy
from memagent_graph.tokenizers import Tokenizer, load_tokenizer
from memagent_training.algorithm.credit import require_roles
from memagent_training.data.reward_functions import RewardFunction, identify_reward
from memagent_training.job import training_output
from memagent_training.job.base_model import BaseModel, find_base_model
from memagent_training.job.collect import CollectSettings
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.job.job_options import Engine, LoopOptions
from memagent_training.job.job_settings import make_config, rate_depends_on_length, select_decisive_settings
from memagent_training.rewards.reward_names import EVIDENCE_REWARDS, choose_term_rewards, resolve_reward
from memagent_training.rl.curriculum import (
    HELD_OUT_START,
    CountedQuestions,
    Curriculum,
    QuestionSplit,
    find_questions_answered_without_document,
)
from memagent_training.serving.policy_sync.folders import has_tied_embeddings
from memagent_training.training_errors import TrainingError

JOURNAL: Final = "journal.jsonl"
RUN_LOG: Final = "runs.sqlite"
POLICIES: Final = "policies"
"""The folder for the weights with which readers read, by iteration."""
BEST: Final = "best"
"""The policy with the best measurement so far."""


_LOOP_MANAGED_SETTINGS: Final = (
    "max_steps",
    "num_train_epochs",
    "save_strategy",
    "save_steps",
    "disable_tqdm",
)
"""Training settings that the loop sets itself, for example a checkpoint after each iteration."""
_PROMPT_SETTINGS: Final = ("layout", "answer_format", "update_template", "answer_template", "empty_memory")
_RANK_TIMEOUT_SECONDS: Final = 86_400
"""The time that other ranks wait for the rank that collects and measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RLJob(LoopOptions):
    """The settings of a loop: the parsed options of `memagent rl`."""

    tasks: tuple[str, ...]
    """Names of evaluation tasks; each question is from one of them. Empty: the data file's own task."""
    lengths: tuple[int, ...]
    """The curriculum's lengths, in the tasks' unit. Empty: all lengths of the data file."""
    model: str = "embedded"
    """The policy to start from: a folder, a hub id, or "embedded"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `MultiConvDAPOConfig` that replace the preset's."""
    collect_settings: CollectSettings = field(default_factory=CollectSettings)
    reward: str | RewardFunction = "exact_match"
    """The name of a built-in reward, or a function; see `collect`."""
    strategy: str | None = None
    """The way of reading, by name or as `file.py:Name`; if left out, the profile's, or the paper's."""
    reading: WordingSettings = field(default_factory=WordingSettings)
    measure_lengths: tuple[int, ...] = ()
    """Lengths of the held-out questions; by default the curriculum's, and 4 times the longest of them."""
    measure_temperatures: tuple[float, ...] = (0.0,)
    """Temperatures to measure at; the first one decides which policy is best."""
    server_options: tuple[str, ...] = ()
    """Additional command-line options for the loop's own server."""

    @property
    def serves_adapters(self) -> bool:
        """Whether the server loads a version's adapters next to the weights from which the loop starts."""
        return self.lora_rank is not None and not self.serve_merged and self.engine is Engine.VLLM


_INEFFECTIVE_SETTINGS: Final[Sequence[tuple[Sequence[str], str, str, Callable[[RLJob], bool]]]] = (
    (
        ("held_out", "drop_answered_without"), "no file of questions is named",
        "name one with --data", lambda job: job.data is None,
    ),
    (
        ("haystack",), "the documents come from the data file",
        "take generated questions without --data", lambda job: job.data is not None,
    ),
    (
        ("base_url", "served_name", "api_key", "server_options", "server_timeout", "server_gpus", "sync_tolerance"),
        "the policy reads in this process", "leave out --engine local", lambda job: job.engine is Engine.LOCAL,
    ),
    (
        ("server_options", "server_timeout", "server_gpus"), "the loop does not start the server that is named",
        "leave out --base-url", lambda job: job.base_url is not None,
    ),
    (
        ("served_name", "api_key"), "no server that runs already is named",
        "name it with --base-url", lambda job: job.base_url is None,
    ),
    (
        ("serve_merged",), "no server gets adapters",
        "train some on a server with --lora", lambda job: job.lora_rank is None or job.engine is Engine.LOCAL,
    ),
)  # fmt: skip
"""Settings without effect on some jobs: their names, the reason, the remedy, and whether a job is one of these."""
_RANGES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "held_out": (lambda value: 0 <= value < 1, "at least 0 and below 1"),
    "iterations": (lambda value: value >= 1, "at least 1"),
    "steps_behind": (lambda value: value in {0, 1}, "0 or 1"),
    "temperature": (lambda value: value > 0, "above 0"),
    "measure_every": (lambda value: value >= 0, "at least 0"),
    "measure_count": (lambda value: value >= 1, "at least 1"),
    "measure_temperatures": (lambda values: min(values, default=-1) >= 0, "one or more, none below 0"),
    "server_timeout": (lambda value: value > 0, "above 0 seconds"),
    "sync_tolerance": (lambda value: value is None or value > 0, "above 0 nats"),
    "lora_rank": (lambda value: value is None or value >= 1, "at least 1"),
}
"""The condition for each number, and its text for messages."""


@dataclass(frozen=True, slots=True)
class PreparedLoop:
    """A loop that is ready to start."""

    job: RLJob
    config: MultiConvDAPOConfig
    base: BaseModel
    curriculum: Curriculum

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps on one iteration's groups."""
        return -(-self.job.collect_settings.groups // self.config.groups_per_step)

    @property
    def profile(self) -> Profile | None:
        """The profile with which the policy reads; None for the reader's defaults."""
        return self.base.profile or load_profile(self.base.folder)

    @property
    def measured_lengths(self) -> tuple[int, ...]:
        """Lengths of the held-out questions."""
        lengths = self.job.lengths
        longer_lengths = () if self.curriculum.split else (4 * lengths[-1],)
        return self.job.measure_lengths or (*lengths, *longer_lengths)

    @property
    def decisive_inputs(self) -> dict[str, dict[str, Any]]:
        """The inputs that determine the weights; the number of iterations only if the learning rate depends on it."""
        job = self.job
        schedule = {"iterations": job.iterations} if rate_depends_on_length(self.config) else {}
        optional = {
            "questions": self.curriculum.split and self.curriculum.split.fingerprint,
            "strategy": job.strategy,
            "chat_template_kwargs": job.chat_template_kwargs,
            "read_with": self.base.profile and _describe_profile(self.base.profile),
        }
        return {
            "settings": {**select_decisive_settings(self.config), **schedule},
            "model": {"weights": self.base.weights_hash, "lora_rank": job.lora_rank},
            "loop": {
                **{name: value for name, value in asdict(job.collect_settings).items() if name != "concurrency"},
                "tasks": list(job.tasks),
                "lengths": list(job.lengths),
                "reward": identify_reward(job.reward),
                "sampled_at": job.temperature,
                "steps_behind": job.steps_behind,
                "advance_at": job.advance_at,
                "small": job.small,
                "haystack": None if job.haystack is None else str(job.haystack),
                "loop_seed": job.seed,
                **{name: value for name, value in optional.items() if value is not None},
            },
        }


def _describe_profile(profile: Profile) -> dict[str, int | float | str]:
    """Return the profile's settings, except the rule for invented words, which loops ignore."""
    values = {name: value for name, value in profile.values.items() if name != "on_invented"}
    return {**values, "prompts": profile.prompts.fingerprint}


def prepare(job: RLJob) -> PreparedLoop:
    """Check a loop's settings, model, tasks and folder, and return it ready to start.

    Raises:
        TrainingError, EvaluationError, TokenizerError: an input is missing or invalid; the message says what to do.
        StrategyError, BudgetError: the policy cannot read with the strategy.
    """
    if job.data is not None and not job.tasks:
        job = replace(job, tasks=(detect_data_task(job.data),))
    _validate(job)
    base = find_base_model(job.model)
    training_output.require_writable_folder(job.out, base.folder)
    if job.base_url is not None and job.lora_rank is None and has_tied_embeddings(base.folder):
        raise TrainingError(
            f"{job.model} has tied embeddings, and {job.base_url} would keep its old output head on a reload",
            hint="Train adapters (--lora), untie them, or leave --base-url out: the loop can restart its own server.",
        )
    config = _make_config(job)
    terms = config.advantage_settings.terms
    roles = choose_strategy(job.strategy, _find_base_profile(job.reading, base)).roles
    choose_term_rewards(terms, has_gold=True, has_logged=False)
    require_roles(terms, {role.name for role in roles})
    tokenizer = load_tokenizer(base.folder)
    base = replace(base, profile=_load_reading_profile(job.reading, base, tokenizer, roles))
    profile = base.profile or load_profile(base.folder)
    if profile is not None:
        complete_prompts(roles, profile.prompts, trained_prompts_only=True)  # otherwise the first read would fail
    settings = TaskSettings(tokenizer, job.seed, job.small, job.haystack, job.data)
    tasks = [load_task(name, settings) for name in job.tasks]
    job = _add_data_lengths(job, tasks)
    curriculum = Curriculum(
        tasks, job.lengths, job.advance_at, job.seed, _split_questions(job, tasks), job.collect_settings.groups
    )
    reward_names = (*(term.reward for term in terms), job.reward if isinstance(job.reward, str) else "")
    need_evidence = EVIDENCE_REWARDS.intersection(reward_names)
    for task in tasks:
        if curriculum.split is None:
            _require_endless_questions(task, job)
        if need_evidence and not task.sample(job.lengths[0], 0).needles:
            raise TrainingError(
                f"{', '.join(sorted(need_evidence))}: the task {task.name} does not have the evidence of its answers",
                hint="Choose a task whose samples have needles, such as niah_multikey_2, or other rewards.",
            )
    prepared = PreparedLoop(job, config, base, curriculum)
    if job.measure_every and curriculum.split is None:
        for task, length in product(tasks, prepared.measured_lengths):
            task.sample(length, HELD_OUT_START)
    config.max_steps = job.iterations * prepared.steps_per_iteration
    config.save_strategy, config.save_steps = SaveStrategy.STEPS, prepared.steps_per_iteration
    config.require_steps_after_warm_up(config.max_steps)
    _require_loop_folder(prepared)
    return prepared


def _find_base_profile(reading: WordingSettings, base: BaseModel) -> Profile | None:
    """Return the profile to start from: the named one, or the model's own, if it has one."""
    return load_profile(base.folder) if reading.profile is None else require_profile(reading.profile)


def _load_reading_profile(
    reading: WordingSettings, base: BaseModel, tokenizer: Tokenizer, roles: Iterable[Role]
) -> Profile | None:
    """Return the profile to read with and to save with the policy; None if the job has no wording settings.

    A model without a profile was not trained on any templates, so it also gets the templates of the strategy's `roles`.

    Raises:
        ProfileError, PromptError, BudgetError: the profile cannot be made; the message says what to do.
    """
    if replace(reading, strategy=None) == WordingSettings():
        return None
    base_profile = _find_base_profile(reading, base)
    profile = base_profile or Profile(Budget(), load_prompts())
    prompts = load_prompts(base=profile.prompts, **{name: getattr(reading, name) for name in _PROMPT_SETTINGS})
    prompts = complete_prompts(roles, prompts) if base_profile is None else prompts
    window = min(profile.budget.context_window, base.context_window or Budget().context_window)
    limits = {limit.name: value for limit in fields(Budget) if (value := getattr(reading, limit.name)) is not None}
    budget = replace(profile.budget, **({"context_window": window} | limits))
    require_room((UPDATE, ANSWER), prompts, budget, tokenizer.count)
    return replace(profile, budget=budget, prompts=prompts, boundary=reading.boundary or profile.boundary)


def _add_data_lengths(job: RLJob, tasks: Sequence[Task]) -> RLJob:
    """Return the job with the lengths of its data file, if it names none."""
    if job.lengths:
        return job
    lengths = sorted({length for task in tasks if isinstance(task, OwnLengths) for length in task.lengths})
    if not lengths:
        raise TrainingError(
            f"the tasks {', '.join(job.tasks)} have no lengths of their own", hint="Pass --lengths that grow."
        )
    return replace(job, lengths=tuple(lengths))


def _split_questions(job: RLJob, tasks: Sequence[Task]) -> QuestionSplit | None:
    """Return the split of a finite task's questions; None if the tasks generate questions without end."""
    finite_tasks = [task for task in tasks if isinstance(task, CountedQuestions)]
    if not finite_tasks and job.data is not None:
        raise TrainingError(
            f"the task {tasks[0].name} makes its own questions, and takes none from {job.data}",
            hint="Leave --task out, or --data.",
        )
    if not finite_tasks:
        return None
    if len(tasks) > 1:
        raise TrainingError(
            f"{finite_tasks[0].name} has a number of questions, and is not mixed with other tasks",
            hint="Train on each of them: one loop after the other.",
        )
    measured_lengths = (job.measure_lengths or job.lengths) if job.measure_every else ()
    dropped_questions = (
        frozenset()
        if job.drop_answered_without is None
        else find_questions_answered_without_document(job.drop_answered_without)
    )
    return QuestionSplit.make(
        finite_tasks[0],
        job.lengths,
        measured_lengths,
        fraction=job.held_out,
        seed=job.seed,
        dropped_questions=dropped_questions,
    )


def _validate(job: RLJob) -> None:
    resolve_reward(job.reward)
    needs_lengths = job.data is None
    if not job.tasks or (needs_lengths and not job.lengths) or list(job.lengths) != sorted(set(job.lengths)):
        raise TrainingError(
            f"a loop cannot have the tasks {', '.join(job.tasks) or '(none)'} with the lengths {list(job.lengths)}",
            hint="Give a --task, and --lengths that grow; or a file of your own questions (--data).",
        )
    for name, (is_valid, condition) in _RANGES.items():
        value = getattr(job, name)
        if not is_valid(value):
            option = "--lora" if name == "lora_rank" else f"--{name}".replace("_", "-")
            raise TrainingError(f"{name} must be {condition}, got {value}", hint=f"Change {option}.")
    defaults = {setting.name: setting.default for setting in fields(job)}
    for names, reason, remedy, has_no_effect in _INEFFECTIVE_SETTINGS:
        changed_settings = [name for name in names if getattr(job, name) != defaults[name]]
        if changed_settings and has_no_effect(job):
            options = ", ".join(f"--{name}" for name in changed_settings).replace("_", "-").replace("options", "option")
            hint = f"Leave out {options}, or {remedy}."
            raise TrainingError(f"{', '.join(changed_settings)} can have no effect: {reason}", hint=hint)
    parse_template_arguments(job.chat_template_kwargs)
    if job.server_gpus is not None:
        _require_separate_gpus(job.server_gpus)


def _require_separate_gpus(gpus: str) -> None:
    trainer_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    shared_gpus = {name.strip() for name in gpus.split(",")} & {name.strip() for name in trainer_gpus.split(",")}
    if shared_gpus:
        raise TrainingError(
            f"server and trainer cannot share the GPUs {', '.join(sorted(shared_gpus))}",
            hint="Start the trainer on others, as in CUDA_VISIBLE_DEVICES=0,1,2,3,4,5, or leave --server-gpus out.",
        )


def _require_loop_folder(prepared: PreparedLoop) -> None:
    job = prepared.job
    has_loop = (job.out / JOURNAL).exists()
    if not has_loop and (job.out / RUN_LOG).exists():
        with closing(RunLog(job.out / RUN_LOG)) as log:
            has_loop = log.counts()[0] > 0  # a new loop would take these runs for its own
    if not has_loop:
        training_output.require_unused_folder(job.out)
    elif job.resume:
        training_output.require_same_inputs(job.out, prepared.decisive_inputs)
    else:
        raise TrainingError(
            f"{job.out} already has a loop", hint="Continue it (--resume), or choose another folder (--out)."
        )


def _make_config(job: RLJob) -> MultiConvDAPOConfig:
    loop_settings = {"temperature": job.temperature, "seed": job.seed}
    for name in (*loop_settings, *_LOOP_MANAGED_SETTINGS):
        if name in job.settings:
            raise TrainingError(
                f"{name} cannot be set this way",
                hint="The loop decides it, or has its own option for it: see memagent rl --help.",
            )
    defaults: dict[str, Any] = {"ddp_timeout": _RANK_TIMEOUT_SECONDS}
    if job.base_url is None and job.temperature != 1:  # as our own server is started; at 1 both are equal
        defaults["logged_after_temperature"] = True
    config = make_config(
        job.preset, {**defaults, **job.settings, **loop_settings, "max_steps": job.iterations}, job.out
    )
    config.disable_tqdm = True  # the loop prints its own progress
    if job.steps_behind and config.importance_cap is None:
        raise TrainingError(
            "rollouts one version behind need importance weights",
            hint="Set their cap (--set importance_cap=2), or stay on-policy (--steps-behind 0).",
        )
    config.groups_per_step = min(config.groups_per_step, job.collect_settings.groups)
    return config


def _require_endless_questions(task: Task, job: RLJob) -> None:
    for length in job.lengths:
        task.sample(length, 0)
        try:
            task.sample(length, HELD_OUT_START)
        except EvaluationError as error:
            raise TrainingError(
                f"the task {task.name} has too few questions to keep asking new ones: {error.message}",
                hint="Let it return its number of questions (count(length)), or choose one that makes them, such as "
                "niah_multikey_2.",
            ) from error
