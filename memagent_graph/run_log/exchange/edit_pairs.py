"""What people changed in memories, as preference pairs in TRL's conversational form: prompt, chosen, rejected.

The log does not have prompts as text, so a pair's prompt is built again: the wording and the memory come from the log,
the section from the document store. That is possible for the role "update", with the text of one section.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final, Literal

from memagent_graph.calls import Writes
from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.errors import DocumentError
from memagent_graph.events import EventKind
from memagent_graph.prompts import AnswerFormat, Prompts, PromptTemplate
from memagent_graph.run_log.edits import author_of
from memagent_graph.run_log.exchange.exporting import check_destination, format_of, published
from memagent_graph.run_log.exchange.parquet import pyarrow
from memagent_graph.run_log.filters import RunFilter
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import Conversation, LoggedEvent, Outcome, RunRecord

_OWN: Final = frozenset({"update", "answer", "answer_format", "empty_memory"})

StoreOf = Callable[[DocumentRef], DocumentStore]
"""Returns the store that has a run's document."""


@dataclass(frozen=True, slots=True)
class EditPair:
    """A memory that the policy wrote, and a person's version of it."""

    prompt: list[dict[str, str]]
    """The policy's prompt, as messages."""
    chosen: list[dict[str, str]]
    """The person's memory; the last one if it was changed several times."""
    rejected: list[dict[str, str]]
    """The policy's."""
    run_id: str
    chunk: int
    branch: str
    author: str | None
    """Who changed it; None if unknown."""
    edited_at: float
    """Seconds since 1970."""
    policy: str


@dataclass(frozen=True, slots=True)
class EditReport:
    """What an export of edits wrote."""

    pairs: int
    left_out: int
    """Edits whose prompt cannot be built again: another role, a deleted document, a redacted text."""
    bytes: int


def export_edits(
    log: RunLog,
    destination: Path | str,
    store_of: StoreOf,
    *,
    chosen: RunFilter | None = None,
    format: Literal["parquet", "jsonl"] | None = None,  # noqa: A002  what users call it
    overwrite: bool = False,
) -> EditReport:
    """Write the edits of runs to one file, a row for each memory that was changed, oldest run first.

    Args:
        log: where the runs are.
        destination: the file.
        store_of: where their documents' texts are.
        chosen: which runs; all if left out.
        format: Parquet or JSON lines; if left out, the suffix decides.
        overwrite: replace an existing file.

    Raises:
        RunLogError, MissingExtraError: as for `export_runs`.
    """
    destination = Path(destination)
    kind = format_of(destination, format)
    check_destination(log, destination, overwrite=overwrite)
    found: list[EditPair] = []
    left_out = 0
    for record in [*log.runs(chosen)][::-1]:
        for pair in _pairs(log, record, store_of):
            if pair is None:
                left_out += 1
            else:
                found.append(pair)
    with published(destination) as file:
        (_write_parquet if kind == "parquet" else _write_lines)(found, file)
        size = file.tell()
    return EditReport(len(found), left_out, size)


def _pairs(log: RunLog, record: RunRecord, store_of: StoreOf) -> Iterator[EditPair | None]:
    """A run's pairs; None for an edit whose prompt cannot be built."""
    edits: dict[str, list[LoggedEvent]] = {}
    for event in log.events(record.run_id):
        if event.kind == EventKind.MEMORY_EDITED:
            edits.setdefault(event.step or "", []).append(event)
    if not edits:
        return
    attempts: dict[str, Conversation] = {}
    for each in log.conversations(record.run_id, superseded=True, with_ids=False):
        attempts[each.step] = each  # the last attempt is what counts
    run = _Run(record, attempts, edits, log.templates(record.run_id), store_of)
    for step in edits:
        pair = run.pair(step)
        # If a person restored what the policy had written, there is no preference.
        if pair is None or pair.chosen != pair.rejected:
            yield pair


