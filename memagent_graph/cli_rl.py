"""The command line's part for reinforcement learning: `memagent rl`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from memagent_graph.cli_json import print_json
from memagent_graph.cli_options import (
    AnswerForm,
    AnswerTemplate,
    AnswerTokens,
    AsJSON,
    ChunkBoundary,
    ChunkTokens,
    ContextWindow,
    EmptyMemory,
    Layout,
    MemoryTokens,
    ProfileSpec,
    QuestionTokens,
    Quiet,
    UpdateTemplate,
)
from memagent_graph.cli_training import (
    LoRARank,
    OptionNames,
    Settings,
    failures_told,
    is_main_process,
    leave_the_others,
    require_extra,
)
from memagent_graph.errors import PolicyError
from memagent_graph.exit_codes import ExitCode

if TYPE_CHECKING:
    from memagent_training.rl import Finished, RLJob

_OPTION_NAMES: Final[OptionNames] = (
    (re.compile(r"\bas many questions as groups are wanted"), "as many --max-questions as --groups"),
    (re.compile(r"\bName a task at least, and lengths that grow"), "Name a --task at least, and --lengths that grow"),
    (re.compile(r"\bSyncSettings\.tolerance\b"), "--sync-tolerance"),
    (re.compile(r"\bstartup_timeout\b"), "--server-timeout"),
    (re.compile(r"\btakes a TrainingRun\b"), "takes a Sample and its ReadResult"),
)
_CODES: Final = {
    "CollapsedError": ExitCode.COLLAPSED,
    "VLLMNotInstalledError": ExitCode.SETTINGS,
    "VLLMServerError": ExitCode.POLICY,
}
_TALKATIVE: Final = ("httpx", "httpx2", "openai", "accelerate", "datasets", "trl")
"""Libraries whose log below warnings says nothing that the dashboard does not."""
_WARNING: Final = r"(transformers|trl|torch|accelerate|peft|datasets|huggingface_hub)\b"
"""Modules about whose warnings a user can do nothing: they are about how trainer and libraries call each other."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("rl")(rl)


