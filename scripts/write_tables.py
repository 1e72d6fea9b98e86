"""Write the tables of docs/reference from the code.

tables.md has the fields of templates and the columns of exports, and training_tables.md the settings, metrics, rewards
and rows of training.

python scripts/write_tables.py
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from memagent_graph.reading.strategy import Strategy
from memagent_graph.run_log.exchange import parquet
from memagent_graph.run_log.records import Conversation, RunRecord
from memagent_graph.strategies import list_strategy_names, load_strategy

REFERENCE: Final = Path(__file__).resolve().parent.parent / "docs/reference"
_COLUMN_MEANINGS: Final = {
    "conversation": "Its row in the log: what `memagent reward --conversation` takes.",
    "escaped": "The columns whose text is escaped as in a JSON string, because it has half surrogate pairs.",
    "run_events": "Events that belong to no conversation, such as edited memories, as JSON.",
    "run_rewards": "The run's rewards, oldest first, each with name, value, source, time and note.",
    "rewards": "The conversation's own rewards, in the form of `run_rewards`.",
}
"""The meanings of columns that are not fields of a record."""
_SETTING_MEANINGS: Final = {
    "learning_rate": "AdamW's learning rate.",
    "lr_scheduler_type": "How the learning rate changes. The names are those of transformers.",
    "warmup_steps": "The number of optimizer steps in which the learning rate grows.",
    "weight_decay": "Weight decay of AdamW and Muon. Biases and norms have none.",
    "max_grad_norm": "The maximum norm of a gradient. Longer ones are scaled down to it.",
    "logging_steps": "The number of optimizer steps between two lines of the log.",
    "epsilon": "How far a ratio may fall below 1, and, without `epsilon_high`, rise above it.",
    "epsilon_high": "How far a ratio may rise above 1.",
    "delta": "Dual clip: the largest ratio that counts where the advantage is negative.",
    "beta": "Weight of the KL divergence from the initial policy (k3).",
    "importance_sampling_level": "token: a ratio for each token; sequence: one ratio for a conversation (GSPO).",
    "temperature": "Temperature at which the runs were sampled. If it is not set, it is read from the runs.",
    "entropy_coef": "Weight of an entropy bonus.",
    "mask_truncated_completions": "Whether completions that were cut off are left out of the loss.",
    "disable_dropout": "Whether dropout is off.",
    "ddp_find_unused_parameters": "The option of PyTorch's DistributedDataParallel.",
    "save_steps": "The number of optimizer steps between two checkpoints.",
    "save_total_limit": "The number of checkpoints that are kept.",
    "baseline": "What a reward is compared with: group_mean or leave_one_out.",
    "divide_by_std": "Whether advantages are divided by their group's sample standard deviation.",
    "advantage_epsilon": "A small number that is added to this standard deviation.",
    "drop_zero_variance": "Whether to leave out groups whose rewards are all equal, from the step and from all means.",
    "loss_weights": "What the loss is a mean over: token_mean, rollout_mean or conversation_mean.",
    "num_train_epochs": "The number of passes over the runs.",
    "old_logprobs": "Denominator of the ratio: recomputed (before the first step) or logged (by the sampler).",
}
"""Meanings of settings under TRL's names, and of those whose text is elsewhere in the code."""
METRICS: Final = {
    "loss, grad_norm, learning_rate, epoch, step, num_tokens": "These have the meaning that TRL gives them.",
    "reward, reward_std": "Mean reward of the rollouts; mean over groups of the standard deviation of rewards.",
    "reward/NAME": "Mean of a credit term's reward.",
    "reward/with_dropped": "Mean reward of all groups, including those without variance.",
    "frac_reward_zero_std": "Fraction of groups whose rewards are all equal.",
    "advantage/abs_mean": "Mean absolute advantage of the learned rows.",
    "rollouts, conversations": "The number of rollouts and of conversations in this step.",
    "conversations/learned, conversations/forwarded": "Conversations that have a gradient; all that were computed.",
    "conversations/per_rollout": "Mean number K of a rollout's conversations.",
    "completions/mean_length, completions/max_length": "Mean and maximum number of tokens of a completion.",
    "completions/ROLE/mean_length, completions/ROLE/max_length": "The same for each role, such as update and answer.",
    "completions/clipped_ratio": "Fraction of completions that were cut off.",
    "prompts/mean_length": "Mean number of tokens of a prompt.",
    "tokens/learned, tokens/forwarded, tokens/padding_fraction": "In the loss; computed; the fraction that is padding.",
    "penalised_fraction": "Fraction of rollouts with an overlong penalty.",
    "groups/dropped_fraction": "Fraction of groups that were left out.",
    "entropy": "Mean entropy at learned tokens, in nats.",
    "kl": "KL divergence from the initial policy (k3, after the clamp), if `beta` is not 0.",
    "ratio/mean, ratio/max": "p / p_old at learned tokens.",
    "clip_ratio/low_mean, clip_ratio/high_mean, clip_ratio/dual_mean": "Fraction of learned tokens that are clipped "
    "from below, from above, and by the dual clip.",
    "importance/mean, importance/capped": "p_old / p_logged after the cap; the fraction of tokens at the cap.",
    "sampling/sampling_logp_difference/mean, sampling/sampling_logp_difference/max": "Difference of log p_old "
    "(the trainer's, before the first step) and log p_logged (the sampler's).",
    "sampling/importance_sampling_ratio/min, sampling/importance_sampling_ratio/mean, "
    "sampling/importance_sampling_ratio/max": "p_old / p_logged, before the cap.",
    "sampling/kl_k1, sampling/kl_k3": "Two estimates of the KL divergence of the sampler from the trainer.",
    "sampling/effective_sample_size": "Effective sample size by these ratios, as a fraction of the tokens.",
    "staleness/mean, staleness/max": "How many policy versions are newer than the one that wrote a conversation.",
    "skipped": "1 if the step was skipped because loss or gradient was not finite.",
    "step_time, train/tokens_per_second": "Seconds of the step; tokens forwarded per second.",
    "memory/peak_gib": "Peak memory of this process, or of its GPU if it has one.",
    "mfu": "Fraction of the GPU's peak bfloat16 FLOP/s that is reached, if this peak is known.",
    "collect/reward, collect/reward_LENGTH, collect/reward_TASK": "`rl`: mean reward of the reads of an iteration.",
    "collect/groups, collect/solved_groups, collect/uniform_groups, collect/failed_groups": "`rl`: groups that "
    "are trained on; groups that are always right; other groups without variance; groups with a failed read.",
    "collect/stage, collect/epoch": "`rl`: index of the longest length asked, from 0; passes over your own questions.",
    "collect/cached_fraction, collect/tokens_per_second": "`rl`: cached fraction of prompt tokens; tokens per second.",
    "measure/accuracy_LENGTH_WAY": "`rl`: accuracy on held-out questions, by temperature. In `as_deployed` the rule "
    "for invented words applies.",
    "sync/seconds, collect/seconds, measure/seconds": "`rl`: seconds of each phase of an iteration.",
}
"""The metrics that training logs; a test compares the names with those of real training."""
_ARROW_TYPES: Final = {
    "ids": "list<uint32>", "logprobs": "list<float>", "names": "list<string>", "spans": "list<struct>",
    "rewards": "list<struct>",
}  # fmt: skip
_BUDGET_NAMES: Final = {"memory_tokens": "the memory", "answer_tokens": "the answer", "question_tokens": "the question"}


