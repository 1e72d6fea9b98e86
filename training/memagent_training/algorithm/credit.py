"""The terms of an advantage: each has a reward, its weight, the scope of its comparison, and the roles that it credits.

A term's rewards are compared within a group, by `Scope`. A run is compared with the other runs on the question, and a
conversation with the conversations at the same position (role, branch and slot) of the other runs. A reward with no
others to compare it with gives an advantage of 0. Terms are summed; without terms, the outcome is the only one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any, Final

import msgspec

from memagent_graph.plain_text import did_you_mean
from memagent_training.data.rollouts import MAX_REWARD, OUTCOME, Rollout, RolloutGroup
from memagent_training.training_errors import TrainingError


class Scope(StrEnum):
    """The part of a run that a reward belongs to, and the rewards that it is compared with."""

    RUN = "run"
    """A reward of a whole run, compared with those of the group's other runs. Rewards of single conversations count by
    their mean."""
    ROLE = "role"
    """The mean over one role's conversations, compared with that of the group's other runs that have such
    conversations."""
    CONVERSATION = "conversation"
    """A reward of one conversation, compared with those at the same position of the group's other runs."""


@dataclass(frozen=True, slots=True)
class CreditedReward:
    """A reward that is compared with others, and the conversations that get its advantage."""

    rollout: int
    reward: float
    conversations: tuple[int, ...]
    """Indices of the rollout's conversations; all of their learned tokens get the advantage."""


@dataclass(frozen=True, slots=True)
class CreditTerm:
    """One term of an advantage. Roles may be patterns, as in "gated_*"."""

    reward: str
    """"outcome", which is the reward that the training run chose (`--reward`), or another reward's name."""
    weight: float = 1.0
    scope: Scope = Scope.RUN
    of: str | None = None
    """The role whose conversations are rewarded, if the scope is one role."""
    roles: tuple[str, ...] = ()
    """The roles whose tokens are credited; all if left out."""
    divide_by_std: bool | None = None
    """Whether its advantages are divided by the standard deviation; by default as in `AdvantageSettings`."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight) or not self.weight:
            raise TrainingError(
                f"the credit term {self.reward!r} has a weight of {self.weight}",
                hint="Set a finite weight other than 0, or leave the term out.",
            )
        if (self.scope is Scope.ROLE) != (self.of is not None):
            raise TrainingError(
                f"the credit term {self.reward!r} has the scope {self.scope.value!r} and is of the role {self.of!r}",
                hint='Give a role (of: answer) with the scope "role", and with no other.',
            )
        if self.reward == OUTCOME and self.scope is not Scope.RUN:
            raise TrainingError(
                f"the credit term {OUTCOME!r} has the scope {self.scope.value!r}, and is a reward of whole runs",
                hint="Leave the scope out, or give a reward of single conversations.",
            )

    def credits(self, role: str) -> bool:
        """Return whether this term credits the tokens of a role."""
        return not self.roles or any(fnmatchcase(role, pattern) for pattern in self.roles)

    def make_comparison_sets(self, group: RolloutGroup) -> list[list[CreditedReward]]:
        """Return the group's rewards in sets; rewards of one set are compared with each other.

        Raises:
            TrainingError: conversations are compared, and a run has no reward for each of them.
        """
        if self.scope is not Scope.CONVERSATION:
            rewards = []
            for g, rollout in enumerate(group.rollouts_G):
                reward = self._compute_run_reward(rollout)
                roles_K = [conversation.role for conversation in rollout.conversations_K]
                if reward is not None:
                    rewards.append(
                        CreditedReward(g, reward, tuple(k for k, role in enumerate(roles_K) if self.credits(role)))
                    )
            return [rewards]
        rewards_by_slot: dict[tuple[str, str, int], list[CreditedReward]] = {}
        for g, rollout in enumerate(group.rollouts_G):
            self.require_reward(rollout)
            rewards_K = rollout.get_reward(self.reward)
            assert isinstance(rewards_K, tuple)  # noqa: S101  checked just now
            for k, (conversation, reward) in enumerate(zip(rollout.conversations_K, rewards_K, strict=True)):
                if self.credits(conversation.role):
                    rewards_by_slot.setdefault(conversation.slot_key, []).append(CreditedReward(g, reward, (k,)))
        return list(rewards_by_slot.values())

    def require_reward(self, rollout: Rollout) -> None:
        """Refuse a rollout without this reward, with one of another scope, or with a number that is not finite.

        Raises:
            TrainingError: the rollout is one of these; the error has the run's id.
        """
        reward = rollout.get_reward(self.reward)
        if reward is None:
            raise TrainingError(
                f"the credit term {self.reward!r} has no reward in this run",
                hint="Load the runs with the rewards of all terms.",
                run_id=rollout.run_id,
            )
        if not isinstance(reward, tuple) and self.scope is not Scope.RUN:
            raise TrainingError(
                f"the credit term {self.reward!r} has the scope {self.scope.value!r}, and is a reward of whole runs",
                hint='Set its scope to "run", or give a reward of single conversations.',
                run_id=rollout.run_id,
            )
        for value in reward if isinstance(reward, tuple) else (reward,):
            if not abs(value) <= MAX_REWARD:
                raise TrainingError(
                    f"a reward is {value}, which is not a finite number of 32 bits",
                    hint="Correct the reward function and reward the runs again, or leave this one's group out.",
                    run_id=rollout.run_id,
                )

    def _compute_run_reward(self, rollout: Rollout) -> float | None:
        """Return the reward of the run, or the mean of a role's conversations; None if it has none of that role."""
        reward = rollout.get_reward(self.reward)
        if not isinstance(reward, tuple):
            return reward
        pairs = zip(rollout.conversations_K, reward, strict=True)
        rewards = [value for conversation, value in pairs if self.of is None or fnmatchcase(conversation.role, self.of)]
        return fmean(rewards) if rewards else None


