"""Runs with all of their records: loads and compares them, and merges the parts of a run."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import attrgetter
from typing import Any, TypeVar, cast

from memagent_graph.documents import DocumentRef
from memagent_graph.events import EventKind
from memagent_graph.policy import ARRAY_TYPES
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import Conversation, LoggedEvent, LoggedRun, Reward, RunFilter


def load_run(log: RunLog, run_id: str) -> LoggedRun | None:
    """Return a run of a log, without the path of its document on this machine; None if there is no such run."""
    for record in log.runs(RunFilter(run_ids=[run_id])):
        rewards = log.rewards(run_id)  # first, so that their conversations exist even if others write meanwhile
        document = cast("DocumentRef", {name: value for name, value in record.document.items() if name != "path"})
        return LoggedRun(
            replace(record, document=document),
            list(log.conversations(run_id, superseded=True)),
            log.events(run_id),
            rewards,
            log.templates(run_id),
        )
    return None


def have_same_content(first: LoggedRun, second: LoggedRun) -> bool:
    """Return whether two runs are equal except for the ids of their conversations and rewards, and their templates."""
    return all(item == other_item for item, other_item in zip_longest(iter_content(first), iter_content(second)))


def iter_content(run: LoggedRun) -> Iterator[object]:
    """Yield what makes two runs equal: the record, the events, the conversations, and the rewards."""
    yield run.record
    yield list(run.events)
    indices_by_id: dict[int | None, int] = {None: -1}
    for conversation in run.conversations:
        indices_by_id[conversation.id] = len(indices_by_id) - 1
        numbers = {name: getattr(conversation, name) for name in ARRAY_TYPES}
        # As bytes, numbers compare equal for any kind of sequence, and a NaN equals itself.
        bytes_by_name: dict[str, Any] = {
            name: None if values is None else array(ARRAY_TYPES[name], values).tobytes()
            for name, values in numbers.items()
        }
        yield replace(conversation, id=None, **bytes_by_name)
    rewards = [replace(reward, id=None, conversation=indices_by_id.get(reward.conversation)) for reward in run.rewards]
    yield sorted(rewards, key=lambda reward: (reward.time, str(reward.conversation)))


Item = TypeVar("Item")


def merge_parts(parts: Sequence[LoggedRun]) -> LoggedRun:
    """Return the run that consists of these parts, which are sorted by their starts.

    If one process began a run and another continued it, both logs have a part of it. The result has all conversations
    and events of the parts, and conversations are superseded as during a read: if a chunk was read twice, the newest
    read counts, and calls that depend on a memory that was edited later do not count. Rewards are kept, except those
    of the run from before a resume or an edit.

    Merging the result with one of its parts returns the result.
    """
    first_part = parts[0]
    if len(parts) == 1:
        return first_part
    events = sorted(_unite_multisets(part.events for part in parts), key=attrgetter("time"))
    conversations, rewards = _merge_conversations(parts, events)
    start_time = min(part.record.began for part in parts)
    resume_times = (part.record.began for part in parts if part.record.began > start_time)
    attempt_time = max([*resume_times, *(part.record.attempt for part in parts if part.record.attempt)], default=None)
    rewards = [reward for reward in rewards if reward.conversation is not None or reward.time >= (attempt_time or 0)]
    newest_record = max(parts, key=_find_last_activity).record
    record = replace(
        first_part.record,
        began=start_time,
        attempt=attempt_time,
        ended=newest_record.ended,
        stop_reason=newest_record.stop_reason,
        answer=newest_record.answer,
    )
    templates = {fingerprint: wording for part in parts for fingerprint, wording in part.templates.items()}
    return LoggedRun(record, conversations, events, sorted(rewards, key=lambda reward: reward.time), templates)


def _unite_multisets(lists: Iterable[Sequence[Item]]) -> list[Item]:
    """Return the union of lists as multisets: each item as often as in the list where it is most frequent."""
    union: Counter[Item] = Counter()
    for items in lists:
        union |= Counter(items)
    return list(union.elements())


def _merge_conversations(
    parts: Sequence[LoggedRun], events: Sequence[LoggedEvent]
) -> tuple[list[Conversation], list[Reward]]:
    """Return all conversations with new ids, and all rewards with these ids."""
    by_attempt: dict[tuple[str, int], Conversation] = {}
    for part in parts:
        for conversation in sorted(part.conversations, key=lambda conversation: conversation.id or 0):
            first_copy = by_attempt.get((conversation.call_id, conversation.attempt), conversation)
            is_superseded = first_copy.superseded or conversation.superseded
            by_attempt[conversation.call_id, conversation.attempt] = replace(first_copy, superseded=is_superseded)
    ordered = list(by_attempt.values())
    if len(parts[0].conversations) != len(by_attempt):  # otherwise they are in the order of that log
        ordered.sort(key=lambda conversation: conversation.began)  # equal times keep the order of the parts
    row_ids = {(conversation.call_id, conversation.attempt): row_id for row_id, conversation in enumerate(ordered)}
    rewards_by_part = []
    for part in parts:
        new_ids = {
            conversation.id: row_ids[conversation.call_id, conversation.attempt] for conversation in part.conversations
        }
        rewards_by_part.append(
            [replace(reward, id=None, conversation=new_ids.get(reward.conversation)) for reward in part.rewards]
        )
    superseded_calls = _find_superseded_calls(ordered, events)
    conversations = [
        replace(conversation, id=row_id, superseded=conversation.call_id in superseded_calls)
        for row_id, conversation in enumerate(ordered)
    ]
    return sorted(conversations, key=lambda conversation: conversation.position), _unite_multisets(rewards_by_part)


def _find_superseded_calls(conversations: Sequence[Conversation], events: Sequence[LoggedEvent]) -> set[str]:
    """Return the ids of the superseded calls. Conversations and events are in the order of their times."""
    edit_times = {event.call_id: event.time for event in events if event.kind == EventKind.MEMORY_EDITED}
    superseded_calls: set[str] = set()
    calls_by_slot: dict[tuple[str, str, int], str] = {}
    for index, conversation in enumerate(conversations):  # parents come before the calls that depend on them
        start_time, slot = conversation.began, (conversation.branch, conversation.role, conversation.slot)
        is_of_old_memory = any(start_time < edit_times.get(parent, start_time) for parent in conversation.parents)
        if conversation.superseded or is_of_old_memory or not superseded_calls.isdisjoint(conversation.parents):
            superseded_calls.add(conversation.call_id)
            continue
        replaced_call = calls_by_slot.get(slot, conversation.call_id)
        calls_by_slot[slot] = conversation.call_id
        if replaced_call != conversation.call_id and replaced_call not in superseded_calls:
            superseded_calls.add(replaced_call)
            for dependent in conversations[:index]:
                if not superseded_calls.isdisjoint(dependent.parents):
                    superseded_calls.add(dependent.call_id)
    return superseded_calls


def _find_last_activity(part: LoggedRun) -> float:
    """Return the time of the newest read or edit in a part."""
    record = part.record
    times = [conversation.began for conversation in part.conversations]
    return max(record.began, record.ended or 0.0, record.attempt or 0.0, *times)
