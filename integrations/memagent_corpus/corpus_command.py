"""Read many documents into one table."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from memagent_graph.cli.commands import add_command
from memagent_graph.cli.exit_codes import ExitCode, failures_told
from memagent_graph.cli.options import (
    CHECKPOINTS_HELP,
    STORE_HELP,
    ApiKey,
    AsJSON,
    MaxSeconds,
    MaxTokensTotal,
    PriceIn,
    PriceOut,
    Quiet,
    ReaderOptions,
    ReplaceUndecodable,
    Temperature,
    TopP,
)
from memagent_graph.cli.output import print_json
from memagent_graph.cli.question_files import questions_of
from memagent_graph.errors import MemAgentError
from memagent_graph.plain_text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memagent_corpus.corpus_estimate import CorpusEstimate
    from memagent_corpus.corpus_inputs import Inputs
    from memagent_corpus.corpus_run import CorpusSummary
    from memagent_corpus.on_ray import ActorPlan, RayEngine
    from memagent_graph.prices import Prices
    from memagent_graph.response_format import ResponseFormat
    from memagent_graph.settings import ReaderSettings


@dataclass(frozen=True, kw_only=True)
class Corpus(ReaderOptions):
    """Read many documents and write one table, with exactly one row for each document and question.

    Run the same command again to continue an unfinished run, or to add new documents and questions.
    """

    examples: ClassVar = (
        'memagent corpus filings -q "Who signed it?" -q "When?" --out answers --base-url http://localhost:8000/v1',
        'memagent corpus "s3://bucket/2024/*.pdf" --questions @questions.txt --out s3://bucket/answers',
        "memagent corpus filings.parquet --text-column body --question-column question --out answers",
        'memagent corpus filings -q "What does it report?" --schema filing.py:Filing --out answers',
        'memagent corpus filings -q "Who signed it?" --out answers --estimate --price-in 0.2 --price-out 0.6',
        'memagent corpus /shared/filings -q "Who signed it?" --out /shared/answers --ray auto --ray-actors 2:16',
    )
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            help="A folder, a pattern in quotes, a Parquet, JSONL, CSV or ZIP file, a URL of one of these (s3, gs, az, "
            "http), zip://PATTERN::ARCHIVE, or dataset:NAME.",
        ),
    ]
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            "--questions",
            "-q",
            help="A question about every document. Repeatable. @FILE is a file with one question per line.",
            show_default="--question-column",
        ),
    ] = None
    out: Annotated[str, typer.Option(help="The folder of the table, or its URL.")]
    schema: Annotated[
        str | None,
        typer.Option(
            help="The form of the answers: a file with a JSON schema, or a Pydantic model as path/to/file.py:Model. "
            "Each property becomes a typed column of the table.",
            show_default="plain text answers",
        ),
    ] = None
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Estimate tokens, price and time, and read nothing."),
    ] = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Read documents again that have rows with errors.")
    ] = False
    documents: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of documents read at the same time.",
            show_default="enough for --concurrency requests",
        ),
    ] = None
    rows_per_part: Annotated[int, typer.Option(min=1, help="Rows in each Parquet file.")] = 10_000
    keep_texts: Annotated[
        bool, typer.Option("--keep-texts", help="Keep the documents' texts beside the table, to check quotes later.")
    ] = False
    checkpoints: Annotated[str | None, typer.Option(help=CHECKPOINTS_HELP, show_default="beside the table")] = None
    store: Annotated[str | None, typer.Option("--store", help=STORE_HELP, show_default="beside the table")] = None
    log: Annotated[
        Path | None, typer.Option("--log", help="Log all calls in this SQLite file.", show_default="none")
    ] = None
    api_key: ApiKey = None
    requests_per_minute: Annotated[
        float | None, typer.Option(min=0.001, help="Maximum number of requests per minute.", show_default="no limit")
    ] = None
    tokens_per_minute: Annotated[
        float | None,
        typer.Option(min=1, help="Maximum number of prompt and completion tokens per minute.", show_default="no limit"),
    ] = None
    session_header: Annotated[
        str | None,
        typer.Option(
            help="Send the document's key in this header of every request, such as X-Session-Id, so that a router can "
            "send all requests of a document to the same replica.",
            show_default="none",
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Read on a Ray cluster: auto, local, HOST:PORT, or ray://HOST:PORT. --concurrency and --documents "
            "then apply to each actor.",
            show_default="in this process",
        ),
    ] = None
    ray_actors: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Number of actors on the cluster.", show_default="one for each machine"),
    ] = None
    encoding: Annotated[str | None, typer.Option(help="The charset of text files.", show_default="detected")] = None
    replace_undecodable: ReplaceUndecodable = False
    max_bytes: Annotated[int, typer.Option(min=1, help="Maximum size of a document in bytes.")] = 2**30
    text_column: Annotated[
        str | None, typer.Option(help="The column with the texts.", show_default="text, if it exists")
    ] = None
    path_column: Annotated[str | None, typer.Option(help="The column with the files' paths.", show_default="path")] = (
        None
    )
    id_column: Annotated[
        str | None, typer.Option(help="The column with unique document names.", show_default="the row's number")
    ] = None
    question_column: Annotated[
        str | None,
        typer.Option(help="The column with a question, or a list of questions, about the row's document only."),
    ] = None
    keep_column: Annotated[
        list[str] | None, typer.Option(help="A column to copy to the table. Repeatable.", show_default="none")
    ] = None
    root: Annotated[
        Path | None,
        typer.Option(help="The folder of the files in --path-column.", show_default="the input table's folder"),
    ] = None
    subset: Annotated[str | None, typer.Option(help="The dataset's subset.")] = None
    split: Annotated[str, typer.Option(help="The dataset's split.")] = "train"
    allow_private_addresses: Annotated[
        bool,
        typer.Option("--allow-private-addresses", help="Allow http and https URLs that lead to your own network."),
    ] = False
    allow_chained_urls: Annotated[
        bool, typer.Option("--allow-chained-urls", help="Allow chains of URLs, such as simplecache::s3://...")
    ] = False
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.")] = None
    max_documents: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many documents; can be continued.")
    ] = None
    max_tokens_total: MaxTokensTotal = None
    max_seconds: MaxSeconds = None
    price_in: PriceIn = None
    price_out: PriceOut = None
    tokens_per_second: Annotated[
        float | None, typer.Option(min=0.001, help="With --estimate: the server's throughput, to estimate the time.")
    ] = None
    as_json: AsJSON = False
    quiet: Quiet = False

    def run(self) -> None:
        """Run the command."""
        import asyncio  # noqa: PLC0415

        from memagent_corpus.corpus_run import Ended  # noqa: PLC0415
        from memagent_graph.cli.console import Console  # noqa: PLC0415
        from memagent_graph.prices import prices_of  # noqa: PLC0415
        from memagent_graph.response_format import ResponseFormat  # noqa: PLC0415

        console = Console(as_json=self.as_json, quiet=self.quiet)
        with failures_told(console):
            prices, actors = prices_of(self.price_in, self.price_out), self._actors()
            questions = questions_of(self.question or ())
            if not questions and self.question_column is None:
                raise MemAgentError("there is no question", hint="Ask one with -q, or use --question-column.")
            form = None if self.schema is None else ResponseFormat.named(self.schema)
            inputs = self._inputs()
            settings = replace(self.settings(), logprobs=None if self.log else False)
            if (self.requests_per_minute or self.tokens_per_minute) and settings.policy_name in {"embedded", "local"}:
                raise MemAgentError(
                    "the limits for requests and tokens per minute are for a server, and this policy has no server",
                    hint="Omit --requests-per-minute and --tokens-per-minute, or use a server with --base-url.",
                )
            console.policy(settings.policy_told)
            try:
                if self.estimate:
                    self._print_estimate(asyncio.run(self._estimate(inputs, questions, settings, form)), prices)
                    return
                summary = asyncio.run(self._read(inputs, questions, settings, form, actors))
            except ValueError as error:
                raise typer.Exit(console.failure(MemAgentError(str(error)), ExitCode.SETTINGS)) from None
            except (KeyboardInterrupt, asyncio.CancelledError):
                typer.echo("interrupted; finished rows are kept, and the same command continues", err=True)
                raise typer.Exit(ExitCode.INTERRUPTED) from None
        self._print_summary(summary, prices)
        if summary.ended is not Ended.DONE:
            raise typer.Exit(ExitCode.STOPPED)
        if summary.rows and summary.failed_rows == summary.rows:
            raise typer.Exit(ExitCode.DOCUMENT)

    def _inputs(self) -> Inputs:
        from memagent_corpus.corpus_inputs import InputOptions, open_inputs  # noqa: PLC0415
        from memagent_corpus.source_access import SourceAccess  # noqa: PLC0415
        from memagent_corpus.table_inputs import Columns  # noqa: PLC0415

        access = SourceAccess(
            root=str(self.root) if self.root else "",
            allow_private=self.allow_private_addresses,
            allow_chained=self.allow_chained_urls,
            max_bytes=self.max_bytes,
            encoding=self.encoding,
        )
        columns = Columns(
            text=self.text_column,
            path=self.path_column,
            id=self.id_column,
            questions=self.question_column,
            kept=tuple(self.keep_column or ()),
        )
        return open_inputs(
            self.source, InputOptions(access=access, columns=columns, subset=self.subset, split=self.split)
        )

    def _actors(self) -> tuple[int, int] | None:
        """Parse --ray-actors to the minimum and maximum number of actors; None if the option is not used."""
        if self.ray_actors is None:
            return None
        if self.ray is None:
            raise MemAgentError("--ray-actors needs a Ray cluster", hint="Choose one with --ray.")
        first, separator, second = self.ray_actors.partition(":")
        try:
            minimum, maximum = int(first), int(second if separator else first)
        except ValueError:
            minimum = maximum = 0
        if not 1 <= minimum <= maximum:
            raise MemAgentError(
                f"--ray-actors {self.ray_actors!r} is not valid", hint="Write it as MIN:MAX, such as 2:16, or as N."
            )
        return minimum, maximum

    async def _read(
        self,
        inputs: Inputs,
        questions: list[str],
        settings: ReaderSettings,
        form: ResponseFormat | None,
        actors: tuple[int, int] | None,
    ) -> CorpusSummary:
        from contextlib import ExitStack  # noqa: PLC0415

        from memagent_corpus.corpus_progress import CorpusProgress  # noqa: PLC0415
        from memagent_corpus.corpus_reader import CorpusReader  # noqa: PLC0415
        from memagent_corpus.corpus_run import (  # noqa: PLC0415
            CHECKPOINTS,
            TEXTS,
            CorpusLimits,
            exclusive,
            run_corpus,
        )
        from memagent_corpus.table_folder import TableFolder  # noqa: PLC0415
        from memagent_graph.documents import open_store  # noqa: PLC0415

        table = TableFolder(self.out, inputs.access)
        in_flight = self.documents or -(-5 * self.concurrency // (4 * max(1, len(questions))))
        with ExitStack() as stack:
            work = stack.enter_context(exclusive(table))
            checkpoints = self.checkpoints or str(work / CHECKPOINTS)
            engine = None
            if self.ray is not None:
                plan = self._plan(work, checkpoints, inputs, questions, settings, form)
                engine = stack.enter_context(self._cluster(self.ray, plan, actors, in_flight))
            progress = stack.enter_context(CorpusProgress(quiet=self.quiet or self.as_json))
            agent = settings.make_reader(
                api_key=self.api_key,
                store=open_store(self.store, work / TEXTS),
                checkpoints=checkpoints,
                run_log=(self.log or False) if engine is None else False,
            )
            reader = CorpusReader(
                agent,
                questions,
                inputs.access,
                keep_texts=self.keep_texts or self.store is not None,  # other machines may use a shared store
                on_update=progress.on_update,
                response_format=form,
            )
            try:
                return await run_corpus(
                    inputs,
                    reader,
                    table,
                    engine=engine,
                    documents_in_flight=in_flight if engine is None else in_flight * engine.pool.max_actors,
                    rows_per_part=self.rows_per_part,
                    retry_failed=self.retry_failed,
                    limits=CorpusLimits(self.max_documents, self.max_tokens_total, self.max_seconds),
                    watcher=progress,
                )
            finally:
                await reader.aclose()

    def _plan(
        self,
        work: Path,
        checkpoints: str,
        inputs: Inputs,
        questions: list[str],
        settings: ReaderSettings,
        form: ResponseFormat | None,
    ) -> ActorPlan:
        """Return the plan for the actors of a cluster."""
        import os  # noqa: PLC0415

        from memagent_corpus.corpus_run import TEXTS  # noqa: PLC0415
        from memagent_corpus.on_ray import ActorPlan  # noqa: PLC0415
        from memagent_graph.storage.checkpoints import is_server  # noqa: PLC0415

        return ActorPlan(
            settings=settings,
            questions=tuple(questions),
            access=inputs.access.absolute,
            response_format=form,
            api_key=self.api_key or os.environ.get("OPENAI_API_KEY"),
            checkpoints=checkpoints if is_server(checkpoints) else str(Path(checkpoints).absolute()),
            texts=str((work / TEXTS).absolute()) if self.keep_texts else None,
            logs=str(_actor_log_folder(self.log)) if self.log else None,
        )

    @contextmanager
    def _cluster(
        self, address: str, plan: ActorPlan, actors: tuple[int, int] | None, documents_in_flight: int
    ) -> Iterator[RayEngine]:
        """Connect to a cluster and yield its engine. At the end, merge the actors' logs into the log."""
        from memagent_corpus.on_ray import connected_engine  # noqa: PLC0415

        try:
            with connected_engine(address, plan, actors=actors, documents_in_flight=documents_in_flight) as engine:
                yield engine
        finally:
            if self.log:
                _merge_actor_logs(self.log)

    async def _estimate(
        self, inputs: Inputs, questions: list[str], settings: ReaderSettings, form: ResponseFormat | None
    ) -> CorpusEstimate:
        import tempfile  # noqa: PLC0415

        from memagent_corpus.corpus_estimate import estimate_corpus  # noqa: PLC0415
        from memagent_corpus.corpus_reader import CorpusReader  # noqa: PLC0415

        with tempfile.TemporaryDirectory(prefix="memagent-estimate-") as folder:
            agent = settings.make_reader(api_key=self.api_key, store=Path(folder), run_log=False)
            reader = CorpusReader(agent, questions, inputs.access, response_format=form)
            try:
                return await estimate_corpus(inputs, reader)
            finally:
                await reader.aclose()

    def _print_estimate(self, estimate: CorpusEstimate, prices: Prices | None) -> None:
        from datetime import timedelta  # noqa: PLC0415

        price = prices.of(estimate.prompt_tokens, estimate.completion_tokens) if prices else None
        seconds = estimate.tokens / self.tokens_per_second if self.tokens_per_second else None
        if self.as_json:
            print_json({**asdict(estimate), "tokens": estimate.tokens, "price": price, "seconds": seconds})
            return
        lines = [
            f"{counted(estimate.documents, 'document')}, {counted(estimate.questions, 'row')}",
            f"{estimate.document_tokens:,} tokens of documents ({counted(estimate.counted, 'document')} counted"
            + ("" if estimate.counted >= estimate.documents else ", the others estimated from their sizes")
            + (f"; {estimate.unreadable:,} cannot be read)" if estimate.unreadable else ")"),
            f"{estimate.chunks:,} chunks and {counted(estimate.calls, 'call')}",
            f"at most {estimate.prompt_tokens:,} prompt tokens and {estimate.completion_tokens:,} completion tokens, "
            "if all memories and answers have their maximum length",
            f"price: {price:,.2f}" if price is not None else "price: unknown; use --price-in and --price-out",
            f"time: {timedelta(seconds=round(seconds))}"
            if seconds is not None
            else "time: unknown; use --tokens-per-second",
        ]
        sys.stdout.write("\n".join(lines) + "\n")

    def _print_summary(self, summary: CorpusSummary, prices: Prices | None) -> None:
        from memagent_corpus.corpus_run import Ended  # noqa: PLC0415

        if self.as_json:
            print_json({**asdict(summary), "ended": summary.ended.value, "out": self.out})
            return
        parts = [f"{counted(summary.read, 'document')} read in {summary.seconds:,.0f} s"]
        if summary.skipped:
            parts.append(f"{summary.skipped:,} skipped, because they have all their rows")
        if summary.changed:
            parts.append(f"{summary.changed:,} checked again, because they may have changed")
        if summary.failed:
            kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(summary.kinds.items()))
            parts.append(f"{summary.failed:,} with errors ({kinds})")
        typer.echo("; ".join(parts), err=True)
        typer.echo(
            f"{counted(summary.rows, 'row')} in {self.out}, {summary.failed_rows:,} of them with errors", err=True
        )
        if summary.failed_rows:
            typer.echo(
                "the error messages are in the table; use --retry-failed to read these documents again", err=True
            )
        if summary.ended is not Ended.DONE:
            option = f"--{summary.ended.value.replace('_', '-')}"
            typer.echo(f"stopped by {option}; to continue, run the same command without this option", err=True)


def _actor_log_folder(log: Path) -> Path:
    """Return the folder in which each actor of a cluster writes its own log file."""
    return log.absolute().with_name(log.name + "-actors")


def _merge_actor_logs(log: Path) -> None:
    """Merge the actors' logs into the log, including those that a killed run left behind."""
    import shutil  # noqa: PLC0415

    from memagent_graph.run_log import RunLog  # noqa: PLC0415
    from memagent_graph.run_log.exchange import merge_logs  # noqa: PLC0415

    folder = _actor_log_folder(log)
    if sources := sorted(folder.glob("*.sqlite")):
        merge_logs(RunLog(log), sources)
    shutil.rmtree(folder, ignore_errors=True)


def register(app: typer.Typer) -> None:
    """Add the command to a command line."""
    add_command(app, "corpus", Corpus)
