"""Train a policy in a closed loop: it reads, is trained on its rewarded reads, and reads with its new weights."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import typer

from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.cli.options import JSONOption, QuietOption, print_json
from memagent_graph.errors import PolicyError
from memagent_graph.settings import WordingSettings
from memagent_training.commands.training_process import (
    Settings,
    build_from_options,
    is_main_process,
    leave_process_group,
    report_failures,
    require_training_extra,
    show_policy,
)
from memagent_training.job.job_options import LoopOptions
from memagent_training.training_errors import RewardError, TrainingError

if TYPE_CHECKING:
    from memagent_training.rl import LoopResult, RLJob

_EXIT_CODES: Final = {
    "CollapsedError": ExitCode.COLLAPSED,
    "VLLMNotInstalledError": ExitCode.SETTINGS,
    "VLLMServerError": ExitCode.POLICY,
}
_QUIETED_MODULES: Final = r"(transformers|trl|torch|accelerate|peft|datasets|huggingface_hub)\b"
"""Modules whose warnings are not for users: they are about how trainer and libraries call each other."""


@dataclass(frozen=True, kw_only=True)
class RL(LoopOptions, WordingSettings):
    """Improve a policy on questions that it reads itself: collect, train, serve the new weights, and again.

    On several devices: accelerate launch --config_file fsdp2.yaml -m memagent_graph rl ..., with a file from
    training/configs/accelerate.
    """

    examples: ClassVar = (
        "memagent rl --data questions.jsonl --model rl-base --out rl-policy",
        "memagent rl --engine local --task niah_multikey_2 --small --lengths 500 --iterations 4 --set warmup_steps=0",
        "memagent rl --task niah_multikey_2 --small --lengths 500,1000,2000 --out rl-policy",
        "memagent rl --task niah_multikey_2 --small --lengths 500,1000,2000 --out rl-policy --resume",
    )
    task: Annotated[
        list[str] | None,
        typer.Option(help="An evaluation task to take questions from. Repeatable.", show_default="that of --data"),
    ] = None
    lengths: Annotated[
        str | None,
        typer.Option(
            help="The documents' lengths, shortest first, as in 500,1000,2000 or 8k.", show_default="those of --data"
        ),
    ] = None
    model: Annotated[
        str,
        typer.Option(help='The policy to start from: a folder, a hub id, one that was added, or "embedded".'),
    ] = "embedded"
    settings: Settings = None
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per question.")] = 16
    groups: Annotated[
        int,
        typer.Option(
            min=1,
            help="Questions to train on per iteration. If the preset drops groups of equal rewards, they do not count.",
        ),
    ] = 16
    max_questions: Annotated[int, typer.Option(min=1, help="Maximum questions per iteration to fill --groups.")] = 64
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent reads.")] = 256
    reward: Annotated[
        str,
        typer.Option(
            help="exact_match, boxed_exact_match, lenient_match, string_match, token_f1, memagent_released, "
            "evidence_f2 or longrlvr; or your own, as module:function or file.py:function."
        ),
    ] = "exact_match"
    measure_lengths: Annotated[
        str | None,
        typer.Option(help="Document lengths to measure with.", show_default="--lengths, and 4 times the last"),
    ] = None
    measure_temperatures: Annotated[
        str,
        typer.Option(help="Temperatures to measure at, comma-separated; the first decides which policy is best."),
    ] = "0.0"
    server_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help='Option of the loop\'s own server, as in "--max-model-len 4096". Repeatable.'
        ),
    ] = None
    quiet: QuietOption = False
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        interruption_message = f"interrupted; {_make_resume_hint(self.out)}"
        with report_failures(as_json=self.as_json, interruption_message=interruption_message, exit_codes=_EXIT_CODES):
            require_training_extra()
            # Libraries print their progress, but standard output is only for results.
            with contextlib.redirect_stdout(sys.stderr), _quiet_libraries():
                result = _run_loop(_make_job(self), quiet=self.quiet)
            leave_process_group()
            if is_main_process():
                _show_result(result, strategy=self.strategy, as_json=self.as_json)


def _make_job(request: RL) -> RLJob:
    """Return the loop that the options describe.

    Raises:
        TrainingError, EvaluationError: a value cannot be parsed.
    """
    from memagent_evaluation.planning import parse_lengths  # noqa: PLC0415
    from memagent_training.job.collect import CollectSettings  # noqa: PLC0415
    from memagent_training.job.job_settings import parse_settings  # noqa: PLC0415
    from memagent_training.rewards.reward_names import choose_reward  # noqa: PLC0415
    from memagent_training.rl.rl_job import RLJob  # noqa: PLC0415

    # The environment's key is only for a server that the loop did not start.
    api_key = request.api_key if request.base_url is None else request.api_key or os.environ.get("OPENAI_API_KEY")
    return build_from_options(
        RLJob,
        request,
        tasks=tuple(dict.fromkeys(request.task or ())),
        lengths=() if request.lengths is None else parse_lengths(request.lengths),
        settings=parse_settings(request.settings or ()),
        collect_settings=build_from_options(CollectSettings, request),
        reward=choose_reward(request.reward),
        reading=build_from_options(WordingSettings, request, strategy=None),
        measure_lengths=() if request.measure_lengths is None else parse_lengths(request.measure_lengths),
        measure_temperatures=_parse_temperatures(request.measure_temperatures),
        api_key=api_key,
        server_options=_split_options(request.server_option or ()),
    )


def _parse_temperatures(text: str) -> tuple[float, ...]:
    try:
        temperatures = tuple(dict.fromkeys(float(number) for number in text.split(",") if number.strip()))
    except ValueError:
        temperatures = ()
    if not temperatures or not all(0 <= temperature < float("inf") for temperature in temperatures):
        raise TrainingError(
            f"{text!r} are not temperatures", hint="Pass numbers of 0 or more, as in --measure-temperatures 0,1."
        )
    return temperatures


def _split_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the server's options, split as a shell does."""
    try:
        return tuple(argument for option in options for argument in shlex.split(option))
    except ValueError as error:
        raise TrainingError(
            f"the options of the server cannot be parsed: {error}", hint="Close the quotes in --server-option."
        ) from error