def read_field_docs(record_type: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, as one line each, with those of its base classes."""
    docs: dict[str, str] = {}
    for parent in reversed(record_type.__mro__[:-1]):
        body = ast.parse(inspect.getsource(parent)).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, next_statement in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_text = isinstance(next_statement, ast.Expr) and isinstance(next_statement.value, ast.Constant)
                docs[statement.target.id] = " ".join(str(next_statement.value.value).split()) if is_text else ""
    return docs


def format_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    titles = list(titles)
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def make_template_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield the roles of the strategies that ship: file, strategies, fields and the maximum length of the reply."""
    strategies_by_role: dict[str, list[str]] = {}
    roles = {}
    for name in list_strategy_names():
        strategy: Strategy = load_strategy(name)
        for role in strategy.roles:
            strategies_by_role.setdefault(role.name, []).append(name)
            roles[role.name] = role
    for name, role in roles.items():
        fields = ", ".join(f"`{{{field}}}`" for field in ("prompt", *sorted(role.fields)))
        length = _BUDGET_NAMES.get(str(role.max_tokens), f"{role.max_tokens} tokens")
        yield f"`{name}.txt`", ", ".join(strategies_by_role[name]), fields, length


def make_column_rows() -> Iterator[tuple[str, str, str]]:
    """Yield the columns of an export: name, type and meaning."""
    run_docs, conversation_docs = read_field_docs(RunRecord), read_field_docs(Conversation)
    docs = {
        **{f"run_{name}": text for name, text in run_docs.items()},
        **run_docs,
        **conversation_docs,
        **_COLUMN_MEANINGS,
    }
    for name, column in parquet.COLUMNS.items():
        yield f"`{name}`", f"`{_ARROW_TYPES.get(column.arrow, column.arrow)}`", docs.get(name, "")


def render_tables_page() -> str:
    """Return the page of templates and exports."""
    lines = ["# Tables", "", "Written by `python scripts/write_tables.py` from the code.", ""]
    lines += ["## Templates", ""]
    lines += [
        "A profile's folder `templates` has a file for each role. A template must have these fields, and no others.",
        "",
    ]
    lines += format_table(("file", "strategies", "fields", "maximum reply"), make_template_rows())
    lines += [
        "",
        "## Exports",
        "",
        "`memagent export runs.parquet` writes a row for each conversation, with its run's columns repeated.",
        "",
    ]
    lines += format_table(("column", "type", "meaning"), make_column_rows())
    return "\n".join(lines) + "\n"


def render_training_page() -> str:
    """Return the page with the settings, metrics, rewards and rows of training."""
    from memagent_training.job import config, job_settings, row_export  # noqa: PLC0415  this imports PyTorch
    from memagent_training.rewards import reward_names  # noqa: PLC0415

    config_type, presets = config.MultiConvDAPOConfig, job_settings.list_presets()
    docs, preset_values = read_field_docs(config_type), {name: job_settings.read_preset(name) for name in presets}
    setting_names = [name for name in config_type.__annotations__ if name not in config.FIXED_OPTIONS]
    setting_names += sorted(
        {name for preset in preset_values.values() for name in preset} - set(setting_names) - set(config.FIXED_OPTIONS)
    )
    fields = config_type.__dataclass_fields__

    def format_cell(value: object) -> str:
        return "-" if value is None else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"

    def make_setting_row(name: str) -> Iterator[str]:
        yield f"`{name}`"
        yield format_cell(fields[name].default)
        for preset in presets:
            value = preset_values[preset].get(name, fields[name].default)
            yield "" if value == fields[name].default else format_cell(value)
        yield docs.get(name) or _SETTING_MEANINGS[name]

    lines = ["# Tables of training", "", "Written by `python scripts/write_tables.py` from the code.", ""]
    lines += ["## Settings", ""]
    lines += [
        "`--set NAME=VALUE` of `memagent train` and `memagent rl`, and lines of a preset's file. `-` is "
        "none. A preset's column has what differs from the default.",
        "",
    ]
    lines += format_table(("setting", "default", *presets, "meaning"), map(make_setting_row, setting_names))
    other_settings = ", ".join(
        f"`{name}`" for name in config_type.list_setting_names() if name not in {*setting_names, *config.FIXED_OPTIONS}
    )
    lines += ["", f"With the meaning that transformers and TRL give them: {other_settings}.", ""]
    lines += ["Any other value of these is refused:", ""]
    lines += format_table(
        ("setting", "value", "instead"),
        ((f"`{name}`", format_cell(value), instead) for name, (value, instead) in sorted(config.FIXED_OPTIONS.items())),
    )
    lines += ["", "## Metrics", "", "The trackers of `--set report_to=...` and `trainer_state.json` have them.", ""]
    lines += format_table(
        ("metric", "meaning"), ((f"`{name.replace(', ', '`, `')}`", text) for name, text in METRICS.items())
    )
    lines += ["", "## Rewards", ""]
    lines += [
        f"{reward_names.REWARD_SIGNATURE} and name it as `--reward FILE.py:reward`; one of conversations, in a term "
        "of `credit`, returns a number for each of `run.conversations_K`. None means that it cannot judge the run.",
        "[An example](../../examples/own_reward.py). Those that come with the package:",
        "",
    ]
    rewards_by_unit = {"the run": reward_names.OUTCOME_REWARDS, "each conversation": reward_names.STEP_REWARDS}
    rewards = [(name, unit, reward) for unit, rewards in rewards_by_unit.items() for name, reward in rewards.items()]
    lines += format_table(
        ("name", "reward of", "meaning"),
        ((f"`{name}`", unit, read_summary(type(reward))) for name, unit, reward in rewards),
    )
    lines += [
        "",
        "## Rows",
        "",
        "`memagent train RUNS --model MODEL --rows rows.parquet`: a row for each conversation.",
        "",
    ]
    lines += format_table(
        ("column", "type", "meaning"),
        ((f"`{name}`", f"`{arrow_type}`", text) for name, arrow_type, text in row_export.COLUMNS),
    )
    return "\n".join(lines) + "\n"


def read_summary(kind: type) -> str:
    """Return the first paragraph of a class's text as one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())


PAGES: Final = {"tables.md": render_tables_page, "training_tables.md": render_training_page}

if __name__ == "__main__":
    for name, render in PAGES.items():
        (REFERENCE / name).write_text(render(), "utf-8")
