"""Improve a policy by the rewards of logged runs."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from memagent_graph.cli.options import JSONOption, print_json
from memagent_graph.plain_text import format_count
from memagent_training.commands.training_process import (
    Settings,
    build_from_options,
    is_main_process,
    leave_process_group,
    report_failures,
    require_training_extra,
    show_policy,
)
from memagent_training.job.job_options import TrainingOptions
from memagent_training.training_errors import RewardError, TrainingError

if TYPE_CHECKING:
    from memagent_training.job.training_job import PreparedJob, TrainingJob


@dataclass(frozen=True, kw_only=True)
class Train(TrainingOptions):
    """Improve the policy that made logged runs, by their rewards (Multi-Conv DAPO).

    On several devices: accelerate launch --config_file fsdp2.yaml -m memagent_graph train ..., with a file from
    training/configs/accelerate.
    """

    examples: ClassVar = (
        "memagent train runs.parquet --model embedded --gold answers.jsonl --reward boxed_exact_match --dry-run",
        "memagent train runs.parquet --model embedded --preset dapo --set warmup_steps=0 --out trained-policy",
    )
    runs: Annotated[Path, typer.Argument(help="A run log, or a file that `memagent export` wrote.")]
    settings: Settings = None
    reward: Annotated[
        str,
        typer.Option(
            help="A logged reward's name; with --gold exact_match, boxed_exact_match, lenient_match, token_f1, "
            "string_match, string_match_part, evidence_f2, longrlvr, exit_in_time or memagent_released; or your own, "
            "as module:function or file.py:function."
        ),
    ] = "reward"
    gold: Annotated[
        Path | None,
        typer.Option(help='JSON lines: {"question" or "run_id": ..., "answers": [...], "evidence": [...]}.'),
    ] = None
    groups: Annotated[
        Path | None,
        typer.Option(help="JSON object: the group of each run.", show_default="by question and document"),
    ] = None
    policy_versions: Annotated[
        str | None, typer.Option(help="Comma-separated policy versions that may have written the runs, oldest first.")
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; load no weights, write nothing (not with --rows).")
    ] = False
    rows: Annotated[
        Path | None,
        typer.Option(
            help="Write the rows that would be trained on to this Parquet file (ids, mask, log-probs, group, "
            "advantage, weight), for another trainer; train nothing."
        ),
    ] = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        interruption_message = (
            f"interrupted; continue with the same command and --resume, if {self.out} has a checkpoint"
        )
        with report_failures(as_json=self.as_json, interruption_message=interruption_message):
            require_training_extra()
            if self.dry_run and self.rows is not None:
                raise TrainingError("--dry-run writes nothing, and --rows writes a file", hint="Leave one of them out.")
            prepared = _prepare(self)
            if self.rows is not None:
                _write_rows(prepared, self.rows)
            elif self.dry_run:
                _show_plan(prepared, as_json=self.as_json)
            else:
                _train(prepared, as_json=self.as_json)


def _make_job(request: Train) -> TrainingJob:
    from memagent_training.job.job_settings import parse_settings, read_preset  # noqa: PLC0415
    from memagent_training.job.training_job import TrainingJob, read_groups  # noqa: PLC0415
    from memagent_training.rewards.gold_answers import GoldAnswers  # noqa: PLC0415
    from memagent_training.rewards.reward_names import OUTCOME_REWARDS, choose_reward  # noqa: PLC0415

    gold = None if request.gold is None else GoldAnswers.load(request.gold)
    versions_text = request.policy_versions
    settings = parse_settings(request.settings or ())
    # With a logged reward, the gold answers may be for the other terms of the advantage.
    credit_terms = settings.get("credit", read_preset(request.preset).get("credit"))
    uses_logged_reward = request.reward == "reward" and credit_terms
    if gold is not None and request.reward == "reward" and not uses_logged_reward:
        raise RewardError(
            f"no reward is named that compares with the gold answers in {request.gold}",
            hint=f"Choose one (--reward): {', '.join(OUTCOME_REWARDS)}.",
        )
    return build_from_options(
        TrainingJob,
        request,
        settings=settings,
        reward=choose_reward(request.reward, has_gold=gold is not None and not uses_logged_reward),
        gold=gold,
        groups=None if request.groups is None else read_groups(request.groups),
        policy_versions=None if versions_text is None else [version.strip() for version in versions_text.split(",")],
    )


def _prepare(request: Train) -> PreparedJob:
    from memagent_training.job.training_job import prepare  # noqa: PLC0415

    prepared = prepare(_make_job(request))
    if not is_main_process():
        return prepared
    if not request.dry_run:
        for line in prepared.replay.report.format_lines():
            typer.echo(line, err=True)
    for folder in prepared.checkpoints.incomplete:
        typer.echo(f"skipped the incomplete checkpoint {folder}", err=True)
    newest = prepared.checkpoints.newest
    if newest is not None:
        typer.echo(f"continuing from {newest}", err=True)
    elif request.resume:
        typer.echo(f"there is no complete checkpoint in {request.out}; beginning with step 0", err=True)
    return prepared


def _write_rows(prepared: PreparedJob, path: Path) -> None:
    from memagent_training.job.row_export import write_rows  # noqa: PLC0415

    if is_main_process():
        try:
            if path.exists() and path.samefile(str(prepared.job.runs)):
                raise TrainingError(f"{path} has the runs, and would be replaced", hint="Choose another file (--rows).")
            row_count = write_rows(prepared.schedule, path)
        except OSError as error:
            raise TrainingError(f"{path} cannot be written: {error}", hint="Choose a file in a folder.") from error
        steps = format_count(prepared.schedule.steps_per_pass, "step")
        typer.echo(f"{format_count(row_count, 'row')} of {steps}", err=True)
        typer.echo(str(path))


def _train(prepared: PreparedJob, *, as_json: bool) -> None:
    from memagent_training.job.training_job import train  # noqa: PLC0415

    # The trainer prints its progress, but standard output is only for results.
    with contextlib.redirect_stdout(sys.stderr):
        policy = train(prepared)
    leave_process_group()
    if not is_main_process():
        return
    adapter = None if policy.adapter is None else str(policy.adapter)
    if as_json:
        print_json(
            {"folder": str(policy.folder), "adapter": adapter, "steps": policy.steps, "metrics": dict(policy.metrics)}
        )
        return
    adapter_lines = (
        () if adapter is None else (f"its separate adapters, to serve with the base model, are in {adapter}",)
    )
    show_policy(policy.folder, policy.steps, *adapter_lines)


def _show_plan(prepared: PreparedJob, *, as_json: bool) -> None:
    if not is_main_process():
        return
    from memagent_training.job.dry_run import iter_plan_lines, plan_training  # noqa: PLC0415

    plan = plan_training(prepared)
    if as_json:
        print_json(plan)
    else:
        typer.echo("\n".join(iter_plan_lines(prepared, plan)))
    prepared.config.require_steps_after_warm_up(prepared.total_steps)
