"""A run of a log with everything that belongs to it: when two are the same, and the parts of one put together."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final, TypeVar, cast

from memagent_graph.documents import DocumentRef
from memagent_graph.events import EventKind
from memagent_graph.run_log.columns import record_columns
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import Conversation, LoggedEvent, LoggedRun, Reward, RunFilter
from memagent_graph.run_log.rows import withdraw_reward

NUMBERS: Final = {
    name: "I" if column.arrow == "ids" else "f"
    for name, column in record_columns(Conversation).items()
    if column.is_numbers
}
"""The type codes of arrays of token ids and log-probs, by attribute of `Conversation`."""


def load_run(log: RunLog, run_id: str) -> LoggedRun | None:
    """Return a run of a log, or None if there is none with this id. Its conversations are read as they are iterated.

    Where its document's file lay on this machine is left out.
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
    """Return a conversation whose ids and log-probs are arrays: lists take ten times as much."""
    values = {name: (kind, getattr(conversation, name)) for name, kind in NUMBERS.items()}
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
            for name, kind, numbers in ((name, kind, getattr(conversation, name)) for name, kind in NUMBERS.items())
        }
        yield replace(conversation, id=None, **as_bytes)
    rewards = [replace(reward, id=None, conversation=order.get(reward.conversation)) for reward in run.rewards]
    yield sorted(rewards, key=lambda reward: (reward.time, str(reward.conversation)))


Item = TypeVar("Item")
_NEW_ATTEMPT: Final = frozenset({EventKind.MEMORY_EDITED, "reward_withdrawn"})
"""Kinds of events that are written when another attempt of a run begins."""


def merge_parts(parts: Sequence[LoggedRun]) -> LoggedRun:
    """Return the run whose parts these are, in the order in which they began; their conversations are lists.

    A run that one process began and another continued is in both their logs, a part in each. Every conversation, event,
    edit and reward of the parts is kept. What counts is decided as while reading: a chunk that was read twice counts
    once, the newest time; what depends on a memory that a person replaced later does not count; and a reward of the run
    that was given before it was resumed or edited is withdrawn, which an event says.

    Merging the result with one of the parts again gives the result.
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
    """Return when the newest attempt began that a part does not know of: the run was resumed, or edited, elsewhere."""
    began = (other.record.began for other in parts if other.record.began > part.record.began)
    edits = (event.time for event in events if event.kind in _NEW_ATTEMPT and event not in part.events)
    return max([*began, *edits], default=-math.inf)


def _is_withdrawn(reward: Reward, attempt: float) -> bool:
    return reward.conversation is None and reward.time < attempt


def _union(lists: Iterable[Sequence[Item]]) -> list[Item]:
    """Return what is in any of the lists, as often as it is in the one that has it most often."""
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
    """Return all conversations, with ids of their own, and the rewards of each part, by these ids."""
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
    """Return the steps that do not count, of conversations in the order in which they began."""
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
    """Return when a part was last written to by a read or an edit."""
    times = [part.record.began, part.record.ended or 0.0]
    times += [conversation.began for conversation in part.conversations]
    return max(times + [event.time for event in part.events if event.kind == EventKind.MEMORY_EDITED])
