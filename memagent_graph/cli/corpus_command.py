"""`memagent corpus`."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from memagent_graph.cli.eval_report import PriceIn, PriceOut
from memagent_graph.cli.exit_codes import ExitCode, failures_told
from memagent_graph.cli.options import (
    CHECKPOINTS_HELP,
    STORE_HELP,
    ApiKey,
    AsJSON,
    MaxSeconds,
    MaxTokensTotal,
    Quiet,
    ReaderOptions,
    ReplaceUndecodable,
    Temperature,
    TopP,
)
from memagent_graph.cli.output import counted, print_json
from memagent_graph.cli.question_files import questions_of
from memagent_graph.errors import MemAgentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memagent_graph.corpus.corpus_estimate import CorpusEstimate
    from memagent_graph.corpus.corpus_inputs import Inputs
    from memagent_graph.corpus.corpus_run import CorpusSummary
    from memagent_graph.evaluation.prices import Prices
    from memagent_graph.response_format import ResponseFormat
    from memagent_graph.settings import ReaderSettings
    from memagent_ray import ActorPlan, RayEngine


@dataclass(frozen=True, kw_only=True)
class Corpus(ReaderOptions):
    """Read many documents and write one table: a row for each document and question, exactly once.

    Started again with the same command, it continues where it was, and adds what is new.
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
            help="A folder, a pattern in quotes, a Parquet, JSONL, CSV or ZIP file, a URL of these (s3, gs, az, http), "
            "zip://PATTERN::ARCHIVE, or dataset:NAME.",
        ),
    ]
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            "--questions",
            "-q",
            help="Asked about every document. Repeat it for several; @FILE is a file with one on each line.",
            show_default="--question-column",
        ),
    ] = None
    out: Annotated[str, typer.Option(help="The folder, or its URL, for the table.")]
    schema: Annotated[
        str | None,
        typer.Option(
            help="The form of the answers: a file with a JSON schema, or a Pydantic model as path/to/file.py:Model. "
            "Each of its properties is a typed column of the table.",
            show_default="answers in words",
        ),
    ] = None
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Say how many tokens it would take, and the price and time; read nothing."),
    ] = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Read documents again whose rows have errors.")
    ] = False
    documents: Annotated[
        int | None,
        typer.Option(min=1, help="Documents in flight.", show_default="enough for --concurrency requests"),
    ] = None
    rows_per_part: Annotated[int, typer.Option(min=1, help="Rows of one Parquet file.")] = 10_000
    keep_texts: Annotated[
        bool, typer.Option("--keep-texts", help="Keep the documents' texts beside the table, for checks of quotes.")
    ] = False
    checkpoints: Annotated[str | None, typer.Option(help=CHECKPOINTS_HELP, show_default="beside the table")] = None
    store: Annotated[str | None, typer.Option("--store", help=STORE_HELP, show_default="beside the table")] = None
    log: Annotated[
        Path | None, typer.Option("--log", help="Log all calls in this SQLite file as well.", show_default="none")
    ] = None
    api_key: ApiKey = None
    requests_per_minute: Annotated[
        float | None, typer.Option(min=0.001, help="Most requests sent in a minute.", show_default="no bound")
    ] = None
    tokens_per_minute: Annotated[
        float | None,
        typer.Option(min=1, help="Most prompt and completion tokens in a minute.", show_default="no bound"),
    ] = None
    session_header: Annotated[
        str | None,
        typer.Option(
            help="Send a document's key in this header of every request, such as X-Session-Id, for a router that keeps "
            "a session on one replica.",
            show_default="none",
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Read on a Ray cluster: auto, local, HOST:PORT, or ray://HOST:PORT. --concurrency and --documents are "
            "then of one actor.",
            show_default="in this process",
        ),
    ] = None
    ray_actors: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Actors that read on the cluster.", show_default="one for each machine"),
    ] = None
    encoding: Annotated[str | None, typer.Option(help="The charset of text files.", show_default="detected")] = None
    replace_undecodable: ReplaceUndecodable = False
    max_bytes: Annotated[int, typer.Option(min=1, help="The largest document.")] = 2**30
    text_column: Annotated[
        str | None, typer.Option(help="The column with the texts.", show_default="text, unless there is none")
    ] = None
    path_column: Annotated[str | None, typer.Option(help="The column with the files' paths.", show_default="path")] = (
        None
    )
    id_column: Annotated[
        str | None, typer.Option(help="The column with unique names.", show_default="the row's number")
    ] = None
    question_column: Annotated[
        str | None, typer.Option(help="The column with a question, or a list of them, for that document alone.")
    ] = None
    keep_column: Annotated[
        list[str] | None, typer.Option(help="A column to copy into the table. Repeatable.", show_default="none")
    ] = None
    root: Annotated[
        Path | None, typer.Option(help="The folder of the files in --path-column.", show_default="the table's")
    ] = None
    subset: Annotated[str | None, typer.Option(help="The dataset's subset.")] = None
    split: Annotated[str, typer.Option(help="The dataset's split.")] = "train"
    allow_private_addresses: Annotated[
        bool,
        typer.Option("--allow-private-addresses", help="Let http and https lead into your own network."),
    ] = False
    allow_chained_urls: Annotated[
        bool, typer.Option("--allow-chained-urls", help="Open chains of URLs, as in simplecache::s3://...")
    ] = False
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None
    max_documents: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many documents; can be continued.")
    ] = None
    max_tokens_total: MaxTokensTotal = None
    max_seconds: MaxSeconds = None
    price_in: PriceIn = None
    price_out: PriceOut = None
    tokens_per_second: Annotated[
        float | None, typer.Option(min=0.001, help="With --estimate: how fast the server is, for the time.")
    ] = None
    as_json: AsJSON = False
    quiet: Quiet = False

    def run(self) -> None:
        """Run the command."""
        import asyncio  # noqa: PLC0415

        from memagent_graph.cli.console import Console  # noqa: PLC0415
        from memagent_graph.corpus.corpus_run import Ended  # noqa: PLC0415
        from memagent_graph.evaluation.prices import prices_of  # noqa: PLC0415
        from memagent_graph.response_format import ResponseFormat  # noqa: PLC0415

        console = Console(as_json=self.as_json, quiet=self.quiet)
        with failures_told(console):
            prices, actors = prices_of(self.price_in, self.price_out), self._actors()
            questions = questions_of(self.question or ())
            if not questions and self.question_column is None:
                raise MemAgentError("there is no question", hint="Ask with -q, or name a --question-column.")
            form = None if self.schema is None else ResponseFormat.named(self.schema)
            inputs = self._inputs()
            settings = replace(self.settings(), logprobs=None if self.log else False)
            if (self.requests_per_minute or self.tokens_per_minute) and settings.policy_name in {"embedded", "local"}:
                raise MemAgentError(
                    "bounds of requests and tokens a minute are for a server, and this policy has none",
                    hint="Leave out --requests-per-minute and --tokens-per-minute, or name a server with --base-url.",
                )
            console.policy(settings.policy_told)
            try:
                if self.estimate:
                    self._print_estimate(asyncio.run(self._estimated(inputs, questions, settings, form)), prices)
                    return
                summary = asyncio.run(self._read(inputs, questions, settings, form, actors))
            except ValueError as error:
                raise typer.Exit(console.failure(MemAgentError(str(error)), ExitCode.SETTINGS)) from None
            except (KeyboardInterrupt, asyncio.CancelledError):
                typer.echo("interrupted; nothing that was read is lost: start the same command again", err=True)
                raise typer.Exit(ExitCode.INTERRUPTED) from None
        self._print_summary(summary, prices)
        if summary.ended is not Ended.DONE:
            raise typer.Exit(ExitCode.STOPPED)
        if summary.rows and summary.failed_rows == summary.rows:
            raise typer.Exit(ExitCode.DOCUMENT)

    def _inputs(self) -> Inputs:
        from memagent_graph.corpus.corpus_inputs import InputOptions, open_inputs  # noqa: PLC0415
        from memagent_graph.corpus.source_access import SourceAccess  # noqa: PLC0415
        from memagent_graph.corpus.table_inputs import Columns  # noqa: PLC0415

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
        """The least and the most actors, if they are given."""
        if self.ray_actors is None:
            return None
        if self.ray is None:
            raise MemAgentError("--ray-actors is for a Ray cluster, and none is named", hint="Name it with --ray.")
        least, separator, most = self.ray_actors.partition(":")
        try:
            found = int(least), int(most if separator else least)
        except ValueError:
            found = 0, 0
        if not 1 <= found[0] <= found[1]:
            raise MemAgentError(
                f"--ray-actors is {self.ray_actors!r}", hint="Write it as MIN:MAX, such as 2:16, or as N."
            )
        return found

    async def _read(
        self,
        inputs: Inputs,
        questions: list[str],
        settings: ReaderSettings,
        form: ResponseFormat | None,
        actors: tuple[int, int] | None,
    ) -> CorpusSummary:
        from contextlib import ExitStack  # noqa: PLC0415

        from memagent_graph.corpus.corpus_progress import CorpusProgress  # noqa: PLC0415
        from memagent_graph.corpus.corpus_reader import CorpusReader  # noqa: PLC0415
        from memagent_graph.corpus.corpus_run import (  # noqa: PLC0415
            CHECKPOINTS,
            TEXTS,
            CorpusLimits,
            exclusive,
            run_corpus,
        )
        from memagent_graph.corpus.table_folder import TableFolder  # noqa: PLC0415
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
                keep_texts=self.keep_texts or self.store is not None,  # others may use a text there
                on_update=progress.reads,
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
        """What the actors of a cluster read with."""
        import os  # noqa: PLC0415

        from memagent_graph.corpus.corpus_run import TEXTS  # noqa: PLC0415
        from memagent_graph.storage.checkpoints import is_server  # noqa: PLC0415
        from memagent_ray import ActorPlan  # noqa: PLC0415

        return ActorPlan(
            settings=settings,
            questions=tuple(questions),
            access=inputs.access.absolute,
            response_format=form,
            api_key=self.api_key or os.environ.get("OPENAI_API_KEY"),
            checkpoints=checkpoints if is_server(checkpoints) else str(Path(checkpoints).absolute()),
            texts=str((work / TEXTS).absolute()) if self.keep_texts else None,
            logs=str(_logs_of_actors(self.log)) if self.log else None,
        )

    @contextmanager
    def _cluster(
        self, address: str, plan: ActorPlan, actors: tuple[int, int] | None, documents_in_flight: int
    ) -> Iterator[RayEngine]:
        """The engine on a cluster. When it ends, the logs of its actors are put into the log."""
        from memagent_ray import reading_on  # noqa: PLC0415

        try:
            with reading_on(address, plan, actors=actors, documents_in_flight=documents_in_flight) as engine:
                yield engine
        finally:
            if self.log:
                _merge_logs(self.log)

    async def _estimated(
        self, inputs: Inputs, questions: list[str], settings: ReaderSettings, form: ResponseFormat | None
    ) -> CorpusEstimate:
        import tempfile  # noqa: PLC0415

        from memagent_graph.corpus.corpus_estimate import estimate_corpus  # noqa: PLC0415
        from memagent_graph.corpus.corpus_reader import CorpusReader  # noqa: PLC0415

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
            + ("" if estimate.counted >= estimate.documents else ", the others by their size")
            + (f"; {estimate.unreadable:,} cannot be read)" if estimate.unreadable else ")"),
            f"{estimate.chunks:,} chunks and {counted(estimate.calls, 'call')}",
            f"at most {estimate.prompt_tokens:,} tokens in and {estimate.completion_tokens:,} out, "
            "with memories and answers as long as they may be",
        ]
        lines.append(f"price: {price:,.2f}" if price is not None else "price: give --price-in and --price-out")
        lines.append(
            f"time: {timedelta(seconds=round(seconds))}" if seconds is not None else "time: give --tokens-per-second"
        )
        sys.stdout.write("\n".join(lines) + "\n")

    def _print_summary(self, summary: CorpusSummary, prices: Prices | None) -> None:
        from memagent_graph.corpus.corpus_run import Ended  # noqa: PLC0415

        if self.as_json:
            print_json({**asdict(summary), "ended": summary.ended.value, "out": self.out})
            return
        told = [f"{counted(summary.read, 'document')} read in {summary.seconds:,.0f} s"]
        if summary.skipped:
            told.append(f"{summary.skipped:,} had their rows already")
        if summary.changed:
            told.append(f"{summary.changed:,} may have changed and were looked at again")
        if summary.failed:
            kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(summary.kinds.items()))
            told.append(f"{summary.failed:,} with errors ({kinds})")
        typer.echo("; ".join(told), err=True)
        typer.echo(
            f"{counted(summary.rows, 'row')} in {self.out}, {summary.failed_rows:,} of them with errors", err=True
        )
        if summary.failed_rows:
            typer.echo("errors are in the table; --retry-failed reads these documents again", err=True)
        if summary.ended is not Ended.DONE:
            typer.echo(
                f"stopped at {summary.ended.value.replace('_', ' ')}; the same command without the limit continues",
                err=True,
            )


def _logs_of_actors(log: Path) -> Path:
    """The folder in which the actors of a cluster log, each in a file of its own."""
    return log.absolute().with_name(log.name + "-actors")


def _merge_logs(log: Path) -> None:
    """Put what actors have logged into the log. What a run that was killed has left is put in by the next one."""
    import shutil  # noqa: PLC0415

    from memagent_graph.run_log import RunLog  # noqa: PLC0415
    from memagent_graph.run_log.exchange import merge_logs  # noqa: PLC0415

    folder = _logs_of_actors(log)
    if sources := sorted(folder.glob("*.sqlite")):
        merge_logs(RunLog(log), sources)
    shutil.rmtree(folder, ignore_errors=True)
