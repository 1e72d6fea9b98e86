"""Reads one document of a corpus for its questions, and returns its rows. Every engine runs this.

A document that cannot be read, or a question that is too long, is a row with an error; so is a policy that fails, and
the engine decides whether that counts or is tried again. What would fail for every document is raised.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from memagent_graph.concurrency.pace import AT_ONCE, Reach, in_passes
from memagent_graph.corpus.corpus_documents import CorpusDocument
from memagent_graph.corpus.corpus_rows import Row, Told, digest_of, failed_row, row_id, row_of
from memagent_graph.corpus.source_access import SourceAccess
from memagent_graph.corpus.typed_columns import columns_of
from memagent_graph.documents import DocumentRef
from memagent_graph.documents.conversion import ConversionCancellation
from memagent_graph.errors import (
    CheckpointError,
    CorpusError,
    DocumentError,
    MemAgentError,
    PolicyAuthenticationError,
    PolicyError,
    PolicyOverloadedError,
    PolicyRequestError,
    PolicyResponseError,
    PolicyUnreachableError,
    RunHeldError,
    RunMismatchError,
    RunNotFoundError,
)
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.reader import MemAgent, result_of
from memagent_graph.reading.graph import check_question
from memagent_graph.reading.state import ReaderContext
from memagent_graph.response_format import ResponseFormat, ResponseFormatSource
from memagent_graph.results import ReadResult
from memagent_graph.trace import MemoryUpdate

_LOADING: Final = 16
"""Documents that are fetched, converted and stored at once."""
_HELD_SECONDS: Final = 60.0
"""How long a run is waited for that another process holds: one that a lost machine has begun ends within seconds."""
_HELD_PAUSE: Final = 0.5
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class CorpusReader:
    """Reads documents one by one; many calls may run at once, in one event loop.

    Args:
        agent: the reader. With checkpoints, documents that a killed process has begun continue at their chunk.
        questions: asked about every document, after a document's own.
        access: opens the documents.
        keep_texts: leave documents' texts in the agent's store.
        on_update: called with each memory update.
        response_format: the form of all answers: a Pydantic model, or a JSON schema. Their values fill typed columns.

    Raises:
        ResponseFormatError, MissingExtraError: `response_format` cannot be used.
        CorpusError: two of its properties would have one column.
    """

    def __init__(
        self,
        agent: MemAgent,
        questions: Sequence[str] = (),
        access: SourceAccess | None = None,
        *,
        keep_texts: bool = False,
        on_update: Callable[[MemoryUpdate], None] | None = None,
        response_format: ResponseFormatSource | None = None,
    ) -> None:
        self.agent = agent
        self.questions = tuple(dict.fromkeys(questions))
        self.access = access or SourceAccess()
        self.on_update = on_update
        self.response_format = None if response_format is None else ResponseFormat.of(response_format)
        self.columns = columns_of(self.response_format, Row.__struct_fields__) if self.response_format else ()
        self.keeps_texts = keep_texts
        self._told = Told((self.access.root, str(agent.store.root)))
        self._loading = ThreadPoolExecutor(_LOADING, thread_name_prefix="memagent-loading")
        self._texts: Counter[str] = Counter()
        """How many reads under way use a text; two documents may have the same."""
        self._settings: str | None = None

    async def settings(self) -> dict[str, Any]:
        """Everything that decides on a row besides document and question, JSON-ready.

        Raises:
            MemAgentError: the policy cannot be reached, or the settings or the schema do not fit it; a question is too
                long.
        """
        graph = await self.agent.agraph(response_format=self.response_format)
        for each in self.questions:
            check_question(each, graph.reader_context)
        return settings_of(graph.reader_context)

    def questions_of(self, document: CorpusDocument) -> tuple[str, ...]:
        """What is asked about a document."""
        return tuple(dict.fromkeys((*document.questions, *self.questions)))

    async def read_one(
        self,
        document: CorpusDocument,
        questions: Sequence[str] | None = None,
        *,
        may_resume: bool = True,
        answered: Container[str] = frozenset(),
    ) -> list[Row]:
        """Read a document once for all of its questions.

        Args:
            document: the document.
            questions: those that are still to be answered; all of the document's if it is left out.
            may_resume: whether its checkpoints are to be looked for; they cost a look-up each.
            answered: ids of rows that have an answer; such questions are not read for again.

        Returns:
            A row for each question that has no answer yet, in order.

        Raises:
            CorpusError, CheckpointError: the disk is full, or cannot be written.
            PolicyAuthenticationError: the server refuses the key.
        """
        asked = self.questions_of(document) if questions is None else tuple(questions)
        settings = await self._fingerprint()
        if not asked:
            return []
        try:
            reference = await self._stored(document)
        except MemAgentError as error:
            _raise_if_for_all(error)
            return [self._failure(document, None, each, settings, error) for each in asked]
        digest = digest_of(reference["key"])
        self._texts[digest] += 1
        try:
            identities = {each: row_id(document.name, digest, each, settings) for each in asked}
            open_questions = [each for each in asked if identities[each] not in answered]
            reads = [partial(self._read, reference, each, identities[each], may_resume) for each in open_questions]
            outcomes = await in_passes(reads, AT_ONCE)
            rows: list[Row] = []
            for question, outcome in zip(open_questions, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    _raise_if_for_all(outcome)
                    rows.append(self._failure(document, digest, question, settings, outcome))
                else:
                    evidence = await asyncio.to_thread(_evidence, outcome)
                    try:
                        row = row_of(outcome, document.name, question, document.metadata, evidence, self.columns)
                    except ValueError as error:  # from the serializers of a user's model
                        row = self._failure(document, digest, question, settings, error)
                    rows.append(row)
            return rows
        finally:
            self._texts[digest] -= 1
            if not self._texts[digest]:
                del self._texts[digest]
                if not self.keeps_texts:
                    await asyncio.to_thread(self.agent.store.remove, reference)

    async def forget(self, rows: Iterable[Row]) -> None:
        """Remove what resuming these rows' reads would need: call it when they are safe."""
        await self.forget_ids(row.id for row in rows if row.chunks)

    async def forget_ids(self, ids: Iterable[str]) -> None:
        """Like `forget`, for rows whose ids are known."""
        saver = await self.agent.acheckpointer()
        if saver is not None:
            await asyncio.gather(*(saver.adelete_thread(each) for each in ids))

    async def keeps_checkpoints_below(self, folder: Path) -> bool:
        """Whether nothing outside of a folder has checkpoints, so that they are lost with it."""
        saver = await self.agent.acheckpointer()
        path = getattr(saver, "path", None)
        return saver is None or (isinstance(path, Path) and folder in path.parents)

    async def aclose(self) -> None:
        """Close the agent."""
        self._loading.shutdown(wait=False, cancel_futures=True)
        await self.agent.aclose()

    async def _fingerprint(self) -> str:
        if self._settings is None:
            self._settings = fingerprint_of(await self.settings())
        return self._settings

    async def _stored(self, document: CorpusDocument) -> DocumentRef:
        """The document's text, in the store. It is fetched and converted in a thread, and that ends when this does."""
        cancellation = ConversionCancellation()
        replace = (await self.agent.aprepare()).replace_undecodable

        def store() -> DocumentRef:
            with self.access.opened(document) as source:
                return self.agent.store.add(source, replace_undecodable=replace, cancellation=cancellation)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._loading, store)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise
        except MemAgentError:
            raise
        except Exception as error:  # parsers of damaged files raise what they like
            raise DocumentError(f"{document.name} cannot be read ({type(error).__name__}): {error}") from error

    async def _read(
        self, reference: DocumentRef, question: str, run_id: str, may_resume: bool, pace: Reach
    ) -> ReadResult:
        """The result, once no other process holds the run."""
        began = time.monotonic()
        while True:
            try:
                return await self._read_held(reference, question, run_id, may_resume, pace)
            except RunHeldError:
                if time.monotonic() - began >= _HELD_SECONDS:
                    raise
                may_resume = True  # whoever holds it may have read some of it
                await asyncio.sleep(_HELD_PAUSE)

    async def _read_held(
        self, reference: DocumentRef, question: str, run_id: str, may_resume: bool, pace: Reach
    ) -> ReadResult:
        if may_resume and self.agent.keeps_checkpoints:
            try:
                stream = self.agent.astream_resume(run_id, response_format=self.response_format, pace=pace)
                return await result_of(stream, self.on_update)
            except (RunNotFoundError, RunMismatchError):
                pass  # nothing of it was saved, or a version that cannot be continued
        stream = self.agent.astream(reference, question, response_format=self.response_format, run_id=run_id, pace=pace)
        return await result_of(stream, self.on_update)

    def _failure(
        self, document: CorpusDocument, digest: str | None, question: str, settings: str, error: Exception
    ) -> Row:
        identity = row_id(document.name, digest or "", question, settings)
        return failed_row(identity, document.name, digest, question, error, self._told, document.metadata)


