"""A run of a log with everything that belongs to it, and when two are the same."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final, cast

from memagent_graph.documents import DocumentRef
from memagent_graph.run_log.columns import columns_of
from memagent_graph.run_log.filters import RunFilter
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import Conversation, LoggedRun

NUMBERS: Final = {
    name: "I" if column.arrow == "ids" else "f"
    for name, column in columns_of(Conversation).items()
    if column.is_numbers
}
"""The type codes of arrays of token ids and log-probs, by attribute of `Conversation`."""


def stored_run(log: RunLog, run_id: str, *, superseded: bool = True) -> LoggedRun | None:
    """Return a run of a log, or None if there is none with this id. Its conversations are read as they are iterated.

    Where its document's file lay on this machine is left out.
    """
    for record in log.runs(RunFilter(run_ids=[run_id])):
        document = cast("DocumentRef", {name: value for name, value in record.document.items() if name != "path"})
        return LoggedRun(
            replace(record, document=document),
            log.conversations(run_id, superseded=superseded),
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
