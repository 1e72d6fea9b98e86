"""Checks whether conversations can be a model's: ids within its vocabulary, lengths within its window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memagent_training.data.rollouts import RolloutGroup
from memagent_training.training_errors import TrainingError


def check_fit(model_config: Any, groups: Sequence[RolloutGroup]) -> None:
    """Refuse conversations that would fail in the middle of a run, or would be nonsense for the model.

    Args:
        model_config: the model's, of transformers.
        groups: the groups to train on.

    Raises:
        TrainingError: a token id is beyond the vocabulary, or a conversation beyond the window; the message names the
            run.
    """
    config = model_config.get_text_config()
    window, vocabulary = getattr(config, "max_position_embeddings", None), config.vocab_size
    for group in groups:
        for rollout in group.rollouts_G:
            for conversation in rollout.conversations_K:
                ids = conversation.prompt_ids_P + conversation.completion_ids_T
                if max(ids) >= vocabulary:
                    raise TrainingError(
                        f"A conversation has the token id {max(ids)}, and the model {vocabulary} tokens",
                        hint="Train the model that wrote the runs.",
                        run_id=rollout.run_id,
                        chunk_index=conversation.chunk_index,
                    )
                if window is not None and len(ids) > window:
                    raise TrainingError(
                        f"A conversation of {len(ids)} tokens exceeds the model's window of {window}",
                        hint=f"Leave such runs out (--max-tokens {window}).",
                        run_id=rollout.run_id,
                        chunk_index=conversation.chunk_index,
                    )
