"""A run with everything that belongs to it, as it is exported and imported."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from memagent_graph.calls import Writes
from memagent_graph.documents import DocumentRef
from memagent_graph.errors import RunLogError
from memagent_graph.run_log.exchange.older_format import with_parents, with_role
from memagent_graph.run_log.filters import RunFilter
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import Conversation, LoggedEvent, Reward, RunRecord

FORMAT_NAME: Final = "memagent-runs"
FORMAT_VERSION: Final = 2
OLDER_VERSION: Final = 1
"""See `older_format`."""
_NUMBERS: Final = {"prompt_token_ids": "I", "token_ids": "I", "logprobs": "f"}


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run with everything that belongs to it. Rewards refer to conversations by their ids in it."""

    record: RunRecord
    conversations: Iterable[Conversation]
    """In order of position and attempt; can be iterated only once."""
    events: Sequence[LoggedEvent] = ()
    """Events of no conversation."""
    rewards: Sequence[Reward] = ()
    templates: Mapping[str, Mapping[str, str]] | None = None
    """The wording of its prompts, by fingerprint."""

    @classmethod
    def read(
        cls,
        version: int,
        record: RunRecord,
        conversations: Sequence[Conversation],
        events: Sequence[LoggedEvent],
        rewards: Sequence[Reward],
        templates: Mapping[str, Mapping[str, str]],
    ) -> LoggedRun:
        """A run from a file of any version; its templates may include those of other runs."""
        if version == OLDER_VERSION:
            conversations = with_parents(conversations)
        used = {each.template for each in conversations}
        own = {name: wording for name, wording in templates.items() if name in used}
        return cls(record, conversations, events, rewards, own)

    def rewards_by_conversation(self) -> dict[int | None, list[Reward]]:
        """Its rewards by conversation; None is the run itself."""
        found: dict[int | None, list[Reward]] = {}
        for reward in self.rewards:
            found.setdefault(reward.conversation, []).append(reward)
        return found


def stored_run(log: RunLog, run_id: str, *, superseded: bool = True) -> LoggedRun | None:
    """A run of a log, or None if there is none with this id. Its conversations are read while they are iterated.

    Where its document's file lay on this machine is left out.
    """
    for found in log.runs(RunFilter(run_ids=[run_id])):
        document = cast("DocumentRef", {name: value for name, value in found.document.items() if name != "path"})
        record = replace(found, document=document)
        conversations = log.conversations(run_id, superseded=superseded)
        return LoggedRun(record, conversations, log.events(run_id), log.rewards(run_id), log.templates(run_id))
    return None


def same(first: LoggedRun, second: LoggedRun) -> bool:
    """Whether two runs are equal except for the ids of their conversations and rewards, and their templates."""
    end = object()
    return all(one == other for one, other in zip_longest(_content(first), _content(second), fillvalue=end))


def check_format(source: Path, name: object, version: object) -> None:
    """Refuse a file that is not an export of this package, or one of a newer version.

    Raises:
        RunLogError: it is not an export, or is of a newer version.
    """
    if name != FORMAT_NAME or not isinstance(version, int):
        raise RunLogError(f"{source} is not an export of runs", hint="`memagent export` writes such files.")
    if version > FORMAT_VERSION:
        raise RunLogError(
            f"{source} was exported by a newer version of this package (format {version}, this one knows "
            f"{FORMAT_VERSION})",
            hint="Upgrade memagent-graph.",
        )


def read_conversation(version: int, values: Mapping[str, Any]) -> Conversation:
    """A conversation from its attributes in a file of any version; other values are ignored.

    Raises:
        ValueError, TypeError, OverflowError, KeyError: it cannot be made from them.
    """
    if version == OLDER_VERSION:
        values = with_role(values)
    numbers: dict[str, Any] = {name: _array(kind, values.get(name)) for name, kind in _NUMBERS.items()}
    return replace(msgspec.convert({**values, **dict.fromkeys(_NUMBERS)}, Conversation), **numbers)


def first_span(conversation: Conversation) -> dict[str, Any]:
    """Attributes of a conversation in format 1 that have their own table now; exports have both."""
    span = conversation.reads[0] if conversation.reads else None
    places = ("start_char", "end_char", "start_byte", "end_byte")
    return {
        "kind": "update" if conversation.writes is Writes.MEMORY else conversation.writes.value,
        **{name: None if span is None else getattr(span, name) for name in places},
        "chunk_tokens": None if span is None else span.tokens,
    }


def _content(run: LoggedRun) -> Iterator[object]:
    yield run.record
    yield list(run.events)
    order: dict[int | None, int] = {None: -1}
    for conversation in run.conversations:
        order[conversation.id] = len(order) - 1
        # As bytes, numbers compare equal for any kind of sequence, and a NaN equals itself.
        numbers = {name: _array(kind, getattr(conversation, name)) for name, kind in _NUMBERS.items()}
        as_bytes: dict[str, Any] = {name: None if found is None else found.tobytes() for name, found in numbers.items()}
        yield replace(conversation, id=None, **as_bytes)
    rewards = [replace(reward, id=None, conversation=order.get(reward.conversation)) for reward in run.rewards]
    yield sorted(rewards, key=lambda reward: (reward.time, str(reward.conversation)))


def _array(kind: str, numbers: Sequence[float] | None) -> array[Any] | None:
    return None if numbers is None else array(kind, numbers)
