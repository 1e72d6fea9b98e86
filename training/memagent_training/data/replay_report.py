"""What replay took of logged runs and what it refused: by reason, by run, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

_NAMED: Final = 3
"""How many runs a line names."""


class Refusal(StrEnum):
    """Why a run is not trained on."""

    UNFINISHED = "unfinished"
    """It was killed, failed, or stopped at a limit: there is no answer that a reward could be for."""
    EDITED = "edited"
    """A person replaced its memory, so what it earned is not the policy's doing alone."""
    LOST_CONVERSATIONS = "lost_conversations"
    """The log has holes: a position, an attempt or the answer is missing."""
    NO_TOKEN_IDS = "no_token_ids"  # noqa: S105  no password
    """A conversation has no token ids or log-probs: the policy did not tell, or a redaction hook dropped them."""
    DAMAGED_TOKENS = "damaged_tokens"
    """A conversation has an empty prompt, or log-probs that are not as many as its tokens, or impossible."""
    OTHER_TOKENIZER = "other_tokenizer"
    """It was made with another tokenizer than the one chosen."""
    OTHER_TEMPLATE = "other_template"
    """It was made with other prompts than those chosen."""
    STALE = "stale"
    """A conversation was written by weights that are too old, or not among those allowed."""
    TOO_LONG = "too_long"
    """Prompt and completion of a conversation together do not fit the model's window."""
    NO_REWARD = "no_reward"
    """It has no reward of that name, or the reward function cannot tell its worth."""
    NON_FINITE_REWARD = "non_finite_reward"
    """Its reward is NaN or infinite."""
    NOT_GROUPED = "not_grouped"
    """The groups were given, and it is in none of them."""
    INCOMPLETE_GROUP = "incomplete_group"
    """Another rollout of its group was refused; the rest alone would be compared with a mean that is not theirs."""
    GROUP_TOO_SMALL = "group_too_small"
    """Its group has too few rollouts to compare them with each other."""

    @property
    def leaves_group_whole(self) -> bool:
        """Whether such a run is no member of its group: it is not of the policy, or the choice, that is trained on."""
        return self in {Refusal.OTHER_TOKENIZER, Refusal.OTHER_TEMPLATE, Refusal.STALE, Refusal.NOT_GROUPED}

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _REMEDIES[self]


_REMEDIES: Final = {
    Refusal.UNFINISHED: "resume them, or delete them from the log",
    Refusal.EDITED: "read the document again without an edit",
    Refusal.LOST_CONVERSATIONS: "read the document again; these runs cannot be mended",
    Refusal.NO_TOKEN_IDS: "read with a policy that tells them (vLLM, or a local one), with log-probs and no redaction",
    Refusal.DAMAGED_TOKENS: "read again; if it recurs, the policy tells its tokens wrongly",
    Refusal.OTHER_TOKENIZER: "train on them apart, with tokenizer=...",
    Refusal.OTHER_TEMPLATE: "train on them apart, with template=...",
    Refusal.STALE: "roll out with the newest weights, or allow older ones",
    Refusal.TOO_LONG: "raise max_tokens if the model's window allows, or read in smaller chunks",
    Refusal.NO_REWARD: "give them one (memagent_training.rewards.relabel), or name another",
    Refusal.NON_FINITE_REWARD: "mend the reward function and score them anew",
    Refusal.NOT_GROUPED: "name their groups",
    Refusal.INCOMPLETE_GROUP: "mend the others of the group, or take groups as they are with whole_groups=False",
    Refusal.GROUP_TOO_SMALL: "roll the question out more often",
}


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What became of the runs of one source. Counts are of what was taken, unless they say otherwise."""

    source: str
    runs: int
    """How many there were, refused ones included."""
    refused: Mapping[Refusal, tuple[str, ...]]
    """The ids of refused runs, oldest first; each stands under the first reason found."""
    groups: int = 0
    rollouts: int = 0
    conversations: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    longest: int = 0
    """Tokens of the longest conversation, prompt and completion together."""
    equal_rewards: int = 0
    """Groups whose rollouts all earned the same; an outcome reward teaches nothing there."""
    tokenizer: str | None = None
    """The tokenizer's fingerprint; None where nothing was taken."""
    template: str | None = None
    """The prompts' fingerprint."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Conversations by the policy version that wrote them; "" where the policy did not tell."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Rollouts by how many versions behind the newest their oldest conversation is; empty without an order."""
    reshaped: tuple[str, ...] = ()
    """Runs sampled with another temperature than 1, or a top_p below 1. Their log-probs are those before temperature,
    so importance weights from them are approximate."""

    def summary(self) -> list[str]:
        """It as lines of text."""
        lines = [
            f"{self.source}: {_count(self.rollouts, 'rollout')} in {_count(self.groups, 'group')} "
            f"of {_count(self.runs, 'run')}"
        ]
        if self.rollouts:
            tokens = f"{self.prompt_tokens} prompt and {self.completion_tokens} completion tokens"
            lines += [
                f"{_count(self.conversations, 'conversation')}, {tokens}, the longest {self.longest}",
                "written by " + ", ".join(f"{name or 'unknown'} ({n})" for name, n in self.versions.items()),
            ]
        if self.staleness:
            lines.append("versions behind: " + ", ".join(f"{lag} ({n})" for lag, n in sorted(self.staleness.items())))
        if self.equal_rewards:
            lines.append(f"{_count(self.equal_rewards, 'group')} with all rewards equal")
        if self.reshaped:
            lines.append(f"{_runs(self.reshaped)} sampled with a temperature or top_p other than 1")
        lines += [
            f"refused, {reason.value}: {_runs(run_ids)}; {reason.remedy}" for reason, run_ids in self.refused.items()
        ]
        return lines


def _runs(run_ids: tuple[str, ...]) -> str:
    more = ", ..." if len(run_ids) > _NAMED else ""
    return f"{_count(len(run_ids), 'run')} ({', '.join(run_ids[:_NAMED])}{more})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
