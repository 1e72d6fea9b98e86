"""The report of a replay: the accepted runs, and the refused ones by reason, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Self

from memagent_graph.plain_text import format_count, list_names

MAX_LISTED: Final = 3
"""The maximum number of runs or groups that a line names."""


class Refusal(StrEnum):
    """The reason why a run is not trained on, with a remedy."""

    UNFINISHED = "unfinished", "resume them, or delete them from the log"
    """The run was killed, failed, or stopped at a limit, so there is no answer to reward."""
    EDITED = "edited", "read the document again without an edit"
    """A person replaced its memory, so its reward is not for the policy alone."""
    LOST_CONVERSATIONS = "lost_conversations", "read the document again; these runs cannot be repaired"
    """The log is incomplete: a position, an attempt or the answer is missing."""
    NO_TOKEN_IDS = (
        "no_token_ids",
        "read with a policy that reports them (vLLM, or a local one), with log-probs and no redaction",
    )
    """A conversation has no token ids or log-probs: the policy reports none, or a redaction hook dropped them."""
    DAMAGED_TOKENS = "damaged_tokens", "read again; if it recurs, the policy reports its tokens wrongly"
    """A conversation has an empty prompt, impossible log-probs, or more or fewer log-probs than tokens."""
    OTHER_TOKENIZER = "other_tokenizer", "train on them separately (--tokenizer FINGERPRINT)"
    """It was made with a tokenizer other than the chosen one."""
    OTHER_TEMPLATE = "other_template", "train on them separately (--template FINGERPRINT)"
    """It was made with prompts other than the chosen ones."""
    STALE = "stale", "roll out with the newest weights, or allow older ones"
    """A conversation was written by weights that are too old, or not among those allowed."""
    TOO_LONG = "too_long", "raise --max-tokens if the model's window allows, or read in smaller chunks"
    """Prompt and completion of a conversation together do not fit into the model's context window."""
    NO_REWARD = (
        "no_reward",
        "give them one (memagent reward), gold answers to compare with (--gold FILE), or name another",
    )
    """It has no reward of that name, or the reward function cannot judge it."""
    NON_FINITE_REWARD = "non_finite_reward", "correct the reward function and score them again"
    """Its reward is NaN, infinite, or larger than 32 bits can hold."""
    NOT_GROUPED = "not_grouped", "name their groups"
    """The groups were given, and none of them has it; or its question was redacted, and the log has no prompt ids that
    would identify the question."""
    GROUP_TOO_SMALL = "group_too_small", "collect more runs of the question with the same settings"
    """Its group has too few rollouts for a comparison."""
    INCOMPLETE_GROUP = (
        "incomplete_group",
        "correct the others of the group, or take incomplete groups (--partial-groups)",
    )
    """Another rollout of its group was refused; the rest would be compared with a wrong mean."""

    remedy: str
    """What the user can do about it."""

    def __new__(cls, value: str, remedy: str) -> Self:
        """Return a reason with its remedy."""
        reason = str.__new__(cls, value)
        reason._value_, reason.remedy = value, remedy
        return reason

    @property
    def is_outside_group(self) -> bool:
        """Whether such a run does not count as part of its group: it has another policy, tokenizer or prompts."""
        return self in {Refusal.OTHER_TOKENIZER, Refusal.OTHER_TEMPLATE, Refusal.STALE, Refusal.NOT_GROUPED}


@dataclass(frozen=True, slots=True)
class ZeroVarianceGroup:
    """A group whose rollouts have equal rewards."""

    group_id: str
    question: str
    """The question; "" if it was redacted."""
    rollouts: int
    reward: float
    """The outcome of each."""

    def __str__(self) -> str:
        return f"{self.question or self.group_id!r} ({format_count(self.rollouts, 'run')}, each {self.reward:g})"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A report on the runs of one source. Counts are for accepted runs, unless stated otherwise."""

    source: str
    runs: int
    """The number of runs in the source, including refused ones."""
    refused: Mapping[Refusal, tuple[str, ...]]
    """The ids of refused runs, oldest first; each under the first reason found."""
    details: Mapping[str, int] = field(default_factory=dict)
    """Refused runs by further detail: why a reward is unknown, or which settings separate groups."""
    groups: int = 0
    rollouts: int = 0
    conversations: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    longest: int = 0
    """Tokens of the longest conversation, prompt and completion together."""
    zero_variance_groups: tuple[ZeroVarianceGroup, ...] = ()
    """The groups whose rollouts have the same value of every requested reward: no training signal."""
    tokenizer: str | None = None
    """The tokenizer's fingerprint; None if no run was accepted."""
    template: str | None = None
    """The prompts' fingerprint."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Conversations by the policy version that wrote them; "" if the policy did not report it."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Rollouts by the number of versions that are newer than their oldest conversation's; empty if versions have no
    order."""
    missing_run_ids: tuple[str, ...] = ()
    """Runs that the given groups name but the source does not have: their groups are incomplete."""
    temperatures: Mapping[float, int] = field(default_factory=dict)
    """Conversations by the temperature that they were sampled at."""
    masked_conversations: int = 0
    """Masked conversations: the policy refused or invented something, and a guard kept the previous memory."""
    non_default_sampling: tuple[str, ...] = ()
    """Runs sampled with a temperature or top_p other than 1. Importance weights are approximate if the log-probs
    are not those of the sampled distribution."""

    def format_lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = [
            f"{self.source}: {format_count(self.rollouts, 'rollout')} in {format_count(self.groups, 'group')} "
            f"of {format_count(self.runs, 'run')}"
        ]
        if self.rollouts:
            tokens = f"{self.prompt_tokens} prompt and {self.completion_tokens} completion tokens"
            lines += [
                f"{format_count(self.conversations, 'conversation')}, {tokens}, the longest {self.longest}",
                "policy versions: "
                + ", ".join(f"{name or 'unknown'} ({count})" for name, count in self.versions.items()),
            ]
        if self.staleness:
            lines.append("staleness: " + ", ".join(f"{lag} ({count})" for lag, count in sorted(self.staleness.items())))
        if self.zero_variance_groups:
            groups = self.zero_variance_groups
            lines.append(
                f"{format_count(len(groups), 'group')} with all rewards equal: {list_names(groups, MAX_LISTED)}"
            )
        if self.missing_run_ids:
            lines.append(f"named in the groups, but missing: {_list_runs(self.missing_run_ids)}")
        if self.masked_conversations:
            conversations = format_count(self.masked_conversations, "conversation")
            lines.append(f"masked, because a guard kept another memory: {conversations}")
        if self.non_default_sampling:
            lines.append(f"{_list_runs(self.non_default_sampling)} sampled with a temperature or top_p other than 1")
        lines += [
            f"refused, {reason.value}: {_list_runs(run_ids)}; {reason.remedy}"
            for reason, run_ids in self.refused.items()
        ]
        lines += [f"{detail}: {format_count(run_count, 'run')}" for detail, run_count in self.details.items()]
        return lines

    @property
    def reasons(self) -> str:
        """The refused runs by reason, in one line, causes first."""
        refused = [f"{reason.value}: {list_names(run_ids, MAX_LISTED)}" for reason, run_ids in self.refused.items()]
        return "; ".join([*refused, *(f"{detail} in {run_count}" for detail, run_count in self.details.items())])

    @property
    def remedies(self) -> str:
        """The remedy for each reason, in one line."""
        return " ".join(f"For {reason.value}: {reason.remedy}." for reason in self.refused)


def _list_runs(run_ids: Sequence[str]) -> str:
    return f"{format_count(len(run_ids), 'run')} ({list_names(run_ids, MAX_LISTED)})"