def rl(
    task: Annotated[list[str], typer.Option(help="An evaluation task whose questions are asked. Repeatable.")],
    lengths: Annotated[str, typer.Option(help="The documents' lengths, shortest first, as in 500,1000,2000 or 8k.")],
    model: Annotated[
        str | None,
        typer.Option(help='The policy to begin with: a folder, a hub id, or "embedded".', show_default="embedded"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for all that the loop keeps, and the policy.")] = Path("rl-policy"),
    preset: Annotated[
        str | None, typer.Option(help="memagent-paper, dapo, or a YAML file of settings.", show_default="dapo")
    ] = None,
    settings: Settings = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="How often to collect and to train.", show_default="100")
    ] = None,
    rollouts: Annotated[
        int | None, typer.Option(min=2, help="How often each question is read.", show_default="16")
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option(min=1, help="Questions with differing rewards to train on per iteration.", show_default="16"),
    ] = None,
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="The most questions to ask for them.", show_default="64")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Reads in flight.", show_default="256")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="At which is read for training; above 0.", show_default="1.0")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="strict, lenient, string_match or token_f1; or your own, as module:function or file.py:function.",
            show_default="strict",
        ),
    ] = None,
    evidence_share: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the advantage that a memory earns by holding what the answer needs.",
            show_default="0.0",
        ),
    ] = None,
    steps_behind: Annotated[
        int | None,
        typer.Option(
            min=0, max=1, help="1 collects during training, with weights one iteration old.", show_default="0"
        ),
    ] = None,
    advance_at: Annotated[
        float | None,
        typer.Option(help="Mean reward of the longest length so far that adds the next one.", show_default="0.8"),
    ] = None,
    profile: ProfileSpec = None,
    layout: Layout = None,
    answer_format: AnswerForm = None,
    update_template: UpdateTemplate = None,
    answer_template: AnswerTemplate = None,
    empty_memory: EmptyMemory = None,
    context_window: ContextWindow = None,
    question_tokens: QuestionTokens = None,
    memory_tokens: MemoryTokens = None,
    chunk_tokens: ChunkTokens = None,
    answer_tokens: AnswerTokens = None,
    boundary: ChunkBoundary = None,
    measure_every: Annotated[
        int | None, typer.Option(min=0, help="Iterations between measurements; 0 for none.", show_default="10")
    ] = None,
    measure_lengths: Annotated[
        str | None,
        typer.Option(help="Lengths of the questions to measure with.", show_default="--lengths, and 4 times the last"),
    ] = None,
    measure_count: Annotated[
        int | None, typer.Option(min=1, help="Questions of each of these lengths.", show_default="32")
    ] = None,
    measure_temperatures: Annotated[
        str | None,
        typer.Option(
            help="At which is measured, with commas between; the first decides which policy is best.",
            show_default="0.0",
        ),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="The tasks' variants for policies of small context.")] = False,
    haystack: Annotated[
        Path | None,
        typer.Option(help="Text to hide facts in: a file, or a folder of .txt and .md.", show_default="Python's docs"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the questions and of the training.", show_default="0")
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="A vLLM server that runs already with the model's weights in float32, on this file system, started "
            "with VLLM_SERVER_DEV_MODE=1 (for --lora: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora) and "
            "--generation-config vllm.",
            show_default="starts its own",
        ),
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="What that server calls the model.", show_default="policy")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="That server's key.", show_default="$OPENAI_API_KEY")] = None,
    server_option: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help='For the server that it starts, as in "--max-model-len 4096". Repeatable.'),
    ] = None,
    server_timeout: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds that the server may take to come up.", show_default="600.0"),
    ] = None,
    sync_tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far log-probs of server and trainer may differ after new weights, in nats.", show_default="0.001"
        ),
    ] = None,
    lora: LoRARank = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the loop in --out, or begin.")] = False,
    quiet: Quiet = False,
    as_json: AsJSON = False,
) -> None:
    """Improve a policy on questions that it reads itself: collect, train, serve the new weights, and again.

    On several devices: accelerate launch --config_file fsdp2.yaml -m memagent_graph rl ..., with a file from
    training/configs/accelerate.
    """
    given = dict(locals())
    interrupted = f"interrupted; {_go_on(out)}"
    with failures_told(as_json=as_json, interrupted=interrupted, option_names=_OPTION_NAMES, codes=_CODES):
        require_extra()
        # Libraries print what they do, and standard output is for results alone.
        with contextlib.redirect_stdout(sys.stderr), _calm_libraries():
            finished = _finished(_job(given), quiet=quiet)
        leave_the_others()
        if is_main_process():
            _show(finished, as_json=as_json)


def _job(given: dict[str, Any]) -> RLJob:
    """What was asked for, from the command's parameters by name; what was not given is as the job has it.

    Raises:
        TrainingError, EvaluationError: a value that cannot be read.
    """
    from memagent_graph.evaluation.planning import parse_lengths  # noqa: PLC0415
    from memagent_training.job.collect import CollectSettings  # noqa: PLC0415
    from memagent_training.job.job_settings import parse_settings  # noqa: PLC0415
    from memagent_training.rewards.reward_names import chosen_reward  # noqa: PLC0415
    from memagent_training.rl.reading_settings import ReadingSettings  # noqa: PLC0415
    from memagent_training.rl.rl_job import MeasureSettings, RLJob  # noqa: PLC0415

    readers: dict[str, Callable[[str], Any]] = {
        "lengths": parse_lengths,
        "measure_lengths": parse_lengths,
        "measure_temperatures": _temperatures,
        "reward": chosen_reward,
    }
    found = {
        name: readers[name](value) if name in readers else value for name, value in given.items() if value is not None
    }
    found |= {
        "tasks": tuple(dict.fromkeys(given["task"])),
        "settings": parse_settings(given["settings"] or ()),
        "server_options": _words(given["server_option"] or ()),
        "lora_rank": given["lora"],
        "collect": CollectSettings(**_of(CollectSettings, found)),
        "reading": ReadingSettings(**_of(ReadingSettings, found)),
        "measure": MeasureSettings(**_of(MeasureSettings, found, "measure_")),
    }
    if given["base_url"] is not None:
        found.setdefault("api_key", os.environ.get("OPENAI_API_KEY"))
    return RLJob(**_of(RLJob, found))


