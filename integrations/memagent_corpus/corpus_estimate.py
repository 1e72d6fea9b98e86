"""Estimates the documents, chunks, calls and tokens of a corpus before it is read. The policy is not called.

All documents are listed. An evenly spaced sample of them is opened to count tokens, and the other documents are
estimated from their sizes. In a small corpus, the tokens of every document are counted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

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
    await reader.settings()
    graph = await reader.agent.agraph(response_format=reader.response_format)
    return await asyncio.to_thread(_estimate, inputs, reader, graph.reader_context)


def _estimate(inputs: CorpusInputs, reader: CorpusReader, context: ReaderContext) -> CorpusEstimate:
    """Count the tokens of a sample, then list all documents again and add up their estimates."""
    step = math.ceil((inputs.total().documents or 1) / _MAX_COUNTED_DOCUMENTS)
    sample: Counter[str] = Counter()
    for document in itertools.islice(inputs.documents(), 0, None, step):
        sample.update(_count(document, reader, context))
        if sample["bytes"] > _MAX_COUNTED_BYTES or sample["counted"] >= _MAX_COUNTED_DOCUMENTS:
            break
    tokens_per_byte = sample["tokens"] / sample["bytes"] if sample["bytes"] else _DEFAULT_TOKENS_PER_BYTE
    mean = sample["tokens"] / sample["counted"] if sample["counted"] else 0.0
    budget, prompts, count = context.budget, context.prompts, context.tokenizer.count
    update_tokens = count(prompts.update.literal) + budget.memory_tokens
    answer_tokens = count(prompts.answer.literal) + budget.memory_tokens
    if context.structure:  # update prompts contain an outline of the schema, the answer prompt the schema itself
        update_tokens += count(context.structure.outline)
        if not context.trained_prompts_only:
            answer_tokens += count(prompts.neutralise(context.structure.format.text))
    lengths = {question: count(question) for question in reader.questions}
    sums: Counter[str] = Counter()
    for document in inputs.documents():
        tokens = mean if document.size is None else document.size * tokens_per_byte
        chunks = max(1, math.ceil(tokens / budget.chunk_tokens))
        sums.update(documents=1, document_tokens=round(tokens))
        for question in reader.expand_questions(document):
            length = lengths.get(question) or count(question)
            sums.update(
                questions=1,
                chunks=chunks,
                calls=chunks + 1,
                prompt_tokens=round(tokens) + chunks * (update_tokens + length) + answer_tokens + length,
                completion_tokens=chunks * budget.memory_tokens + budget.answer_tokens,
            )
    return CorpusEstimate(unreadable=sample["unreadable"], counted=sample["counted"], **sums)


def _count(document: CorpusDocument, reader: CorpusReader, context: ReaderContext) -> dict[str, int]:
    """Return the tokens and bytes of a document of the sample.

    The text is counted in pieces of 1 MiB. A character at their boundary may be cut in two, so the number of tokens can
    be slightly too high.
    """
    store, step = reader.agent.store, 2**20
    try:
        with reader.access.open_document(document) as source:
            reference = store.add(source, replace_undecodable=context.replace_undecodable)
    except MemAgentError:
        return {"unreadable": 1}
    size = reference["size"] or 0
    pieces = (store.read_bytes(reference, start, start + step) for start in range(0, size, step))
    tokens = sum(context.tokenizer.count(piece.decode("utf-8", "replace")) for piece in pieces)
    store.remove(reference)
    return {"counted": 1, "tokens": tokens, "bytes": document.size or size}
