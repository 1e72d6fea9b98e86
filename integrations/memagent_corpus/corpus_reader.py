"""Reads one document of a corpus and returns its rows, one for each question. All engines use it.

If a document cannot be read, a question is too long or the policy fails, the row has an error. The caller decides
whether to retry. Errors that every other document would cause too, such as a full disk, are raised.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from memagent_corpus.corpus_rows import CorpusRow, compute_row_id, get_digest, make_corpus_row
from memagent_corpus.source_access import CorpusDocument, SourceAccess
from memagent_corpus.typed_columns import make_typed_columns
from memagent_graph.concurrency.background import Cancellation
from memagent_graph.concurrency.shared_pass import MAX_SHARED_READS, Barrier, read_in_passes
from memagent_graph.documents import DocumentRef
from memagent_graph.documents.conversion import run_in_thread
from memagent_graph.errors import (
    CheckpointError,
    CorpusError,
    DocumentError,
    DocumentStoreError,
    MemAgentError,
    PolicyAuthenticationError,
    PolicyError,
    PolicyOverloadedError,
    PolicyRequestError,
    PolicyResponseError,
    PolicyUnreachableError,
    PromptCutError,
    RunHeldError,
)
from memagent_graph.plain_text import remove_folders
from memagent_graph.reader import MemAgent
from memagent_graph.reading.inputs import check_question
from memagent_graph.response_format import ResponseFormat, ResponseFormatSource
from memagent_graph.results import ReadResult
from memagent_graph.trace import MemoryUpdate

_LOCK_WAIT_SECONDS: Final = 60.0
"""The time to wait for a run that another process is reading. The lock of a lost machine ends within seconds."""
_LOCK_RETRY_SECONDS: Final = 0.5
_TOO_MANY_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})


@dataclass(frozen=True, slots=True)
class DocumentTask:
    """A document and the questions that still have to be answered. It can be pickled."""

    document: CorpusDocument
    questions: tuple[str, ...]
    """Questions without a row, or with a failed row that is to be retried. All of them if the source changed."""
    is_begun: bool = True
    """Whether an earlier process began to read the document, so that checkpoints may exist."""
    answered_ids: frozenset[str] = frozenset()
    """The ids of the document's rows that have an answer. They stay valid if the text has not changed."""
    is_changed: bool = False
    """Whether the document may have changed since it was read, according to its source."""

    async def read(self, reader: CorpusReader) -> list[CorpusRow]:
        """Read the document and return its rows (`CorpusReader.read_one`)."""
        return await reader.read_one(
            self.document, self.questions, may_resume=self.is_begun, answered_ids=self.answered_ids
        )


