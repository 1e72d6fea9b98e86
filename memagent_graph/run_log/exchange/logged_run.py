"""Runs with all of their records: loads and compares them, and merges the parts of a run."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar, cast

from memagent_graph.documents import DocumentRef
from memagent_graph.events import EventKind
from memagent_graph.policy import ARRAY_TYPES
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import Conversation, LoggedEvent, LoggedRun, Reward, RunFilter


def load_run(log: RunLog, run_id: str) -> LoggedRun | None:
    """Return a run of a log, or None if there is no such run. The path of the document on this machine is left out."""
    for record in log.runs(RunFilter(run_ids=[run_id])):
        rewards = log.rewards(run_id)  # first, so that their conversations are there while others write
        document = cast("DocumentRef", {name: value for name, value in record.document.items() if name != "path"})
        return LoggedRun(
            replace(record, document=document),
            list(log.conversations(run_id, superseded=True)),
            log.events(run_id),
            rewards,
            log.templates(run_id),
        )
    return None


def is_same(first: LoggedRun, second: LoggedRun) -> bool:
    """Return whether two runs are equal except for the ids of their conversations and rewards, and their templates."""
    end = object()
    return all(one == other for one, other in zip_longest(contents(first), contents(second), fillvalue=end))


def contents(run: LoggedRun) -> Iterator[object]:
    """Yield all of a run that makes it another one: record, events, conversations, rewards."""
    yield run.record
    yield list(run.events)
    order: dict[int | None, int] = {None: -1}
    for conversation in run.conversations:
        order[conversation.id] = len(order) - 1
        # As bytes, numbers compare equal for any kind of sequence, and a NaN equals itself.
        as_bytes: dict[str, Any] = {
            name: None if numbers is None else array(kind, numbers).tobytes()
            for name, kind, numbers in ((name, kind, getattr(conversation, name)) for name, kind in ARRAY_TYPES.items())
        }
        yield replace(conversation, id=None, **as_bytes)
    rewards = [replace(reward, id=None, conversation=order.get(reward.conversation)) for reward in run.rewards]
    yield sorted(rewards, key=lambda reward: (reward.time, str(reward.conversation)))


Item = TypeVar("Item")


def merge_parts(parts: Sequence[LoggedRun]) -> LoggedRun:
    """Return the run with these parts, which are in the order of their beginnings.

    If one process began a run and another continued it, both logs have a part of it. All conversations, events, edits
    and rewards of the parts are kept, and superseded as during a read. If a chunk was read twice, the newest read
    counts. What depends on a memory that a person replaced later does not count. A reward of the run from before a
    resume or an edit is left out.

    Merging the result with one of its parts returns the result.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    events = _unite(part.events for part in parts)
    conversations, rewards = _merge_conversations(parts, events)
    began = min(part.record.began for part in parts)
    resumes = (part.record.began for part in parts if part.record.began > began)
    attempt = max([*resumes, *(part.record.attempt for part in parts if part.record.attempt)], default=None)
    rewards = [reward for reward in rewards if reward.conversation is not None or reward.time >= (attempt or 0)]
    newest = max(parts, key=_find_last_activity).record
    record = replace(
        first.record,
        began=began,
        attempt=attempt,
        ended=newest.ended,
        stop_reason=newest.stop_reason,
        answer=newest.answer,
    )
    templates = {fingerprint: wording for part in parts for fingerprint, wording in part.templates.items()}
    return LoggedRun(record, conversations, events, sorted(rewards, key=lambda reward: reward.time), templates)


def _unite(lists: Iterable[Sequence[Item]]) -> list[Item]:
    """Return the union of lists as multisets."""
    union: Counter[Item] = Counter()
    for items in lists:
        union |= Counter(items)
    return list(union.elements())


def _merge_conversations(
    parts: Sequence[LoggedRun], events: Sequence[LoggedEvent]
) -> tuple[list[Conversation], list[Reward]]:
    """Return all conversations with new ids, and all rewards with these ids."""
    merged: dict[tuple[str, int], Conversation] = {}
    for part in parts:
        for conversation in sorted(part.conversations, key=lambda conversation: conversation.id or 0):
            earlier = merged.get((conversation.call_id, conversation.attempt), conversation)
            is_superseded = earlier.superseded or conversation.superseded
            merged[conversation.call_id, conversation.attempt] = replace(earlier, superseded=is_superseded)
    in_order = list(merged.values())
    if len(parts[0].conversations) != len(merged):  # otherwise they are in the order of its log
        in_order.sort(key=lambda conversation: conversation.began)  # at one time: in order of parts
    ids = {(conversation.call_id, conversation.attempt): number for number, conversation in enumerate(in_order)}
    rewards_by_part = []
    for part in parts:
        new_ids = {attempt.id: ids[attempt.call_id, attempt.attempt] for attempt in part.conversations}
        rewards_by_part.append(
            [replace(reward, id=None, conversation=new_ids.get(reward.conversation)) for reward in part.rewards]
        )
    stale = _find_stale_calls(in_order, events)
    conversations = [
        replace(conversation, id=number, superseded=conversation.call_id in stale)
        for number, conversation in enumerate(in_order)
    ]
    return sorted(conversations, key=lambda conversation: conversation.position), _unite(rewards_by_part)


def _find_stale_calls(conversations: Sequence[Conversation], events: Sequence[LoggedEvent]) -> set[str]:
    """Return the superseded calls of conversations, which are in the order in which they were read."""
    edited: dict[str | None, float] = {}
    for event in events:
        if event.kind == EventKind.MEMORY_EDITED:
            edited[event.call_id] = max(event.time, edited.get(event.call_id, event.time))
    stale: set[str] = set()
    call_at: dict[tuple[str, str, int], str] = {}
    for number, conversation in enumerate(conversations):  # each after its parents
        began, slot = conversation.began, (conversation.branch, conversation.role, conversation.slot)
        is_of_old_memory = any(began < edited.get(parent, began) for parent in conversation.parents)
        if conversation.superseded or is_of_old_memory or not stale.isdisjoint(conversation.parents):
            stale.add(conversation.call_id)
            continue
        replaced = call_at.get(slot, conversation.call_id)
        call_at[slot] = conversation.call_id
        if replaced != conversation.call_id and replaced not in stale:
            stale.add(replaced)
            for earlier in conversations[:number]:
                if not stale.isdisjoint(earlier.parents):
                    stale.add(earlier.call_id)
    return stale


def _find_last_activity(part: LoggedRun) -> float:
    """Return the time of the newest read or edit in a part."""
    record = part.record
    times = [conversation.began for conversation in part.conversations]
    return max(record.began, record.ended or 0.0, record.attempt or 0.0, *times)
