"""The actions of a person on reads: ask, pause, edit a memory, ask before the end, judge an answer.

A read that a person changed is marked as edited. It no longer answers the request that started it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

from memagent_graph.documents import DocumentRef
from memagent_graph.errors import CheckpointError, MemAgentError, RunHeldError, RunLogError, RunNotFoundError
from memagent_graph.reading.inputs import check_question
from memagent_graph.reading.state import ReaderContext
from memagent_graph.results import AnswerSoFar
from memagent_graph.run_log import RunFilter, RunLog
from memagent_graph.timeline.view import RunView, load_run_view
from memagent_graph.trace import MemoryUpdate
from memagent_serve.api_errors import APIError, make_bad_request_error
from memagent_serve.app import ServerResources
from memagent_serve.keys import Owner
from memagent_serve.ledger import ReadState
from memagent_serve.reads import ReadRequest, ServedRead
from memagent_serve.request_texts import Source, iter_stored_pieces, join_sources
from memagent_serve.uploads import UploadedFile


class LiveReads:
    """The page's actions.

    Args:
        resources: the reader, the manager and the ledger, shared with the API.
    """

    def __init__(self, resources: ServerResources) -> None:
        self._resources = resources
        self._reader, self.manager, self.ledger = resources.reader, resources.manager, resources.ledger
        self._change_lock = asyncio.Lock()
        self.revisions: Counter[str] = Counter()
        """By run id: how often the updates may have been replaced in this process. Pages then reload the read."""

    # Documents and questions

    async def add_document(self, owner: Owner, file: UploadedFile) -> DocumentRef:
        """Return the text of a file that was just uploaded. A file whose text is not stored is deleted."""
        try:
            return await self._resources.uploads.read_text(owner, file.id)
        except (MemAgentError, APIError, asyncio.CancelledError):
            await asyncio.to_thread(self._resources.uploads.delete, owner, file.id)
            raise

    async def start_reads(
        self, owner: Owner, files: Sequence[str], questions: Sequence[str], *, read_again: bool
    ) -> list[ServedRead]:
        """Read files, in order and as one document, for each of the questions.

        Raises:
            APIError: a file is missing, a question is empty or too long, or too many reads are running.
        """
        context = await self._reader.aprepare()
        questions = list(dict.fromkeys(question.strip() for question in questions))
        if not files or not questions:
            raise make_bad_request_error("choose a document and ask a question", "questions" if files else "files")
        for question in questions:
            _require_answerable(question, context, "questions")
        uploads, store, reads = self._resources.uploads, self._reader.store, []
        with uploads.holding_texts():
            references = [await uploads.read_text(owner, file_id) for file_id in files]
            document = references[0]
            if len(references) > 1:
                sources = [Source(ref["name"], partial(iter_stored_pieces, store, ref), ref) for ref in references]
                document = await uploads.add_text(owner, join_sources(sources), replaces_held=True)
            for question in questions:
                request = ReadRequest(owner=owner, document=document, question=question, sampling=context.sampling)
                read, _ = await self.manager.start(request, read_again=read_again)
                reads.append(read)
        return reads

    # Queries

    async def get_view(self, owner: Owner, run_id: str) -> RunView:
        """Return the current state of a read. Raises like `Ledger.get`, and `RunNotFoundError` if it has not begun."""
        await asyncio.to_thread(self.ledger.get, owner.name, run_id)
        return await asyncio.to_thread(load_run_view, self._log, run_id, self._reader.store)

    async def list_updates(self, owner: Owner, run_id: str) -> list[MemoryUpdate]:
        """Return the valid memory updates of a read, in order. Raises like `get_view`.

        If a read is paused or killed between two writes, the log is one chunk ahead of the checkpoints. This chunk is
        read again, so its update is left out unless the read is running.
        """
        view = await self.get_view(owner, run_id)
        updates = list(view.trace.updates)
        if view.stop_reason is not None or self.manager.find(owner, run_id) is not None:
            return updates
        try:
            call_ids = {update.call_id for update in await self._reader.ahistory(run_id)}
        except RunNotFoundError:  # the read was killed before its first checkpoint
            return []
        except MemAgentError:  # the read cannot be continued, so only the log has its updates
            return updates
        return [update for update in updates if update.call_id in call_ids]

    def get_answers(self, run_ids: Sequence[str]) -> dict[str, str | None]:
        """Return the answers in the run log, by run id."""
        if self._reader.run_log is None or not run_ids:
            return {}
        return {run.run_id: run.answer for run in self._reader.run_log.runs(RunFilter(run_ids=list(run_ids)))}

    @property
    def _log(self) -> RunLog:
        if self._reader.run_log is None:
            raise APIError(501, "the page needs the log of runs", code="no_run_log")
        return self._reader.run_log

    # Pause and resume

    async def pause(self, owner: Owner, run_id: str, state: ReadState = ReadState.PAUSED) -> None:
        """Pause or stop a read. The chunk that was being read is read again when the read continues."""
        entry = await asyncio.to_thread(self.ledger.get, owner.name, run_id)
        read = self.manager.find(owner, run_id)
        if read is not None:
            await self.manager.cancel(read, state)
            self.revisions[run_id] += 1
        elif not entry.state.has_ended or entry.state is ReadState.PAUSED:
            await asyncio.to_thread(self.ledger.mark, run_id, state)

    async def resume(self, owner: Owner, run_id: str) -> None:
        """Continue a read where it stopped.

        Raises:
            APIError: 409, the read has ended; 429, too many reads are running.
        """
        async with self._change_lock:
            entry = await asyncio.to_thread(self.ledger.get, owner.name, run_id)
            if entry.state is ReadState.FINISHED:
                raise APIError(409, "the read has ended; edit its memory to continue it", code="read_ended")
            await self.manager.resume(owner, entry)

    # Changes by a person

    async def edit(self, owner: Owner, run_id: str, chunk: int, branch: str, memory_before: str, text: str) -> None:
        """Replace a branch's memory with a text, and discard everything that is based on it.

        Args:
            owner: whose read it is; named as the author.
            run_id: the read; it must not be running.
            chunk: the chunk of the memory.
            branch: the branch, "" for the trunk.
            memory_before: the memory as the person saw it.
            text: the new memory.

        Raises:
            APIError: 409, the read is running, or the memory has changed; 400, the text is too long.
        """
        async with self._change_lock:
            entry = await asyncio.to_thread(self.ledger.get, owner.name, run_id)
            if self.manager.find(owner, run_id) is not None:
                raise APIError(409, "the read is running; pause it first", code="read_running")
            updates = await self.list_updates(owner, run_id)
            newest_update = next((update for update in reversed(updates) if update.branch == branch), None)
            if newest_update is None or newest_update.chunk_index != chunk or newest_update.memory != memory_before:
                self.revisions[run_id] += 1
                raise APIError(409, "the memory has changed in the meantime; check the new one", code="memory_changed")
            # Before the edit: if the process is killed in between, the original request must not get the edited read.
            await asyncio.to_thread(self.ledger.mark_edited, run_id)
            try:
                await self._reader.aedit_memory(run_id, chunk, text, branch=branch, author=owner.name)
            except MemAgentError as error:
                await asyncio.to_thread(self.ledger.mark_edited, run_id, edited=entry.edited)
                if isinstance(error, CheckpointError | RunHeldError | RunLogError):
                    raise  # for example, the disk is full
                raise make_bad_request_error(str(error), "text") from error
            await asyncio.to_thread(self.ledger.mark, run_id, ReadState.PAUSED)
            self.revisions[run_id] += 1

    async def answer_now(self, owner: Owner, run_id: str, question: str) -> AnswerSoFar:
        """Answer a question from the current memory; the read itself is not affected.

        Raises:
            APIError: 404, there is no such read; 400, the question is empty or too long.
            RunNotFoundError: the read has not begun.
        """
        entry = await asyncio.to_thread(self.ledger.get, owner.name, run_id)
        reader = await self.manager.get_reader(ReadRequest.from_entry(entry, owner))
        _require_answerable(question, await reader.aprepare(), "question")
        answer = await reader.aanswer_so_far(run_id, question)
        if answer.usage is not None:
            self._resources.metrics.count_tokens(answer.usage)
        return answer

    async def judge(self, owner: Owner, run_id: str, *, up: bool) -> None:
        """Record a thumb up or down for a read, with the key's name as the source."""
        await asyncio.to_thread(self.ledger.get, owner.name, run_id)
        await asyncio.to_thread(self._log.reward, run_id, float(up), name="thumbs", source=owner.name)


def _require_answerable(question: str, context: ReaderContext, param: str) -> None:
    try:
        check_question(question, context)
    except MemAgentError as error:
        raise make_bad_request_error(str(error), param) from error