def parse_credit_terms(entries: Sequence[Mapping[str, Any]]) -> tuple[CreditTerm, ...]:
    """Return the terms that a list of mappings describes, as read from YAML, TOML or JSON.

    Raises:
        TrainingError: an entry is not a mapping with a reward, has an unknown key or an invalid value.
    """
    return tuple(map(_parse_credit_term, entries))


def require_roles(terms: Sequence[CreditTerm], roles: Collection[str]) -> None:
    """Refuse terms about roles that the runs do not have, because they would credit nothing.

    Raises:
        TrainingError: a term names such a role; the message lists the existing roles.
    """
    for term in terms:
        for pattern in (*term.roles, *(() if term.of is None else (term.of,))):
            if not any(fnmatchcase(role, pattern) for role in roles):
                raise TrainingError(
                    f"the credit term {term.reward!r} is about the role {pattern!r}, and the runs have "
                    f"{', '.join(sorted(roles))}",
                    hint="Choose one of theirs, or read with the strategy that has that role (--strategy).",
                )


_TERM_HINT: Final = (
    "Write it as in {reward: outcome, weight: 0.8} or {reward: format, weight: 0.2, scope: conversation}."
)


def _parse_credit_term(entry: Any) -> CreditTerm:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("reward"), str) or not entry["reward"]:
        raise TrainingError(f"{entry!r} is not a credit term", hint=_TERM_HINT)
    names = [field.name for field in dataclasses.fields(CreditTerm)]
    for name in entry:
        if name not in names:
            hint = did_you_mean(str(name), names, f"Choose one of: {', '.join(names)}.")
            raise TrainingError(f"the credit term {entry['reward']!r} has an unknown key {name!r}", hint=hint)
    roles = entry.get("roles")
    if roles is not None and not roles:  # an empty list would mean all
        raise TrainingError(f"the credit term {entry['reward']!r} has roles: {roles!r}", hint=_TERM_HINT)
    try:
        return msgspec.convert({**entry, "roles": (roles,)} if isinstance(roles, str) else entry, CreditTerm)
    except msgspec.ValidationError as error:
        hint = f"{_TERM_HINT} Scopes: {', '.join(Scope)}."
        raise TrainingError(f"the credit term {entry['reward']!r} cannot be parsed: {error}", hint=hint) from error


OUTCOME_TERMS: Final = (CreditTerm(OUTCOME),)