def _of(kind: Any, found: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Those values that a dataclass has fields for."""
    return {each.name: found[prefix + each.name] for each in fields(kind) if prefix + each.name in found}


def _temperatures(text: str) -> tuple[float, ...]:
    from memagent_training.training_errors import TrainingError  # noqa: PLC0415

    try:
        found = tuple(dict.fromkeys(float(each) for each in text.split(",") if each.strip()))
    except ValueError:
        found = ()
    if not found or not all(0 <= each < float("inf") for each in found):
        raise TrainingError(
            f"{text!r} are no temperatures", hint="Give numbers of 0 or more, as in --measure-temperatures 0,1."
        )
    return found


def _words(options: Sequence[str]) -> tuple[str, ...]:
    """The server's options one by one, as a shell would take them apart."""
    from memagent_training.training_errors import TrainingError  # noqa: PLC0415

    try:
        return tuple(word for each in options for word in shlex.split(each))
    except ValueError as error:
        raise TrainingError(
            f"the options of the server cannot be taken apart: {error}", hint="Close the quotes in --server-option."
        ) from error


def _finished(job: RLJob, *, quiet: bool) -> Finished:
    """Run the loop, and say what is left of one that ends early."""
    from memagent_training.rl import run  # noqa: PLC0415
    from memagent_training.rl.collapse import CollapsedError  # noqa: PLC0415
    from memagent_training.rl.dashboard import Dashboard  # noqa: PLC0415
    from memagent_training.rl.rl_job import BEST, JOURNAL  # noqa: PLC0415
    from memagent_training.serving.vllm_server import VLLMServerError  # noqa: PLC0415

    try:
        with Dashboard(job.iterations, quiet=quiet or not is_main_process()) as dashboard:
            return run(job, dashboard)
    except CollapsedError:
        if is_main_process() and (job.out / BEST).is_dir():
            best = job.out / BEST
            typer.echo(f"the policy that was measured best is in {best}; begin from it: --model {best}", err=True)
        raise
    except (PolicyError, VLLMServerError):
        if is_main_process() and (job.out / JOURNAL).exists():
            typer.echo(_go_on(job.out), err=True)
        raise


def _go_on(out: Path) -> str:
    return f"go on from what {out} keeps with the same command and --resume"


@contextlib.contextmanager
def _calm_libraries() -> Iterator[None]:
    """No progress bars, notes, or warnings of libraries on the screen while it lasts."""
    import transformers.utils.logging as transformers_log  # noqa: PLC0415

    had_bars, verbosity = transformers_log.is_progress_bar_enabled(), transformers_log.get_verbosity()
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    transformers_log.disable_progress_bar()
    transformers_log.set_verbosity_error()
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=_WARNING)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        transformers_log.set_verbosity(verbosity)
        if had_bars:
            transformers_log.enable_progress_bar()


def _show(finished: Finished, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "policy": str(finished.policy),
                "steps": finished.steps,
                "reason": finished.reason,
                "best": None if finished.best is None else str(finished.best),
                "measurements": [{**asdict(each), "mean": each.mean} for each in finished.measurements],
            }
        )
        return
    steps = f"{finished.steps:,} step{'' if finished.steps == 1 else 's'}"
    typer.echo(f"{finished.reason}; trained for {steps}; the policy is in {finished.policy}", err=True)
    if finished.best is not None:
        typer.echo(f"the policy that was measured best is in {finished.best}", err=True)
    typer.echo(f'read with it: memagent read DOCUMENT --question "..." --model {finished.policy}', err=True)
    typer.echo(str(finished.policy))
