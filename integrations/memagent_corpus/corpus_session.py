"""Runs `memagent corpus`: reads a corpus or estimates its cost, shows progress, and prints a summary.

An estimate does not call the policy. All documents are listed. An evenly spaced sample of them is opened to count
tokens, and the other documents are estimated from their sizes. In a small corpus, the tokens of every document are
counted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import typer

from memagent_corpus.corpus_inputs import CorpusInputs, open_inputs
from memagent_corpus.corpus_options import CorpusOptions
from memagent_corpus.corpus_reader import CorpusReader
from memagent_corpus.corpus_rows import CorpusRow
from memagent_corpus.corpus_run import (
    CHECKPOINTS_FILE,
    TEXTS_FOLDER,
    CorpusLimits,
    CorpusSummary,
    StopCause,
    lock_table,
    run_corpus,
)
from memagent_corpus.on_ray import ActorPlan, RayEngine, connect
from memagent_corpus.source_access import CorpusDocument, CorpusSize, SourceAccess
from memagent_corpus.table_folder import TableFolder
from memagent_corpus.table_inputs import InputColumns
from memagent_graph.cli.console import Console, ProgressDisplay, describe_progress
from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.cli.options import expand_questions, print_json
from memagent_graph.documents import open_store
from memagent_graph.errors import MemAgentError
from memagent_graph.plain_text import format_count, make_one_line
from memagent_graph.policies.server_url import find_environment_key
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import ReaderContext
from memagent_graph.response_format import ResponseFormat
from memagent_graph.results import Prices
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.exchange import merge_logs
from memagent_graph.storage.checkpoints import is_postgres_url
from memagent_graph.trace import MemoryUpdate

_MAX_COUNTED_DOCUMENTS: Final = 200
"""Maximum number of documents whose tokens are counted."""
_MAX_COUNTED_BYTES: Final = 50 * 2**20
_DEFAULT_TOKENS_PER_BYTE: Final = 0.25
"""Used if no document could be counted."""


class CorpusProgress:
    """Shows the documents that are done, failures, the rate and the remaining time."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display
        self._documents_skipped = self._documents_read = self._documents_failed = 0
        self._bytes_skipped = self._bytes_read = self._tokens = 0
        self._has_chunk_updates = False

    def on_start(self, total: CorpusSize) -> None:
        """Record the size of the corpus and the time."""
        self._total = total
        self._started_at = time.monotonic()

    def on_skip(self, documents: int, size: int) -> None:
        """Count documents that already have all of their rows; `size` is in bytes."""
        self._documents_skipped += documents
        self._bytes_skipped += size
        self._show()

    def on_update(self, update: MemoryUpdate) -> None:
        """Count the tokens of one chunk."""
        self._has_chunk_updates = True
        self._tokens += update.prompt_tokens + update.completion_tokens
        self._show()

    def on_document(self, document: CorpusDocument, rows: Sequence[CorpusRow]) -> None:
        """Count a finished document."""
        self._documents_read += 1
        self._bytes_read += document.size or 0
        self._documents_failed += any(row.has_error for row in rows)
        if not self._has_chunk_updates:  # other processes read the chunks
            self._tokens += sum(row.usage.prompt_tokens + row.usage.completion_tokens for row in rows)
        self._show()

    def _show(self) -> None:
        total, skipped, done = self._total.documents or 0, self._documents_skipped, self._documents_read
        if self._total.size:  # sizes predict the remaining time better than the number of documents
            total, skipped, done = self._total.size, self._bytes_skipped, self._bytes_read
        elapsed_seconds, remaining = time.monotonic() - self._started_at, total - skipped - done
        rate = f"{60 * self._documents_read / max(elapsed_seconds, 1e-9):,.1f}/min"
        status = describe_progress(
            elapsed_seconds,
            rate,
            failed=self._documents_failed,
            tokens=self._tokens,
            done_work=done if total else 0,
            work_left=remaining,
        )
        self._display.update(self._documents_skipped + self._documents_read, status, total=self._total.documents)


