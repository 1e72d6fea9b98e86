"""Measure policies and ways of reading on documents with known answers.

Imports are inside functions, because they are slow and `--help` does not need them.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from memagent_evaluation.eval_options import EvalOptions
from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.cli.options import JSONOption, PriceInOption, PriceOutOption, print_json
from memagent_graph.errors import EvaluationError, PolicyError
from memagent_graph.policies.server_url import remove_credentials

if TYPE_CHECKING:
    from memagent_evaluation.result_table import Results
    from memagent_graph.results import Prices


@dataclass(frozen=True, kw_only=True)
class Eval(EvalOptions):
    """Measure a policy on long documents, compared with other ways to read them: accuracy, cost, failures."""

    examples: ClassVar = (
        "memagent eval --list",
        "memagent eval niah_single_2 --lengths 8k,32k --n 50 --base-url http://localhost:8000/v1",
        "memagent eval niah_single_2 --small --model embedded --systems memagent,full_context --out results",
    )

    def run(self) -> None:
        """Run the command."""
        if self.list_names:
            _print_names(as_json=self.as_json)
            return
        if not self.tasks:
            raise typer.BadParameter("name at least one; --list names all", param_hint="'TASKS'")
        import asyncio  # noqa: PLC0415

        from memagent_evaluation.harness import EvaluationEnd  # noqa: PLC0415
        from memagent_evaluation.report import write_outputs  # noqa: PLC0415
        from memagent_evaluation.request import run_evaluation  # noqa: PLC0415
        from memagent_evaluation.result_journal import RUNS, require_no_results  # noqa: PLC0415
        from memagent_evaluation.result_table import QuestionOutcome  # noqa: PLC0415
        from memagent_graph.results import Prices  # noqa: PLC0415

        out, log_path = self.out, self.log or self.out / RUNS
        prices = Prices.of(self.price_in, self.price_out)
        if not self.resume:
            require_no_results(out)
        try:
            evaluation_end = asyncio.run(run_evaluation(self, log_path, _format_command_line(self.context)))
        except ValueError as error:
            raise EvaluationError(str(error)) from error
        except PolicyError:
            _print_how_to_continue(out)
            raise
        except (KeyboardInterrupt, asyncio.CancelledError):
            _print_how_to_continue(out, "interrupted; ")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        results = write_outputs(out, log_path, prices)
        _print_results(results, out, log_path, evaluation_end.value, prices, as_json=self.as_json)
        if evaluation_end is not EvaluationEnd.DONE:
            typer.echo(f"stopped at {evaluation_end.value.replace('_', ' ')}; {_describe_resumption(out)}", err=True)
            raise typer.Exit(ExitCode.STOPPED)
        if all(row.outcome is QuestionOutcome.FAILED for row in results.rows):
            raise typer.Exit(ExitCode.POLICY)


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """Make the tables and plots of an evaluation again, finished or not, or compare two evaluations."""

    examples: ClassVar = (
        "memagent eval-report results",
        "memagent eval-report results other-results",
    )
    folder: Annotated[Path, typer.Argument(help="A folder that `memagent eval` wrote to.")]
    other: Annotated[Path | None, typer.Argument(help="Another one, to compare on the questions that both have.")] = (
        None
    )
    price_in: PriceInOption = None
    price_out: PriceOutOption = None
    as_json: JSONOption = False

    def run(self) -> None:
        """Run the command."""
        from memagent_evaluation.report import render_comparison, write_outputs  # noqa: PLC0415
        from memagent_evaluation.result_journal import RUNS, load_results  # noqa: PLC0415
        from memagent_evaluation.standings import compare_evaluations  # noqa: PLC0415
        from memagent_graph.cli.console import Console  # noqa: PLC0415
        from memagent_graph.results import Prices  # noqa: PLC0415

        folder, other = self.folder, self.other
        if other is None:
            log_path = folder / RUNS if (folder / RUNS).exists() else None
            prices = Prices.of(self.price_in, self.price_out)
            with Console().show_status("drawing tables and plots"):
                results = write_outputs(folder, log_path, prices)
            end = "unfinished" if results.missing else "done"
            _print_results(results, folder, log_path, end, prices, as_json=self.as_json)
            return
        with Console().show_status("comparing the evaluations"):
            first, second = load_results(folder), load_results(other)
        names = (str(folder), str(other))
        if self.as_json:
            by_system = compare_evaluations(first, second, names)
            standings = {
                system: [standing.to_dict() for standing in system_standings]
                for system, system_standings in by_system.items()
            }
            print_json({"first": names[0], "second": names[1], "standings": standings})
        else:
            sys.stdout.write(render_comparison(first, second, names))


def _print_results(
    results: Results, folder: Path, log_path: Path | None, end: str, prices: Prices | None, *, as_json: bool
) -> None:
    """Print the report, or the figures as JSON."""
    from memagent_evaluation.report import render_report, summarise  # noqa: PLC0415
    from memagent_evaluation.standings import compare_systems  # noqa: PLC0415
    from memagent_evaluation.suites import compute_suite_scores  # noqa: PLC0415

    if as_json:
        values = {
            "evaluation": results.evaluation_id,
            "folder": str(folder),
            "ended": end,
            "rows": len(results.rows),
            "missing": results.missing,
            "settings": results.settings,
            "results": summarise(results, prices),
            "suites": [asdict(score) for score in compute_suite_scores(results.rows)],
            "standings": [standing.to_dict() for standing in compare_systems(results)],
        }
        print_json(values)
        return
    sys.stdout.write(render_report(results, log=log_path, prices=prices))
    if results.rows:
        typer.echo(f"table, report and plots are in {folder}", err=True)


def _print_names(*, as_json: bool) -> None:
    from memagent_evaluation.suites import SUITES  # noqa: PLC0415
    from memagent_evaluation.systems import list_systems  # noqa: PLC0415
    from memagent_evaluation.tasks import list_task_options, list_tasks  # noqa: PLC0415

    if as_json:
        print_json({"tasks": list_tasks(), "suites": SUITES, "systems": list_systems()})
        return
    tasks = ["".join([name, *(f"[:{option}=...]" for option in list_task_options(name))]) for name in list_tasks()]
    suites = [f"{name}: {', '.join(suite)}" for name, suite in SUITES.items()]
    for title, names in (("tasks", tasks), ("suites", suites), ("systems", list_systems())):
        typer.echo(f"{title}:\n" + "\n".join(f"  {name}" for name in names))


def _print_how_to_continue(folder: Path, reason: str = "") -> None:
    """Print how to continue an evaluation that ended early. Other errors name the remedy themselves."""
    from memagent_evaluation.result_journal import JOURNAL  # noqa: PLC0415

    if (folder / JOURNAL).exists():
        typer.echo(f"{reason}{_describe_resumption(folder)}", err=True)


def _describe_resumption(folder: Path) -> str:
    return f"nothing in {folder} is lost; continue with the same command and --resume"


_SECRET_OPTIONS = {"judge_api_key", *(option.name for option in fields(EvalOptions) if not option.repr)}


def _format_command_line(context: typer.Context) -> str:
    """Return the command line as it was given, without keys and other credentials."""
    arguments = ["memagent", "eval", *(context.params["tasks"] or ())]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in {"tasks", *_SECRET_OPTIONS}:
            continue
        value = context.params[name]
        option = max(parameter.opts, key=len)
        if name in {"base_url", "judge_base_url"}:
            value = remove_credentials(value)
        arguments += [option] if value is True else [option, str(value)]
    return shlex.join(arguments)