class CorpusReader:
    """Reads the documents of a corpus. Many calls can run concurrently in one event loop.

    Args:
        agent: the reader. If it has checkpoints, documents that a killed process began continue at their next chunk.
        questions: questions about every document. A document's own questions come first.
        access: opens the documents.
        keep_texts: keep the documents' texts in the agent's store.
        on_update: called after each memory update.
        response_format: the form of all answers, as a Pydantic model or a JSON schema. Its properties become typed
            columns.

    Raises:
        ResponseFormatError, MissingExtraError: `response_format` cannot be used.
        CorpusError: two properties of `response_format` would have the same column name.
    """

    def __init__(
        self,
        agent: MemAgent,
        questions: Sequence[str],
        access: SourceAccess,
        *,
        keep_texts: bool = False,
        on_update: Callable[[MemoryUpdate], None] | None = None,
        response_format: ResponseFormatSource | None = None,
    ) -> None:
        self.agent = agent
        self.questions = tuple(dict.fromkeys(questions))
        self.access = access
        self.on_update = on_update
        self.response_format = None if response_format is None else ResponseFormat.of(response_format)
        self.columns = (
            make_typed_columns(self.response_format, CorpusRow.__struct_fields__) if self.response_format else ()
        )
        self.keeps_texts = keep_texts
        self._text_users: Counter[str] = Counter()
        """The number of running reads for each text. Two documents may have the same text."""
        self._removal_lock = asyncio.Lock()
        self._settings_fingerprint: str | None = None

    async def collect_settings(self) -> dict[str, Any]:
        """Return all settings that affect a row, JSON-serializable.

        Raises:
            MemAgentError: the policy cannot be reached, the settings or the schema do not fit its context window, or a
                question is too long.
        """
        context = (await self.agent.agraph(response_format=self.response_format)).reader_context
        for question in self.questions:
            check_question(question, context)
        sampling, schema = context.sampling, context.response_format
        return {  # the server's address and load limits do not affect a row
            "model": context.policy.name,
            "strategy": context.strategy,
            "strategy_options": context.strategy_fingerprint,
            "tokenizer": context.tokenizer.fingerprint,
            "prompts": context.prompts.fingerprint,
            "boundary": context.boundary,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            **asdict(context.budget),
            **{f"on_{name}": getattr(value, "value", value) for name, value in asdict(context.rules).items()},
            **({"response_format": {"schema": schema.schema, "digest": schema.fingerprint}} if schema else {}),
        }

    def expand_questions(self, document: CorpusDocument) -> tuple[str, ...]:
        """Return a document's own questions, then those about every document, without duplicates."""
        return tuple(dict.fromkeys((*document.questions, *self.questions)))

    async def read_one(
        self,
        document: CorpusDocument,
        questions: Sequence[str] | None = None,
        *,
        may_resume: bool = True,
        answered_ids: Container[str] = frozenset(),
    ) -> list[CorpusRow]:
        """Read a document in one pass for all of its questions.

        Args:
            document: the document.
            questions: the questions to answer; all questions about the document by default.
            may_resume: whether to look for checkpoints, which takes one lookup per question.
            answered_ids: ids of rows that have an answer. Their questions are skipped.

        Returns:
            A row for each question that was not skipped, in the order of the questions.

        Raises:
            CorpusError, CheckpointError: the texts or checkpoints cannot be stored, or too many files are open.
            PolicyAuthenticationError: the server rejects the API key.
        """
        questions = self.expand_questions(document) if questions is None else tuple(questions)
        settings = await self._compute_fingerprint()
        if not questions:
            return []
        try:
            reference = await self._hold_text(document)
        except MemAgentError as error:
            _raise_if_fatal(error)
            return [self._make_failed_row(document, None, question, settings, error) for question in questions]
        try:
            digest = get_digest(reference["key"])
            row_ids = {question: compute_row_id(document.name, digest, question, settings) for question in questions}
            unanswered_questions = [question for question in questions if row_ids[question] not in answered_ids]
            reads = [
                partial(self._read_question, reference, question, row_ids[question], may_resume)
                for question in unanswered_questions
            ]
            outcomes = await read_in_passes(reads, MAX_SHARED_READS)
            return [
                await self._make_row(document, digest, question, settings, outcome)
                for question, outcome in zip(unanswered_questions, outcomes, strict=True)
            ]
        finally:
            await self._release_text(reference)

    async def delete_checkpoints(self, ids: Iterable[str]) -> None:
        """Delete the checkpoints of these rows. Call this when the rows are stored safely."""
        saver = await self.agent.acheckpointer()
        if saver is not None:
            await asyncio.gather(*(saver.adelete_thread(run_id) for run_id in ids))

    async def keeps_checkpoints_below(self, folder: Path) -> bool:
        """Return whether the checkpoints, if any, are in a file below this folder."""
        saver = await self.agent.acheckpointer()
        path = getattr(saver, "path", None)
        return saver is None or (isinstance(path, Path) and folder in path.parents)

    async def _compute_fingerprint(self) -> str:
        """Return the settings as a string that is the same on every machine."""
        if self._settings_fingerprint is None:
            settings = await self.collect_settings()
            self._settings_fingerprint = msgspec.json.encode(settings, order="deterministic").decode()
        return self._settings_fingerprint

    async def _hold_text(self, document: CorpusDocument) -> DocumentRef:
        """Store a document's text until it is released. Another document with the same text may be removing it."""
        reference = await self._store_text(document)
        self._text_users[reference["key"]] += 1
        try:
            async with self._removal_lock:
                is_stored = await asyncio.to_thread(self.agent.store.has_text, reference)
            return reference if is_stored else await self._store_text(document)
        except BaseException:
            await self._release_text(reference)
            raise

    async def _release_text(self, reference: DocumentRef) -> None:
        self._text_users[reference["key"]] -= 1
        async with self._removal_lock:
            if not self._text_users[reference["key"]]:
                del self._text_users[reference["key"]]
                if not self.keeps_texts:
                    await asyncio.to_thread(self.agent.store.remove, reference)

    async def _store_text(self, document: CorpusDocument) -> DocumentRef:
        """Fetch, convert and store a document's text in a thread, which stops when this call is cancelled."""

        def store(cancellation: Cancellation) -> DocumentRef:
            with self.access.open_document(document) as source:
                return self.agent.store.add(source, cancellation=cancellation)

        try:
            return await run_in_thread(store)
        except MemAgentError:
            raise
        except Exception as error:  # parsers of damaged files raise many kinds of exceptions
            message = f"{document.name} cannot be read ({type(error).__name__}): {error}"
            raise DocumentError(message, hint="It may be damaged: save it again, or as text.") from error

    async def _read_question(
        self, reference: DocumentRef, question: str, run_id: str, may_resume: bool, barrier: Barrier
    ) -> ReadResult:
        """Read for one question. If another process is reading the same run, wait until it stops."""
        started_at = time.monotonic()
        while True:
            try:
                return await self.agent.aresume_or_read(
                    run_id, reference, question, may_resume=may_resume, on_update=self.on_update,
                    response_format=self.response_format, barrier=barrier,
                )  # fmt: skip
            except CheckpointError:
                if not may_resume:
                    raise
                may_resume = False  # the checkpoints are damaged: the read starts again
            except RunHeldError:
                if time.monotonic() - started_at >= _LOCK_WAIT_SECONDS:
                    raise
                may_resume = True  # the other process may have saved checkpoints
                await asyncio.sleep(_LOCK_RETRY_SECONDS)

    async def _make_row(
        self, document: CorpusDocument, digest: str, question: str, settings: str, outcome: ReadResult | Exception
    ) -> CorpusRow:
        """Return the row for the outcome of one question."""
        if isinstance(outcome, Exception):
            _raise_if_fatal(outcome)
            return self._make_failed_row(document, digest, question, settings, outcome)
        try:  # in a thread, because it searches for the evidence
            return await asyncio.to_thread(
                make_corpus_row, outcome, document.name, question, document.metadata, self.columns
            )
        except ValueError as error:  # from the serializers of a user's model
            return self._make_failed_row(document, digest, question, settings, error)

    def _make_failed_row(
        self, document: CorpusDocument, digest: str | None, question: str, settings: str, error: Exception
    ) -> CorpusRow:
        """Return the row of a document or question that could not be read; paths in its message are relative."""
        message = str(error)
        if isinstance(error, MemAgentError) and error.hint:
            message = f"{error.message.rstrip('.')}. {error.hint}"
        return CorpusRow(
            id=compute_row_id(document.name, digest or "", question, settings),
            document=document.name,
            digest=digest,
            question=question,
            error=remove_folders(message, (self.access.root, str(self.agent.store.root))) or type(error).__name__,
            error_kind=type(error).__name__,
            metadata=document.metadata,
        )


def _raise_if_fatal(error: Exception) -> None:
    """Raise an error that every other document would cause too."""
    cause = error.__cause__
    has_no_descriptor = isinstance(cause, OSError) and cause.errno in _TOO_MANY_FILES
    if isinstance(error, DocumentStoreError) or (isinstance(error, DocumentError) and has_no_descriptor):
        remedy = "Raise the limit of open files (`ulimit -n`)." if has_no_descriptor else error.hint
        first_words = f"{remedy} Then run" if remedy else "Run"
        hint = f"{first_words} the same command again. Finished rows are not lost."
        raise CorpusError(error.message, hint=hint) from error
    if isinstance(error, CheckpointError | CorpusError | PolicyAuthenticationError):
        raise error


POLICY_ERRORS: Final = frozenset(
    error_class.__name__
    for error_class in (
        PolicyError,
        PolicyUnreachableError,
        PolicyRequestError,
        PolicyOverloadedError,
        PolicyResponseError,
        PromptCutError,
    )
)
"""Names of the errors of a policy or its server. A retry may succeed."""
