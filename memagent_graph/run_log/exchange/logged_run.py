"""Runs with all of their records: loads and compares them, and merges the parts of a run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final, TypeVar, cast

from memagent_graph.documents import DocumentRef
from memagent_graph.events import EventKind
from memagent_graph.policy import ARRAY_TYPES
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import Conversation, LoggedEvent, LoggedRun, Reward, RunFilter
from memagent_graph.run_log.rows import withdraw_reward


def load_run(log: RunLog, run_id: str) -> LoggedRun | None:
    """Return a run of a log, or None if there is no such run. Conversations are read during iteration.

    The path of the document on this machine is left out.
    """
    for record in log.runs(RunFilter(run_ids=[run_id])):
        document = cast("DocumentRef", {name: value for name, value in record.document.items() if name != "path"})
        return LoggedRun(
            replace(record, document=document),
            log.conversations(run_id, superseded=True),
            log.events(run_id),
            log.rewards(run_id),
            log.templates(run_id),
        )
    return None


def with_arrays(conversation: Conversation) -> Conversation:
    """Return a conversation with ids and log-probs as arrays, because lists need ten times as much memory."""
    values = {name: (kind, getattr(conversation, name)) for name, kind in ARRAY_TYPES.items()}
    arrays: dict[str, Any] = {name: numbers and array(kind, numbers) for name, (kind, numbers) in values.items()}
    return replace(conversation, **arrays)


def is_same(first: LoggedRun, second: LoggedRun) -> bool:
    """Return whether two runs are equal except for the ids of their conversations and rewards, and their templates."""
    end = object()
    return all(one == other for one, other in zip_longest(_content(first), _content(second), fillvalue=end))


def _content(run: LoggedRun) -> Iterator[object]:
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
_NEW_ATTEMPT: Final = frozenset({EventKind.MEMORY_EDITED, "reward_withdrawn"})
"""The kinds of events at the beginning of another attempt of a run."""


def merge_parts(parts: Sequence[LoggedRun]) -> LoggedRun:
    """Return the run with these parts, which are in the order of their beginnings. Their conversations are lists.

    If one process began a run and another continued it, both logs have a part of it. All conversations, events, edits
    and rewards of the parts are kept, and superseded as during a read. If a chunk was read twice, the newest read
    counts. What depends on a memory that a person replaced later does not count. A reward of the run from before a
    resume or an edit is withdrawn, with an event.

    Merging the result with one of its parts returns the result.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    events = _union([part.events for part in parts])
    conversations, rewards_by_part = _conversations(parts, events)
    attempts = [_later_attempt(part, parts, events) for part in parts]
    events = _union(
        [
            events,
            *(
                [withdraw_reward(reward, attempt) for reward in rewards if _is_withdrawn(reward, attempt)]
                for rewards, attempt in zip(rewards_by_part, attempts, strict=True)
            ),
        ]
    )
    rewards = _union(
        [reward for reward in rewards if not _is_withdrawn(reward, attempt)]
        for rewards, attempt in zip(rewards_by_part, attempts, strict=True)
    )
    newest = max(parts, key=_last_active).record
    record = replace(
        first.record,
        began=min(part.record.began for part in parts),
        ended=newest.ended,
        stop_reason=newest.stop_reason,
        answer=newest.answer,
    )
    templates = {fingerprint: wording for part in parts for fingerprint, wording in part.templates.items()}
    return LoggedRun(record, conversations, events, sorted(rewards, key=lambda reward: reward.time), templates)


def _later_attempt(part: LoggedRun, parts: Sequence[LoggedRun], events: Sequence[LoggedEvent]) -> float:
    """Return the start of the newest attempt (a resume or an edit) that a part does not contain."""
    began = (other.record.began for other in parts if other.record.began > part.record.began)
    edits = (event.time for event in events if event.kind in _NEW_ATTEMPT and event not in part.events)
    return max([*began, *edits], default=-math.inf)


def _is_withdrawn(reward: Reward, attempt: float) -> bool:
    return reward.conversation is None and reward.time < attempt


def _union(lists: Iterable[Sequence[Item]]) -> list[Item]:
    """Return the union of lists as multisets."""
    union: list[Item] = []
    for items in lists:
        missing = list(items)
        for item in union:
            if item in missing:
                missing.remove(item)
        union += missing
    return union


def _conversations(
    parts: Sequence[LoggedRun], events: Sequence[LoggedEvent]
) -> tuple[list[Conversation], list[list[Reward]]]:
    """Return all conversations with new ids, and the rewards of the parts with these ids."""
    ids: dict[tuple[str, int], int] = {}
    by_id: dict[int, Conversation] = {}
    rewards_by_part: list[list[Reward]] = []
    for part in parts:
        common: dict[int | None, int] = {}
        for conversation in part.conversations:
            number = common[conversation.id] = ids.setdefault((conversation.step, conversation.attempt), len(ids))
            earlier = by_id.get(number, conversation)
            by_id[number] = replace(earlier, id=number, superseded=earlier.superseded or conversation.superseded)
        rewards_by_part.append(
            [replace(reward, id=None, conversation=common.get(reward.conversation)) for reward in part.rewards]
        )
    in_order = sorted(by_id.values(), key=lambda conversation: conversation.began)  # at one time: in order of parts
    if len(list(parts[0].conversations)) != len(ids):  # otherwise it has numbered them all
        in_order = [replace(conversation, seq=seq) for seq, conversation in enumerate(in_order)]
    stale = _stale(in_order, events)
    conversations = [replace(conversation, superseded=conversation.step in stale) for conversation in in_order]
    return sorted(conversations, key=lambda conversation: (conversation.position, conversation.seq)), rewards_by_part


def _stale(conversations: Sequence[Conversation], events: Sequence[LoggedEvent]) -> set[str]:
    """Return the superseded steps of conversations, which are in the order of their beginnings."""
    edited: dict[str | None, float] = {}
    for event in events:
        if event.kind == EventKind.MEMORY_EDITED:
            edited[event.step] = max(event.time, edited.get(event.step, event.time))
    stale: set[str] = set()
    step_at: dict[tuple[str, str, int], str] = {}
    for number, conversation in enumerate(conversations):  # each after its parents
        began, slot = conversation.began, (conversation.branch, conversation.role, conversation.slot)
        is_of_old_memory = any(began < edited.get(parent, began) for parent in conversation.parents)
        if conversation.superseded or is_of_old_memory or not stale.isdisjoint(conversation.parents):
            stale.add(conversation.step)
            continue
        replaced = step_at.get(slot, conversation.step)
        step_at[slot] = conversation.step
        if replaced != conversation.step and replaced not in stale:
            stale.add(replaced)
            for earlier in conversations[:number]:
                if not stale.isdisjoint(earlier.parents):
                    stale.add(earlier.step)
    return stale


def _last_active(part: LoggedRun) -> float:
    """Return the time of the newest read or edit in a part."""
    times = [part.record.began, part.record.ended or 0.0]
    times += [conversation.began for conversation in part.conversations]
    return max(times + [event.time for event in part.events if event.kind == EventKind.MEMORY_EDITED])
