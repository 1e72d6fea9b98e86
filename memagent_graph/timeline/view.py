"""A run for viewing, from a run log and the store of documents, or from a result (`ReadResult.view`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.documents.omissions import list_document_events
from memagent_graph.errors import DocumentError
from memagent_graph.events import ReadEvent
from memagent_graph.provenance.evidence import (
    Evidence,
    Provenance,
    find_excerpt_evidence,
    find_provenance,
    find_sentence_around,
    find_supporting_lines,
)
from memagent_graph.provenance.places import Places, make_link_prefix
from memagent_graph.run_log import Reward, RunLog
from memagent_graph.trace import MemoryUpdate, Span, Trace, Writes

MAX_CUT_CHARACTERS: Final = 40
"""Maximum characters of a word that is left out because it is cut. Scripts without spaces have longer parts."""
_CUT_WORD_BEFORE: Final = re.compile(rf"^\S{{0,{MAX_CUT_CHARACTERS}}}\s+(?=\S)")
_CUT_WORD_AFTER: Final = re.compile(rf"\s\S{{0,{MAX_CUT_CHARACTERS}}}\Z")


@dataclass(frozen=True)
class RunView:
    """A run with the texts of its document, the input of `build_timeline`. Times are seconds since 1970."""

    run_id: str
    question: str
    document: DocumentRef
    model: str
    strategy: str
    """The strategy's name."""
    trace: Trace = field(repr=False)
    """The trace of the run."""
    answer: str | None
    raw_answer: str | None
    stop_reason: str | None
    """The stop reason; None while the run goes on, or after a crash."""
    began: float | None = None
    rewards: tuple[Reward, ...] = ()
    places: Places = field(default_factory=Places, repr=False)
    """The names of the document's places."""
    span_text: Callable[[Span | MemoryUpdate], str | None] = field(default=lambda _: None, repr=False)
    """Returns the text of a part of the document; None if it is no longer stored."""

    @property
    def answer_events(self) -> tuple[ReadEvent, ...]:
        """Events about parts of the document that are not in its text, and the events of the answer."""
        return list_document_events(self.document) + (self.trace.answers[-1].events if self.trace.answers else ())

    @cached_property
    def provenance(self) -> Provenance:
        """The provenance of the final memory, or quotes for the answer if an excerpt was shown instead of chunks."""
        if (call := self.trace.newest_excerpt_call) is not None:
            supported_text = self.answer or "" if call.writes is Writes.ANSWER else self.trace.final_memory
            return Provenance(evidence=find_excerpt_evidence(call, supported_text, self.span_text, self.places))
        return find_provenance(self.trace, self.span_text, self.places)

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """The quotes that support the answer, or without an answer the quotes of all memory lines."""
        if self.answer is None or self.trace.newest_excerpt_call is not None:
            return self.provenance.evidence
        lines = find_supporting_lines(self.answer, self.question, [line.line for line in self.provenance.lines])
        return tuple(evidence for evidence in self.provenance.evidence if evidence.line_index in lines)

    def chunk_text(self, update: MemoryUpdate) -> str | None:
        """Return the text that an update read; None if it read no single passage, or if it is no longer stored."""
        return self.span_text(update) if self.trace.reads_one_passage(update) else None

    def list_sentences(self) -> list[tuple[str, Evidence]]:
        """Return the sentences of the evidence without duplicates, with their first quotes."""
        sentences: dict[tuple[int, int], tuple[str, Evidence]] = {}
        for quote in self.evidence:
            text_start, text = self.load_text_around(quote)
            quote_start, quote_end = quote.start_char - text_start, quote.end_char - text_start
            start, end = find_sentence_around(text, quote_start, quote_end)
            sentences.setdefault((text_start + start, text_start + end), (text[start:end] or quote.quote, quote))
        return list(sentences.values())

    def get_quote_context(self, quote: Evidence, characters: int) -> tuple[str, str]:
        """Return the text around a quote in its chunk, whole words in at most `characters` on each side.

        Both texts are empty if the document is no longer stored.
        """
        text_start, text = self.load_text_around(quote)
        start, end = quote.start_char - text_start, quote.end_char - text_start
        before, after = text[max(0, start - characters) : start], text[end : end + characters]
        if start > characters and not text[start - characters - 1].isspace():
            before = _CUT_WORD_BEFORE.sub("", before, count=1)
        if end + characters < len(text) and not text[end + characters].isspace():
            after = _CUT_WORD_AFTER.sub("", after)
        return before, after

    def load_text_around(self, quote: Evidence) -> tuple[int, str]:
        """Return the text of the chunk or passage with a quote, preceded by the text's position in the document."""
        if quote.update >= 0:
            update = self.trace.updates[quote.update]
            return update.start_char, self.span_text(update) or ""
        reads = self.trace.newest_excerpt_call.reads if self.trace.newest_excerpt_call else ()
        span = next(span for span in reads if span.start_char <= quote.start_char < span.end_char)
        return span.start_char, self.span_text(span) or ""


def load_run_view(log: RunLog, run_id: str, store: DocumentStore) -> RunView:
    """Return a logged run, finished or not. The texts of chunks come from the store, if it still has them.

    Raises:
        RunNotFoundError: there is no such run in the log.
    """
    record = log.get(run_id)
    trace = log.trace(run_id)
    return RunView(
        run_id=run_id,
        question=record.question,
        document=record.document,
        model=trace.calls[-1].completion.model if trace.calls else "",
        strategy=record.strategy,
        trace=trace,
        answer=record.answer,
        raw_answer=trace.answers[-1].text if trace.answers else None,
        stop_reason=record.stop_reason,
        began=record.began,
        rewards=tuple(reward for reward in log.rewards(run_id) if reward.conversation is None),
        **load_texts(store, record.document),
    )


def load_texts(store: DocumentStore, document: DocumentRef) -> dict[str, Any]:
    """Return the fields of a `RunView` that come from the store, if the document is still stored."""
    return {
        "places": Places(
            _return_default_if_lost(lambda: store.sections(document), []),
            _return_default_if_lost(lambda: store.headings(document), []),
            make_link_prefix(document),
        ),
        "span_text": make_text_reader(store, document),
    }


def make_text_reader(store: DocumentStore, document: DocumentRef) -> Callable[[Span | MemoryUpdate], str | None]:
    """Return a function that returns the text of a part of the document; None if it is no longer stored."""
    return lambda part: _return_default_if_lost(lambda: store.read(document, part.start_byte, part.end_byte), None)


def _return_default_if_lost(read: Callable[[], Any], default: Any) -> Any:
    try:
        return read()
    except (DocumentError, OSError):
        return default
