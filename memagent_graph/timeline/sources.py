"""Where a `RunView` comes from: a run log with the documents it refers to, or a result at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from memagent_graph.documents import DocumentRef, DocumentStore, SourceMark
from memagent_graph.errors import DocumentError
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.policy import strip_reasoning
from memagent_graph.run_log import Conversation, ConversationKind, LoggedEvent, Outcome, RunLog
from memagent_graph.timeline.view import RewardView, RunView
from memagent_graph.trace import MemoryUpdate

if TYPE_CHECKING:
    from memagent_graph.results import ReadResult


def view_of_run(log: RunLog, run_id: str, store: DocumentStore) -> RunView:
    """A logged run, finished or not. Texts of chunks come from the store, where they are still there.

    Raises:
        RunNotFoundError: the log holds no such run.
    """
    record = log.get(run_id)
    conversations = list(log.conversations(run_id))
    counted = [each for each in conversations if each.outcome is not Outcome.DISCARDED]
    updates = _updates(conversations, log.events(run_id), record.document)
    answers = [each for each in counted if each.kind is ConversationKind.ANSWER]
    answer = answers[-1] if answers else None
    attempts = [each for each in conversations if each.kind is ConversationKind.ANSWER]
    return RunView(
        run_id=run_id,
        question=record.question,
        document=record.document,
        model=counted[-1].policy if counted else "",
        updates=tuple(updates),
        answer=record.answer,
        raw_answer=answer.text if answer else None,
        stop_reason=record.stop_reason,
        answer_events=tuple(_event(event, None) for each in attempts for event in each.events),
        answer_prompt_tokens=sum(each.prompt_tokens for each in attempts),
        answer_completion_tokens=sum(each.completion_tokens for each in attempts),
        answer_seconds=sum(each.seconds for each in attempts),
        began=record.began,
        ended=record.ended,
        rewards=tuple(
            RewardView(each.name, each.value, each.source, each.time)
            for each in log.rewards(run_id)
            if each.conversation is None
        ),
        sections=_sections(store, record.document),
        chunk_text=chunk_reader(store, record.document),
    )


def view_of_result(result: ReadResult, store: DocumentStore | None) -> RunView:
    """A result, whether it was logged or not; without a store, chunks have no text."""
    answered = result.usage
    return RunView(
        run_id=result.run_id,
        question=result.question,
        document=result.document,
        model=result.model,
        updates=result.updates,
        answer=result.answer,
        raw_answer=result.raw_answer,
        stop_reason=result.stop_reason.value,
        answer_events=result.answer_events,
        answer_prompt_tokens=answered.prompt_tokens - sum(each.prompt_tokens for each in result.updates),
        answer_completion_tokens=answered.completion_tokens - sum(each.completion_tokens for each in result.updates),
        answer_seconds=max(0.0, answered.seconds - sum(each.seconds for each in result.updates)),
        sections=_sections(store, result.document) if store else (),
        chunk_text=chunk_reader(store, result.document) if store else lambda _: None,
    )


def chunk_reader(store: DocumentStore, document: DocumentRef) -> Callable[[MemoryUpdate], str | None]:
    """Gives the text that an update read, or None where the store has lost it."""

    def read(update: MemoryUpdate) -> str | None:
        try:
            return store.read(document, update.start_byte, update.end_byte)
        except (DocumentError, OSError):
            return None

    return read


def _sections(store: DocumentStore, document: DocumentRef) -> Sequence[SourceMark]:
    try:
        return store.sections(document)
    except (DocumentError, OSError):
        return ()


def _updates(
    conversations: Iterable[Conversation], events: Sequence[LoggedEvent], document: DocumentRef
) -> Iterable[MemoryUpdate]:
    """The memory after every chunk, rebuilt from what was said and what was made of it."""
    memory = ""
    discarded: list[Conversation] = []
    for each in conversations:
        if each.kind is not ConversationKind.UPDATE:
            continue
        if each.outcome is Outcome.DISCARDED:
            discarded.append(each)
            continue
        attempts, discarded = [*discarded, each], []
        previous, memory = memory, _memory_after(each, memory)
        told = [_event(event, each.position) for attempt in attempts for event in attempt.events]
        for edit in events:
            if edit.position == each.position and edit.kind == EventKind.MEMORY_EDITED and edit.time >= each.began:
                memory = edit.text or ""
                told.append(_event(edit, each.position))
        yield MemoryUpdate(
            chunk_index=each.position,
            start_char=each.start_char or 0,
            end_char=each.end_char or 0,
            start_byte=each.start_byte or 0,
            end_byte=each.end_byte or 0,
            chunk_tokens=each.chunk_tokens or 0,
            memory=memory,
            changed=memory != previous,
            progress=(each.end_byte or 0) / document["size"] if document["size"] else None,
            prompt_tokens=sum(attempt.prompt_tokens for attempt in attempts),
            completion_tokens=sum(attempt.completion_tokens for attempt in attempts),
            seconds=sum(attempt.seconds for attempt in attempts),
            events=tuple(told),
        )


def _memory_after(conversation: Conversation, previous: str) -> str:
    if conversation.outcome is Outcome.KEPT_PREVIOUS:
        return previous
    if conversation.memory is not None:
        return conversation.memory
    return strip_reasoning(conversation.text or "").strip()


def _event(event: LoggedEvent, chunk_index: int | None) -> ReadEvent:
    return ReadEvent(EventKind(event.kind), chunk_index, event.detail, UpdateRule(event.rule) if event.rule else None)
