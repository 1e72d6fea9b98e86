"""`MemAgentDocumentCompressor`: retrieved documents in, one reading of all of them with citations out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from typing import Any, Literal

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import ensure_config
from langchain_core.runnables.config import set_config_context
from pydantic import ConfigDict, PrivateAttr
from typing_extensions import TypedDict

from langchain_memagent.graph_reads import Around, GraphReads, run_id_in, run_in_graph
from memagent_graph import MemAgent, ReadResult
from memagent_graph.reading.inputs import check_question
from memagent_graph.reading.outcome import raise_first


class Citation(TypedDict):
    """A quote in one of the retrieved documents that supports a line of the reading."""

    document: int
    """The index of the document in the input, counted from 0."""
    metadata: dict[str, Any]
    """The metadata of that document."""
    start_char: int
    """Where the quote begins in that document's `page_content`."""
    end_char: int
    quote: str
    line: str
    """The line of the reading's memory."""


class MemAgentDocumentCompressor(BaseDocumentCompressor):
    """Reads everything that a retriever found, one chunk after the other, with the query as the question.

    For retrieval results that are too long for one prompt: retrieve many documents, read them, and pass on one page.
    Use it in a chain as `RunnableLambda(lambda found: compressor.compress_documents(found["documents"],
    found["question"]))`, or wherever LangChain accepts a compressor. Called inside a LangGraph node, a killed read is
    resumed with the graph.

    Args:
        agent: the reader; prepared at the first call.
        keep: "reading" gives one `Document`: the answer and the memory, and as metadata `run_id`, `answer`,
            `stop_reason`, `chunks_read` and `citations` (a list of `Citation`). "cited" gives the retrieved documents
            that are cited, unchanged and in their order.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    agent: MemAgent
    keep: Literal["reading", "cited"] = "reading"
    _reads: GraphReads = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Check the fields; pydantic calls it."""
        self._reads = GraphReads(self.agent)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Read the documents; the result is empty if they have no text.

        Raises:
            BudgetError: the query is longer than the reader's questions may be.
            MemAgentError: everything that `MemAgent.read` raises.
        """
        with _within(callbacks) as context:
            return self._compress(documents, context.run(run_in_graph, self._read(documents, query)))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """`compress_documents` for asynchronous code."""
        with _within(callbacks) as context:
            result = await asyncio.get_running_loop().create_task(self._read(documents, query), context=context)
        return await asyncio.to_thread(self._compress, documents, result)

    async def _read(self, documents: Sequence[Document], query: str) -> ReadResult | None:
        """Read the documents as one; None if they have no text."""
        if not any(document.page_content.strip() for document in documents):
            return None
        check_question(query, await self._reads.prepare())
        reference = await self._reads.store(list(documents))
        run_ids = {query: run_id_in(ensure_config(), query, reference["key"])}
        [result] = raise_first(await self._reads.read_each(reference, run_ids, Around.here().report))
        return result

    def _compress(self, documents: Sequence[Document], result: ReadResult | None) -> list[Document]:
        if result is None:
            return []
        citations = list(self._citations(documents, result))
        if self.keep == "cited":
            cited = {citation["document"] for citation in citations}
            return [document for index, document in enumerate(documents) if index in cited]
        text = "\n\n".join(part for part in (result.answer, result.memory) if part)
        metadata = {
            "run_id": result.run_id,
            "answer": result.answer,
            "stop_reason": result.stop_reason.value,
            "chunks_read": result.chunks_read,
            "citations": citations,
        }
        return [Document(text, metadata=metadata)] if text else []

    def _citations(self, documents: Sequence[Document], result: ReadResult) -> Iterator[Citation]:
        """Return the quotes behind answer and memory, by retrieved document; a quote that spans two becomes two."""
        starts = [mark.start_char for mark in self.agent.store.sections(result.document)]
        for evidence in result.view().provenance.evidence:
            for index, (document, first) in enumerate(zip(documents, starts, strict=True)):
                start = max(evidence.start_char - first, 0)
                end = min(evidence.end_char - first, len(document.page_content))
                if start < end:
                    yield Citation(
                        document=index,
                        metadata=dict(document.metadata),
                        start_char=start,
                        end_char=end,
                        quote=document.page_content[start:end],
                        line=evidence.line,
                    )


def _within(callbacks: Callbacks | None) -> AbstractContextManager[Context]:
    """Return the calling context, in which a read is also reported to these callbacks."""
    return set_config_context(ensure_config({"callbacks": callbacks} if callbacks else None))
