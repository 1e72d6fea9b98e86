"""Checks which weights a server answers with, by its log-probs of fixed prompts, compared with the trainer's.

There are two requests per prompt. The log-probs of the prompt's own tokens depend only on the weights, because vLLM
does not use its prefix cache for them. The log-probs of tokens that are sampled after the prompt depend on the cache,
so only they show a cache of older weights, if the server has seen the prompt before. Therefore the probe also runs
before a swap.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from memagent_training.forward.layouts import IdRow, TokenRow, lay_out
from memagent_training.forward.scoring import score_completions
from memagent_training.serving.policy_sync.folders import PolicyFolder
from memagent_training.serving.policy_sync.server_api import ServerAPI
from memagent_training.training_errors import SyncError, TrainingError

_LENGTHS: Final = (40, 170, 300)
"""Tokens per prompt: less than a cache block, more than a block of 128 (the default on CPUs), and many blocks of 32."""
_COMPLETION_TOKENS: Final = 8
_SEED: Final = 20
_MIN_SIGNAL_TO_NOISE: Final = 6.0
"""The change of the trainer's log-probs must be this many times the previous difference between server and trainer."""
_MAX_UNEXPLAINED_FRACTION: Final = 0.4
"""The maximum fraction of that change that the server's log-probs may lack."""
_FLOAT32_RESOLUTION: Final = 1e-6
RowScorer: TypeAlias = Callable[[Sequence[TokenRow]], list[list[float]]]
"""Returns log-probs of rows' completion tokens under some weights, at temperature 1: one list per row, one number per
token. Called in a separate thread."""


@dataclass(frozen=True, slots=True)
class ProbeLogProbs:
    """Log-probs of the probe's tokens, over all prompts."""

    prompt: tuple[float, ...]
    """Log-probs of the prompts' tokens: comparable between versions."""
    completion: tuple[float, ...]
    """Log-probs of the tokens that the server sampled after the prompts."""


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """A server's reply to the probe."""

    rows: tuple[IdRow, ...]
    """For each prompt a row: its first token as the prompt, and all scored tokens as the completion."""
    logprobs: ProbeLogProbs
    cached_tokens: int
    """The number of prompt tokens from the server's prefix cache, if it reports this."""

    def split(self, logprobs: Sequence[Sequence[float]]) -> ProbeLogProbs:
        """Split another model's log-probs of the same rows into those of prompts and of completions."""
        completion_length = len(self.logprobs.completion) // len(self.rows)
        return ProbeLogProbs(
            tuple(value for row in logprobs for value in row[:-completion_length]),
            tuple(value for row in logprobs for value in row[-completion_length:]),
        )


class PreviousLogProbs(NamedTuple):
    """The log-probs of the prompts with the previous weights."""

    server: tuple[float, ...]
    trainer: tuple[float, ...]


def make_prompts(vocabulary: int, window: int | None) -> list[tuple[int, ...]]:
    """Return random prompts as token ids, of at least two tokens each, the same for equal vocabularies and windows.

    No ids are from the lowest eighth and the upper half, where control tokens and image tokens usually are.
    """
    longest = _LENGTHS[-1] if window is None else max(2, min(_LENGTHS[-1], window - _COMPLETION_TOKENS))
    generator = random.Random(_SEED)
    low, high = vocabulary // 8, max(vocabulary // 2, vocabulary // 8 + 1)
    lengths = sorted({min(length, longest) for length in _LENGTHS})
    return [tuple(generator.randrange(low, high) for _ in range(length)) for length in lengths]


