"""What a corpus would take, before it is read: documents, chunks, calls and tokens. The policy is asked nothing.

Documents are listed, and some of them, evenly spread, are opened and their tokens counted; from these and the sizes of
all the rest follows. Small corpora are counted in full.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from memagent_graph.corpus.corpus_documents import CorpusDocument
from memagent_graph.corpus.corpus_inputs import Inputs
from memagent_graph.corpus.corpus_reader import CorpusReader
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.state import ReaderContext

_COUNTED_DOCUMENTS: Final = 200
"""Documents whose tokens are counted, at most."""
_COUNTED_BYTES: Final = 50 * 2**20


@dataclass(frozen=True, slots=True)
class CorpusEstimate:
    """What a corpus would take at most, with memories and answers as long as they may be.

    One pass over the chunks and an answer is counted: a strategy that looks back or reads again takes more.
    """

    documents: int
    unreadable: int
    """Documents that cannot be opened, as far as they were."""
    questions: int
    """Pairs of a document and a question: the rows."""
    document_tokens: int
    chunks: int
    """For each question."""
    calls: int
    prompt_tokens: int
    completion_tokens: int
    counted: int
    """Documents whose tokens were counted; the others are extrapolated by their size."""

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens


async def estimate_corpus(inputs: Inputs, reader: CorpusReader) -> CorpusEstimate:
    """Estimate what reading all of a corpus would take.

    Raises:
        MemAgentError: the inputs cannot be listed, or the policy's settings do not fit.
    """
    await reader.settings()
    graph = await reader.agent.agraph()
    total = await asyncio.to_thread(inputs.total)
    step = max(1, math.ceil((total.documents or _COUNTED_DOCUMENTS) / _COUNTED_DOCUMENTS))
    return await asyncio.to_thread(_Estimate(inputs, reader, graph.reader_context, step).result)


class _Estimate:
    """One estimate; runs in a thread."""

    def __init__(self, inputs: Inputs, reader: CorpusReader, context: ReaderContext, step: int) -> None:
        self._inputs, self._reader, self._context, self._step = inputs, reader, context, step
        count, prompts, budget = context.tokenizer.count, context.prompts, context.budget
        self._update = count(prompts.update.literal) + budget.memory_tokens
        self._answer = count(prompts.answer.literal) + budget.memory_tokens
        self._bytes = self._tokens = self._counted = self._unreadable = 0

    def result(self) -> CorpusEstimate:
        """The estimate: a pass that counts some documents, and one that adds up all."""
        for number, document in enumerate(self._inputs.documents()):
            if number % self._step == 0:
                self._count(document)
            if self._bytes > _COUNTED_BYTES or self._counted >= _COUNTED_DOCUMENTS:
                break
        per_byte = self._tokens / self._bytes if self._bytes else 0.25
        mean = self._tokens / self._counted if self._counted else 0.0
        questions = {each: self._context.tokenizer.count(each) for each in self._reader.questions}
        sums = dict.fromkeys(
            ("documents", "questions", "document_tokens", "chunks", "calls", "prompt", "completion"), 0
        )
        budget = self._context.budget
        for document in self._inputs.documents():
            tokens = mean if document.size is None else document.size * per_byte
            asked = self._reader.questions_of(document)
            chunks = max(1, math.ceil(tokens / budget.chunk_tokens))
            for each in asked:
                question = questions.get(each) or self._context.tokenizer.count(each)
                sums["questions"] += 1
                sums["chunks"] += chunks
                sums["calls"] += chunks + 1
                sums["prompt"] += round(tokens) + chunks * (self._update + question) + self._answer + question
                sums["completion"] += chunks * budget.memory_tokens + budget.answer_tokens
            sums["documents"] += 1
            sums["document_tokens"] += round(tokens)
        return CorpusEstimate(
            documents=sums["documents"],
            unreadable=self._unreadable,
            questions=sums["questions"],
            document_tokens=sums["document_tokens"],
            chunks=sums["chunks"],
            calls=sums["calls"],
            prompt_tokens=sums["prompt"],
            completion_tokens=sums["completion"],
            counted=self._counted,
        )

    def _count(self, document: CorpusDocument) -> None:
        store = self._reader.agent.store
        try:
            with self._reader.access.opened(document) as source:
                reference = store.add(source, replace_undecodable=self._context.replace_undecodable)
        except MemAgentError:
            self._unreadable += 1
            return
        tokens = sum(self._context.tokenizer.count(piece) for piece in _pieces(store, reference))
        self._tokens += tokens
        self._bytes += document.size or int(reference["size"] or 0)
        self._counted += 1
        store.remove(reference)


def _pieces(store: Any, reference: Any) -> Iterator[str]:
    """A stored text in pieces of a megabyte; a character that one splits counts as a token more."""
    size, step = store.size(reference) or 0, 2**20
    for start in range(0, size, step):
        yield store.read_bytes(reference, start, start + step).decode("utf-8", "replace")
