"""Estimates the documents, chunks, calls and tokens of a corpus before it is read. The policy is not called.

All documents are listed. An evenly spaced sample of them is opened to count tokens, and the other documents are
estimated from their sizes. In a small corpus, the tokens of every document are counted.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from memagent_corpus.corpus_inputs import CorpusInputs
from memagent_corpus.corpus_reader import CorpusReader
from memagent_corpus.source_access import CorpusDocument
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.state import ReaderContext

_MAX_COUNTED_DOCUMENTS: Final = 200
"""Maximum number of documents whose tokens are counted."""
_MAX_COUNTED_BYTES: Final = 50 * 2**20
_DEFAULT_TOKENS_PER_BYTE: Final = 0.25
"""Used if no document could be counted."""


@dataclass(frozen=True, slots=True)
class CorpusEstimate:
    """Upper bounds for reading a corpus: all memories and answers have their maximum length.

    The estimate covers one pass over the chunks and one answer for each question. Strategies that read chunks more than
    once, and repairs of answers that do not fit their schema, need more.
    """

    documents: int
    unreadable: int
    """Documents in the sample that cannot be opened."""
    questions: int
    """Pairs of a document and a question, which is the number of rows."""
    document_tokens: int
    chunks: int
    """Total over all pairs of a document and a question."""
    calls: int
    prompt_tokens: int
    completion_tokens: int
    counted: int
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
    await reader.settings()
    graph = await reader.agent.agraph(response_format=reader.response_format)
    total = await asyncio.to_thread(inputs.total)
    step = max(1, math.ceil((total.documents or _MAX_COUNTED_DOCUMENTS) / _MAX_COUNTED_DOCUMENTS))
    return await asyncio.to_thread(_Estimate(inputs, reader, graph.reader_context, step).result)


class _Estimate:
    """Computes one estimate. It blocks, so it runs in a thread."""

    def __init__(self, inputs: CorpusInputs, reader: CorpusReader, context: ReaderContext, step: int) -> None:
        self._inputs, self._reader, self._context, self._step = inputs, reader, context, step
        count, prompts, budget = context.tokenizer.count, context.prompts, context.budget
        self._update = count(prompts.update.literal) + budget.memory_tokens
        self._answer = count(prompts.answer.literal) + budget.memory_tokens
        if context.structure:  # update prompts contain an outline of the schema, the answer prompt the schema itself
            self._update += count(context.structure.outline)
            self._answer += (
                0 if context.trained_prompts_only else count(prompts.neutralise(context.structure.format.text))
            )
        self._bytes = self._tokens = self._counted = self._unreadable = 0

    def result(self) -> CorpusEstimate:
        """Count the tokens of a sample, then list all documents again and add up their estimates."""
        for number, document in enumerate(self._inputs.documents()):
            if number % self._step == 0:
                self._count(document)
            if self._bytes > _MAX_COUNTED_BYTES or self._counted >= _MAX_COUNTED_DOCUMENTS:
                break
        tokens_per_byte = self._tokens / self._bytes if self._bytes else _DEFAULT_TOKENS_PER_BYTE
        mean = self._tokens / self._counted if self._counted else 0.0
        budget, count = self._context.budget, self._context.tokenizer.count
        lengths = {question: count(question) for question in self._reader.questions}
        sums: Counter[str] = Counter(documents=0, questions=0, document_tokens=0, chunks=0, calls=0)
        sums.update(prompt_tokens=0, completion_tokens=0)
        for document in self._inputs.documents():
            tokens = mean if document.size is None else document.size * tokens_per_byte
            chunks = max(1, math.ceil(tokens / budget.chunk_tokens))
            sums.update(documents=1, document_tokens=round(tokens))
            for question in self._reader.expand_questions(document):
                length = lengths.get(question) or count(question)
                sums.update(
                    questions=1,
                    chunks=chunks,
                    calls=chunks + 1,
                    prompt_tokens=round(tokens) + chunks * (self._update + length) + self._answer + length,
                    completion_tokens=chunks * budget.memory_tokens + budget.answer_tokens,
                )
        return CorpusEstimate(unreadable=self._unreadable, counted=self._counted, **sums)

    def _count(self, document: CorpusDocument) -> None:
        """Add the document's tokens and bytes to the sample."""
        store = self._reader.agent.store
        try:
            with self._reader.access.open_document(document) as source:
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
    """Split a stored text into pieces of 1 MiB.

    A character at a boundary may be cut in two, so the token count can be slightly too high.
    """
    size, step = reference["size"], 2**20
    for start in range(0, size, step):
        yield store.read_bytes(reference, start, start + step).decode("utf-8", "replace")
