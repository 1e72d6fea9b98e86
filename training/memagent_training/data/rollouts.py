"""Logged runs as training data: token ids, log-probs and rewards, in complete rollouts and groups.

Letters in names and docstrings give shapes: G rollouts of a group, K conversations of a rollout (K varies), P tokens of
a prompt, T tokens of a completion.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, TypeAlias

from memagent_training.training_errors import TrainingError

MAX_REWARD: Final = 3.4028234663852886e38
"""The largest 32-bit float; losses are computed in 32 bits."""
OUTCOME: Final = "outcome"
"""The name by which a term of the advantage refers to `Rollout.reward`."""
RewardValue: TypeAlias = float | tuple[float, ...]
"""A reward of a whole run, or one for each of its K conversations."""


@dataclass(frozen=True, slots=True)
class TrainingConversation:
    """One prompt and the completion that the policy sampled, exactly as logged.

    A completion token contributes to the loss if its `loss_mask_T` is true, or if there is no mask.
    """

    prompt_ids_P: array[int] = field(repr=False)
    completion_ids_T: array[int] = field(repr=False)
    logprobs_T: array[float] = field(repr=False)
    """Natural log of the probability that the sampling policy gave each completion token: before temperature, unless
    the server reports it otherwise (`MultiConvDAPOConfig.logged_after_temperature`)."""
    role: str
    """The role: "update", "answer", or another one of the strategy."""
    branch: str
    """The branch in the run's graph; "" is the trunk."""
    slot: int
    """Its index among the conversations of that role and branch, from 0."""
    truncated: bool
    """Whether the completion was cut off at the maximum output length."""
    policy_version: str
    loss_mask_T: Sequence[bool] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        token_count = len(self.completion_ids_T)
        if {len(self.logprobs_T), token_count if self.loss_mask_T is None else len(self.loss_mask_T)} != {token_count}:
            raise ValueError(
                f"log-probs and loss mask must have an entry for each of the {token_count} completion tokens"
            )

    @property
    def slot_key(self) -> tuple[str, str, int]:
        """Role, branch and slot: the position at which a group's conversations are compared."""
        return self.role, self.branch, self.slot

    @property
    def chunk_index(self) -> int | None:
        """The index of the chunk that an update of the trunk read, or None. Later passes continue the count."""
        return self.slot if self.role == "update" and not self.branch else None

    @property
    def learned_tokens(self) -> int:
        """The number of completion tokens that contribute to the loss."""
        return len(self.completion_ids_T) if self.loss_mask_T is None else sum(self.loss_mask_T)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run: its conversations in the order of the log, and its reward."""

    run_id: str
    conversations_K: tuple[TrainingConversation, ...]
    reward: float
    term_rewards: Mapping[str, RewardValue] = field(default_factory=dict)
    """The rewards for the terms of the advantage, by name: one for the run, or one for each of its K conversations."""

    def __post_init__(self) -> None:
        reward_counts = {len(rewards) for rewards in self.term_rewards.values() if isinstance(rewards, tuple)}
        if not self.conversations_K or reward_counts - {len(self.conversations_K)}:
            raise ValueError(f"run {self.run_id} must have conversations, and a term one reward or one for each")

    def get_reward(self, name: str) -> RewardValue | None:
        """Return the reward of that name; None if there is none."""
        return self.reward if name == OUTCOME else self.term_rewards.get(name)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts of one question on one document, which are compared with each other."""

    group_id: str
    rollouts_G: tuple[Rollout, ...]


def require_known_token_ids(model_config: Any, groups: Sequence[RolloutGroup]) -> None:
    """Refuse token ids that are not in the model's vocabulary.

    Args:
        model_config: the model's `transformers` configuration.
        groups: the groups to train on.

    Raises:
        TrainingError: a token id is beyond the vocabulary; the message names the run.
    """
    vocabulary_size = model_config.get_text_config().vocab_size
    for group in groups:
        for rollout in group.rollouts_G:
            for conversation in rollout.conversations_K:
                largest_id = max(chain(conversation.prompt_ids_P, conversation.completion_ids_T))
                if largest_id >= vocabulary_size:
                    raise TrainingError(
                        f"a conversation has the token id {largest_id}, and the model has {vocabulary_size} tokens",
                        hint="Train the model that wrote the runs.",
                        run_id=rollout.run_id,
                        chunk_index=conversation.chunk_index,
                    )