@dataclass(frozen=True)
class _Run:
    """The data that a run's pairs are made from."""

    record: RunRecord
    conversations: Mapping[str, Conversation]
    """The last attempt of each step, by the step."""
    edits: Mapping[str, list[LoggedEvent]]
    """By the step whose memory they replaced, oldest first."""
    templates: Mapping[str, Mapping[str, str]]
    store_of: StoreOf

    def pair(self, step: str) -> EditPair | None:
        conversation, edit = self.conversations.get(step), self.edits[step][-1]
        if conversation is None or conversation.role != "update" or len(conversation.reads) != 1 or edit.text is None:
            return None
        rejected = self._written(conversation)
        memory = self._before(conversation)
        chunk = self._chunk(conversation)
        if rejected is None or memory is None or chunk is None or conversation.template not in self.templates:
            return None
        prompts = _prompts(self.templates[conversation.template])
        asked = prompts.update_messages(self._question_shown, memory, chunk)
        return EditPair(
            prompt=[{"role": each["role"], "content": each["content"]} for each in asked],
            chosen=[{"role": "assistant", "content": edit.text}],
            rejected=[{"role": "assistant", "content": rejected}],
            run_id=self.record.run_id,
            chunk=conversation.reads[0].index,
            branch=conversation.branch,
            author=author_of(edit.detail),
            edited_at=edit.time,
            policy=conversation.policy,
        )

    @property
    def _question_shown(self) -> str:
        """The question as prompts of memories show it, as `ReaderContext.question_shown`."""
        form = self.record.settings.get("response_format")
        outline = form.get("outline") if isinstance(form, Mapping) else None
        return f"{self.record.question}\n\n{outline}" if outline else self.record.question

    def _written(self, conversation: Conversation) -> str | None:
        """The memory that the policy wrote at a step; None if it was redacted."""
        if conversation.outcome is Outcome.ACCEPTED and conversation.writes is Writes.MEMORY:
            return conversation.written
        return conversation.memory if conversation.memory is not None else self._before(conversation)

    def _before(self, conversation: Conversation) -> str | None:
        """The memory that a step started from, written by its parents or edited by a person."""
        memories = []
        for parent in conversation.parents:
            edited = [edit.text for edit in self.edits.get(parent, ()) if edit.time <= conversation.began]
            known = self.conversations.get(parent)
            memory = edited[-1] if edited else self._written(known) if known else None
            if memory is None:
                return None
            memories.append(memory)
        return "\n".join(filter(None, memories))

    def _chunk(self, conversation: Conversation) -> str | None:
        span, document = conversation.reads[0], self.record.document
        try:
            return self.store_of(document).read(document, span.start_byte, span.end_byte)
        except (DocumentError, OSError):
            return None


def _prompts(wording: Mapping[str, str]) -> Prompts:
    return Prompts(
        update=PromptTemplate(wording["update"]),
        answer=PromptTemplate(wording["answer"]),
        answer_format=AnswerFormat(wording["answer_format"]),
        empty_memory=wording["empty_memory"],
        others={name: PromptTemplate(text) for name, text in wording.items() if name not in _OWN},
    )


def _write_parquet(pairs: list[EditPair], file: IO[bytes]) -> None:
    pa = pyarrow("Parquet export")
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    texts, times = ("run_id", "branch", "author", "policy"), ("edited_at",)
    schema = pa.schema(
        [
            *((name, messages) for name in ("prompt", "chosen", "rejected")),
            *((name, pa.string()) for name in texts),
            ("chunk", pa.int64()),
            *((name, pa.float64()) for name in times),
        ]
    )
    rows = [json.loads(_storable(json.dumps(asdict(pair), ensure_ascii=False))) for pair in pairs]
    pa.parquet.write_table(pa.Table.from_pylist(rows, schema=schema), file, compression="zstd")


def _write_lines(pairs: list[EditPair], file: IO[bytes]) -> None:
    for pair in pairs:
        file.write(_storable(json.dumps(asdict(pair), ensure_ascii=False)).encode() + b"\n")


def _storable(text: str) -> str:
    """Half surrogate pairs, which neither format can store, become question marks."""
    return text.encode("utf-8", "replace").decode()