async def probe_server(api: ServerAPI, model: str, prompts: Sequence[tuple[int, ...]]) -> ProbeReply:
    """Return a server's reply to the probe.

    Raises:
        SyncError: the server does not answer, or its answer has no log-probs.
    """
    rows: list[IdRow] = []
    prompt_logprobs: list[float] = []
    completion_logprobs: list[float] = []
    cached_tokens = 0
    for prompt in prompts:
        # The request that reads the cache comes first, because the other one would fill it.
        body = _make_body(model, prompt, _COMPLETION_TOKENS)
        reply = await api.complete(body | {"logprobs": 0, "seed": _SEED})
        prompt_reply = await api.complete(_make_body(model, prompt, 1) | {"prompt_logprobs": 0})
        try:
            choice = reply["choices"][0]
            token_ids = tuple(int(token) for token in choice["token_ids"])
            token_logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            entries = prompt_reply["choices"][0]["prompt_logprobs"][1:]
            prompt_scores = [
                float(entry[str(token)]["logprob"]) for entry, token in zip(entries, prompt[1:], strict=True)
            ]
            if not len(token_ids) == len(token_logprobs) == _COMPLETION_TOKENS:
                raise ValueError(f"{len(token_logprobs)} of {_COMPLETION_TOKENS} tokens")
        except (LookupError, TypeError, ValueError) as error:
            raise SyncError(
                f"{api.root_url} returns no log-probs that can be compared: {error!r}",
                hint="It must be a vLLM server whose completions have token ids and log-probs.",
            ) from error
        rows.append(IdRow(prompt[:1], (*prompt[1:], *token_ids)))
        prompt_logprobs += prompt_scores
        completion_logprobs += token_logprobs
        cached_tokens += ((reply.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return ProbeReply(tuple(rows), ProbeLogProbs(tuple(prompt_logprobs), tuple(completion_logprobs)), cached_tokens)


def _make_body(model: str, prompt: tuple[int, ...], tokens: int) -> dict[str, Any]:
    # At temperature 1, and with nothing else, raw and processed log-probs are the same.
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        **sampling,
    }


def find_largest_gap(left: ProbeLogProbs, right: ProbeLogProbs) -> float:
    """Return the largest difference; infinity if a value is not a finite number."""
    pairs = [*zip(left.prompt, right.prompt, strict=True), *zip(left.completion, right.completion, strict=True)]
    return max(_compute_distance(*pair) for pair in pairs)


def find_mismatch(
    server: ProbeLogProbs, trainer: ProbeLogProbs, *, tolerance: float, before: PreviousLogProbs | None = None
) -> str | None:
    """Return how the server's log-probs show that it has other weights than the trainer; None if they do not.

    After small steps, two versions may be within the tolerance of each other. Then the log-probs `before` the swap
    distinguish them: if the trainer's moved much farther than its difference from the server, the server's must have
    moved with them.
    """
    for server_values, trainer_values, description in (
        (server.prompt, trainer.prompt, "of the probe's prompts"),
        (server.completion, trainer.completion, "of completions after cached prompts"),
    ):
        worst_pair = max(zip(server_values, trainer_values, strict=True), key=lambda pair: _compute_distance(*pair))
        if not _compute_distance(*worst_pair) <= tolerance:
            return (
                f"its log-probs {description} are not the trainer's: {worst_pair[0]:.5f} against {worst_pair[1]:.5f}, "
                f"with a tolerance of {tolerance:g}"
            )
    if before is None:
        return None
    noise = _compute_rms(before.server, before.trainer)
    signal = _compute_rms(trainer.prompt, before.trainer)
    server_moves = [new - old for new, old in zip(server.prompt, before.server, strict=True)]
    trainer_moves = [new - old for new, old in zip(trainer.prompt, before.trainer, strict=True)]
    if (
        signal > _MIN_SIGNAL_TO_NOISE * max(noise, _FLOAT32_RESOLUTION)
        and _compute_rms(server_moves, trainer_moves) > _MAX_UNEXPLAINED_FRACTION * signal
    ):
        return (
            f"its log-probs did not move with the trainer's, which moved by {signal:.2g} (root mean square), while"
            f" the server's moved by {_compute_rms(server.prompt, before.server):.2g}: it still has some old weights"
        )
    return None


def _compute_distance(left: float, right: float) -> float:
    difference = abs(left - right)
    return difference if math.isfinite(difference) else math.inf


def _compute_rms(left: Sequence[float], right: Sequence[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(left, right, strict=True)) / max(len(left), 1))


def score_with_folder(policy: Path, rows: Sequence[TokenRow]) -> list[list[float]]:
    """Return the log-probs (as a `RowScorer`) of a policy, which is loaded from its folder in float32 on the CPU.

    Raises:
        TrainingError: the policy cannot be loaded.
    """
    try:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  slow to import

        folder = PolicyFolder.inspect(policy)
        source = folder.path if folder.has_weights else folder.adapter_base
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
        if not folder.has_weights:
            from peft import PeftModel  # noqa: PLC0415  optional

            model = PeftModel.from_pretrained(model, str(folder.adapter))
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{policy} cannot be loaded to verify it: {error}", hint="Check its files.") from error
    return score_with_model(model, rows)


def score_with_model(model: Any, rows: Sequence[TokenRow]) -> list[list[float]]:
    """Return a model's log-probs of rows' completion tokens, at temperature 1, without dropout."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        micro_batch = lay_out(rows, "padded", device=model.device)
        scored_BT = score_completions(model, micro_batch).logprobs_BT.tolist()
    model.train(was_training)
    return [scores[: len(row.completion_ids_T)] for scores, row in zip(scored_BT, rows, strict=True)]