def _evidence(result: ReadResult) -> Sequence[Evidence]:
    return result.evidence


def settings_of(context: ReaderContext) -> dict[str, Any]:
    """What decides on a row, JSON-ready. Where the server is, and how it is used, is no part of it."""
    sampling, rules = context.sampling, context.rules
    form = context.structure.format if context.structure else None
    return {
        "model": context.policy.name,
        "strategy": context.strategy.name,
        "strategy_options": context.strategy.fingerprint,
        "tokenizer": context.tokenizer.fingerprint,
        "prompts": context.prompts.fingerprint,
        "boundary": context.boundary,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        **asdict(context.budget),
        **{f"on_{name}": getattr(value, "value", value) for name, value in asdict(rules).items()},
        **({"response_format": {"schema": form.schema, "digest": form.fingerprint}} if form else {}),
    }


def fingerprint_of(settings: Mapping[str, Any]) -> str:
    """Settings as one text that is equal on every machine."""
    return msgspec.json.encode(dict(settings), order="deterministic").decode()


def _raise_if_for_all(error: Exception) -> None:
    """Raise what every other document would meet as well."""
    cause = error.__cause__
    if isinstance(error, DocumentError) and isinstance(cause, OSError) and cause.errno in _NO_ROOM:
        raise CorpusError(
            error.message, hint="Make room and start the same command again: nothing that was read is lost."
        ) from error
    if isinstance(error, CheckpointError | CorpusError | PolicyAuthenticationError):
        raise error


POLICY_FAILURES: Final = frozenset(
    kind.__name__
    for kind in (
        PolicyError,
        PolicyUnreachableError,
        PolicyRequestError,
        PolicyOverloadedError,
        PolicyResponseError,
    )
)
"""Kinds of errors that are the policy's or its server's, and may be gone later."""