@dataclass(frozen=True, slots=True)
class CorpusEstimate:
    """Upper bounds for reading a corpus: all memories and answers have their maximum length.

    The estimate covers one pass over the chunks and one answer for each question. Strategies that read chunks more than
    once, and repairs of answers that do not fit their schema, need more.
    """

    documents: int = 0
    unreadable: int = 0
    """Documents in the sample that cannot be opened."""
    questions: int = 0
    """Pairs of a document and a question, which is the number of rows."""
    document_tokens: int = 0
    chunks: int = 0
    """Total over all pairs of a document and a question."""
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    counted: int = 0
    """Documents whose tokens were counted. The others are estimated from their sizes."""

    @property
    def tokens(self) -> int:
        """The sum of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


async def estimate_corpus(inputs: CorpusInputs, reader: CorpusReader) -> CorpusEstimate:
    """Estimate the calls and tokens that reading a corpus needs.

    Raises:
        MemAgentError: the inputs cannot be listed, or the reader's settings are invalid.
    """
    await reader.collect_settings()
    graph = await reader.agent.agraph(response_format=reader.response_format)
    return await asyncio.to_thread(_add_up_estimates, inputs, reader, graph.reader_context)


def _add_up_estimates(inputs: CorpusInputs, reader: CorpusReader, context: ReaderContext) -> CorpusEstimate:
    """Count the tokens of a sample, then list all documents again and add up their estimates."""
    sample_step = math.ceil((inputs.total().documents or 1) / _MAX_COUNTED_DOCUMENTS)
    sample: Counter[str] = Counter()
    for document in itertools.islice(inputs.documents(), 0, None, sample_step):
        sample.update(_measure_document(document, reader, context))
        if sample["bytes"] > _MAX_COUNTED_BYTES or sample["counted"] >= _MAX_COUNTED_DOCUMENTS:
            break
    tokens_per_byte = sample["tokens"] / sample["bytes"] if sample["bytes"] else _DEFAULT_TOKENS_PER_BYTE
    mean_tokens = sample["tokens"] / sample["counted"] if sample["counted"] else 0.0
    budget, prompts, count_tokens = context.budget, context.prompts, context.tokenizer.count
    update_tokens = count_tokens(prompts.update.literal) + budget.memory_tokens
    answer_tokens = count_tokens(prompts.answer.literal) + budget.memory_tokens
    if context.response_format:  # update prompts contain an outline of the schema, the answer prompt the schema itself
        update_tokens += count_tokens(context.outline)
        if not context.trained_prompts_only:
            answer_tokens += count_tokens(prompts.neutralise(context.schema))
    tokens_by_question = {question: count_tokens(question) for question in reader.questions}
    totals: Counter[str] = Counter()
    for document in inputs.documents():
        document_tokens = mean_tokens if document.size is None else document.size * tokens_per_byte
        chunk_count = max(1, math.ceil(document_tokens / budget.chunk_tokens))
        totals.update(documents=1, document_tokens=round(document_tokens))
        for question in reader.expand_questions(document):
            question_tokens = tokens_by_question.get(question) or count_tokens(question)
            totals.update(
                questions=1,
                chunks=chunk_count,
                calls=chunk_count + 1,
                prompt_tokens=round(document_tokens)
                + chunk_count * (update_tokens + question_tokens)
                + answer_tokens
                + question_tokens,
                completion_tokens=chunk_count * budget.memory_tokens + budget.answer_tokens,
            )
    return CorpusEstimate(unreadable=sample["unreadable"], counted=sample["counted"], **totals)


def _measure_document(document: CorpusDocument, reader: CorpusReader, context: ReaderContext) -> dict[str, int]:
    """Return the tokens and bytes of a document of the sample.

    The text is counted in pieces of a megabyte, so the number of tokens can be slightly too high.
    """
    store = reader.agent.store
    try:
        with reader.access.open_document(document) as source:
            reference = store.add(source)
    except MemAgentError:
        return {"unreadable": 1}
    tokens = sum(map(context.tokenizer.count, store.pieces(reference)))
    store.remove(reference)
    return {"counted": 1, "tokens": tokens, "bytes": document.size or reference["size"]}


class CorpusSession:
    """One run of the command.

    Args:
        options: the command's options.
    """

    def __init__(self, options: CorpusOptions) -> None:
        self._options = options
        self._console = Console(as_json=options.as_json, quiet=options.quiet)

    def run(self) -> None:
        """Read or estimate the corpus.

        Raises:
            typer.Exit: with the exit code, if it is not 0.
        """
        options = self._options
        prices = Prices.of(options.price_in, options.price_out)
        if options.ray_actors is not None and options.ray is None:
            raise MemAgentError("--ray-actors needs a Ray cluster", hint="Choose one with --ray.")
        self._questions = expand_questions(options.question or ())
        if not self._questions and options.question_column is None:
            raise MemAgentError("there is no question", hint="Ask one with -q, or use --question-column.")
        self._response_format = None if options.schema is None else ResponseFormat.load(options.schema)
        self._inputs = self._open_inputs()
        settings = options.make_settings()
        self._settings = settings if options.log else settings.replace(logprobs=False)
        self._console.print_note(self._settings.policy_reason)
        try:
            if options.estimate:
                self._print_estimate(asyncio.run(self._estimate_corpus()), prices)
                return
            summary = asyncio.run(self._read_corpus())
        except ValueError as error:
            self._console.report_error(MemAgentError(str(error)))
            raise typer.Exit(ExitCode.SETTINGS) from None
        except (KeyboardInterrupt, asyncio.CancelledError):
            typer.echo("interrupted; finished rows are kept, and the same command continues", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        self._print_summary(summary)
        if summary.ended is not StopCause.DONE:
            raise typer.Exit(ExitCode.STOPPED)
        if summary.rows and summary.failed_rows == summary.rows:
            raise typer.Exit(ExitCode.DOCUMENT)

    def _open_inputs(self) -> CorpusInputs:
        options = self._options
        return open_inputs(
            options.source,
            access=SourceAccess(
                root=str(options.root) if options.root else "",
                allow_private=options.allow_private_addresses,
                max_bytes=options.max_bytes,
                encoding=options.encoding,
            ),
            columns=InputColumns(
                text=options.text_column,
                path=options.path_column,
                id=options.id_column,
                questions=options.question_column,
                copied=tuple(options.keep_column or ()),
            ),
            subset=options.subset,
            split=options.split,
        )

    # Reading

    async def _read_corpus(self) -> CorpusSummary:
        options, access = self._options, self._inputs.access
        table = TableFolder(options.out, access)
        documents_in_flight = options.documents or -(-5 * options.concurrency // (4 * max(1, len(self._questions))))
        with ExitStack() as stack:
            work_folder = stack.enter_context(lock_table(table))
            checkpoints = options.checkpoints or str(work_folder / CHECKPOINTS_FILE)
            engine = None
            if options.ray is not None:
                engine = stack.enter_context(self._connect_to_cluster(options.ray, checkpoints, documents_in_flight))
            progress = CorpusProgress(
                stack.enter_context(ProgressDisplay("documents", quiet=options.quiet or options.as_json))
            )
            agent = MemAgent(
                settings=self._settings,
                store=open_store(options.store or work_folder / TEXTS_FOLDER),
                checkpoints=checkpoints,
                run_log=(options.log or False) if engine is None else False,
            )
            reader = CorpusReader(
                agent,
                self._questions,
                access,
                keep_texts=options.store is not None,
                on_update=progress.on_update,
                response_format=self._response_format,
            )
            async with aclosing(reader):
                return await run_corpus(
                    self._inputs,
                    reader,
                    table,
                    engine=engine,
                    documents_in_flight=documents_in_flight if engine is None else documents_in_flight * engine.actors,
                    rows_per_part=options.rows_per_part,
                    retry_failed=options.retry_failed,
                    limits=CorpusLimits(options.max_documents, options.max_tokens_total, options.max_seconds),
                    watcher=progress,
                )

    @contextmanager
    def _connect_to_cluster(self, address: str, checkpoints: str, documents_in_flight: int) -> Iterator[RayEngine]:
        """Connect to a cluster and yield its engine. At the end, merge the actors' logs into the log.

        Logs that a killed run left behind are merged, too.
        """
        options = self._options
        log_folder = options.log.absolute().with_name(f"{options.log.name}-actors") if options.log else None
        header_names = (line.partition(":")[0].strip() for line in self._settings.header or ())
        plan = ActorPlan(
            settings=self._settings.replace(api_key=options.api_key or find_environment_key(header_names) or None),
            questions=tuple(self._questions),
            access=self._inputs.access.absolute,
            response_format=self._response_format,
            checkpoints=checkpoints if is_postgres_url(checkpoints) else str(Path(checkpoints).absolute()),
            texts=str(Path(options.store).absolute()) if options.store else None,
            logs=str(log_folder) if log_folder else None,
        )
        try:
            with connect(address) as ray:
                machine_count = max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
                yield RayEngine(plan, options.ray_actors or machine_count, documents_in_flight)
        finally:
            if options.log and log_folder:
                if sources := sorted(log_folder.glob("*.sqlite")):
                    merge_logs(RunLog(options.log), sources, is_own=True)
                shutil.rmtree(log_folder, ignore_errors=True)

    async def _estimate_corpus(self) -> CorpusEstimate:
        with tempfile.TemporaryDirectory(prefix="memagent-estimate-") as folder:
            agent = MemAgent(settings=self._settings, store=Path(folder), run_log=False)
            reader = CorpusReader(agent, self._questions, self._inputs.access, response_format=self._response_format)
            async with aclosing(reader):
                return await estimate_corpus(self._inputs, reader)

    # Printing

    def _print_estimate(self, estimate: CorpusEstimate, prices: Prices | None) -> None:
        rate = self._options.tokens_per_second
        price = prices.cost(estimate.prompt_tokens, estimate.completion_tokens) if prices else None
        seconds = estimate.tokens / rate if rate else None
        if self._options.as_json:
            print_json({**asdict(estimate), "tokens": estimate.tokens, "price": price, "seconds": seconds})
            return
        lines = [
            f"{format_count(estimate.documents, 'document')}, {format_count(estimate.questions, 'row')}",
            f"{estimate.document_tokens:,} tokens of documents ({format_count(estimate.counted, 'document')} counted"
            + ("" if estimate.counted >= estimate.documents else ", the others estimated from their sizes")
            + (f"; {estimate.unreadable:,} cannot be read)" if estimate.unreadable else ")"),
            f"{format_count(estimate.chunks, 'chunk')} and {format_count(estimate.calls, 'call')}",
            f"at most {estimate.prompt_tokens:,} prompt tokens and {estimate.completion_tokens:,} completion tokens, "
            "if all memories and answers have their maximum length",
            f"price: {price:,.2f}" if price is not None else "price: unknown; use --price-in and --price-out",
            f"time: {timedelta(seconds=round(seconds))}"
            if seconds is not None
            else "time: unknown; use --tokens-per-second",
        ]
        sys.stdout.write("\n".join(lines) + "\n")

    def _print_summary(self, summary: CorpusSummary) -> None:
        out = self._options.out
        if self._options.as_json:
            print_json({**asdict(summary), "ended": summary.ended.value, "out": out})
            return
        parts = [f"{format_count(summary.read, 'document')} read in {summary.seconds:,.0f} s"]
        if summary.skipped:
            parts.append(f"{summary.skipped:,} skipped, because they have all their rows")
        if summary.without_question:
            parts.append(f"{summary.without_question:,} without a question")
        if summary.changed:
            parts.append(f"{summary.changed:,} checked again, because they may have changed")
        if summary.failed:
            kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(summary.kinds.items()))
            names = ", ".join(make_one_line(name, 60) for name in summary.failures)
            ellipsis = ", ..." if summary.failed > len(summary.failures) else ""
            parts.append(f"{summary.failed:,} with errors ({kinds}): {names}{ellipsis}")
        if summary.incomplete:
            parts.append(f"{summary.incomplete:,} not completely converted to text (see the events in the table)")
        lines = ["; ".join(parts), f"{format_count(summary.rows, 'row')} in {out}, {summary.failed_rows:,} with errors"]
        if summary.failed_rows:
            lines.append("the error messages are in the table; use --retry-failed to read these documents again")
        if summary.ended is not StopCause.DONE:
            option = f"--{summary.ended.value.replace('_', '-')}"
            lines.append(f"stopped by {option}; to continue, run the same command without this option")
        typer.echo("\n".join(lines), err=True)