def _run_loop(job: RLJob, *, quiet: bool) -> LoopResult:
    """Run the loop; if it ends with an error, print how to continue."""
    from memagent_training.rl import run  # noqa: PLC0415
    from memagent_training.rl.collector import CollapsedError  # noqa: PLC0415
    from memagent_training.rl.loop_status import LoopStatus  # noqa: PLC0415
    from memagent_training.rl.rl_job import BEST, JOURNAL  # noqa: PLC0415
    from memagent_training.serving.vllm_server import VLLMServerError  # noqa: PLC0415

    try:
        with LoopStatus(job.iterations, quiet=quiet or not is_main_process()) as status:
            return run(job, status)
    except CollapsedError:
        if is_main_process() and (job.out / BEST).is_dir():
            best_folder = job.out / BEST
            remedy = f"start from it: --model {shlex.quote(str(best_folder))}"
            typer.echo(f"the policy that was measured best is in {best_folder}; {remedy}", err=True)
        raise
    except (PolicyError, RewardError, VLLMServerError):
        if is_main_process() and (job.out / JOURNAL).exists():
            typer.echo(_make_resume_hint(job.out), err=True)
        raise


def _make_resume_hint(out: Path) -> str:
    return f"continue with what {out} keeps with the same command and --resume"


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Turn off progress bars, messages and warnings of libraries while the loop runs."""
    import transformers.utils.logging as transformers_log  # noqa: PLC0415

    had_bars, verbosity = transformers_log.is_progress_bar_enabled(), transformers_log.get_verbosity()
    disabled_level = logging.root.manager.disable
    transformers_log.disable_progress_bar()
    transformers_log.set_verbosity_error()
    logging.disable(logging.INFO)  # the status shows the same
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=_QUIETED_MODULES)
            yield
    finally:
        logging.disable(disabled_level)
        transformers_log.set_verbosity(verbosity)
        if had_bars:
            transformers_log.enable_progress_bar()


def _show_result(result: LoopResult, *, strategy: str | None, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "policy": str(result.policy),
                "steps": result.steps,
                "reason": result.reason,
                "best": None if result.best is None else str(result.best),
                "measurements": [
                    {**asdict(measurement), "mean": measurement.mean} for measurement in result.measurements
                ],
            }
        )
        return
    best_lines = () if result.best is None else (f"the policy that was measured best is in {result.best}",)
    show_policy(result.policy, result.steps, *best_lines, reason=f"{result.reason}; ", strategy=strategy)
