"""Computes a model's log-probs of a micro-batch's completion tokens, in any layout.

How transformers treats masks (5.23, checked by the tests):

- A 4-D mask is passed unchanged to SDPA in every layer, also a `NodeMask`, which is not a matrix (`tree_attention.py`).
  Eager attention would add it to a matrix, and flash attention accepts no mask.
- Without a mask and without a cache, rows of one sequence are distinguished by positions that start again
  (masking_utils.find_packed_sequence_indices). Packed rows are forwarded like that where a `NodeMask` cannot be used:
  with flash attention, and in layers with a window. Therefore `use_cache=False`: with the configs' default, True, rows
  would silently see each other, as they do in some models' eager attention (OPT, GPT-OSS) and in recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memagent_training.forward.layouts import MicroBatch
from memagent_training.forward.tree_attention import NodeMask
from memagent_training.training_errors import TrainingError

LOGITS_CHUNK: Final = 1024
"""The maximum number of tokens whose logits are in memory at once."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of each row's completion tokens, right-padded with zeros; differentiable."""

    logprobs_BT: Tensor
    entropies_BT: Tensor | None
    """Entropy of the distribution of each token, in nats."""


def score_completions(
    model: nn.Module,
    micro_batch: MicroBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Return the log-probs of every row's completion tokens, in float32 or better.

    Logits are computed only where a completion token is predicted, `LOGITS_CHUNK` tokens at a time, and computed again
    in the backward pass instead of being kept. The model's output head is replaced for this, so that it returns
    log-probs inside the model's own forward, where autocast and sharded wrappers work. A model that changes its logits
    after the head (a soft cap, a scale) is detected, and then all of its logits are computed.

    Args:
        model: a causal language model of transformers, wrapped or not.
        micro_batch: from `lay_out`.
        temperature: logits are divided by it.
        with_entropy: whether to return each distribution's entropy too.
        entropy_gradient: whether the entropy is differentiable too.

    Raises:
        TrainingError: the model's attention does not support the layout.
    """
    unwrapped_model: Any = getattr(model, "module", model)
    inputs = {
        "input_ids": micro_batch.input_ids_SN,
        "position_ids": micro_batch.position_ids_SN,
        "attention_mask": _make_attention_mask(unwrapped_model, micro_batch),
        "use_cache": False,
    }
    scoring = _Scoring(micro_batch, temperature, with_entropy, entropy_gradient)
    scored_C2 = None
    if unwrapped_model not in _MODELS_THAT_CHANGE_LOGITS:
        scored_C2 = _score_in_forward(model, unwrapped_model, inputs, scoring)
    if scored_C2 is None:
        _MODELS_THAT_CHANGE_LOGITS.add(unwrapped_model)
        logits_CV = model(**inputs).logits.flatten(0, 1)[micro_batch.scored_indices_C]
        scored_C2 = scoring.score(logits_CV, micro_batch.scored_ids_C)
    # The last entry is the score of padding.
    scores_BT2 = torch.cat([scored_C2, scored_C2.new_zeros(1, 2)])[micro_batch.score_index_BT]
    entropies_BT = scores_BT2[..., 1] if with_entropy else None
    return TokenScores(scores_BT2[..., 0], entropies_BT)


_MODELS_THAT_CHANGE_LOGITS: WeakSet[nn.Module] = WeakSet()
"""Models that change what their head returns, for example by a soft cap."""

_PROBE_VALUE = 100.0
"""Returned by the head after the scores, to detect a model that changes it; exact in bfloat16, and above any cap."""


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Computes the log-prob and the entropy of each scored token, from hidden states or logits."""

    micro_batch: MicroBatch
    temperature: float
    with_entropy: bool
    entropy_gradient: bool

    def score_hidden(self, head: nn.Module, hidden_SND: Tensor) -> Tensor:
        """Return (C, 2), a chunk of logits at a time."""
        scored_CD = hidden_SND.flatten(0, 1)[self.micro_batch.scored_indices_C]

        def score_plainly(hidden: Tensor, ids: Tensor) -> Tensor:
            return self.score(head.forward(hidden), ids)

        columns = (torch.split(column, LOGITS_CHUNK) for column in (scored_CD, self.micro_batch.scored_ids_C))
        chunks = list(zip(*columns, strict=True))
        score_chunk: Callable[..., Tensor] = score_plainly
        if len(chunks) > 1 and torch.is_grad_enabled():
            score_chunk = partial(checkpoint, score_plainly, use_reentrant=False)
        return torch.cat([score_chunk(*chunk) for chunk in chunks])

    def score(self, logits_CV: Tensor, ids_C: Tensor) -> Tensor:
        """Return (C, 2), from all logits at once."""
        if logits_CV.dtype != torch.float64:
            logits_CV = logits_CV.float()
        logits_CV = logits_CV / self.temperature
        normalizer_C = logits_CV.logsumexp(-1)
        logprobs_C = logits_CV.gather(1, ids_C[:, None])[:, 0] - normalizer_C
        if not self.with_entropy:
            return torch.stack([logprobs_C, torch.zeros_like(logprobs_C)], dim=1)
        with nullcontext() if self.entropy_gradient else torch.no_grad():
            entropies_C = normalizer_C - (logits_CV.softmax(-1) * logits_CV).sum(-1)
        return torch.stack([logprobs_C, entropies_C], dim=1)


def _score_in_forward(
    model: nn.Module, unwrapped_model: Any, inputs: dict[str, Any], scoring: _Scoring
) -> Tensor | None:
    """Return (C, 2) from one forward of the model, or None if the model changes what its head returns.

    Meanwhile the head returns scores and a probe value, (1, C + 1, 2), instead of logits.
    """
    scores: list[Tensor] = []

    def score_and_skip_head(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # A sharded head's weights are gathered now, and may be released again before the other hook.
        scores.append(scoring.score_hidden(module, inputs[0]))
        return (inputs[0][:, :0],)

    def return_scores(module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        return torch.cat([scores[0][None], scores[0].new_full((1, 1, 2), _PROBE_VALUE)], dim=1)

    head: nn.Module = unwrapped_model.get_output_embeddings()
    hooks = [head.register_forward_pre_hook(score_and_skip_head), head.register_forward_hook(return_scores)]
    try:
        returned_C2: Tensor = model(**inputs).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    if bool((returned_C2[-1] != _PROBE_VALUE).any()):
        return None
    if returned_C2.dtype == scores[0].dtype:
        return returned_C2[:-1]
    # A sharded wrapper may round the returned value, which is then too inexact, but it must be part of the graph.
    return scores[0] + 0 * returned_C2[:-1]


def _make_attention_mask(unwrapped_model: Any, micro_batch: MicroBatch) -> Tensor | None:
    """Return the mask in a form that the model's attention applies exactly, the same for every layer; None if the
    attention needs none.

    Raises:
        TrainingError: the model's attention does not support the layout.
    """
    if not micro_batch.nodes:
        return micro_batch.padding_mask_SN
    config = unwrapped_model.config.get_text_config()
    attention, layout, longest_row = config._attn_implementation, micro_batch.layout, micro_batch.longest
    layer_types = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if layer_types - {"full_attention", "sliding_attention"}:
        raise TrainingError(
            f"the {layout} layout does not work with layers of {sorted(layer_types)}: use --set layout=padded"
        )
    window = getattr(config, "sliding_window", None) if "sliding_attention" in layer_types else None
    exceeds_window = window is not None and longest_row > window
    if attention == "sdpa" and not exceeds_window:
        return NodeMask(micro_batch.nodes, micro_batch.input_ids_SN.device) if len(micro_batch.nodes) > 1 else None
    if attention != "sdpa" and "flash" not in attention:
        raise TrainingError(f"{attention} attention cannot tell the rows apart: use --set layout=padded")
    if layout == "packed":
        return None
    if exceeds_window:
        raise TrainingError(
            f"a row of {longest_row} tokens is longer than the model's attention window of {window}, which the {layout}"
            " layout would ignore: use --set layout=packed"
        )
    raise TrainingError(f"{attention} attention takes no 4-D mask: use --set layout=packed")
